"""From token losses to one loss: the weight of each token.

The weights come from the mask of the whole minibatch, once; then loss = sum(weights * token losses), whatever the split
of the rows and tokens into microbatches or devices.
"""

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_name, check_shapes
from jrl.errors import UserError

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def weights(mask: Array, mode: str, max_length: int | None = None) -> jax.Array:
    """The weight of every token in the loss of a minibatch.

        token-mean               1 / tokens                   DAPO (arXiv:2503.14476)
        seq-mean-token-sum       1 / rows
        seq-mean-token-mean      1 / (rows * row's tokens)    GRPO (arXiv:2402.03300)
        seq-mean-token-sum-norm  1 / (rows * max_length)      Dr. GRPO (arXiv:2503.20783)

    Args:
      mask: bool[N, T], of the whole minibatch; rows without a token do not count as rows.
      mode: one of the above.
      max_length: tokens, a constant of the run such as the longest response allowed; for seq-mean-token-sum-norm alone.

    Returns:
      f32[N, T], 0 outside the mask, and 0 everywhere where nothing is in the mask.

    Raises:
      UserError: an unknown mode; max_length missing or not positive where it is needed.
    """
    check_name("aggregation", mode, MODES)
    mask = jnp.asarray(mask, bool)
    check_shapes("N T", mask=mask)
    row_tokens = jnp.sum(mask, axis=1, keepdims=True)  # [N, 1]
    rows = jnp.sum(row_tokens > 0).astype(jnp.float32)
    if mode == "token-mean":
        denominator = jnp.sum(row_tokens).astype(jnp.float32)
    elif mode == "seq-mean-token-sum":
        denominator = rows
    elif mode == "seq-mean-token-mean":
        denominator = rows * row_tokens  # [N, 1]
    else:
        if max_length is None or max_length <= 0:
            raise UserError(f"aggregation {mode} divides by max_length, which is {max_length}; give a positive number")
        denominator = rows * max_length
    return jnp.where(mask, 1.0 / denominator, 0.0)  # a denominator is 0 only where nothing is in the mask
