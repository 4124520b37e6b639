"""Truncated importance weights by hand, against NumPy, and what the policy loss makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.algorithms.rollout_correction import truncated_importance_weights
from jrl.config import default_config, with_preset
from jrl.losses import policy_loss

both = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])


@both
def test_weights_by_hand(compiled):
    # The learner finds a token 1, 1.5, 4 and 0.25 times as likely as the rollout did; twice is the most.
    old = np.log(np.array([[0.2, 0.3, 0.8, 0.1]], np.float32))
    rollout = np.log(np.array([[0.2, 0.2, 0.2, 0.4]], np.float32))
    fn = jax.jit(truncated_importance_weights, static_argnums=2) if compiled else truncated_importance_weights
    weights, truncated = fn(old, rollout, 2.0)
    np.testing.assert_allclose(weights, [[1.0, 1.5, 2.0, 0.25]], rtol=1e-6)
    assert np.asarray(truncated).tolist() == [[False, False, True, False]]
    assert weights.dtype == jnp.float32


def test_uncapped_weights_turn_means_over_the_rollout_into_means_over_the_learner():
    rng = np.random.default_rng(0)
    rollout, old = (rng.dirichlet(np.ones(8)) for _ in range(2))
    value = rng.standard_normal(8)
    log = lambda p: np.log(p)[None].astype(np.float32)  # noqa: E731
    means = [
        rollout @ (np.asarray(truncated_importance_weights(log(old), log(rollout), cap)[0][0]) * value) for cap in (1e9, 1.0)
    ]
    assert means[0] == pytest.approx(old @ value, rel=1e-5)
    assert means[1] != pytest.approx(old @ value, rel=1e-2)  # the bias that the cap costs


def test_no_gradient_flows_and_far_ratios_stay_finite():
    old, rollout = np.float32([[-1.0, -2.0]]), np.float32([[-1.5, -1.0]])
    total = lambda *x: truncated_importance_weights(*x, 2.0)[0].sum()  # noqa: E731
    for gradient in jax.grad(total, argnums=(0, 1))(old, rollout):
        assert not np.any(gradient)
    weights, _ = truncated_importance_weights(np.float32([[0.0, -500.0]]), np.float32([[-500.0, 0.0]]), 1e30)
    np.testing.assert_allclose(weights, [[np.exp(20.0), np.exp(-20.0)]], rtol=1e-5)
    with pytest.raises(ValueError, match=r"^rollout_logprobs has shape \(2,\)"):
        truncated_importance_weights(old, rollout[0], 2.0)


def loss_of(cap, logprobs, **columns):
    """(total, gradient by the logprobs, metrics) of the policy loss of one row of tokens."""
    algorithm = with_preset(default_config()).algorithm
    algorithm.rollout_is_cap = cap
    columns = {name: np.float32([[x]]) for name, x in columns.items()}
    packed = type("Packed", (), {"columns": columns})
    forward = type("Forward", (), {"logprobs": lambda self, params, packed: (params, jnp.zeros_like(params))})()
    call = jax.value_and_grad(lambda p: policy_loss(algorithm)(forward, p, packed), has_aux=True)
    (total, metrics), gradient = call(np.float32([[logprobs]]))
    return float(total), gradient[0, 0], {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize("separate", [True, False], ids=["old logprobs", "one update"])
def test_the_policy_gradient_of_each_token_is_weighted(separate):
    old, rollout = np.log([0.2, 0.3, 0.8, 0.1]), np.log([0.2, 0.2, 0.2, 0.4])
    advantages, weight, share = [1.0, -2.0, 1.0, 3.0], [0.25] * 4, [1 / 3, 1 / 3, 1 / 3, 0.0]
    given = {"advantages": advantages, "weight": weight, "share": share, "rollout_logprobs": rollout}
    given |= {"old_logprobs": old} if separate else {}
    total, gradient, metrics = loss_of(2.0, old, **given)
    by_hand = -0.25 * np.array([1.0 * 1.0, 1.5 * -2.0, 2.0 * 1.0, 0.25 * 3.0])  # the ratio of the update is 1
    assert total == pytest.approx(by_hand.sum(), rel=1e-5) == metrics["pg_loss"]
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-5)
    # Means over the tokens with a share, of which one of three is truncated.
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1 + 1.5 + 2) / 3, rel=1e-5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3, rel=1e-5)
    plain, unweighted, reported = loss_of(0.0, old, **given)
    np.testing.assert_allclose(unweighted, -0.25 * np.array(advantages), rtol=1e-5)
    assert plain != pytest.approx(total) and not any("rollout_is" in name for name in reported)
