"""From the parameters that are trained to those that the rollout reads: another layout, another precision."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.decoder import Params
from jrl.models.quantize import quantize_params
from jrl.sharding.layout import Layout
from jrl.sharding.reshard import reshard


def weight_publisher(arch: Arch, source: Layout, target: Layout, dtype, weights: str) -> Callable[[Params], Params]:
    """A function from parameters in the layout `source` to those that an engine in the layout `target` reads.

    Args:
      dtype: of the rollout's computation.
      weights: "same": in `dtype`, the very same arrays where layout and dtype agree; "int8": matrices as 8-bit integers,
        quantized where they lie, so that few bytes move.
    """
    if weights == "int8":
        quantize = jax.jit(functools.partial(quantize_params, dtype=dtype), out_shardings=int8_arrays(arch, source, dtype)[1])
        shardings = int8_arrays(arch, target, dtype)[1]
        return lambda params: reshard(quantize(params), shardings)
    shardings = target.tree(decoder.param_axes(arch), decoder.abstract_params(arch))
    return lambda params: reshard(params, shardings, dtype)


def int8_arrays(arch: Arch, layout: Layout, dtype) -> tuple[Any, Any]:
    """Shape and dtype, and sharding, of each quantized parameter: two trees."""
    shapes = jax.eval_shape(functools.partial(quantize_params, dtype=dtype), decoder.abstract_params(arch))
    return shapes, layout.tree(decoder.param_axes(arch, decoder.Int8Decoder), shapes)
