"""The kernels as functions of arrays. Letters: M rows, K and N sizes of a weight, W columns of a panel, P panels, L layers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.rollout.native import library

NONE = np.zeros(0, np.float32)


class Part(NamedTuple):
    """A matrix among those that are packed into one."""

    offset: int = 0  # its first column in the packed one
    first: int = 0  # its first panel, and from one of its panels to the next: 1, or 2 where two matrices take turns
    step: int = 1


WHOLE = Part()


def _kernel(name: str, *args: Any, **options: Any) -> Callable[..., Any]:
    library.panel()  # from then on JAX knows them
    return jax.ffi.ffi_call(f"jrl_{name}", *args, **options)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("part", "transposed"))
def pack(packed: jax.Array, w: jax.Array, part: Part = WHOLE, transposed: bool = False) -> jax.Array:
    """`packed` f32[L, P, K, W], which is donated, with the columns of w f32[L, K, N], or f32[L, N, K] where `transposed`.

    Of one layer w may lack the first axis.
    """
    w = w.reshape(packed.shape[0], *w.shape[-2:])
    call = _kernel("pack", jax.ShapeDtypeStruct(packed.shape, packed.dtype), input_output_aliases={1: 0})
    return call(
        w, packed, transposed=transposed, offset=np.int32(part.offset), first=np.int32(part.first), step=np.int32(part.step)
    )


def packed_shape(layers: int, size: int, columns: int, matrices: int = 1) -> tuple[int, int, int, int]:
    """Of weights [L, K = size, N = columns]; `matrices` of them taking turns."""
    width = library.panel()
    return layers, -(-columns // width) * matrices, size, width


def product(
    x: jax.Array, w: jax.Array, columns: int, layer: Any, busy: jax.Array, *, norm: Any = NONE, bias: Any = NONE,
    residual: Any = NONE, eps: float = 0.0, gated: bool = False,
) -> jax.Array:  # fmt: skip
    """f32[M, N = columns]: norm(x) W + bias + residual; where `gated` silu(norm(x) W) * (norm(x) W') of two that take turns.

    Args:
      x: f32[M, K].
      w: f32[L, P, K, W] of `pack`.
      layer: i32[], the one that is multiplied with.
      busy: bool[M]; the other rows cost nothing and are 0.
      norm: f32[L, K], scales of an RMSNorm of x with `eps`; left out where empty.
      bias: f32[L, N]; residual: f32[M, N]; left out where empty.
    """
    call = _kernel("product", jax.ShapeDtypeStruct((x.shape[0], columns), x.dtype))
    return call(x, w, jnp.asarray(layer, jnp.int32), busy, norm, bias, residual, eps=np.float32(eps), gated=gated)


class Slots(NamedTuple):
    """What attention reads of B slots."""

    lens: Any  # i32[B], tokens in the cache
    busy: Any  # bool[B], what is made of the others is 0
    pages: Any  # i32[B, W], of each slot in the order of its tokens, then 0
    num_pages: int  # of a layer's block of the pool


def attend(
    qkv: jax.Array, rotation: tuple[jax.Array, jax.Array], layer: Any, slots: Slots, pool: dict[str, jax.Array], *,
    q_norm: Any = NONE, k_norm: Any = NONE, eps: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
    """Attention of T new tokens of each of B slots to what is cached of it and to those before it, f32[B T, H K], and the pool.

    Args:
      qkv: f32[B T, (H + 2 J) K], queries, keys and values as their products make them.
      rotation: cosines and sines f32[.., K / 2] of the B T positions, as `decoder.rotation_tables`; queries and keys are turned.
      layer: i32[].
      pool: `k` and `v` f32[.., J, S, K], updated in place.
      q_norm, k_norm: f32[L, K], scales of an RMSNorm of each head before it is turned, with `eps`; left out where empty.
    """
    kv_heads, _, size = pool["k"].shape[-3:]
    out = jax.ShapeDtypeStruct((len(qkv), qkv.shape[1] - 2 * kv_heads * size), qkv.dtype)
    shapes = [out, *(jax.ShapeDtypeStruct(pool[n].shape, pool[n].dtype) for n in "kv")]
    call = _kernel("attend", shapes, input_output_aliases={9: 1, 10: 2})
    cosines, sines = (x.reshape(len(qkv), -1) for x in rotation)
    result, k, v = call(
        qkv, cosines, sines, q_norm, k_norm, jnp.asarray(layer, jnp.int32), slots.lens, slots.busy, slots.pages, pool["k"],
        pool["v"], num_pages=np.int32(slots.num_pages), eps=np.float32(eps),
    )  # fmt: skip
    return result, {"k": k, "v": v}


def sample(logits: jax.Array, temperature: jax.Array, uniform: jax.Array, busy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`jrl.rollout.sampler.sample` of f32[M, V]; the tokens of rows that are not busy, and their logprobs, are 0."""
    rows = logits.shape[:1]
    shapes = [jax.ShapeDtypeStruct(rows, jnp.int32), jax.ShapeDtypeStruct(rows, jnp.float32)]
    token, logprob = _kernel("sample", shapes)(logits, temperature, uniform, busy)
    return token, logprob
