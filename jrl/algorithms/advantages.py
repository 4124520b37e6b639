"""Advantages: how much better than expected each token or response was.

N sequences, T tokens, [N, T] indexed by token; `mask` says which tokens the policy chose. What lies outside the mask
never enters a result, not even as NaN. All results are float32 and no gradient is meant to flow through them.
"""

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_shapes


def token_rewards(rewards: Array, mask: Array, penalty: Array | None = None) -> jax.Array:
    """r_t = R [t is the last token of the response] - penalty_t.

    With penalty = beta KL_t this is the reward of InstructGPT (arXiv:2203.02155, eq. 2), spread over the tokens.

    Args:
      rewards: [N], the reward R of each whole response.
      mask: bool[N, T].
      penalty: [N, T] or None, subtracted on every token of the mask; the coefficient is already in it.

    Returns:
      f32[N, T], 0 outside the mask; a row without tokens carries no reward.
    """
    rewards, mask = jnp.asarray(rewards, jnp.float32), jnp.asarray(mask, bool)
    check_shapes("N T", mask=mask)
    check_shapes("N", mask_rows=jnp.any(mask, axis=1), rewards=rewards)
    steps = jnp.arange(mask.shape[1])  # [T]
    last = jnp.max(jnp.where(mask, steps, -1), axis=1)  # [N], -1 in a row without tokens
    out = jnp.where(steps == last[:, None], rewards[:, None], 0.0)  # [N, T]
    if penalty is None:
        return out
    check_shapes("N T", mask=mask, penalty=penalty)
    return jnp.where(mask, out - penalty, 0.0)


def grpo(rewards: Array, group_ids: Array, valid: Array, normalize_std: bool = True) -> jax.Array:
    """Advantage over the other responses to the same prompt.

        A_i = (R_i - mean) / (std + 1e-6)    GRPO (arXiv:2402.03300, section 4.1.2)
        A_i = R_i - mean                     with normalize_std=False: Dr. GRPO (arXiv:2503.20783)

    mean and std (unbiased, n - 1) are those of the valid responses of the group.

    Args:
      rewards: [N], the reward of each whole response.
      group_ids: int[N], any integers in any order; groups may differ in size.
      valid: bool[N]; the others enter no statistic, whatever their reward, NaN included.

    Returns:
      f32[N]; exactly 0 for responses that are not valid, are alone in their group, or whose group has equal rewards.
    """
    rewards, valid = jnp.asarray(rewards, jnp.float32), jnp.asarray(valid, bool)
    check_shapes("N", rewards=rewards, group_ids=group_ids, valid=valid)
    n = rewards.shape[0]
    # Segments must lie in [0, N), and ids need not: responses that were filtered out leave holes.
    group = jnp.unique(jnp.asarray(group_ids), size=n, return_inverse=True)[1].reshape(n)

    def total(x):  # [N] -> [N], the sum over the valid responses of each one's group
        return jax.ops.segment_sum(jnp.where(valid, x, 0.0), group, n)[group]

    count = total(jnp.ones(n))
    centred = rewards - total(rewards) / jnp.maximum(count, 1)
    # The mean of equal numbers is not exactly that number (three times 0.1), so equality is asked of the rewards.
    low = jax.ops.segment_min(jnp.where(valid, rewards, jnp.inf), group, n)[group]
    high = jax.ops.segment_max(jnp.where(valid, rewards, -jnp.inf), group, n)[group]
    std = jnp.sqrt(total(jnp.square(centred)) / jnp.maximum(count - 1, 1))
    out = centred / (std + 1e-6) if normalize_std else centred
    return jnp.where(valid & (high > low), out, 0.0)


def gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float) -> tuple[jax.Array, jax.Array]:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16) over the tokens of the mask alone.

        delta_t  = r_t + gamma V_next - V_t
        A_t      = delta_t + gamma lambda A_next
        return_t = A_t + V_t

    "next" is the next token of the mask: the bootstrap jumps over tool tokens. After the last one V and A are 0, also
    where a response was cut off at its length limit.

    Args:
      rewards, values: [N, T]; V_t is computed from the tokens before t.
      mask: bool[N, T].
      gamma, lam: discount and lambda per token.

    Returns:
      Advantages f32[N, T], not whitened, and returns f32[N, T]; 0 outside the mask.
    """
    rewards, values = jnp.asarray(rewards, jnp.float32), jnp.asarray(values, jnp.float32)
    mask = jnp.asarray(mask, bool)
    check_shapes("N T", rewards=rewards, values=values, mask=mask)

    def back(carry, x):
        v_next, a_next = carry  # [N]
        r_t, v_t, mask_t = x
        a_t = r_t + gamma * v_next - v_t + gamma * lam * a_next
        carry = jnp.where(mask_t, v_t, v_next), jnp.where(mask_t, a_t, a_next)
        return carry, jnp.where(mask_t, a_t, 0.0)

    zero = jnp.zeros(mask.shape[0])
    advantages = jax.lax.scan(back, (zero, zero), (rewards.T, values.T, mask.T), reverse=True)[1].T  # [N, T]
    return advantages, jnp.where(mask, advantages + values, 0.0)


def moments(x: Array, mask: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean and unbiased variance of x over the mask (any one shape), and whether x varies there at all.

    The mean of equal numbers carries a rounding error, so their variance need not be exactly 0; `varies` is exact.
    """
    count = jnp.sum(mask)
    mean = jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(count, 1)
    variance = jnp.sum(jnp.where(mask, jnp.square(x - mean), 0.0)) / jnp.maximum(count - 1, 1)
    low, high = jnp.min(jnp.where(mask, x, jnp.inf)), jnp.max(jnp.where(mask, x, -jnp.inf))
    return mean, variance, high > low


def whiten(x: Array, mask: Array) -> jax.Array:
    """(x - mean) / sqrt(var + 1e-8) over the mask of the whole batch, var unbiased.

    Args:
      x: [N, T]; mask: bool[N, T].

    Returns:
      f32[N, T]; 0 outside the mask, and everywhere where x does not vary over it.
    """
    x, mask = jnp.asarray(x, jnp.float32), jnp.asarray(mask, bool)
    check_shapes("N T", x=x, mask=mask)
    mean, variance, varies = moments(x, mask)
    return jnp.where(mask & varies, (x - mean) / jnp.sqrt(variance + 1e-8), 0.0)
