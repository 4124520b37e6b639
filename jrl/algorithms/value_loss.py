"""The critic's loss and how much of the returns it explains."""

import jax
import jax.numpy as jnp


def clipped_value_loss(values, old_values, returns, clip: float) -> tuple[jax.Array, jax.Array]:
    """0.5 max((V - R)^2, (clip(V, V_old +- clip) - R)^2) per token, and where the clipped term was the larger."""
    near = old_values + jnp.clip(values - old_values, -clip, clip)
    plain, bounded = jnp.square(values - returns), jnp.square(near - returns)
    return 0.5 * jnp.maximum(plain, bounded), (bounded > plain).astype(jnp.float32)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 - Var(returns - values) / Var(returns) over the mask; 0 where the returns do not vary."""
    mask = jnp.asarray(mask)
    count = jnp.maximum(jnp.sum(mask), 1)

    def variance(x):
        mean = jnp.sum(jnp.where(mask, x, 0.0)) / count
        return jnp.sum(jnp.where(mask, jnp.square(x - mean), 0.0)) / count

    total = variance(returns)
    return jnp.where(total > 1e-12, 1 - variance(returns - values) / jnp.maximum(total, 1e-12), 0.0)
