"""What the pieces of an algorithm are given of a batch, by the names in `jrl.algorithms.pieces.ARRAYS`, and what comes back of
them and of the updates.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jrl.algorithms.pieces import call
from jrl.errors import UserError
from jrl.types import Batch


def of_samples(batch: Batch, reward_weights: Mapping[str, float]) -> dict[str, Any]:
    """What is known of N responses once they are scored; rewards as the reward functions gave them."""
    return {
        "rewards": batch.rewards, "reward_parts": batch.reward_parts, "reward_weights": reward_weights,
        "group_ids": batch.rollout.group_ids, "valid": batch.valid, "lens": batch.rollout.loss_mask.sum(axis=1),
        "truncated": batch.truncated,
    }  # fmt: skip


def kept(keep: Callable, arguments: Mapping[str, Any]) -> np.ndarray:
    """Row numbers of the responses that a filter keeps."""
    result, n = np.asarray(call(keep, arguments)), len(arguments["rewards"])
    if result.shape != (n,) or result.dtype != bool:
        raise UserError(f"filter {_name(keep)} returns {result.dtype}{list(result.shape)}; return bool[{n}], True for what stays")
    return np.flatnonzero(result)


def estimate(advantage: Callable, arguments: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """Advantages f32[N, T], 0 outside the mask, and with a critic the returns f32[N, T] that it learns."""
    mask, critic = np.asarray(arguments["mask"]), "values" in arguments
    result = call(advantage, arguments)
    if critic != isinstance(result, tuple):
        what = "the advantages and the returns that the critic learns, as a tuple" if critic else "the advantages alone"
        raise UserError(f"advantage {_name(advantage)}: return {what}")
    parts = [np.asarray(x, np.float32) for x in (result if critic else (result,))]
    if parts[0].shape not in (mask.shape, mask.shape[:1]) or any(x.shape != mask.shape for x in parts[1:]):
        got = " and ".join(str(list(x.shape)) for x in parts)
        raise UserError(f"advantage {_name(advantage)} returns shape {got}; return [N] or [N, T], returns as [N, T]")
    each = parts[0] if parts[0].ndim == 2 else parts[0][:, None]
    return np.where(mask, each, np.float32(0)), parts[1] if critic else None


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", repr(fn))


def minibatches(group_ids: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Row numbers of `count` minibatches of whole groups, in random order; one minibatch keeps the order."""
    groups = np.unique(group_ids)
    if count > 1:
        groups = rng.permutation(groups)
    return [np.flatnonzero(np.isin(group_ids, part)) for part in np.array_split(groups, min(count, len(groups)))]


def collect(metrics: dict[str, list[float]], prefix: str, new: dict[str, float]) -> None:
    """Appends an update's metrics under `prefix/name`, names that already have a room of their own as they are."""
    for name, value in new.items():
        metrics.setdefault(name if "/" in name else f"{prefix}/{name}", []).append(value)
