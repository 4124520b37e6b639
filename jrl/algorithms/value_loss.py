"""The critic's loss, and how much of the returns it explains."""

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_shapes
from jrl.algorithms.advantages import moments


def clipped_value_loss(values: Array, old_values: Array, returns: Array, clip: float) -> tuple[jax.Array, jax.Array]:
    """L = 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), PPO's value loss (as in arXiv:2006.05990).

    The gradient is V - R, and 0 where the clipped term is the larger: V has moved by more than clip towards R.

    Args:
      values: [N, T], of the critic being updated; the only argument that gradients flow to.
      old_values: [N, T], before the updates on these samples.
      returns: [N, T].
      clip: in units of the values.

    Returns:
      Loss f32[N, T], and f32[N, T], 1 where the clipped term holds.
    """
    check_shapes("N T", values=values, old_values=old_values, returns=returns)
    values = jnp.asarray(values, jnp.float32)
    old_values = jax.lax.stop_gradient(jnp.asarray(old_values, jnp.float32))
    returns = jax.lax.stop_gradient(jnp.asarray(returns, jnp.float32))
    # V itself inside the bounds; V_old + clip(V - V_old) would round, and count as clipped what is not.
    near = jnp.clip(values, old_values - clip, old_values + clip)
    plain, bounded = jnp.square(values - returns), jnp.square(near - returns)
    clipped = bounded > plain
    return 0.5 * jnp.where(clipped, bounded, plain), clipped.astype(jnp.float32)


def explained_variance(values: Array, returns: Array, mask: Array) -> jax.Array:
    """1 - Var(returns - values) / Var(returns) over the mask.

    Args:
      values, returns: [N, T]; mask: bool[N, T].

    Returns:
      f32[]: 1 for a perfect critic, 0 for a constant one, negative for a worse one; 0 where the returns do not vary.
    """
    values, returns = jnp.asarray(values, jnp.float32), jnp.asarray(returns, jnp.float32)
    mask = jnp.asarray(mask, bool)
    check_shapes("N T", values=values, returns=returns, mask=mask)
    residual, (_, total, varies) = moments(returns - values, mask)[1], moments(returns, mask)
    defined = varies & (total > 0)  # a variance can underflow
    return jnp.where(defined, 1 - residual / jnp.where(defined, total, 1.0), 0.0)
