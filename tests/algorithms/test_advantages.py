"""Advantages against float64 NumPy loops and numbers worked by hand."""

import functools

import jax
import numpy as np
import pytest

from jrl.algorithms.advantages import gae, grpo, token_rewards, whiten

both = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])


def variant(fn, compiled, *static):
    return jax.jit(fn, static_argnums=static) if compiled else fn


# grpo -----------------------------------------------------------------------------------------------------------------


def grpo_reference(rewards, ids, valid, normalize_std=True):
    out = np.zeros(len(rewards))
    for i in range(len(rewards)):
        group = [float(r) for r, g, v in zip(rewards, ids, valid, strict=True) if v and g == ids[i]]
        if not valid[i] or len(group) < 2:
            continue
        mean = sum(group) / len(group)
        std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
        out[i] = (rewards[i] - mean) / (std + 1e-6 if normalize_std else 1.0)
    return out


@both
def test_grpo_by_hand(compiled):
    # Rewards 1, 0, 0, 1: mean 1/2, unbiased std sqrt(4 * 1/4 / 3) = 1/sqrt(3), A = +-sqrt(3)/2.
    # Rewards 2, 0: mean 1, std sqrt(2), A = +-1/sqrt(2). Rewards 5, 5: 0.
    rewards, ids = np.array([1, 2, 0, 0, 0, 1, 5, 5], np.float32), np.array([0, 1, 0, 0, 1, 0, 2, 2])
    valid = np.ones(8, bool)
    a, b = 3**0.5 / 2, 2**-0.5
    np.testing.assert_allclose(variant(grpo, compiled)(rewards, ids, valid), [a, b, -a, -a, -b, a, 0, 0], rtol=1e-5)
    plain = variant(grpo, compiled, 3)(rewards, ids, valid, False)
    np.testing.assert_allclose(plain, [0.5, 1, -0.5, -0.5, -1, 0.5, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_on_ragged_groups_equals_the_loops(normalize_std):
    rng = np.random.default_rng(1)
    ids = rng.permutation(np.repeat([1000, -1, 7, 0, 2], [1, 9, 2, 5, 7]))  # not a range, not sorted, sizes 1 to 9
    valid = rng.random(24) < 0.8
    rewards = rng.normal(size=24).astype(np.float32)
    expected = grpo_reference(rewards, ids, valid, normalize_std)
    assert np.count_nonzero(expected) > 12
    got = jax.jit(grpo, static_argnums=3)(rewards, ids, valid, normalize_std)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@both
def test_groups_of_equal_rewards_give_exactly_zero(compiled):
    fn, by_formula = variant(grpo, compiled), []
    for reward in (0.0, 0.1, 1 / 3, 0.7, 1.1, -1e6, 1e-30):
        for size in (1, 3, 7):
            equal = np.arange(8) < size
            rewards = np.where(equal, reward, np.arange(8)).astype(np.float32)
            got = np.asarray(fn(rewards, equal.astype(int), np.ones(8, bool)))
            assert (got[equal] == 0).all()
            assert size == 7 or (got[~equal] != 0).any()  # the other group has something to learn from
            total = functools.reduce(np.add, rewards[equal])  # one after the other, in float32
            by_formula.append(rewards[0] - total / np.float32(size))
    assert np.any(by_formula)  # the negative control: R - mean rounds, so the formula alone is not 0 on these


@both
def test_invalid_samples_enter_no_statistic(compiled):
    rewards = np.array([1, 0, np.nan, 3, 5, np.inf, 0, 0], np.float32)
    ids, valid = np.array([0, 0, 0, 1, 1, 0, 2, 2]), np.array([1, 1, 0, 1, 0, 0, 1, 1], bool)
    fn = variant(grpo, compiled)
    got = np.asarray(fn(rewards, ids, valid))
    np.testing.assert_allclose(got, [2**-0.5, -(2**-0.5), 0, 0, 0, 0, 0, 0], rtol=1e-5)
    counted = np.asarray(fn(np.nan_to_num(rewards, posinf=2.0), ids, np.ones(8, bool)))
    assert not np.allclose(counted[:2], got[:2])  # were they valid, they would count


def test_integer_rewards_are_not_truncated():
    rewards, ids = np.array([1, 0, 0, 0, 0, 0, 0, 0]), np.array([0, 0, 0, 1, 1, 1, 1, 1])
    got = grpo(rewards, ids, np.ones(8, bool), normalize_std=False)
    np.testing.assert_allclose(got, [2 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0, 0], rtol=1e-6)


# token_rewards --------------------------------------------------------------------------------------------------------


@both
def test_reward_lies_on_the_last_token_and_the_penalty_on_all(compiled):
    mask = np.array([[0, 1, 1, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]], bool)
    rewards = np.array([2.0, -1.0, np.nan], np.float32)
    fn = variant(token_rewards, compiled)
    np.testing.assert_array_equal(fn(rewards, mask), [[0, 0, 2, 0, 0], [0, 0, 0, 0, -1], [0, 0, 0, 0, 0]])
    penalty = np.where(mask, np.arange(5, dtype=np.float32) / 4, np.nan)
    expected = [[0, -0.25, 1.5, 0, 0], [0, 0, -0.5, 0, -2], [0, 0, 0, 0, 0]]
    np.testing.assert_array_equal(fn(rewards, mask, penalty), expected)


# gae ------------------------------------------------------------------------------------------------------------------


def gae_reference(rewards, values, mask, gamma, lam):
    """The sum of eq. 16 term by term, rather than the recursion, on the tokens of the mask cut out of each row."""
    advantages = np.zeros(mask.shape)
    for n, row in enumerate(mask):
        at = np.flatnonzero(row)
        r, v = rewards[n, at].astype(float), np.append(values[n, at].astype(float), 0.0)
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(at))]
        for i, t in enumerate(at):
            advantages[n, t] = sum((gamma * lam) ** (j - i) * delta[j] for j in range(i, len(at)))
    return advantages, np.where(mask, advantages + np.where(mask, values, 0), 0)


@both
def test_gae_by_hand(compiled):
    # gamma 1/2, lambda 1/2; V = 1, 2, 4; r = 0, 0, 8. delta = 0 + 1 - 1, 0 + 2 - 2, 8 - 4 = 0, 0, 4; A = 1/4, 1, 4.
    values, rewards = np.array([[1, 2, 4]], np.float32), np.array([[0, 0, 8]], np.float32)
    got = variant(gae, compiled, 3, 4)(rewards, values, np.ones((1, 3), bool), 0.5, 0.5)
    np.testing.assert_array_equal(got[0], [[0.25, 1, 4]])
    np.testing.assert_array_equal(got[1], [[1.25, 3, 8]])


MASK = np.array([[0, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0, 0], [0] * 8], bool)


@both
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_equals_the_sum_and_never_reads_outside_the_mask(compiled, gamma, lam):
    rng = np.random.default_rng(2)
    rewards, values = (rng.normal(size=MASK.shape).astype(np.float32) for _ in range(2))
    dirty = [np.where(MASK, x, np.nan).astype(np.float32) for x in (rewards, values)]
    expected = gae_reference(rewards, values, MASK, gamma, lam)
    for got, want in zip(variant(gae, compiled, 3, 4)(*dirty, MASK, gamma, lam), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_bootstrap_jumps_over_tool_tokens():
    rng = np.random.default_rng(3)
    rewards, values = (rng.normal(size=MASK.shape).astype(np.float32) for _ in range(2))
    with_tool = np.asarray(gae(rewards, values, MASK, 0.9, 0.8)[0])
    cut = MASK[0]
    rows = [x[:1, cut] for x in (rewards, values)]
    without = np.asarray(gae(*rows, np.ones((1, 4), bool), 0.9, 0.8)[0])
    np.testing.assert_array_equal(with_tool[0, cut], without[0])
    # The negative control: reading the tool tokens as tokens gives other advantages before them, the same after.
    naive = np.asarray(gae(rewards, values, MASK | (np.arange(8) == 3) | (np.arange(8) == 4), 0.9, 0.8)[0])
    assert (np.abs(naive[0, 1:3] - with_tool[0, 1:3]) > 1e-3).all()
    np.testing.assert_array_equal(naive[0, 5:7], with_tool[0, 5:7])


def test_without_discount_the_return_is_the_reward_to_go():
    """lambda = gamma = 1: whatever the critic says, A + V is the sum of the rewards still to come."""
    rewards = np.asarray(token_rewards(np.array([3.0, -2.0, 1.0, 0.0], np.float32), MASK))
    values = np.random.default_rng(4).normal(size=MASK.shape).astype(np.float32)
    returns = gae(rewards, values, MASK, 1.0, 1.0)[1]
    np.testing.assert_allclose(returns, np.where(MASK, [[3.0], [-2.0], [1.0], [0.0]], 0), atol=1e-5)


# whiten ---------------------------------------------------------------------------------------------------------------


@both
def test_whiten_over_the_mask(compiled):
    x = np.where(MASK, np.random.default_rng(5).normal(3, 7, MASK.shape), np.nan).astype(np.float32)
    inside = x[MASK].astype(float)
    got = np.asarray(variant(whiten, compiled)(x, MASK))
    expected = (inside - inside.mean()) / np.sqrt(inside.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(got[MASK], expected, rtol=1e-4, atol=1e-5)
    assert (got[~MASK] == 0).all()
    assert abs(got[MASK].std(ddof=1) - 1) < 1e-5 < abs(got[MASK].std(ddof=0) - 1)  # unbiased, not biased


@both
def test_whitening_what_does_not_vary_gives_exactly_zero(compiled):
    fn, off_the_mean = variant(whiten, compiled), []
    for tokens in (0, 1, 3, 7, 13, 32):
        mask = np.arange(32).reshape(4, 8) < tokens
        for value in (0.1, 0.7, 1.1, 100.1):
            x = np.full(mask.shape, value, np.float32)
            assert (np.asarray(fn(x, mask)) == 0).all()
            off_the_mean.append(x[0, 0] - functools.reduce(np.add, x[mask], np.float32(0)) / np.float32(max(tokens, 1)))
    assert np.any(off_the_mean[4:])  # the negative control: x - mean rounds, and a variance near 0 magnifies it


# the door -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: grpo(np.ones((2, 3)), np.zeros(2, int), np.ones(2, bool)), "rewards"),
        (lambda: grpo(np.ones(3), np.zeros(2, int), np.ones(3, bool)), "group_ids"),
        (lambda: gae(np.ones((2, 3)), np.ones((2, 2)), np.ones((2, 3), bool), 1.0, 1.0), "values"),
        (lambda: gae(np.ones(3), np.ones(3), np.ones(3, bool), 1.0, 1.0), "rewards"),
        (lambda: token_rewards(np.ones(3), np.ones((2, 3), bool)), "rewards"),
        (lambda: token_rewards(np.ones(2), np.ones((2, 3), bool), np.ones(3)), "penalty"),
        (lambda: whiten(np.ones((3, 3)), np.ones(3, bool)), "mask"),
    ],
)
def test_wrong_shapes_are_refused_rather_than_broadcast(call, named):
    with pytest.raises(ValueError, match=f"^{named} has shape"):
        call()
