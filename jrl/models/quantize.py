"""Symmetric 8-bit integers: weights that are only read, and keys and values that are kept.

    scale = max |x| / 127 along an axis,  q = round(x / scale),  so that |x - q scale| <= scale / 2

The axis is the one that a product sums over, so the scale is a factor of the product: y = (x q) scale, and no copy of the
weight in another precision has to be kept. Activations stay as they are.
"""

import jax
import jax.numpy as jnp

from jrl.models.decoder import MASTER_DTYPE, QUANTIZED_DTYPE, Params

LARGEST = 127  # -128 has no counterpart
SUMMED_AXIS = {"kernel": -2, "embedding": -1}  # [.., in, out]: per output; [V, D]: per token, as the tied head wants it


def int8(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """i8 of x's shape, and the scale f32 of x's shape without `axis`; 0 where all is 0, NaN where anything is not finite."""
    x = x.astype(MASTER_DTYPE)
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / LARGEST
    steps = jnp.round(x / jnp.where(scale > 0, scale, 1.0))
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)  # integers hold no NaN: it must not vanish
    return steps.astype(QUANTIZED_DTYPE), jnp.squeeze(scale, axis)


def quantize_params(params: Params, dtype) -> Params:
    """The parameters of `decoder.Int8Decoder` from those of `decoder.Decoder`; norms and biases in `dtype`."""
    out: Params = {}
    for name, x in params.items():
        if isinstance(x, dict):
            out[name] = quantize_params(x, dtype)
        elif name in SUMMED_AXIS:
            out[name], out["scale"] = int8(x, SUMMED_AXIS[name])
        else:
            out[name] = x.astype(dtype)
    return out
