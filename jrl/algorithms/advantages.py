"""Advantages: how much better than expected each token or response was."""

import jax
import jax.numpy as jnp


def token_rewards(rewards: jax.Array, mask: jax.Array, penalty: jax.Array | None = None) -> jax.Array:
    """The response's reward on its last token, less a penalty on every token.

    Args:
      rewards: f32[N]; mask: bool[N, T]; penalty: f32[N, T], such as beta KL, or None.

    Returns:
      f32[N, T], 0 outside the mask; a row without tokens carries no reward.
    """
    mask = jnp.asarray(mask)
    steps = jnp.arange(mask.shape[1])
    last = jnp.max(jnp.where(mask, steps, -1), axis=1)
    out = jnp.where(steps == last[:, None], jnp.asarray(rewards, jnp.float32)[:, None], 0.0)
    return out if penalty is None else jnp.where(mask, out - penalty, 0.0)


def grpo(rewards: jax.Array, group_ids: jax.Array, valid: jax.Array, normalize_std: bool = True) -> jax.Array:
    """A_i = (R_i - mean of its group) / (std of its group + 1e-6) (arXiv:2402.03300, eq. 3); without the std, Dr. GRPO
    (arXiv:2503.20783). Groups may be ragged; std is unbiased; a group of equal rewards or of one gives exactly 0.
    """
    rewards, valid = jnp.asarray(rewards, jnp.float32), jnp.asarray(valid)
    n = rewards.shape[0]
    ids = jnp.unique(jnp.asarray(group_ids), size=n, fill_value=-1, return_inverse=True)[1].reshape(-1)
    total = lambda x: jax.ops.segment_sum(jnp.where(valid, x, 0.0), ids, n)[ids]  # noqa: E731
    count = total(jnp.ones(n))
    low = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), ids, n)[ids]
    high = jax.ops.segment_max(jnp.where(valid, rewards, -jnp.inf), ids, n)[ids]
    centred = rewards - total(rewards) / jnp.maximum(count, 1)
    std = jnp.sqrt(total(jnp.square(centred)) / jnp.maximum(count - 1, 1))
    out = centred / (std + 1e-6) if normalize_std else centred
    return jnp.where(valid & (high > low), out, 0.0)


def gae(rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float, lam: float) -> tuple[jax.Array, jax.Array]:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16), over the tokens of the mask as if the others were not.

        delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1},  return_t = A_t + V_t

    All [N, T]; returns advantages and returns, 0 outside the mask.
    """
    mask = jnp.asarray(mask)

    def back(carry, x):
        next_value, next_advantage = carry
        r, v, m = x
        advantage = r + gamma * next_value - v + gamma * lam * next_advantage
        carry = jnp.where(m, v, next_value), jnp.where(m, advantage, next_advantage)
        return carry, jnp.where(m, advantage, 0.0)

    zero = jnp.zeros(mask.shape[0])
    _, out = jax.lax.scan(back, (zero, zero), (jnp.asarray(rewards).T, jnp.asarray(values).T, mask.T), reverse=True)
    return out.T, jnp.where(mask, out.T + values, 0.0)


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """(x - mean) / sqrt(var + 1e-8) over the mask of the whole batch, var unbiased; 0 outside."""
    count = jnp.maximum(jnp.sum(mask), 1)
    mean = jnp.sum(jnp.where(mask, x, 0.0)) / count
    var = jnp.sum(jnp.where(mask, jnp.square(x - mean), 0.0)) / jnp.maximum(count - 1, 1)
    return jnp.where(mask, (x - mean) * jax.lax.rsqrt(var + 1e-8), 0.0)
