"""A stand-in for jrl.main in the tests of sweeps: python -m tests.fake_run ARGS, with the arguments of jrl.main.

It writes what a run writes, in no time. `data.prompt_suffix` says what becomes of it: ok; broken (until a file `repaired` lies
beside its directory); killed; slow (it waits for SIGTERM, saves and leaves, and when resumed ends well); together (it waits
until three arms have begun).
"""

import json
import os
import pathlib
import random
import signal
import sys
import time

from jrl.config import load
from jrl.main import parse

STEPS = 4


def main() -> None:
    command = parse(sys.argv[1:])
    config = load(command.config or "", command.overrides)
    directory, kind = pathlib.Path(config.run_dir), config.data.prompt_suffix
    log = directory.parent / f"starts{config.seed}.txt"
    with log.open("a") as file:
        file.write(f"{'resumed' if config.resume else 'fresh'} {time.time()}\n")
    if kind == "broken" and not (directory.parent / "repaired").exists():
        sys.exit("Traceback (most recent call last):\nMemoryError: \x1b[31mout of <memory>")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    if kind == "killed" and not config.resume:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "slow" and not config.resume:
        wait(directory)
    if kind.startswith("together"):
        meet(directory.parent.parent)
    finish(directory, config.seed, 1e3 * config.learner.learning_rate)
    with log.open("a") as file:
        file.write(f"ended {time.time()}\n")


def wait(directory: pathlib.Path) -> None:
    """Until SIGTERM, for at most a minute; then saves and leaves."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (directory / "metrics.jsonl").write_text("")  # from now on it can be told to leave
    try:
        time.sleep(60)
    finally:
        (directory / "saved").write_text("")


def meet(sweep: pathlib.Path) -> None:
    end = time.monotonic() + 60
    while len(list(sweep.glob("*/starts*.txt"))) < 3:
        if time.monotonic() > end:
            sys.exit("alone")
        time.sleep(0.02)


def finish(directory: pathlib.Path, seed: int, slope: float) -> None:
    draw = random.Random(seed)
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(STEPS):
            row = {"train/accuracy": slope * step + draw.random() / 10, "critic/score/mean": draw.random(), "actor/lr": slope}
            file.write(json.dumps({"step": step, "kind": "train", **row}) + "\n")
        for step in (0, STEPS):
            row = {"val-core/sums/last_number/mean@4": slope * step + draw.random() / 10}
            file.write(json.dumps({"step": step, "kind": "eval", **row}) + "\n")
    result = {"task": "sums", "accuracy_after": slope + draw.random() / 10, "greedy_after": None, "steps": STEPS, "seconds": 1.5}
    (directory / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
