"""What a run of any stage keeps: its directory, its metrics, its checkpoints, and how it is interrupted.

`runs/NAME/` holds config.json, metrics.jsonl, TensorBoard events, checkpoints/, result.json, report.html and hf/, the trained
model as `transformers` reads it; what a run of RL keeps besides is in `jrl.rl_run`. Of several processes, which share the
directory, the first writes; checkpoints are written by all.
"""

import abc
import itertools
import json
import logging
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from jrl import config as config_lib
from jrl import wandb_log
from jrl.activity import at_step
from jrl.audit import Audit, surroundings
from jrl.checkpoint import Checkpointer
from jrl.data import PromptStream
from jrl.errors import UserError
from jrl.launch import cluster
from jrl.learner import Learner
from jrl.metrics import COLUMNS, Columns, MetricsWriter, Sink, Timers
from jrl.prometheus import Exporter
from jrl.report import write_report
from jrl.sharding.hosts import gather, is_chief, together

log = logging.getLogger("jrl")

T = TypeVar("T")

ROWS = ("metrics.jsonl", "samples.jsonl")  # which are cut to the step that a run goes on from
HOSTS = "hosts.jsonl"  # a line for each process: what it is doing
MADE_BY_RUNS = ("config.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "result.json")


class Interrupted(Exception):
    """SIGTERM or Ctrl-C came; the message says which."""


class Run(abc.ABC):
    """The state of a run beside the models', and everything that leaves the process.

    A stage says by overriding what is its own: `fresh_states`, `abstract_states` and `resumed`, `note` and `written` (what a
    checkpoint holds beside the states), `score`, `export` and `summary`.

    Args:
      learners: what is trained, by name.
      stream: the data in their order.
      columns: what the console shows of each step.

    Attributes:
      step: steps completed.
      before: the metrics of the evaluation at the start.
      last_eval: those of the latest one, and the step that it was made at.
    """

    def __init__(self, config, learners: dict[str, Learner], stream: PromptStream, columns: Columns = COLUMNS):
        self.config, self.learners, self.stream, self._columns = config, learners, stream, columns
        self.directory = run_directory(config.run_dir)
        self.step, self.seconds, self.earlier = 0, 0.0, 0.0
        self.before: dict[str, float] = {}
        self.last_eval: tuple[int, dict[str, float]] = (-1, {})
        self.timers = Timers()
        self.metrics: MetricsWriter | None = None  # of the process that writes, as the next one
        self.audit: Audit | None = None
        self._committed: dict[str, Any] = {}
        self._signal: str | None = None
        self._old_handlers: dict[int, Any] = {}
        together("the run's directory")  # all have looked at it
        if not config.resume and is_chief():
            _set_aside(self.directory)
        together("the run's directory")
        self.checkpoints = Checkpointer(self.directory / "checkpoints", config.checkpoint.keep, config.checkpoint.best)
        self._began = self._step_began = time.perf_counter()

    # What a stage says -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def fresh_states(self) -> dict[str, Any]:
        """The training states of a run from the beginning."""

    def abstract_states(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of what a checkpoint holds."""
        return {name: learner.abstract_state() for name, learner in self.learners.items()}

    def note(self) -> dict[str, Any]:
        """Where the finished steps have led: what a checkpoint holds beside the states. Objects in it must not change later."""
        return {"seconds": self.seconds, "elapsed": self.elapsed, "before": self.before, "stream": self.stream.state()}

    def written(self, note: dict[str, Any]) -> dict[str, Any]:
        """A note as JSON can hold it."""
        return note

    def resumed(self, note: dict[str, Any]) -> None:
        """Takes up what `written` made of a note."""
        self.seconds, self.earlier, self.before = note["seconds"], note["elapsed"], note["before"]
        self.stream.restore(note["stream"])

    @abc.abstractmethod
    def score(self, evaluation: dict[str, float]) -> float | None:
        """By which checkpoints are compared, higher is better."""

    @abc.abstractmethod
    def export(self, directory: pathlib.Path, states: dict[str, Any]) -> None:
        """Writes the trained model as a Hugging Face directory."""

    @abc.abstractmethod
    def summary(self, after: dict[str, float]) -> dict[str, Any]:
        """What the last line on stdout says first."""

    # Signals -------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Run":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old_handlers[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()
        self.checkpoints.close()

    def _note_signal(self, number: int, _frame: Any) -> None:
        self._signal = signal.Signals(number).name
        # A second one is not waited for.
        signal.signal(number, self._old_handlers[number])
        log.warning("%s: saving and leaving; again to leave at once", self._signal)

    def check(self) -> None:
        """Raises Interrupted if a signal has come. Called where nothing is half done."""
        if self._signal:
            raise Interrupted(self._signal)

    def exchange(self, value: T, what: str) -> list[T]:
        """Every process's value, in their order; Interrupted in all of them if a signal has come to any.

        Args:
          what: that is waited for, in words.
        """
        signals, values = zip(*gather((self._signal, value), what), strict=True)
        for told in filter(None, signals):
            raise Interrupted(told)
        return list(values)

    # Start and resume ------------------------------------------------------------------------------------------------------

    def restore(self, step: int | None = None) -> dict[str, Any]:
        """The training states: of the latest readable checkpoint when resuming, or that of a step, otherwise fresh ones."""
        found = None
        if step is None and self.config.resume_step >= 0:
            step = self.config.resume_step
        if self.config.resume:
            found = self.checkpoints.restore(self.abstract_states(), step)
            if found is None:
                log.warning("nothing to resume in %s: starting from the beginning", self.checkpoints.directory)
        if found is None:
            states = self.fresh_states()
        else:
            self.step, states, extra = found
            self.resumed(extra)
            log.info("resumed at step %d", self.step)
        if is_chief():
            self._open_logs()
        if watch := cluster.watch():
            watch.show(self.directory / HOSTS)
        at_step(self.step)
        self.commit()
        return states

    def _open_logs(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.audit = Audit(self.directory)
        how = "resumed" if self.step else "started"
        self.audit.note(how, step=self.step, config=config_lib.flatten(self.config), **surroundings())
        if self.config.resume and self.config.resume_step >= 0:
            self._keep_later_rows()
        resolved = json.dumps(config_lib.flatten(self.config), indent=1)
        (self.directory / "config.json").write_text(resolved + "\n")
        c = self.config
        sinks: list[Sink] = [Exporter(c.log.prometheus_port)] if c.log.prometheus_port else []
        sinks += [wandb_log.Wandb(c.log.wandb, self.directory, config_lib.flatten(c))] if c.log.wandb else []
        console = "json" if c.log.json else True
        self.metrics = MetricsWriter(self.directory, c.log.tensorboard, c.steps, self.step, console, self._columns, sinks)

    def _keep_later_rows(self) -> None:
        """Before what came after the step that the run goes back to is dropped from its files: copies of them."""
        for file in (f for name in ROWS if (f := self.directory / name).exists()):
            number = next(i for i in itertools.count(1) if not file.with_name(f"{file.name}.{i}").exists())
            shutil.copyfile(file, file.with_name(f"{file.name}.{number}"))

    def commit(self) -> None:
        """Takes note of where the finished steps have led; a checkpoint of an interrupted step goes back to here."""
        self._committed = self.note()

    @property
    def elapsed(self) -> float:
        """Seconds of the whole run, those of the processes that it is resumed from included."""
        return self.earlier + time.perf_counter() - self._began

    # During ----------------------------------------------------------------------------------------------------------------

    def steps(self, states: dict[str, Any], evaluate: Callable[[], Any]) -> Iterator[int]:
        """The steps that are left. Between them the run evaluates and saves when that is due, and leaves when it is told to.

        Args:
          states: the training states, which the caller replaces in this very dict.

        Raises:
          Interrupted: a signal came; the step before is finished.
        """
        c = self.config
        for step in range(self.step, c.steps):
            at_step(step)
            self._step_began = time.perf_counter()
            yield step
            if c.eval.every_steps and (step + 1) % c.eval.every_steps == 0 and step + 1 < c.steps:
                evaluate()
            self.save_if_due(states)
            self.exchange(None, "the end of the step")

    def step_times(self, tokens: int) -> dict[str, float]:
        """The seconds of the step that ends now, in whole and in part, and the tokens that went through it in each."""
        seconds = time.perf_counter() - self._step_began
        self.seconds += seconds
        return self.timers.collect() | {"timing_s/step": seconds, "perf/throughput": tokens / seconds}

    def write_step(self, step: int, metrics: dict[str, float]) -> None:
        """Writes a step's metrics, and counts it as done."""
        if self.metrics:
            self.metrics.log(step, metrics)
        self.step = step + 1

    def write_eval(self, result: dict[str, float], shown: dict[str, float]) -> dict[str, float]:
        """Writes an evaluation as `shown`, and returns its `result`."""
        self.last_eval = self.step, result
        if self.metrics:
            self.metrics.log_eval(self.step, shown)
        return result

    # Saving and leaving ------------------------------------------------------------------------------------------------------

    def save_if_due(self, states: dict[str, Any]) -> None:
        every = self.config.checkpoint.every_steps
        if every and self.step % every == 0 and self.step < self.config.steps:
            self.save(states)

    def save(self, states: dict[str, Any]) -> None:
        """A checkpoint of the last finished step; the writing goes on in the background."""
        with self.timers("save_checkpoint"):
            step, result = self.last_eval
            metric = self.score(result) if step == self.step else None
            new = self.checkpoints.save(self.step, states, self.written(self._committed), metric)
            if self.audit and new:
                self.audit.note("checkpoint", step=self.step, metric=metric)

    def leave(self, states: dict[str, Any], why: Interrupted) -> dict[str, Any]:
        """Saves an interrupted run."""
        self.save(states)
        self.checkpoints.wait()
        self.close()
        if self.audit:
            self.audit.note("interrupted", step=self.step, signal=str(why))
        log.warning("%s: saved step %d in %s; continue with --config.resume=True", why, self.step, self.directory)
        return {"interrupted": str(why), "steps": self.step, "run_dir": str(self.directory)}

    def finish(self, states: dict[str, Any], evaluate: Callable[[], dict[str, float]]) -> dict[str, Any]:
        """The last evaluation, checkpoint, export and report; returns the summary."""
        if jax.process_count() > 1:
            self.save(states)  # one process that fails in the evaluation could not save
        try:
            after = evaluate()
        except Exception:  # whatever went wrong, it shall not cost the weights
            if jax.process_count() == 1:
                self.save(states)
                self.checkpoints.wait()
            raise
        self.commit()
        self.save(states)
        self.checkpoints.wait()
        export = self.directory / "hf" if self.config.export.hf else None
        if export:
            self.export(export, states)
        result = self.summary(after) | {"export": str(export) if export else None}
        self.close()
        if is_chief():
            (self.directory / "result.json").write_text(json.dumps(result, indent=1) + "\n")
            if self.audit:
                self.audit.note("finished", step=self.step, result=result)
            write_report(self.directory)
        return result

    def close(self) -> None:
        """Closes what the run writes to."""
        if self.metrics:
            self.metrics.close()


def check_outputs(config) -> None:
    """Looks at what a run will write to, before anything takes time.

    Raises:
      UserError: the directory cannot be used, a port is taken, a package is missing.
    """
    run_directory(config.run_dir)
    if not is_chief():
        return
    if port := config.log.prometheus_port:
        Exporter(port).close()
    if project := config.log.wandb:
        wandb_log.package(project)


def run_directory(path: str) -> pathlib.Path:
    """The directory that a run may use; nothing is written.

    Raises:
      UserError: it is no directory, cannot be made, or holds files of something else than a run.
    """
    directory = pathlib.Path(path).expanduser()
    there = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"config.run_dir={path}: {there} is not a directory that can be written to; choose another")
    if there == directory and any(directory.iterdir()) and not any((directory / name).exists() for name in MADE_BY_RUNS):
        raise UserError(f"config.run_dir={path}: holds files that are no run's; give a new or an empty directory")
    return directory


def _set_aside(directory: pathlib.Path) -> None:
    """Renames an earlier run's directory to NAME.1, NAME.2, ...: a new run starts empty, and nothing is lost."""
    if not directory.exists() or not any(directory.iterdir()):
        return
    directory = directory.absolute()
    number = next(i for i in itertools.count(1) if not directory.with_name(f"{directory.name}.{i}").exists())
    directory.rename(directory.with_name(f"{directory.name}.{number}"))
    log.info("%s held a run; it is now %s.%d (to continue one: --config.resume=True)", directory, directory, number)
