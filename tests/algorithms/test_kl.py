"""KL estimators: their values, and by exact sums over a small vocabulary what their means and gradients estimate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algorithms.kl import ESTIMATORS, adapted_coef, kl
from jrl.errors import UserError

both = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])

PLAIN, STRAIGHT = ("k1", "abs", "k2", "k3"), ("k1+", "abs+", "k3+")
FORMULA = {
    "k1": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.exp(-d) - 1 + d,
}


@both
@pytest.mark.parametrize("name", ESTIMATORS)
def test_values(compiled, name):
    rng = np.random.default_rng(0)
    p, q = (-rng.exponential(size=(3, 8)).astype(np.float32) for _ in range(2))
    fn = jax.jit(kl, static_argnums=2) if compiled else kl
    expected = np.vectorize(FORMULA[name.removesuffix("+")])(p.astype(float) - q)
    np.testing.assert_allclose(fn(p, q, name), expected, rtol=1e-4, atol=1e-6)


def test_values_by_hand():
    p, q = np.array([[np.log(0.5), np.log(0.25)]], np.float32), np.array([[np.log(0.25), np.log(0.5)]], np.float32)
    log2 = np.log(2)  # d = log 2, -log 2
    np.testing.assert_allclose(kl(p, q, "k1"), [[log2, -log2]], rtol=1e-6)
    np.testing.assert_allclose(kl(p, q, "abs"), [[log2, log2]], rtol=1e-6)
    np.testing.assert_allclose(kl(p, q, "k2"), [[log2**2 / 2] * 2], rtol=1e-6)
    np.testing.assert_allclose(kl(p, q, "k3"), [[0.5 - 1 + log2, 2 - 1 - log2]], rtol=1e-6)


# A policy p = softmax(theta) and a reference q over 8 tokens: means over p are exact sums, in float64.
THETA, Q = np.random.default_rng(1).normal(size=(2, 8))
Q = np.exp(Q) / np.exp(Q).sum()


def softmax(theta):
    return np.exp(theta - theta.max()) / np.exp(theta - theta.max()).sum()


def gradient(fn, step=1e-5):
    """d fn(p) / d theta by central differences."""
    return np.array([(fn(softmax(THETA + e)) - fn(softmax(THETA - e))) / (2 * step) for e in np.eye(8) * step])


def mean_gradient(name):
    """The gradient of the estimate, averaged over tokens drawn from the policy, as a loss sees it."""
    p = jnp.asarray(softmax(THETA), jnp.float32)

    @jax.jit
    @jax.grad
    def gradient_of_the_mean(theta):
        estimates = kl(jax.nn.log_softmax(theta)[None], jnp.log(jnp.asarray(Q, jnp.float32))[None], name)
        return jnp.sum(p * estimates[0])

    return np.asarray(gradient_of_the_mean(jnp.asarray(THETA, jnp.float32)))


FORWARD = gradient(lambda p: np.sum(p * np.log(p / Q)))  # of KL(p || q)
REVERSED = gradient(lambda p: np.sum(Q * np.log(Q / p)))  # of KL(q || p)
VARIATION = gradient(lambda p: np.sum(np.abs(p - Q)))


@pytest.mark.parametrize(
    "name, expected",
    [("k1", np.zeros(8)), ("abs", VARIATION), ("k2", FORWARD), ("k3", REVERSED), *((name, FORWARD) for name in STRAIGHT)],
)
def test_gradient_in_the_loss_is_what_the_documentation_says(name, expected):
    got = mean_gradient(name)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    # The negative control: these gradients are far from each other, so only the right one is matched.
    others = [g for g in (np.zeros(8), VARIATION, FORWARD, REVERSED) if g is not expected and np.any(g != expected)]
    assert len(others) == 3 and all(np.abs(got - g).max() > 1e-2 for g in others)


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    p = softmax(THETA)
    truth = np.sum(p * np.log(p / Q))
    log_p, log_q = np.log(p)[None].astype(np.float32), np.log(Q)[None].astype(np.float32)
    mean = {name: float(np.sum(p * np.asarray(kl(log_p, log_q, name))[0])) for name in PLAIN}
    np.testing.assert_allclose([mean["k1"], mean["k3"]], truth, atol=1e-6)
    assert abs(mean["k2"] - truth) > 1e-3 and abs(mean["abs"] - truth) > 1e-3  # far beyond the tolerance above


def test_k3_keeps_its_precision_near_the_reference():
    d = np.random.default_rng(2).uniform(-1e-4, 1e-4, (3, 8)).astype(np.float32)
    truth = d.astype(float) ** 2 / 2
    got = np.asarray(kl(d, np.zeros_like(d), "k3"))
    assert np.abs(got - truth).max() < 1e-11
    naive = np.exp(-d) - np.float32(1) + d  # the negative control
    assert np.abs(naive - truth).max() > 1e-8


def test_k3_is_clamped_far_from_the_reference():
    gaps = np.tile(np.array([25.0, -25.0, 300.0, -300.0], np.float32), (3, 2))
    zero = np.zeros_like(gaps)
    np.testing.assert_allclose(kl(gaps, zero, "k3"), FORMULA["k3"](np.clip(gaps.astype(float), -20, 20)), rtol=1e-5)
    assert not np.any(jax.jit(jax.grad(lambda x: kl(x, zero, "k3").sum()))(gaps))


def test_the_reference_is_a_constant():
    p, q = np.full((3, 8), -1.0, np.float32), np.full((3, 8), -2.0, np.float32)
    total = lambda a, b: jnp.stack([kl(a, b, name).sum() for name in ESTIMATORS])  # noqa: E731
    to_policy, to_reference = jax.jit(jax.jacrev(total, argnums=(0, 1)))(p, q)  # [estimator, 3, 8]
    assert np.all(to_policy) and not np.any(to_reference)


def test_every_form_is_a_config_value_and_the_other_way_round():
    from jrl.config_keys import KEYS

    assert set(ESTIMATORS) == {*PLAIN, *STRAIGHT}
    assert all(KEYS["algorithm.kl_estimator"].rule.holds(name) for name in ESTIMATORS)
    assert not KEYS["algorithm.kl_estimator"].rule.holds("k2+")


def test_the_adaptive_controller_by_hand():
    # Twice the target: the error 1 is clipped to 0.2; 100 samples of a horizon of 1000: 2 % more. A tenth above: 1 % more.
    assert adapted_coef(0.5, 0.2, 0.1, 100, 1000) == pytest.approx(0.5 * 1.02)
    assert adapted_coef(0.5, 0.11, 0.1, 100, 1000) == pytest.approx(0.5 * 1.01)
    assert adapted_coef(0.5, 0.1, 0.1, 100, 1000) == 0.5
    assert adapted_coef(0.5, 0.0, 0.1, 100, 1000) == pytest.approx(0.5 * 0.98)


@pytest.mark.parametrize("gain", [0.5, 5.0])
def test_the_adaptive_controller_finds_the_weight_that_keeps_the_target(gain):
    """A policy whose KL falls with its weight, as gain / weight, ends at the target from either side."""
    coef = 1.0
    for _ in range(3000):
        coef = adapted_coef(coef, gain / coef, 2.0, 64, 1000)
    assert gain / coef == pytest.approx(2.0, rel=1e-3)


def test_bad_arguments():
    x = np.zeros((2, 3))
    with pytest.raises(UserError, match="kl_estimator 'k4' is not known; use one of k1, abs, k2, k3, "):
        kl(x, x, "k4")
    with pytest.raises(ValueError, match="^ref_logprobs has shape"):
        kl(x, np.zeros((2, 1)), "k1")
