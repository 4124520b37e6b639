"""From token losses to one loss: the weight of each token, from the whole minibatch."""

import jax
import jax.numpy as jnp


def weights(mask: jax.Array, mode: str, max_length: int) -> jax.Array:
    """f32[N, T] such that loss = sum(weights * token losses), whatever the split into microbatches.

    token-mean: 1 / tokens. seq-mean-token-sum: 1 / rows. seq-mean-token-mean: 1 / (rows * tokens of the row).
    seq-mean-token-sum-norm: 1 / (rows * max_length). Rows without a token are not counted.
    """
    m = jnp.asarray(mask, jnp.float32)
    tokens = jnp.sum(m, axis=1, keepdims=True)
    rows = jnp.maximum(jnp.sum(tokens > 0), 1)
    return {
        "token-mean": lambda: m / jnp.maximum(jnp.sum(m), 1),
        "seq-mean-token-sum": lambda: m / rows,
        "seq-mean-token-mean": lambda: m / (rows * jnp.maximum(tokens, 1)),
        "seq-mean-token-sum-norm": lambda: m / (rows * max_length),
    }[mode]()
