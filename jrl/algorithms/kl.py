"""Estimators of KL(policy || reference) from samples of the policy (http://joschu.net/blog/kl-approx.html)."""

import jax
import jax.numpy as jnp


def kl(logprobs: jax.Array, ref_logprobs: jax.Array, estimator: str) -> jax.Array:
    """Per token, in nats; with d = logprobs - ref_logprobs: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""
    d = jnp.clip(logprobs - ref_logprobs, -20.0, 20.0)
    return {
        "k1": lambda: d,
        "abs": lambda: jnp.abs(d),
        "k2": lambda: 0.5 * jnp.square(d),
        "k3": lambda: jnp.exp(-d) - 1 + d,
    }[estimator]()
