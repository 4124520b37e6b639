"""The one exception a user is meant to read, and how commands tell it."""

import functools
import sys
from collections.abc import Callable, Sequence


class UserError(ValueError):
    """Bad input from a person: one line that names the key or row, the value and the remedy."""


def entry_point(main: Callable[[Sequence[str]], int | None]) -> Callable[..., int]:
    """A `main` of arguments as a command's: by default those of this process, and a mistake of the user's ends it.

    Of a `UserError` the message alone is printed, in one line, and the exit status is 2; otherwise it is main's, or 0.
    """

    @functools.wraps(main)
    def told(args: Sequence[str] | None = None) -> int:
        try:
            return main(sys.argv[1:] if args is None else args) or 0
        except UserError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2

    return told
