"""Runs what is left of a sweep, each run in a process of its own, so that whatever ends one of them ends no other.

Ctrl-C and SIGTERM are passed on to the processes, which save and leave; a second one too, on which they leave at once.
"""

import collections
import contextlib
import dataclasses
import fcntl
import logging
import os
import pathlib
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from jrl.errors import UserError
from jrl.launch.cluster import alone
from jrl.metrics import duration, safe_line
from jrl.sweep import grid
from jrl.sweep.grid import Run, Sweep

log = logging.getLogger("jrl")

FINISHED, FAILED, INTERRUPTED, RUNNING, BEGUN, WAITING = "finished", "failed", "interrupted", "running", "begun", "waiting"
POLL_S = 0.1
LAST_LINES = 5  # of a failed run's log
_LAST_BYTES = 20_000


class Pool(Protocol):
    """Where processes run. A job is whatever `start` returns."""

    def room(self, running: int) -> bool:
        """Whether one more may be started."""

    def start(self, command: Sequence[str], output: pathlib.Path) -> Any:
        """Starts a process whose stdout and stderr go to a file, or puts it in a queue."""

    def started(self, job: Any) -> bool:
        """Whether the process is there, or has been."""

    def ended(self, job: Any) -> int | None:
        """Its exit status, negative for the signal that ended it; None while it is not over."""

    def stop(self, job: Any, number: int) -> None:
        """Passes a signal on."""


class Processes:
    """Processes beside this one, `parallel` at a time.

    Args:
      lock: a file descriptor that they keep open, see `held`.
    """

    def __init__(self, parallel: int, lock: int):
        self._parallel, self._lock = parallel, lock

    def room(self, running: int) -> bool:
        return running < self._parallel

    def start(self, command: Sequence[str], output: pathlib.Path) -> subprocess.Popen:
        with output.open("wb") as file:
            # In a session of their own: Ctrl-C in a terminal would else reach them twice, and the second one is not waited for.
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=alone(), start_new_session=True,
                pass_fds=(self._lock,),
            )  # fmt: skip

    def started(self, job: subprocess.Popen) -> bool:
        return True

    def ended(self, job: subprocess.Popen) -> int | None:
        return job.poll()

    def stop(self, job: subprocess.Popen, number: int) -> None:
        job.send_signal(number)


@contextlib.contextmanager
def held(directory: pathlib.Path) -> Iterator[int]:
    """Makes the directory, and keeps other sweeps out of it until this one and the processes it has started are over.

    Raises:
      UserError: another one is at work there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / grid.LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UserError(
                f"--sweep_dir={directory}: a sweep (process {file.read().strip()}) or a run of its is still at work there;"
                " end it, wait for it, or give another directory"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


class Signals:
    """Notes SIGINT and SIGTERM instead of ending the process."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, lambda n, _frame: self.received.append(n))
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


@dataclasses.dataclass
class Active:
    """A run that has been handed to the pool."""

    job: Any
    resumed: bool
    began: float | None = None  # time.monotonic() when it was seen to run


class Execution:
    """The runs of a sweep and what has become of them.

    Attributes:
      status: of all runs, by name: finished, failed, interrupted, running, begun (in an earlier start of the sweep) or waiting.
    """

    def __init__(self, sweep: Sweep, pool: Pool):
        self.sweep, self._pool = sweep, pool
        self.status = {run.name: status_on_disk(run) for run in sweep.runs}
        self._waiting = collections.deque(run for run in sweep.runs if self.status[run.name] != FINISHED)
        self._active: dict[str, tuple[Run, Active]] = {}
        self._seconds: list[float] = []
        self._most_at_once = 1

    def all(self, on_end: Callable[["Execution"], Any]) -> int | None:
        """Runs what is not finished; the signal that cut it short, if one came.

        Args:
          on_end: called whenever a run is over.
        """
        done = len(self.sweep.runs) - len(self._waiting)
        if done:
            log.info("%d of %d runs are finished already", done, len(self.sweep.runs))
        with Signals() as signals:
            try:
                self._loop(signals.received, on_end)
            except BaseException:
                self._stop(signal.SIGTERM)
                raise
        return signals.received[0] if signals.received else None

    def _loop(self, received: list[int], on_end: Callable[["Execution"], Any]) -> None:
        """Until all runs are over; once a signal is in `received`, until those that have been started are."""
        forwarded = 0
        while self._active or (self._waiting and not received):
            while self._waiting and not received and self._pool.room(len(self._active)):
                self._start(self._waiting.popleft())
            for number in received[forwarded:]:
                forwarded += 1
                self._stop(number)
            ended = [run for run, active in list(self._active.values()) if self._look(run, active, bool(forwarded))]
            if ended:
                on_end(self)
            else:
                time.sleep(POLL_S)

    def _start(self, run: Run) -> None:
        run.directory.parent.mkdir(parents=True, exist_ok=True)
        run.log.unlink(missing_ok=True)
        try:
            grid.check_unchanged(run)
        except UserError as error:
            run.log.write_text(f"error: {error}\n", encoding="utf-8")
            self._end(run, FAILED, 0.0)
            return
        resumed = run.begun()
        self._active[run.name] = run, Active(self._pool.start(run.command(), run.log), resumed)

    def _stop(self, number: int) -> None:
        log.warning("%s: passed on to %d runs, which save and leave", signal.Signals(number).name, len(self._active))
        for _, active in self._active.values():
            self._pool.stop(active.job, number)

    def _look(self, run: Run, active: Active, stopped: bool) -> bool:
        """Takes note of a run's start and end; whether it has ended."""
        code = self._pool.ended(active.job)
        if active.began is None and (code is not None or self._pool.started(active.job)):
            active.began, self.status[run.name] = time.monotonic(), RUNNING
            if not stopped:
                verb = "resumed" if active.resumed else "started"
                log.info("%s of %d %s: %s", self._number(run), len(self.sweep.runs), verb, safe_line(run.name))
        seconds = time.monotonic() - (active.began or time.monotonic())
        self._most_at_once = max(self._most_at_once, sum(a.began is not None for _, a in self._active.values()))
        if code is None:
            return False
        del self._active[run.name]
        status = status_on_disk(run)
        if status != FINISHED and not stopped:
            status = FAILED if code else INTERRUPTED  # it was told to leave by somebody else
        elif status == BEGUN:
            status = INTERRUPTED
        self._end(run, status, seconds)
        return True

    def _end(self, run: Run, status: str, seconds: float) -> None:
        self.status[run.name] = status
        self._seconds += [seconds] if status == FINISHED else []
        log.info(
            "%s of %d %s: %s, %s%s; %s", self._number(run), len(self.sweep.runs), status, safe_line(run.name), duration(seconds),
            _headline(run), self._left(),
        )  # fmt: skip

    def _number(self, run: Run) -> int:
        return 1 + next(i for i, other in enumerate(self.sweep.runs) if other.name == run.name)

    def _left(self) -> str:
        left = len(self._waiting) + len(self._active)
        if not left or not self._seconds:
            return f"{left} left"
        return f"{left} left, about {duration(statistics.mean(self._seconds) * left / min(left, self._most_at_once))}"


def _headline(run: Run) -> str:
    """The numbers that a run's last line is about, after a comma."""
    result = run.result() or {}
    told = [f"{key} {value:.4g}" for key, value in result.items() if key.endswith("_after") and isinstance(value, float)]
    return f" ({', '.join(told)})" if told else ""


def status_on_disk(run: Run) -> str:
    return FINISHED if run.result() is not None else BEGUN if run.begun() else WAITING


def last_lines(run: Run) -> list[str]:
    """Of what a run's process has said, nothing in them that could command a terminal."""
    try:
        with run.log.open("rb") as file:
            file.seek(max(0, run.log.stat().st_size - _LAST_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [safe_line(line) for line in text.splitlines() if line.strip()][-LAST_LINES:]
