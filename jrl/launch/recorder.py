"""Outlives a process by one line, which says where it ended if it ended without a word.

`Recorder` starts `python -m jrl.launch.recorder`, which reads lines on stdin, the last of which counts: {"who": .., "where": ..}
with "why", or with "coordinator", "chief" and "first" to find out why; or {"fine": true} before an orderly end. A process that is
killed, runs out of memory or is aborted by a library cannot say so itself; the end of the pipe does.
"""

import json
import signal
import socket
import subprocess
import sys
import time
from typing import Any

GRACE_S = 2.0  # in which a coordinator that is going away has gone


class Recorder:
    """Of this process, from here on."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "jrl.launch.recorder"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def tell(self, state: dict[str, Any]) -> None:
        """What is true from now on."""
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        try:
            pipe.write(json.dumps(state) + "\n")
            pipe.flush()
            if state.get("fine"):
                pipe.close()
        except OSError:  # somebody has ended the recorder; the run does not depend on it
            pass

    def fine(self) -> None:
        """The orderly end."""
        self.tell({"fine": True})


def main() -> None:
    # What ends the process that is watched must not end this one before it has spoken.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    last: dict = {}
    for line in sys.stdin:
        last = json.loads(line)
    if last and not last.get("fine"):
        print(f"jrl: {last['who']} ended without a word, {last['where']}{_why(last)}", file=sys.stderr, flush=True)


def _why(last: dict) -> str:
    if "why" in last:
        return f": {last['why']}"
    time.sleep(GRACE_S)
    host, port = last["coordinator"]
    if last["first"] or _answers(host, port):
        return ": it was killed, or crashed; what stands above, or the system's log (out of memory?), may say why"
    return f": the coordinator, {last['chief']}, is gone from {host}:{port}, and nobody can go on without it"


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=GRACE_S).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
