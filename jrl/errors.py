"""The one exception a user is meant to read."""


class UserError(ValueError):
    """Bad input from a person: one line that names the key or row, the value and the remedy.

    `jrl.main` prints the message alone, without a traceback, and exits with status 2.
    """
