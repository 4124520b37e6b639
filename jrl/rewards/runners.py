"""Ways to run a reward function: inline, in a process that can be killed, in a thread that can be left behind.

Each has `run(prompts, completions, columns, timeout_s) -> (rewards f32[N], failures)`: where a sample has no reward it
is NaN, and `failures` say why; and `misfit(columns)`, see `worker.misfit`, to be asked before any sample. N samples. In
`jrl.rewards.per_sample` several of them score single samples.
"""

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np

from jrl.rewards import worker
from jrl.rewards.worker import RewardFailure

START_TIMEOUT_S = 60.0  # for starting a process and importing a user's module, on top of the rewards' own deadline
MAX_ABANDONED = 8  # threads of one function that may hang at a time
BATCH = ("prompts", "completions")  # what a function of all samples gets before its columns
ROW = ("prompt", "completion")  # what a function of one sample can take besides its columns, by name

Columns = dict[str, list]


class Failures(NamedTuple):
    kind: str  # of `RewardFailure`
    samples: int
    text: str


Outcome = tuple[np.ndarray, list[Failures]]


class Runner(Protocol):
    def run(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, timeout_s: float) -> Outcome: ...

    def misfit(self, columns: Collection[str]) -> str: ...


def all_failed(n: int, failure: RewardFailure) -> Outcome:
    """No reward for any of n samples."""
    return np.full(n, np.nan, np.float32), [Failures(failure.kind, n, failure.text)]


class Inline:
    """Calls the function in place: for rules that are known to return."""

    def __init__(self, fn: Callable):
        self._fn = fn

    def run(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, timeout_s: float) -> Outcome:
        try:
            return worker.call(self._fn, prompts, completions, columns), []
        except RewardFailure as failure:
            return all_failed(len(completions), failure)

    def misfit(self, columns: Collection[str]) -> str:
        return worker.misfit(self._fn, BATCH, columns)


class Abandonable:
    """Calls the function in a daemon thread, left to itself at the deadline: for what no other process can load.

    A function of one sample is called for one after another.
    """

    def __init__(self, fn: Callable):
        self._fn, self._per_sample = fn, worker.per_sample(fn)
        self._abandoned: list[threading.Thread] = []

    def run(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, timeout_s: float) -> Outcome:
        n = len(completions)
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MAX_ABANDONED:
            return all_failed(n, RewardFailure("timeout", f"not called: {MAX_ABANDONED} earlier calls still hang"))
        done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        call = self._of_each if self._per_sample else self._fn
        arguments = (prompts, completions, columns, timeout_s)
        thread = threading.Thread(target=lambda: done.put(Inline(call).run(*arguments)), daemon=True)
        thread.start()
        try:
            return done.get(timeout=timeout_s)
        except queue.Empty:
            self._abandoned.append(thread)
            return all_failed(n, RewardFailure("timeout", f"still running after {timeout_s:g} s, in a thread that goes on"))

    def _of_each(self, prompts: Sequence[str], completions: Sequence[str], **columns: list) -> list[float]:
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
        return [worker.row(self._fn, *sample) for sample in zip(prompts, completions, rows, strict=True)]

    def misfit(self, columns: Collection[str]) -> str:
        return worker.misfit(self._fn, *(((), [*ROW, *columns]) if self._per_sample else (BATCH, columns)))


class Process:
    """A process with one function: started when needed, reused, killed and replaced when it hangs or crashes."""

    def __init__(self, spec: bytes | str, module: str = "", options: Mapping[str, Any] | None = None):
        self._load = spec, module, options  # see `worker.load`
        self._connection: Connection | None = None
        self.kill: Callable[[], Any] = lambda: None

    def start(self) -> None:
        """Starts the process and loads the function, unless it runs already.

        Raises:
          RewardFailure: of kind load.
        """
        if self._connection is not None:
            return
        mine, its = multiprocessing.Pipe()
        command = [sys.executable, "-P", worker.__file__, str(its.fileno())]
        # A group of its own: Ctrl-C is for the trainer, and a kill reaches what the function has started. What a
        # function prints goes to stderr. Should it use jax, it must not claim the accelerator.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[its.fileno()], start_new_session=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        its.close()
        self._connection = mine
        self.kill = weakref.finalize(self, _kill, process, mine)
        path = [os.path.abspath(entry) for entry in dict.fromkeys([*sys.path, ""])]
        try:
            self.send("load", path, *self._load)
            self.receive(START_TIMEOUT_S)
        except RewardFailure as failure:
            self._stop()
            raise RewardFailure("load", failure.text) from None

    def send(self, *message: Any) -> None:
        """Raises RewardFailure where the message cannot be pickled or nobody is there to read it."""
        assert self._connection is not None
        try:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            self._stop()
            raise RewardFailure("crash", "the worker process died") from None
        except Exception as error:
            raise RewardFailure("error", f"a column cannot be sent to the worker process: {worker.describe(error)}") from error

    def receive(self, timeout_s: float) -> Any:
        """The next reply; at the deadline, or at any other interruption, the process is killed."""
        assert self._connection is not None
        try:
            if not self._connection.poll(max(timeout_s, 0.0)):
                raise RewardFailure("timeout", f"still running after {timeout_s:.3g} s; its process was killed")
            status, value = self._connection.recv()
        except (EOFError, OSError):
            self._stop()
            raise RewardFailure("crash", "the worker process died") from None
        except BaseException:
            self._stop()
            raise
        if status != "ok":
            raise RewardFailure(status, value)
        return value

    def ask(self, *question: Any) -> Any:
        """The answer to a question about the function. Raises RewardFailure where it cannot be loaded."""
        self.start()
        self.send(*question)
        return self.receive(START_TIMEOUT_S)

    def _stop(self) -> None:
        self.kill()
        self._connection = None


def _kill(process: subprocess.Popen, connection: Connection) -> None:
    connection.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Batches:
    """A user's function in a worker process, all samples in one call."""

    def __init__(self, process: Process):
        self._process = process

    def run(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, timeout_s: float) -> Outcome:
        try:
            self._process.start()
            self._process.send("batch", prompts, completions, columns)
            return self._process.receive(timeout_s), []
        except RewardFailure as failure:
            return all_failed(len(completions), failure)

    def misfit(self, columns: Collection[str]) -> str:
        return self._process.ask("misfit", BATCH, list(columns))


class Row:
    """A function of one sample in a worker process."""

    def __init__(self, process: Process):
        self._process = process

    def start(self) -> None:
        self._process.start()

    def run(self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, timeout_s: float) -> Outcome:
        ((prompt, completion),) = zip(prompts, completions, strict=True)
        try:
            self._process.start()
            self._process.send("row", prompt, completion, {name: values[0] for name, values in columns.items()})
            return np.array([self._process.receive(timeout_s)], np.float32), []
        except RewardFailure as failure:
            return all_failed(1, failure)

    def misfit(self, columns: Collection[str]) -> str:
        return self._process.ask("misfit", (), [*ROW, *columns])
