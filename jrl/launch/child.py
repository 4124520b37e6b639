"""Runs a command that ends with its parent: python -m jrl.launch.child PARENT_PID COMMAND [ARG ...]

A worker that is killed must not leave its training behind, which would go on writing to a run that has been restarted.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl.h


def main() -> int:
    """Becomes the command; returns, with status 1, only if the parent is gone already."""
    # Ray's processes block SIGINT, and children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() == int(sys.argv[1]):  # it could have ended before the call above
        os.execvp(sys.argv[2], sys.argv[2:])
    return 1


if __name__ == "__main__":
    sys.exit(main())
