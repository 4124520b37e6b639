"""Policy losses, per token."""

import jax
import jax.numpy as jnp


def ppo_clip(logprobs, old_logprobs, advantages, clip_low: float, clip_high: float, dual_clip: float | None = None):
    """max(-r A, -clip(r, 1 - low, 1 + high) A) (arXiv:1707.06347); where A < 0 at most -c A (dual clip, arXiv:1912.09729).

    All f32[N, T]. Returns the token losses and {"ratio", "clipped"}.
    """
    ratio = jnp.exp(jnp.clip(logprobs - old_logprobs, -20.0, 20.0))
    plain = -ratio * advantages
    bounded = -jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    loss = jnp.maximum(plain, bounded)
    if dual_clip is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)
    return loss, {"ratio": ratio, "clipped": (bounded > plain).astype(jnp.float32)}
