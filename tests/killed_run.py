"""A run that kills itself as `kill -9` would, at a moment of choice: python -m tests.killed_run MOMENT STEP CONFIG_ARGS..."""

import os
import signal
import sys

from jrl import main
from jrl.checkpoint import Checkpointer
from jrl.learner import Learner
from jrl.rl_run import RLRun
from jrl.rollout.engine import Engine
from jrl.samples import SampleWriter


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str, at_step: int) -> None:
    """Replaces one method so that the process dies there once `at_step` steps are done."""
    owner, name = {
        "in_generation": (Engine, "generate"),
        "in_update": (Learner, "update"),
        "between_logs": (SampleWriter, "write"),
        "in_save": (Checkpointer, "save"),
        "between_steps": (RLRun, "save_if_due"),
    }[moment]
    original, finish = getattr(owner, name), RLRun.finish_step
    finished = 0

    def counted(self, step, *rest):
        nonlocal finished
        finish(self, step, *rest)
        finished = step + 1

    def replaced(self, *args, **kwargs):
        if finished < at_step:
            return original(self, *args, **kwargs)
        if moment == "in_generation":
            original(self, *args, **(kwargs | {"on_step": die}))
        if moment == "in_save":
            original(self, *args, **kwargs)  # orbax is still writing when this returns
        die()

    RLRun.finish_step = counted
    setattr(owner, name, replaced)


if __name__ == "__main__":
    arm(sys.argv[1], int(sys.argv[2]))
    sys.exit(main.main(sys.argv[3:]))
