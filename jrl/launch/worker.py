"""What runs on each host: a training process, its output, and for process 0 the run's metrics as gauges.

The process is a child of the worker, so that whatever kills it leaves somebody who can tell how it ended.
"""

import collections
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from jrl.errors import UserError

LOGS = "logs"  # in the run directory
LAST_WORDS = 20  # lines of stderr kept to tell how a process ended
_KILL_S = 10.0
_DRAIN_S = 5.0  # for the output of a process that has ended; children of it may hold the pipes open
_TAIL_BYTES = 1 << 18  # of metrics.jsonl: many steps


@dataclasses.dataclass(frozen=True)
class Report:
    """What a process did since the last report.

    Attributes:
      lines: written to stdout and stderr.
      status: None while it runs; then the exit status, or minus the number of the signal that ended it.
      last_words: its last lines on stderr.
      summary: the JSON object that is its last line on stdout, of a process that has ended.
      began: it has taken the run directory.
    """

    lines: list[str]
    status: int | None
    last_words: list[str]
    summary: dict[str, Any] | None
    began: bool


class TrainingProcess:
    """One process of a run."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._last_words: collections.deque[str] = collections.deque(maxlen=LAST_WORDS)
        self._last_out = ""

    def free_port(self) -> int:
        """A port of this host that nobody listens on."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            return sock.getsockname()[1]

    def tpu_worker_id(self) -> int | None:
        """The number that this host has in its TPU slice, if it can be told."""
        import ray

        number = os.environ.get("TPU_WORKER_ID") or ray.get_runtime_context().get_node_labels().get("ray.io/tpu-worker-id")
        return int(number) if number else None

    def start(
        self, args: Sequence[str], directory: str, run_dir: str, process: int, environment: Mapping[str, str], title: str
    ) -> None:
        """Starts `python ARGS` in a directory of this host.

        Args:
          run_dir: of the run, for the log and the metrics; relative to the directory.
          process: its number in the run; the metrics are those of 0.
          environment: added to this process's.
          title: first line in the log.

        Raises:
          UserError: the directory is not there.
        """
        if not os.path.isdir(directory):
            raise UserError(f"there is no directory {directory} on this host: start from one that all hosts share, or let Ray "
                            "bring it, with ray job submit --working-dir")  # fmt: skip
        self._log = _Log(pathlib.Path(directory, pathlib.Path(run_dir).expanduser()), process, title)
        self._gauges = _Gauges(self._log.run_dir) if process == 0 else None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jrl.launch.child", str(os.getpid()), sys.executable, *args],
            cwd=directory,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # a Ctrl-C at the driver's terminal is passed on by the driver, once
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream, is_error), daemon=True)
            for stream, is_error in ((self._process.stdout, False), (self._process.stderr, True))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: TextIO, is_error: bool) -> None:
        for line in stream:
            line = line.rstrip("\n")
            print(line, flush=True)  # to this worker's log, which Ray's dashboard shows
            with self._lock:
                self._lines.append(line)
                self._log.write(line)
                if is_error:
                    self._last_words.append(line)
                elif line.strip():
                    self._last_out = line

    def poll(self) -> Report:
        """What has happened since the last call."""
        status = self._process.poll()
        if status is not None:
            deadline = time.monotonic() + _DRAIN_S
            for reader in self._readers:
                reader.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            lines, self._lines = self._lines, []
            began = self._log.open()
        if self._gauges and began:
            self._gauges.update()
        summary = None if status is None else _json_object(self._last_out)
        return Report(lines, status, list(self._last_words), summary, began)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the training process, if it is still there."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the training process and its children at once, and waits until it is gone."""
        if self._process and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_KILL_S)


class _Log:
    """RUN_DIR/logs/process-N.log. Nothing is written before the run has taken the directory: an earlier run's is renamed then."""

    def __init__(self, run_dir: pathlib.Path, process: int, title: str):
        self.run_dir, self._name = run_dir, f"process-{process}.log"
        self._file: TextIO | None = None
        self._before, self._early = self._state(), [title]

    def _state(self) -> tuple[int, int] | None:
        """Changes when a run starts or resumes, which writes its config."""
        try:
            stat = (self.run_dir / "config.json").stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def open(self) -> bool:
        """Whether the run has taken the directory; from then on lines go to the file, those before included."""
        if self._file is None and self._state() not in (None, self._before):
            folder = self.run_dir / LOGS
            folder.mkdir(exist_ok=True)
            self._file = (folder / self._name).open("a", encoding="utf-8")
            early, self._early = self._early, []
            for line in early:
                self.write(line)
        return self._file is not None

    def write(self, line: str) -> None:
        if self._file is None:
            self._early.append(line)
        else:
            self._file.write(line + "\n")
            self._file.flush()


class _Gauges:
    """The latest numbers of a run as metrics of Ray, such as `jrl_actor_entropy{run="runs/demo"}`, for its dashboard."""

    def __init__(self, run_dir: pathlib.Path):
        from jrl.metrics import FILE  # here, as it takes a second, and one process in all needs it

        self._path, self._run, self._seen, self._gauges = run_dir / FILE, str(run_dir), 0, {}

    def update(self) -> None:
        try:
            changed = self._path.stat().st_mtime_ns
        except OSError:
            return
        if changed == self._seen:
            return
        self._seen = changed
        for row in _latest_rows(self._path):
            prefix = "jrl_eval_" if row.pop("kind", "train") == "eval" else "jrl_"
            for name, value in row.items():
                if isinstance(value, int | float):
                    self._set(prefix + re.sub(r"\W", "_", name), name, value)

    def _set(self, name: str, about: str, value: float) -> None:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description=f"{about} of a jrl run", tag_keys=("run",))
        self._gauges[name].set(value, tags={"run": self._run})


def _latest_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The last row of each kind in metrics.jsonl."""
    with path.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
        rows = [row for line in file.read().decode("ascii", "replace").splitlines() if (row := _json_object(line))]
    return list({row.get("kind"): row for row in rows}.values())


def _json_object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
