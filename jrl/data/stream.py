"""The order in which prompts are trained on: shuffled in every epoch, the same again after a resume."""

import hashlib
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from jrl.errors import UserError


class HasUid(Protocol):
    """What tells the data of one run from those of another."""

    @property
    def uid(self) -> str: ...


Drawn = TypeVar("Drawn", bound=HasUid)


class PromptStream(Generic[Drawn]):
    """Endless prompts, or whatever a stage learns from; every epoch is a permutation of all, which depends on (seed, epoch) only.

    A draw may cross the border of two epochs, so no prompt is ever left out. The cursor is two integers.
    """

    def __init__(self, prompts: Sequence[Drawn], prompts_per_step: int, seed: int, key: str = "rollout.prompts_per_step"):
        """
        Args:
          key: where the config says how many there are in a step.
        """
        if len(prompts) < prompts_per_step:
            raise UserError(f"{key}={prompts_per_step}: there are {len(prompts)} training examples; take fewer")
        self._prompts = list(prompts)
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._digest = hashlib.blake2b(" ".join(p.uid for p in prompts).encode(), digest_size=8).hexdigest()
        self._start(epoch=0)

    def _start(self, epoch: int, position: int = 0) -> None:
        self._epoch, self._position = epoch, position
        self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._prompts))

    def next(self, k: int | None = None) -> list[Drawn]:
        """The next `k` prompts, those of a step unless told otherwise."""
        drawn: list[Drawn] = []
        wanted = self._prompts_per_step if k is None else k
        while len(drawn) < wanted:
            part = self._order[self._position : self._position + wanted - len(drawn)]
            drawn += [self._prompts[i] for i in part]
            self._position += len(part)
            if self._position == len(self._prompts):
                self._start(self._epoch + 1)
        return drawn

    def state(self) -> dict[str, Any]:
        """The cursor, fit for JSON, with what it belongs to."""
        return {"epoch": self._epoch, "position": self._position, "seed": self._seed, "prompts": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises:
          UserError: the state belongs to other prompts or another seed, so the order could not be continued.
        """
        for name, mine in (("seed", self._seed), ("prompts", self._digest)):
            if state[name] != mine:
                raise UserError(
                    f"resume: the checkpoint was made with other training data ({name} {state[name]}, now {mine}); "
                    "restore the data settings and the seed of that run, or start a new run_dir"
                )
        self._start(state["epoch"], state["position"])
