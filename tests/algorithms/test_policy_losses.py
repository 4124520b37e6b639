"""The policy losses beside PPO's: against float64 NumPy loops, their gradients by finite differences or by hand."""

import jax
import numpy as np
import pytest

from jrl.algorithms.aggregation import weights
from jrl.algorithms.policy_loss import (
    cispo,
    clip_cov,
    clip_cov_selection,
    covariance,
    gmpo,
    gspo,
    kl_cov,
    kl_cov_selection,
    ppo_clip,
    reinforce,
    sapo,
)

RNG = np.random.default_rng(0)
LENS = np.array([6, 1, 4, 3, 0])
MASK = (np.arange(8) >= 1) & (np.arange(8) < 1 + LENS[:, None]) & (np.arange(8) != 3)  # a tool token within
OLD = -RNG.exponential(size=MASK.shape).astype(np.float32)
NEW = OLD + RNG.normal(0, 0.5, MASK.shape).astype(np.float32)
ROWS = np.float32([1.5, -2.0, 0.5, -0.25, 1.0])  # one advantage a row, of both signs
ADVANTAGES = np.where(MASK, ROWS[:, None], 0).astype(np.float32)
TOKENWISE = np.where(MASK, RNG.normal(size=MASK.shape), 0).astype(np.float32)
SELECTED = (RNG.random(MASK.shape) < 0.3) & MASK


def ratio(new, n, t):
    return np.exp(np.clip(float(new[n, t]) - float(OLD[n, t]), -20, 20))


def mean_log_ratio(new, n, clip=None):
    d = [float(new[n, t]) - float(OLD[n, t]) for t in np.flatnonzero(MASK[n])]
    return np.mean([clip(x) for x in d] if clip else d) if d else 0.0


def clipped(r, a, low, high):
    return max(-r * a, -min(max(r, 1 - low), 1 + high) * a)


def one_gmpo(new, n, a):
    clip = (lambda d: min(d, 0.3)) if a > 0 else (lambda d: max(d, -0.2)) if a < 0 else (lambda d: d)
    return -a * np.exp(mean_log_ratio(new, n, clip))


def one_sapo(r, a):
    tau = 1.0 if a > 0 else 2.0
    return -a * 4 / tau / (1 + np.exp(-tau * (r - 1)))


# name -> (the function of (new, advantages), the loss of one token, which advantages)
CASES = {
    "gspo": (
        lambda x, a: gspo(x, OLD, a, MASK, 0.1, 0.4),
        lambda x, a, n, t: clipped(np.exp(mean_log_ratio(x, n)), a, 0.1, 0.4), ADVANTAGES,
    ),
    "gmpo": (lambda x, a: gmpo(x, OLD, a, MASK, 0.2, 0.3), lambda x, a, n, t: one_gmpo(x, n, a), ADVANTAGES),
    "cispo": (
        lambda x, a: cispo(x, OLD, a, 0.3, 0.4),
        lambda x, a, n, t: -min(max(ratio(NEW, n, t), 0.7), 1.4) * a * float(x[n, t]), TOKENWISE,
    ),
    "sapo": (lambda x, a: sapo(x, OLD, a, 1.0, 2.0), lambda x, a, n, t: one_sapo(ratio(x, n, t), a), TOKENWISE),
    "reinforce": (lambda x, a: reinforce(x, a), lambda x, a, n, t: -a * float(x[n, t]), TOKENWISE),
    "clip_cov": (
        lambda x, a: clip_cov(x, OLD, a, SELECTED, 0.2, 0.3),
        lambda x, a, n, t: 0.0 if SELECTED[n, t] else clipped(ratio(x, n, t), a, 0.2, 0.3), TOKENWISE,
    ),
    "kl_cov": (
        lambda x, a: kl_cov(x, OLD, a, SELECTED, 0.7),
        lambda x, a, n, t: -ratio(x, n, t) * a + SELECTED[n, t] * 0.7 * abs(float(x[n, t]) - float(OLD[n, t])), TOKENWISE,
    ),
}  # fmt: skip


def reference(name, new, weight):
    """sum of weight * loss, token by token in float64."""
    _, one, advantages = CASES[name]
    return sum(weight[n, t] * one(new, float(advantages[n, t]), n, t) for n, t in zip(*np.nonzero(MASK), strict=True))


def ours(name, new, weight):
    fn, _, advantages = CASES[name]
    return (weight * fn(new, advantages)[0]).sum()


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_formula(name):
    weight = np.asarray(weights(MASK, "seq-mean-token-mean"), float)
    fn, one, advantages = CASES[name]
    loss, about = jax.jit(fn)(NEW, advantages)
    expected = np.array([[one(NEW, float(advantages[n, t]), n, t) if MASK[n, t] else 0 for t in range(8)] for n in range(5)])
    np.testing.assert_allclose(np.where(MASK, loss, 0), expected, rtol=1e-4, atol=1e-5)
    assert all(x.shape == MASK.shape and x.dtype == np.float32 for x in about.values())
    got = jax.jit(jax.grad(lambda x: ours(name, x, weight)))(NEW)
    for n, t in zip(*np.nonzero(MASK), strict=True):
        step = np.zeros(MASK.shape)
        step[n, t] = 1e-5
        expected = (reference(name, NEW.astype(float) + step, weight) - reference(name, NEW.astype(float) - step, weight)) / 2e-5
        assert got[n, t] == pytest.approx(expected, rel=1e-3, abs=1e-5), (n, t)
    assert not np.any(got[~MASK]) and np.count_nonzero(got) > 3


@pytest.mark.parametrize("name", CASES)
def test_gradients_flow_to_the_new_logprobs_alone_and_on_policy_they_are_ppos(name):
    fn, _, advantages = CASES[name]
    to_advantages = jax.grad(lambda a: fn(NEW, a)[0].sum())(advantages)
    assert not np.any(to_advantages)
    on_policy = np.asarray(jax.grad(lambda x: (MASK * fn(x, advantages)[0]).sum())(OLD))
    by_ppo = np.asarray(jax.grad(lambda x: (MASK * ppo_clip(x, OLD, advantages, 0.2, 0.2)[0]).sum())(OLD))
    if name == "cispo":  # the weight is that of NEW above; here it is 1
        assert np.allclose(on_policy, by_ppo)
    elif name in ("clip_cov", "kl_cov"):
        assert np.allclose(on_policy[MASK & ~SELECTED], by_ppo[MASK & ~SELECTED])
        assert not np.allclose(on_policy[SELECTED], by_ppo[SELECTED])
    else:
        np.testing.assert_allclose(on_policy, by_ppo, atol=1e-5)


def test_gspo_and_gmpo_by_hand():
    # Two tokens of ratio 2 and 1/2: the sequence's is 1, so neither is clipped, though PPO would clip one of them.
    old, new = np.zeros((1, 2), np.float32), np.log(np.float32([[2.0, 0.5]]))
    both, one = np.ones((1, 2), bool), np.ones((1, 2), np.float32)
    np.testing.assert_allclose(gspo(new, old, one, both, 0.2, 0.2)[0], [[-1, -1]], rtol=1e-6)
    assert not np.any(gspo(new, old, one, both, 0.2, 0.2)[1]["clipped"]) and np.any(
        ppo_clip(new, old, one, 0.2, 0.2)[1]["clipped"]
    )
    # GMPO with A = 1 clips log 2 to 0.2, and leaves log 1/2: exp((0.2 - log 2) / 2).
    np.testing.assert_allclose(gmpo(new, old, one, both, 0.2, 0.2)[0], [[-np.exp((0.2 - np.log(2)) / 2)] * 2], rtol=1e-6)
    np.testing.assert_array_equal(gmpo(new, old, one, both, 0.2, 0.2)[1]["clipped"], [[1, 0]])
    np.testing.assert_array_equal(gmpo(new, old, -one, both, 0.2, 0.2)[1]["clipped"], [[0, 1]])


def test_gspos_gradient_is_that_of_the_sequence_ratio():
    """With one advantage a row and seq-mean-token-mean, against finite differences of mean over rows of -s A."""
    weight = np.asarray(weights(MASK, "seq-mean-token-mean"), float)
    got = jax.grad(lambda x: (weight * gspo(x, OLD, ADVANTAGES, MASK, 9e-1, 9.0)[0]).sum())(NEW)
    rows = [n for n in range(5) if MASK[n].any()]
    total = lambda x: np.mean([-ROWS[n] * np.exp(mean_log_ratio(x, n)) for n in rows])  # noqa: E731
    for n, t in zip(*np.nonzero(MASK), strict=True):
        step = np.zeros(MASK.shape)
        step[n, t] = 1e-5
        expected = (total(NEW.astype(float) + step) - total(NEW.astype(float) - step)) / 2e-5
        assert got[n, t] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_what_lies_outside_the_mask_changes_nothing_inside(name):
    """Losses of whole sequences read the row: no padding or tool token may count."""
    fn, _, advantages = CASES[name]
    dirty = np.where(MASK, NEW, NEW + 3).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(fn(dirty, advantages)[0])[MASK], np.asarray(fn(NEW, advantages)[0])[MASK])


def test_far_ratios_stay_finite():
    far = OLD + np.float32(300.0) * np.where(np.arange(8) % 2, 1, -1)
    for name, (fn, _, advantages) in CASES.items():
        loss, gradient = fn(far, advantages)[0], jax.grad(lambda x, f=fn, a=advantages: f(x, a)[0].sum())(far)
        assert np.isfinite(loss).all() and np.isfinite(gradient).all(), name


# The choice of tokens by covariance -------------------------------------------------------------------------------------


def covariances():
    a, x = TOKENWISE[MASK].astype(float), OLD[MASK].astype(float)
    out = np.full(MASK.shape, -np.inf)
    out[MASK] = (a - a.mean()) * (x - x.mean())
    return out


def test_covariance_and_the_highest_of_it():
    np.testing.assert_allclose(covariance(OLD, TOKENWISE, MASK), covariances(), rtol=1e-4, atol=1e-6)
    for fraction, count in ((1e-9, 1), (0.25, 2), (0.5, 5), (1.0, 11)):
        got = np.asarray(kl_cov_selection(OLD, TOKENWISE, MASK, fraction))
        assert got.sum() == count == max(int(MASK.sum() * fraction), 1)
        assert covariances()[got].min() >= np.delete(covariances(), np.flatnonzero(got)).max()


def test_clip_cov_draws_at_random_within_the_bounds():
    cov = covariances()
    low, high = np.sort(cov[MASK])[[3, 9]]  # five lie strictly between
    drawn = [
        np.asarray(clip_cov_selection(OLD, TOKENWISE, MASK, 0.2, float(low), float(high), jax.random.key(k))) for k in range(40)
    ]
    eligible = (cov > np.float32(low) + 1e-6) & (cov < np.float32(high) - 1e-6)
    assert eligible.sum() == 5 and all(d.sum() == 2 and not (d & ~eligible).any() for d in drawn)
    assert (np.sum(drawn, axis=0)[eligible] > 5).all()  # each of the five in its turn: 16 of 40 expected
    assert not np.any(clip_cov_selection(OLD, TOKENWISE, MASK, 0.2, 1e6, 1e7, jax.random.key(0)))
