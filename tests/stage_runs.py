"""Runs of the stages before RL on the tiny random model, with small data of their own: helpers of their tests."""

import json
import os
import pathlib
import signal
from typing import Any

from jrl.config import load
from jrl.supervised import SupervisedTrainer
from tests.runs import QUIET, ROOT

SHORT = QUIET | {
    "steps": 4, "checkpoint.every_steps": 1, "checkpoint.keep": 9, "data.examples_per_step": 4, "learner.mesh.fsdp": 1,
    "learner.mesh.data": -1,
}  # fmt: skip
WORDS = ("red", "green", "blue", "white", "black", "grey", "pink", "brown")


def a_stage_run(stage: str, folder: pathlib.Path, /, **changes: Any) -> SupervisedTrainer:
    """A trainer of configs/STAGE.py in this process; keys with dots are spelt with two underscores."""
    keys = SHORT | {"run_dir": str(folder)} | {name.replace("__", "."): value for name, value in changes.items()}
    return SupervisedTrainer(load(f"{ROOT}/configs/{stage}.py", keys))


def stop_after(trainer, step):
    """SIGTERM comes while that many steps are done."""
    finish = trainer.run.finish_step

    def counted(done, *args):
        finish(done, *args)
        if done + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.run.finish_step = counted


def conversations(path: pathlib.Path, count: int = 24) -> str:
    """Chats of one to three turns, of different lengths."""
    with path.open("w") as file:
        for i in range(count):
            chat = []
            for turn in range(1 + i % 3):
                word = WORDS[(i + turn) % len(WORDS)]
                chat += [{"role": "user", "content": f"{i} {word}?"}, {"role": "assistant", "content": word * (1 + i % 4)}]
            file.write(json.dumps({"messages": chat}) + "\n")
    return str(path)


def pairs(path: pathlib.Path, count: int = 24) -> str:
    """The better answer ends with an exclamation mark; it is the longer one or the shorter one."""
    with path.open("w") as file:
        for i in range(count):
            word, other = WORDS[i % len(WORDS)], WORDS[(i * 3 + 1) % len(WORDS)]
            answers = (f"{other} {other}!", other) if i % 2 else (f"{other}!", f"{other} {other}")
            row = {"prompt": f"{i} {word}?", "chosen": answers[0], "rejected": answers[1], "margin": (i % 3) / 4}
            file.write(json.dumps(row) + "\n")
    return str(path)


def labelled(path: pathlib.Path, count: int = 24) -> str:
    """Longer answers are wanted."""
    with path.open("w") as file:
        for i in range(count):
            word, good = WORDS[i % len(WORDS)], i % 2 == 0
            row = {"prompt": f"{i} {word}?", "completion": f"{word} {word}!" if good else word, "label": good}
            file.write(json.dumps(row) + "\n")
    return str(path)


def steps(path: pathlib.Path, count: int = 24) -> str:
    """A step is right if it ends in a full stop."""
    with path.open("w") as file:
        for i in range(count):
            labels = [(i >> k) % 2 for k in range(1 + i % 3)]
            answer = [f"{WORDS[(i + k) % len(WORDS)]}{'.' if label else '?'}" for k, label in enumerate(labels)]
            file.write(json.dumps({"prompt": f"{i}?", "steps": answer, "labels": labels}) + "\n")
    return str(path)
