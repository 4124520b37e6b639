"""Penalties, filters and resampling: by hand and against what their papers say."""

import numpy as np
import pytest

from jrl.algorithms.samples import RESAMPLING, informative, overlong_penalty, resample, resampling_weights
from jrl.errors import UserError


def test_overlong_penalty_by_hand():
    # At most 20 tokens, the last 5 of which cost: nothing to 15, then a fifth of 2 each.
    got = overlong_penalty(np.array([1, 15, 16, 18, 20]), 20, 0.25, 2.0)
    np.testing.assert_allclose(got, [0, 0, -0.4, -1.2, -2.0], rtol=1e-6)
    assert got.dtype == np.float32
    np.testing.assert_allclose(overlong_penalty(np.array([10, 20]), 20, 1.0, 1.0), [-0.5, -1.0], rtol=1e-6)


def test_only_groups_of_different_known_rewards_are_informative():
    ids = np.array([3, 3, 5, 5, 7, 7, 9])
    rewards, valid = np.float32([1, 0, 1, 1, 1, 0, 4]), np.array([1, 1, 1, 1, 1, 0, 1], bool)
    assert informative(rewards, ids, valid).tolist() == [True, True, False, False, False, False, False]
    assert informative(rewards, ids, np.ones(7, bool)).tolist() == [True, True, False, False, True, True, False]


IDS, VALID = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2]), np.array([1, 1, 1, 1, 1, 1, 1, 0, 1], bool)
REWARDS = np.float32([1, -2, 0, 1, 0, 0, 3, 9, 1])


@pytest.mark.parametrize(
    "method, expected",
    [
        ("power", [1 / 6, 4 / 6, 0, 1 / 6, 0.5, 0.5, 9 / 10, 0, 1 / 10]),  # |R|^2, of each group; all 0: evenly
        ("max_min", [1 / 3, 1 / 3, 0, 1 / 3, 0.5, 0.5, 0.5, 0, 0.5]),
        ("max_random", [0.4, 0.1, 0.1, 0.4, 0.5, 0.5, 0.8, 0, 0.2]),
        ("none", [0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 0, 0.5]),
    ],
)
def test_resampling_weights_by_hand(method, expected):
    np.testing.assert_allclose(resampling_weights(REWARDS, IDS, VALID, method, 2.0), expected, rtol=1e-12)
    assert method in RESAMPLING and len(RESAMPLING) == 4
    with pytest.raises(UserError, match="algorithm.resample 'best' is not known; use one of none, power"):
        resampling_weights(REWARDS, IDS, VALID, "best", 2.0)


def test_draws_follow_the_weights_and_their_random_numbers():
    weights = resampling_weights(REWARDS, IDS, VALID, "power", 2.0)
    rows = np.concatenate([resample(weights, 9, np.random.default_rng(seed)) for seed in range(2000)])
    seen = np.bincount(rows, minlength=9) / len(rows)
    np.testing.assert_allclose(seen, weights / 3, atol=0.01)
    assert seen[2] == seen[7] == 0  # a weight of 0, and an unknown reward
    first, again, other = (resample(weights, 9, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist() and first.tolist() == sorted(first.tolist())
