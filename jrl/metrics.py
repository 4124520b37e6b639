"""One dict of numbers a step, to the console, to metrics.jsonl and to TensorBoard; and the timers that fill part of it.

The console is stderr: stdout belongs to the run's summary. Steps count from 0, so `step` is also the number of steps
that the policy had learned from when it made the step's samples, and evaluations carry the same number.
"""

import collections
import contextlib
import logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.text import Text
from tensorboardX import SummaryWriter

from jrl import activity, jsonl

log = logging.getLogger("jrl")

FILE = "metrics.jsonl"
TENSORBOARD = "tensorboard"

# Timers ----------------------------------------------------------------------------------------------------------------


class Timer:
    """Wall-clock seconds spent inside `with timer:`, added up over every entry, also those that end in an exception.

    JAX returns before the device is done: the block must end by waiting for its result, as reading it on the host does.

    Args:
      name: of the activity, for those who ask what this process is doing.
    """

    def __init__(self, name: str) -> None:
        self.seconds = 0.0
        self._began = 0.0
        self._name, self._activities = name, contextlib.ExitStack()

    def __enter__(self) -> "Timer":
        self._activities.enter_context(activity.doing(self._name))
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began
        self._activities.close()


class Timers:
    """Timers by name: `with timers("gen"): ...`, then `collect()` once a step."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self._timers.setdefault(name, Timer(name))

    def collect(self) -> dict[str, float]:
        """{"timing_s/NAME": seconds} since the last call, and starts anew."""
        seconds = {f"timing_s/{name}": timer.seconds for name, timer in self._timers.items()}
        self._timers = {}
        return seconds


# Metrics of arrays -----------------------------------------------------------------------------------------------------


def stats(name: str, values: np.ndarray) -> dict[str, float]:
    """{"NAME/mean", "NAME/max", "NAME/min"} of any number of values; nothing of none."""
    x = np.asarray(values, np.float64)
    return {f"{name}/mean": float(x.mean()), f"{name}/max": float(x.max()), f"{name}/min": float(x.min())} if x.size else {}


def response_metrics(lens: np.ndarray, max_tokens: int) -> dict[str, float]:
    """Statistics of response lengths i[N] in tokens; clip_ratio is the share of them that are `max_tokens` long."""
    lens = np.asarray(lens)
    clipped = {"response_length/clip_ratio": float(np.mean(lens >= max_tokens))} if lens.size else {}
    return stats("response_length", lens) | clipped


# Of the console: heading, width, the metrics of which the first that is there is shown, format.
Columns = tuple[tuple[str, int, tuple[str, ...], str], ...]
COLUMNS: Columns = (
    ("reward", 7, ("critic/score/mean",), ".3f"),
    ("accuracy", 8, ("train/accuracy",), ".3f"),
    ("KL", 9, ("actor/kl_ref", "actor/ppo_kl"), ".2e"),
    ("entropy", 7, ("actor/entropy",), ".3f"),
    ("length", 6, ("response_length/mean",), ".1f"),
    ("tokens/s", 8, ("perf/throughput",), ",.0f"),
)

# Writing ---------------------------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Takes each row of numbers, as Prometheus's and W&B's do."""

    def update(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes each step's metrics everywhere.

    Args:
      total_steps: of the whole run, for the time left.
      start_step: the first step that this process takes. What an earlier process wrote of this step and later ones is
        dropped, from metrics.jsonl and from what TensorBoard shows; at 0, all of it.
      console: False to print nothing, "json" to log each step and evaluation as the fields of a record.
      columns: what it shows of each step.
      sinks: where else each row of numbers goes.
    """

    def __init__(
        self, run_dir: str | os.PathLike, tensorboard: bool, total_steps: int, start_step: int = 0,
        console: bool | str = True, columns: Columns = COLUMNS, sinks: Sequence[Sink] = (),
    ):  # fmt: skip
        run_dir = pathlib.Path(run_dir)
        self._file = jsonl.Appender(run_dir / FILE, lambda row: _is_past(row, start_step))
        self._board = None
        if tensorboard:
            self._board = SummaryWriter(str(run_dir / TENSORBOARD), purge_step=start_step, flush_secs=10)
            # Purging takes the evaluation before `start_step` with it, which is not made again.
            for row in jsonl.read(run_dir / FILE):
                if row["step"] == start_step:
                    self._to_board(start_step, _numbers(row))
        self._console = _Table(total_steps, columns) if console is True else None
        self._records, self._sinks = console == "json", sinks

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line in each place. Values are numbers; NaN and infinities become null in the file, and are called out."""
        self._write(step, "train", metrics)
        if self._console:
            self._console.row(step, metrics)

    def log_eval(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The same for an evaluation of the policy that has learned from `step` steps."""
        self._write(step, "eval", metrics)
        if self._console:
            self._console.evaluation(step, metrics)

    def _write(self, step: int, kind: str, metrics: Mapping[str, Any]) -> None:
        numbers = {name: _number(value) for name, value in metrics.items()}
        self._file.write([{"step": int(step), "kind": kind, **numbers}])
        self._to_board(step, numbers)
        for sink in self._sinks:
            sink.update(step, metrics)
        if self._records:
            log.info("%s", kind, extra={"fields": {"step": int(step), **numbers}})

    def _to_board(self, step: int, numbers: Mapping[str, float | None]) -> None:
        if self._board:
            for name, value in numbers.items():
                if value is not None and math.isfinite(value):
                    self._board.add_scalar(name, value, step)

    def print_samples(self, samples: Iterable[tuple[str, str, float]]) -> None:
        """Shows (prompt, completion, reward) as text, in which nothing can command the terminal."""
        if self._console:
            self._console.samples(samples)

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()
        for sink in self._sinks:
            sink.close()


def read_metrics(run_dir: str | os.PathLike) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(steps, evaluations) of a run, each row {"step": i, NAME: number or None}, in the order of steps.

    Of evaluations repeated at one step, as after a kill between evaluating and saving, the last one counts.

    Raises:
      UserError: a broken line, with its number.
    """
    rows: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "eval": {}}
    for row in jsonl.read(pathlib.Path(run_dir) / FILE):
        rows[row.get("kind", "train")][row["step"]] = {"step": row["step"], **_numbers(row)}
    train, evals = ([rows[kind][step] for step in sorted(rows[kind])] for kind in ("train", "eval"))
    return train, evals


def points(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The finite values of each metric, with their steps."""
    found = collections.defaultdict(list)
    for row in rows:
        for key, value in row.items():
            if key != "step" and value is not None:
                found[key].append((row["step"], value))
    return dict(found)


def _is_past(row: Mapping[str, Any], start_step: int) -> bool:
    """Whether a resumed run will not make this row again: an evaluation at `start_step` came before that step."""
    return row["step"] < start_step or (row.get("kind") == "eval" and row["step"] == start_step > 0)


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("step", "kind")}


def _number(value: Any) -> float | int:
    value = np.asarray(value).item()
    return int(value) if isinstance(value, bool) else value


# The console -----------------------------------------------------------------------------------------------------------

_HEADING_EVERY = 25  # rows
_RECENT = 10  # steps whose median duration predicts the rest; the first ones compile
_TEXT_LIMIT = 1000  # characters of a sample shown


class _Table:
    """A row a step: aligned under headings in a terminal, `name value` pairs on one plain line otherwise."""

    def __init__(self, total_steps: int, columns: Columns):
        self._columns = columns
        self._out = Console(file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._total, self._digits, self._rows = total_steps, len(str(total_steps)), 0
        self._durations: list[float] = []
        self._last = time.perf_counter()

    def row(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        self._durations, self._last = [*self._durations[1 - _RECENT :], now - self._last], now
        left = duration(float(np.median(self._durations)) * max(self._total - step - 1, 0))
        cells = [(heading, width, *_cell(metrics, names, form)) for heading, width, names, form in self._columns]
        done = f"{step + 1:>{self._digits}}/{self._total}"
        if self._out.is_terminal:
            self._aligned(step, done, left, cells)
        else:
            pairs = " ".join(f"{heading} {text}" for heading, _, text, _ in cells)
            self._out.print(f"step {done.strip()} {pairs} left {left}")
        self._rows += 1
        self._complain(metrics)

    def _aligned(self, step: int, done: str, left: str, cells: Sequence[tuple[str, int, str, bool]]) -> None:
        if self._rows % _HEADING_EVERY == 0:
            heading = "".join(f"{name:>{width + 2}}" for name, width, _, _ in cells)
            self._out.print(Text(f"{'step':>{len(done)}}  {'':10}{heading}{'left':>10}", style="bold"))
        full = round(10 * (step + 1) / max(self._total, 1))
        line = Text(f"{done}  ").append("━" * full, "green").append("━" * (10 - full), "bright_black")
        for _, width, text, finite in cells:
            line.append(f"{text:>{width + 2}}", "" if finite else "bold red")
        self._out.print(line.append(f"{left:>10}", "cyan"))

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        values = "  ".join(f"{safe_line(name)} {float(value):.4g}" for name, value in metrics.items())
        self._out.print(Text(f"held out after {step} steps: {values}", style="bold green"))
        self._complain(metrics)
        # The time spent on it is not a step's.
        self._last = time.perf_counter()

    def _complain(self, metrics: Mapping[str, Any]) -> None:
        bad = [f"{safe_line(name)}={float(value)}" for name, value in metrics.items() if not math.isfinite(float(value))]
        if bad:
            self._out.print(Text(f"not finite: {', '.join(bad)}", style="bold red"))

    def samples(self, samples: Iterable[tuple[str, str, float]]) -> None:
        for prompt, completion, reward in samples:
            self._out.print(Text(f"┌ reward {reward:.4g}", style="bold"))
            for text, style in ((prompt, "bright_black"), (completion, "default")):
                for line in _shown(text):
                    self._out.print(Text("│ ", style="bright_black").append(line, style))
            self._out.print(Text("└", style="bold"))


def _cell(metrics: Mapping[str, Any], names: Sequence[str], form: str) -> tuple[str, bool]:
    """The text of a cell, and whether its number is finite."""
    name = next((n for n in names if n in metrics), None)
    if name is None:
        return "-", True
    value = float(metrics[name])
    return (format(value, form), True) if math.isfinite(value) else (str(value), False)


def duration(seconds: float) -> str:
    """As a person says it: 42s, 3m12s, 5h04m."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def safe_line(text: str) -> str:
    """`text` with everything that is no visible character, line ends and terminal commands among it, written as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shown(text: str) -> Iterator[str]:
    cut = len(text) - _TEXT_LIMIT
    for line in text[:_TEXT_LIMIT].split("\n"):
        yield safe_line(line)
    if cut > 0:
        yield f"[{cut} more characters]"
