"""Estimators of KL(policy || reference), token by token, from samples of the policy.

With p the policy and q the reference at one position, given the tokens before it, x ~ p and d = log p(x) - log q(x)
(http://joschu.net/blog/kl-approx.html):

    name  estimate           its mean                            the mean of its gradient
    k1    d                  KL(p || q)                          0
    abs   |d|                sum |p - q| to first order          that of sum |p - q|
    k2    d^2 / 2            KL(p || q) to second order in d     that of KL(p || q)
    k3    exp(-d) - 1 + d    KL(p || q), never negative          that of KL(q || p)

    k1+, abs+, k3+    as without the plus        that of KL(p || q)

In the reward no gradient flows through the estimate and its mean is what counts: k1 and k3 are unbiased, k3 with the
lower variance near the reference. In the loss its gradient is what counts: k2 has the gradient of KL(p || q) exactly,
k3 that of the reversed KL, which agrees to first order near the reference, and k1 none at all but noise. The straight-through
forms, with a plus, have the value of one estimator and the gradient of k2. All this is said of x ~ p: once the policy has moved
away from the one that sampled, every gradient here is that of an expectation under the wrong distribution.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_name, check_shapes

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) = 4.9e8 still leaves float32 room for sums


def _k3(d: Array) -> jax.Array:
    # expm1, since exp(-d) - 1 has an error of 6e-8 however small d is, and k3 itself is d^2 / 2.
    d = jnp.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.expm1(-d) + d


def _k2(d: Array) -> jax.Array:
    return 0.5 * jnp.square(d)


def _straight_through(value: Callable[[Array], jax.Array]) -> Callable[[Array], jax.Array]:
    """The value of one estimator, the gradient of k2."""
    return lambda d: jax.lax.stop_gradient(value(d) - _k2(d)) + _k2(d)


_PLAIN = {"k1": lambda d: d, "abs": jnp.abs, "k2": _k2, "k3": _k3}
ESTIMATORS = _PLAIN | {f"{name}+": _straight_through(fn) for name, fn in _PLAIN.items() if name != "k2"}


def kl(logprobs: Array, ref_logprobs: Array, estimator: str) -> jax.Array:
    """Estimated KL of the policy to the reference at each token.

    Args:
      logprobs: [N, T], of the sampled tokens under the policy; gradients flow.
      ref_logprobs: [N, T], of the same tokens under the reference; a constant, gradients stop.
      estimator: one of the names above; for k3, d is clamped to +-20.

    Returns:
      f32[N, T], in nats.

    Raises:
      UserError: an unknown estimator.
    """
    check_name("kl_estimator", estimator, ESTIMATORS)
    check_shapes("N T", logprobs=logprobs, ref_logprobs=ref_logprobs)
    d = jnp.asarray(logprobs, jnp.float32) - jax.lax.stop_gradient(jnp.asarray(ref_logprobs, jnp.float32))
    return ESTIMATORS[estimator](d)


def adapted_coef(coef: float, measured: float, target: float, samples: int, horizon: float) -> float:
    """The adaptive controller of the KL's weight (arXiv:1909.08593, section 2.2), after a step.

        coef (1 + clip(measured / target - 1, -0.2, 0.2) samples / horizon)

    Args:
      measured, target: KL to the reference, in nats, mean over tokens.
      samples: responses of the step.
      horizon: samples over which a KL of twice the target or more raises the weight by about a fifth.
    """
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)
