"""The clipped policy loss against float64 NumPy, by hand, by finite differences, and at its borders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algorithms.policy_loss import ppo_clip

both = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
LOW, HIGH, DUAL = 0.2, 0.28, 3.0


def reference(logprobs, old, advantages, low=LOW, high=HIGH, dual=None):
    """The table's formula for one token, in float64."""
    ratio = np.exp(min(max(float(logprobs) - float(old), -20.0), 20.0))
    a = float(advantages)
    loss = max(-ratio * a, -min(max(ratio, 1 - low), 1 + high) * a)
    return min(loss, -dual * a) if dual is not None and a < 0 else loss


def random_tokens(rows=3, columns=8, spread=0.5, seed=0):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(rows, columns)).astype(np.float32)
    new = old + rng.normal(0, spread, old.shape).astype(np.float32)
    return new, old, rng.normal(size=old.shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=5)
def value_and_gradient(new, old, advantages, low=LOW, high=HIGH, dual=None):
    """(loss, gradient by the logprob, clipped) of every token."""

    def total(x):
        loss, about = ppo_clip(x, old, advantages, low, high, dual)
        return loss.sum(), (loss, about["clipped"])

    gradient, (loss, clipped) = jax.grad(total, has_aux=True)(new)
    return loss, gradient, clipped


def loss_at(ratio, advantage, dual=None, high=HIGH, low=LOW):
    """(loss, gradient by the logprob, clipped) of one token whose ratio is given."""

    x, a = (np.full((1, 1), v, np.float32) for v in (np.log(ratio), advantage))
    loss, gradient, clipped = value_and_gradient(x, np.zeros_like(x), a, low, high, dual)
    return float(loss[0, 0]), float(gradient[0, 0]), bool(clipped[0, 0])


@both
@pytest.mark.parametrize("dual", [None, DUAL])
def test_equals_the_formula(compiled, dual):
    new, old, advantages = random_tokens(spread=1.0)
    fn = jax.jit(ppo_clip, static_argnums=(3, 4, 5)) if compiled else ppo_clip
    loss, about = fn(new, old, advantages, LOW, HIGH, dual)
    expected = np.vectorize(lambda x, o, a: reference(x, o, a, dual=dual))(new, old, advantages)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(about["ratio"], np.exp(new.astype(float) - old), rtol=1e-5)
    assert loss.dtype == about["ratio"].dtype == about["clipped"].dtype == jnp.float32
    if dual is not None:  # the negative control: the bound was met by some token
        assert not np.allclose(expected, np.vectorize(reference)(new, old, advantages))


@pytest.mark.parametrize(
    "ratio, advantage, dual, loss, gradient, clipped",
    [
        # A > 0: the loss stops falling above 1.28, and a fallen ratio is always pulled back.
        (1.0, 2.0, None, -2.0, -2.0, False),
        (1.25, 2.0, None, -2.5, -2.5, False),
        (1.5, 2.0, None, -2.56, 0.0, True),
        (0.5, 2.0, None, -1.0, -1.0, False),
        # A < 0: the loss stops falling below 0.8, and a risen ratio is always pushed down ...
        (0.5, -2.0, None, 1.6, 0.0, True),
        (0.9, -2.0, None, 1.8, 1.8, False),
        (1.5, -2.0, None, 3.0, 3.0, False),
        (5.0, -2.0, None, 10.0, 10.0, False),
        # ... except with dual clip above 3, which leaves all else alone.
        (5.0, -2.0, DUAL, 6.0, 0.0, False),
        (2.5, -2.0, DUAL, 5.0, 5.0, False),
        (0.5, -2.0, DUAL, 1.6, 0.0, True),
        (5.0, 2.0, DUAL, -2.56, 0.0, True),
        # A = 0: nothing to learn.
        (1.5, 0.0, DUAL, 0.0, 0.0, False),
    ],
)
def test_both_signs_and_all_sides_by_hand(ratio, advantage, dual, loss, gradient, clipped):
    got = loss_at(ratio, advantage, dual)
    np.testing.assert_allclose(got[:2], (loss, gradient), rtol=1e-5, atol=1e-6)
    assert got[2] is clipped


def test_gradient_at_and_just_beyond_the_borders():
    # Borders chosen so that the ratio of a float32 logprob lies on them exactly.
    above, below = (float(jnp.exp(jnp.float32(x))) for x in (0.25, -0.25))
    high, low = above - 1, 1 - below
    at = [loss_at(np.exp(0.25), 1.0, high=high), loss_at(np.exp(-0.25), -1.0, low=low)]
    np.testing.assert_allclose([g for _, g, _ in at], [-above, below], rtol=1e-6)  # all of it, not half
    assert not any(clipped for *_, clipped in at)
    beyond = [loss_at(np.exp(0.25 + 1e-5), 1.0, high=high), loss_at(np.exp(-0.25 - 1e-5), -1.0, low=low)]
    assert [g for _, g, _ in beyond] == [0, 0] and all(clipped for *_, clipped in beyond)


@pytest.mark.parametrize("dual", [None, DUAL])
def test_gradient_equals_finite_differences(dual):
    new, old, advantages = random_tokens(spread=1.0, seed=1)
    ratio, step = np.exp(new.astype(float) - old), 1e-6
    smooth = np.min([np.abs(ratio - b) for b in (1 - LOW, 1 + HIGH, DUAL)], axis=0) > 1e-4
    assert smooth.all()
    fn = np.vectorize(lambda x, o, a: reference(x, o, a, dual=dual))
    x = new.astype(float)
    expected = (fn(x + step, old, advantages) - fn(x - step, old, advantages)) / (2 * step)
    got = value_and_gradient(new, old, advantages, LOW, HIGH, dual)[1]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert 0 < np.count_nonzero(expected) < expected.size  # some tokens clipped, some not


def test_on_policy_the_loss_is_minus_a_and_its_gradient_the_policy_gradient():
    new, _, advantages = random_tokens(seed=2)
    np.testing.assert_array_equal(ppo_clip(new, new, advantages, LOW, HIGH)[1]["ratio"], np.ones_like(new))
    loss, gradient, clipped = value_and_gradient(new, new, advantages, LOW, HIGH, DUAL)
    np.testing.assert_array_equal(loss, -advantages)
    np.testing.assert_array_equal(gradient, -advantages)
    assert not np.any(clipped)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_far_log_ratios_are_clamped_and_stay_finite(advantage):
    gaps = np.tile(np.array([25.0, 200.0, -25.0, -200.0], np.float32), (3, 2))
    zero = np.zeros_like(gaps)
    loss, gradient, _ = value_and_gradient(gaps, zero, zero + np.float32(advantage))
    np.testing.assert_allclose(loss, np.vectorize(reference)(gaps, 0.0, advantage), rtol=1e-5)
    assert not np.any(gradient)
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.exp(np.float32(200.0)))  # the negative control: unclamped it overflows


def test_gradients_flow_to_the_new_logprobs_alone():
    new, old, advantages = random_tokens(seed=3)
    got = jax.jit(jax.grad(lambda *x: ppo_clip(*x, LOW, HIGH)[0].sum(), argnums=(0, 1, 2)))(new, old, advantages)
    assert np.any(got[0]) and not np.any(got[1]) and not np.any(got[2])


def test_one_advantage_per_row_is_refused_rather_than_broadcast():
    with pytest.raises(ValueError, match=r"^advantages has shape \(4,\)"):
        ppo_clip(np.zeros((4, 4)), np.zeros((4, 4)), np.zeros(4), LOW, HIGH)
