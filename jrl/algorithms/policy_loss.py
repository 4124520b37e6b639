"""Policy losses, token by token; `jrl.algorithms.aggregation` makes one number of them."""

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_shapes
from jrl.algorithms.kl import LOG_RATIO_LIMIT


def ppo_clip(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped surrogate objective (arXiv:1707.06347, eq. 7), as a loss to minimize.

        r = exp(logprobs - old_logprobs), the exponent clamped to +-20
        L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        L = min(L, -c A) where A < 0, with dual_clip c > 1 (arXiv:1912.09729)

    So dL/dlogprobs is -r A, but 0 for A > 0 and r > 1 + clip_high, for A < 0 and r < 1 - clip_low, with dual clip for
    A < 0 and r > c, and wherever the clamp holds. Exactly at the border of a clip it is still -r A. Unequal bounds are
    the clip-higher of DAPO (arXiv:2503.14476).

    Args:
      logprobs: [N, T], under the policy being updated; the only argument that gradients flow to.
      old_logprobs: [N, T], under the policy before the updates on these samples.
      advantages: [N, T].

    Returns:
      Loss f32[N, T], and two f32[N, T] to report: "ratio" r, and "clipped", 1 where the clipped term of the max holds.
    """
    check_shapes("N T", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    old_logprobs = jax.lax.stop_gradient(jnp.asarray(old_logprobs, jnp.float32))
    advantages = jax.lax.stop_gradient(jnp.asarray(advantages, jnp.float32))
    log_ratio = jnp.asarray(logprobs, jnp.float32) - old_logprobs
    ratio = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    plain = -ratio * advantages
    bounded = -jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    clipped = bounded > plain
    loss = jnp.where(clipped, bounded, plain)  # not maximum(), whose gradient at equality is half of each side's
    if dual_clip is not None:
        bound = -dual_clip * advantages
        loss = jnp.where((advantages < 0) & (loss > bound), bound, loss)
    return loss, {"ratio": jax.lax.stop_gradient(ratio), "clipped": clipped.astype(jnp.float32)}
