"""The critic's loss against float64 NumPy, by hand and by finite differences; explained variance."""

import jax
import numpy as np
import pytest

from jrl.algorithms.value_loss import clipped_value_loss, explained_variance

both = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])


def reference(value, old, target, clip):
    near = min(max(float(value), float(old) - clip), float(old) + clip)
    return 0.5 * max((float(value) - float(target)) ** 2, (near - float(target)) ** 2)


def random_tokens(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(3, 8)).astype(np.float32) for _ in range(3)]


@both
def test_equals_the_formula(compiled):
    values, old, returns = random_tokens()
    fn = jax.jit(clipped_value_loss, static_argnums=3) if compiled else clipped_value_loss
    loss, clipped = fn(values, old, returns, 0.5)
    expected = np.vectorize(reference)(values, old, returns, 0.5)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(clipped, expected > 0.5 * (values.astype(float) - returns) ** 2)
    assert 0 < np.asarray(clipped).sum() < clipped.size


@pytest.mark.parametrize(
    "value, loss, gradient, clipped",
    [
        # V_old = 0, clip = 1, R = 4.
        (0.5, 6.125, -3.5, 0),  # inside: 0.5 * 3.5^2
        (2.0, 4.5, 0.0, 1),  # moved past 1 towards R: held at 0.5 * 3^2
        (-2.0, 18.0, -6.0, 0),  # moved away: 0.5 * 6^2, and free to come back
        (1.0, 4.5, -3.0, 0),  # exactly at the border
    ],
)
def test_by_hand(value, loss, gradient, clipped):
    x, old, returns = (np.full((1, 1), v, np.float32) for v in (value, 0, 4))
    fn = lambda v: tuple(y[0, 0] for y in clipped_value_loss(v, old, returns, 1.0))  # noqa: E731
    (got, flag), slope = jax.jit(jax.value_and_grad(fn, has_aux=True))(x)
    assert (float(got), float(slope[0, 0]), int(flag)) == (loss, gradient, clipped)


def test_gradient_equals_finite_differences_and_flows_to_the_values_alone():
    values, old, returns = random_tokens(1)
    step, fn, x = 1e-6, np.vectorize(reference), values.astype(float)
    expected = (fn(x + step, old, returns, 0.5) - fn(x - step, old, returns, 0.5)) / (2 * step)
    got = jax.jit(jax.grad(lambda *a: clipped_value_loss(*a, 0.5)[0].sum(), argnums=(0, 1, 2)))(values, old, returns)
    np.testing.assert_allclose(got[0], expected, rtol=1e-4, atol=1e-5)
    assert 0 < np.count_nonzero(expected) < expected.size
    assert not np.any(got[1]) and not np.any(got[2])


def test_values_inside_the_clip_never_count_as_clipped():
    """V_old + (V - V_old) rounds, so a clip written with it would report noise as clipping."""
    rng = np.random.default_rng(2)
    old, values = (rng.uniform(-x, x, (3, 8)).astype(np.float32) for x in (0.1, 1e-3))
    returns = np.zeros_like(old)
    assert not np.any(clipped_value_loss(values, old, returns, 0.2)[1])
    rounded = old + np.clip(values - old, -0.2, 0.2)  # the negative control
    assert np.any(np.square(rounded) > np.square(values))


@both
def test_explained_variance(compiled):
    fn = jax.jit(explained_variance) if compiled else explained_variance
    rng = np.random.default_rng(3)
    mask = rng.random((3, 8)) < 0.7
    returns, noise = rng.normal(2, 3, mask.shape).astype(np.float32), rng.normal(size=mask.shape).astype(np.float32)
    hide = lambda x: np.where(mask, x, np.nan).astype(np.float32)  # noqa: E731  (nothing outside the mask is read)
    values = returns + noise
    expected = 1 - noise[mask].astype(float).var() / returns[mask].astype(float).var()
    np.testing.assert_allclose(fn(hide(values), hide(returns), mask), expected, rtol=1e-4)
    np.testing.assert_allclose(fn(hide(returns), hide(returns), mask), 1, atol=1e-6)
    np.testing.assert_allclose(fn(hide(returns + 5), hide(returns), mask), 1, atol=1e-5)  # a bias is not variance
    np.testing.assert_allclose(fn(hide(0 * returns + 7), hide(returns), mask), 0, atol=1e-5)
    np.testing.assert_allclose(fn(hide(-returns), hide(returns), mask), -3, rtol=1e-4)  # worse than a constant


@both
@pytest.mark.parametrize("value", [0.0, 0.1, 1000.1])
def test_explained_variance_of_returns_that_do_not_vary_is_zero(compiled, value):
    fn = jax.jit(explained_variance) if compiled else explained_variance
    values, returns = random_tokens(4)[0], np.full((3, 8), value, np.float32)
    for mask in (np.ones((3, 8), bool), np.zeros((3, 8), bool), np.eye(3, 8, dtype=bool)):
        assert fn(values, returns, mask) == 0


def test_wrong_shapes_are_refused_rather_than_broadcast():
    x = np.ones((3, 3))
    with pytest.raises(ValueError, match="^returns has shape"):
        clipped_value_loss(x, x, np.ones(3), 0.5)
    with pytest.raises(ValueError, match="^mask has shape"):
        explained_variance(x, x, np.ones((1, 3), bool))
