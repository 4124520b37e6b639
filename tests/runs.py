"""Whole runs on the tiny random model, and what they leave behind: helpers of the tests of runs."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import orbax.checkpoint as ocp

from jrl.config import load
from jrl.trainer import Trainer

ROOT = pathlib.Path(__file__).parent.parent
TINY = f"{ROOT}/configs/tiny.py"
QUIET = {"log.tensorboard": False, "export.hf": False, "log.print_samples_every": 0}
RUN = QUIET | {
    "steps": 4, "checkpoint.every_steps": 1, "checkpoint.keep": 9, "algorithm.minibatches": 2, "eval.every_steps": 3,
}  # fmt: skip


def a_run(folder: pathlib.Path, arg: str = "", /, options: dict[str, Any] | None = None, **changes: Any) -> Trainer:
    """A trainer of configs/tiny.py[:ARG] in this process; keys with dots are spelt with two underscores.

    Args:
      options: keyword arguments of the trainer.
    """
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    return Trainer(load(TINY + arg, RUN | {"run_dir": str(folder)} | keys), **(options or {}))


def command(
    folder: pathlib.Path, arg: str = "", config: str = TINY, base: dict[str, Any] | None = None, **changes: Any
) -> list[str]:
    """The same run as a command line, or one of another config.

    Args:
      base: keys in place of those of `RUN`.
    """
    keys = (RUN if base is None else base) | {"run_dir": str(folder)}
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return [sys.executable, "-m", "jrl.main", f"--config={config}{arg}", *(f"--config.{k}={v}" for k, v in keys.items())]


def start(args: list[str], **options: Any) -> subprocess.Popen:
    """A process beside this one, with its devices and precision."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(args, cwd=ROOT, text=True, **(pipes | options))


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sampled(folder: pathlib.Path) -> list[tuple]:
    """Which samples were drawn and what they were worth, in order."""
    return [(r["step"], r["uid"], r["tokens"], r["logprobs"], r["reward"]) for r in lines(folder / "samples.jsonl")]


def trained(folder: pathlib.Path) -> list[dict]:
    """The metrics of each step, without those that tell the time or count programs."""
    told = [m for m in lines(folder / "metrics.jsonl") if m["kind"] == "train"]
    return [{k: v for k, v in m.items() if not k.startswith(("timing_s/", "perf/"))} for m in told]


def digests(folder: pathlib.Path, step: int) -> dict[str, int]:
    """What a checkpoint says of the bits of parameters, optimizers and counters."""
    with ocp.CheckpointManager((folder / "checkpoints").resolve(), item_names=("state", "extra")) as manager:
        content = manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))["extra"]
    return {name: entry[2] for name, entry in content["manifest"].items()}


def assert_same_runs(a: pathlib.Path, b: pathlib.Path, step: int) -> None:
    """Samples, metrics and the last state are equal, bit by bit."""
    assert sampled(a) == sampled(b)
    assert trained(a) == trained(b)
    assert digests(a, step) == digests(b, step)


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **changes}
