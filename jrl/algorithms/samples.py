"""What is done to samples between their rewards and their advantages: penalties, filters, resampling.

N responses, T tokens. Everything runs on the host, on NumPy arrays. The functions that `jrl.algorithms.presets.FILTERS` names
take their arguments by name (`jrl.algorithms.pieces`).
"""

import numpy as np

from jrl.algorithms._checks import check_name

RESAMPLING = ("none", "power", "max_min", "max_random")


def overlong_penalty(lens: np.ndarray, max_tokens: int, buffer: float, factor: float) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, section 3.4), to be added to the rewards.

        min(-(l - (max - b)) / b, 0) factor,    b = buffer max

    Args:
      lens: [N], tokens of each response.
      max_tokens: the longest response allowed.
      buffer: the share of it at its end in which the penalty grows.
      factor: the penalty at the very end.

    Returns:
      f32[N], from -factor to 0.
    """
    room = buffer * max_tokens
    over = np.asarray(lens, np.float32) - np.float32(max_tokens - room)
    return np.minimum(-over / np.float32(room) * np.float32(factor), 0.0).astype(np.float32)


def informative(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """bool[N]: the responses of groups whose valid rewards differ. The others have advantage 0 relative to their group and
    teach nothing (dynamic sampling, DAPO, arXiv:2503.14476, eq. 11)."""
    mixed = [g for g in np.unique(group_ids) if len(np.unique(rewards[(group_ids == g) & valid])) > 1]
    return np.isin(group_ids, mixed)


def resampling_weights(rewards: np.ndarray, group_ids: np.ndarray, valid: np.ndarray, method: str, power: float) -> np.ndarray:
    """How often each response is to be drawn: policy filtration (PF-PPO, arXiv:2409.06957).

    Rewards are trusted most at the ends, so of each group

        power       |R|^power
        max_min     1 for the best and the worst, 0 for the rest
        max_random  0.4 for the best, 0.1 for the rest
        none        1

    Args:
      rewards, group_ids, valid: [N]; what is not valid is never drawn.

    Returns:
      f64[N]: sums to 1 over each group with a valid response, so that each prompt keeps its part of the batch; where the
      weights of a group are all 0, its responses have equal ones.

    Raises:
      UserError: an unknown method.
    """
    check_name("algorithm.resample", method, RESAMPLING)
    rewards, out = np.asarray(rewards, np.float64), np.zeros(len(rewards))
    for group in np.unique(group_ids):
        rows = np.flatnonzero((group_ids == group) & valid)
        r = rewards[rows]
        if not len(rows):
            continue
        weights = {
            "power": np.abs(r) ** power,
            "max_min": ((r == r.max()) | (r == r.min())).astype(float),
            "max_random": np.where(r == r.max(), 0.4, 0.1),
            "none": np.ones(len(rows)),
        }[method]
        out[rows] = weights / weights.sum() if weights.sum() > 0 else 1 / len(rows)
    return out


def resample(weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Row numbers of `count` draws with replacement, in ascending order, so that a response drawn twice stays together."""
    return np.sort(rng.choice(len(weights), size=count, p=weights / weights.sum()))
