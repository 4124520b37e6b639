"""The responses of former steps, to be drawn from again (PF-PPO, arXiv:2409.06957).

They keep the logprobs that they were sampled with, and everything that depends on the present weights is computed anew, so the
correction for the rollout's mismatch (`jrl.algorithms.rollout_correction`) is that for their age too.
"""

import base64
import dataclasses
import io
from collections.abc import Iterable
from typing import Any

import numpy as np

from jrl.data import Prompt
from jrl.types import Batch, Rollout, concatenate


class Replay:
    """The scored batches of the last `steps` steps.

    Attributes:
      batches: oldest first. Batches never change, so this tuple is a snapshot.
      versions: of the weights that chose the tokens of the latest `join`.
    """

    def __init__(self, steps: int, batches: Iterable[Batch] = ()):
        self.steps = steps
        self.batches = tuple(batches)
        self.versions: list[int] = []

    def join(self, new: Batch) -> Batch:
        """The new batch, and after it the former ones; no two share a group id."""
        parts, first = [], 0
        for batch in (new, *self.batches):
            names, ids = np.unique(batch.rollout.group_ids, return_inverse=True)
            ids = batch.rollout.group_ids if batch is new else (first + ids).astype(np.int32)
            parts.append(dataclasses.replace(batch, rollout=dataclasses.replace(batch.rollout, group_ids=ids)))
            first = max(int(ids.max()) + 1, first + len(names))
        joined = concatenate(parts)
        self.versions = np.unique(joined.rollout.versions[joined.rollout.loss_mask]).tolist()
        return joined

    def push(self, new: Batch) -> None:
        """Takes a batch in and lets go of those that are too old."""
        if self.steps:
            self.batches = (*self.batches, new)[-self.steps :]


def to_text(batches: Iterable[Batch]) -> list[str]:
    """Batches, as they are before their advantages are known, as text; prompts by their uid."""
    return [_encode(batch) for batch in batches]


def from_text(texts: Iterable[str], prompts: Iterable[Prompt]) -> list[Batch]:
    """What `to_text` wrote, with the prompts of the run."""
    by_uid = {prompt.uid: prompt for prompt in prompts}
    return [_decode(text, by_uid) for text in texts]


_ROLLOUT = tuple(f.name for f in dataclasses.fields(Rollout))
_BATCH = ("rewards", "valid", "ids", "greedy_rewards")


def _encode(batch: Batch) -> str:
    arrays = {f"rollout.{name}": getattr(batch.rollout, name) for name in _ROLLOUT}
    arrays |= {name: getattr(batch, name) for name in _BATCH if getattr(batch, name) is not None}
    arrays |= {f"part.{name}": part for name, part in batch.reward_parts.items()}
    arrays |= {"uids": np.array([p.uid for p in batch.prompts]), "texts": np.array([str(t) for t in batch.texts])}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return base64.b64encode(file.getvalue()).decode()


def _decode(text: str, prompts: dict[str, Prompt]) -> Batch:
    arrays: dict[str, Any] = dict(np.load(io.BytesIO(base64.b64decode(text))))
    mine = np.empty(len(arrays["uids"]), object)
    mine[:] = [prompts[uid] for uid in arrays["uids"]]
    return Batch(
        rollout=Rollout(**{name: arrays[f"rollout.{name}"] for name in _ROLLOUT}),
        prompts=mine, texts=arrays["texts"].astype(object),
        reward_parts={name.removeprefix("part."): x for name, x in arrays.items() if name.startswith("part.")},
        **{name: arrays[name] for name in _BATCH if name in arrays},
    )  # fmt: skip
