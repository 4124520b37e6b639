"""Decoding on a CPU: the decoder's step over a few rows, by kernels of our own (`jrl.rollout.native`).

XLA multiplies a few rows with a weight at half the speed of many, and gathers the pages that attention reads. Here weights are
packed once for each version, so that they are read in a stream while they are multiplied with; norms, biases, residuals and the
gate are parts of the products; attention reads pages where they lie; and idle slots cost nothing.

Prefill, which has many rows, is XLA's, from the weights as they were loaded.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.decoder import Attend, Params
from jrl.rollout import paged_attention
from jrl.rollout.backends import XlaBackend
from jrl.rollout.native import ops
from jrl.rollout.native.ops import Part, Slots

Array = Any


class Packed(NamedTuple):
    """A model's weights as `next_logits` reads them: matrices in panels [L, P, K, W], the rest as it is."""

    embedding: Array  # f32[V, D]
    attn_norm: Array  # f32[L, D]
    qkv: Array  # of [L, D, (H + 2 J) K]
    qkv_bias: Array  # f32[L, (H + 2 J) K], or empty
    q_norm: Array  # f32[L, K], or empty
    k_norm: Array
    o: Array  # of [L, H K, D]
    o_bias: Array  # f32[L, D], or empty
    mlp_norm: Array  # f32[L, D]
    gate_up: Array  # of two [L, D, F], whose panels take turns
    down: Array  # of [L, F, D]
    final_norm: Array  # f32[1, D]
    head: Array  # of [1, D, V]


def packed_shapes(arch: Arch) -> dict[str, tuple[int, int, int, int]]:
    """Of the packed matrices, by name."""
    a, shape = arch, ops.packed_shape
    heads, kv_heads = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return {
        "qkv": shape(a.num_layers, a.hidden_size, heads + 2 * kv_heads),
        "o": shape(a.num_layers, heads, a.hidden_size),
        "gate_up": shape(a.num_layers, a.hidden_size, a.intermediate_size, matrices=2),
        "down": shape(a.num_layers, a.intermediate_size, a.hidden_size),
        "head": shape(1, a.hidden_size, a.vocab_size),
    }


def pack_params(arch: Arch, params: Params) -> Packed:
    """The weights of `jrl.models.decoder.Decoder`, float32, packed where they lie."""
    layers, head = params["layers"], params["embed" if arch.tie_embeddings else "lm_head"]
    [device] = head["embedding" if arch.tie_embeddings else "kernel"].devices()
    room = {name: jnp.zeros(shape, device=device) for name, shape in packed_shapes(arch).items()}
    offset = 0
    for name in "qkv":
        w = layers[name]["kernel"]
        room["qkv"] = ops.pack(room["qkv"], w, Part(offset=offset))
        offset += w.shape[-1]
    for number, name in enumerate(("gate", "up")):
        room["gate_up"] = ops.pack(room["gate_up"], layers[name]["kernel"], Part(first=number, step=2))
    for name in ("o", "down"):
        room[name] = ops.pack(room[name], layers[name]["kernel"])
    rows = head["embedding"] if arch.tie_embeddings else head["kernel"]
    room["head"] = ops.pack(room["head"], rows, transposed=arch.tie_embeddings)
    bias = lambda *names: jnp.concatenate([layers[n]["bias"] for n in names], -1) if "bias" in layers[names[0]] else ops.NONE  # noqa: E731
    scale = lambda name: layers[name]["scale"] if name in layers else ops.NONE  # noqa: E731
    return Packed(
        embedding=params["embed"]["embedding"], attn_norm=scale("attn_norm"), mlp_norm=scale("mlp_norm"),
        q_norm=scale("q_norm"), k_norm=scale("k_norm"), final_norm=params["final_norm"]["scale"][None],
        qkv_bias=bias("q", "k", "v"), o_bias=bias("o"), **room,
    )  # fmt: skip


class CpuBackend(XlaBackend):
    """Implements `jrl.rollout.backends.Backend` for one CPU device; pool and prefill are those of `XlaBackend`."""

    name = "cpu"
    row_pages: int | None = None  # the work follows what is in the slots whatever the width of the table

    def decode_params(self, params: Params, unroll: bool) -> Any:
        """Packed, where they are numbers of 32 bits and the MLP has no biases; otherwise as `XlaBackend`."""
        if self.arch.mlp_bias or "scale" in params["embed"]:
            return super().decode_params(params, unroll)
        return pack_params(self.arch, params)

    def packed_bytes(self) -> int:
        return 0 if self.arch.mlp_bias else sum(4 * math.prod(shape) for shape in packed_shapes(self.arch).values())

    def decode_attend(
        self, table: paged_attention.Table, lens: jax.Array, active: jax.Array, num_pages: int, page_size: int, tokens: int = 1
    ) -> Attend:
        return PagedAttention(Slots(lens[0], active[0], paged_attention.pages_of_slots(table, active)[0], num_pages))

    def logits(self, params, tokens, positions, attend, pool, busy):
        if not isinstance(params, Packed):
            return super().logits(params, tokens, positions, attend, pool, busy)
        logits, pool = next_logits(self.arch, params, tokens[0], positions[0], attend.slots, pool, busy[0])
        return logits[None], pool

    def sample(self, logits, temperature, uniform, busy):
        return tuple(x[None] for x in ops.sample(logits[0], temperature[0], uniform[0], busy[0]))


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """The `attend` of `jrl.models.decoder`; `next_logits` reads the slots alone."""

    slots: Slots

    def __call__(self, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, pool: Any) -> tuple[jax.Array, Any]:
        """As queries and keys come turned, by an angle of nothing."""
        qkv = jnp.concatenate([x.reshape(x.shape[1], -1) for x in (q, k, v)], axis=-1)
        still = jnp.ones((q.shape[1], q.shape[-1] // 2), q.dtype)
        out, pool = ops.attend(qkv, (still, jnp.zeros_like(still)), layer, self.slots, pool)
        return out.reshape(q.shape), pool


def next_logits(
    arch: Arch, params: Packed, tokens: jax.Array, positions: jax.Array, slots: Slots, pool: Any, busy: jax.Array
) -> tuple[jax.Array, Any]:
    """f32[M, V] after each of the slots' new tokens i32[M], as `decoder.forward` and `decoder.logits` make them, and the pool.

    Args:
      positions: i32[M]; busy: bool[M], the others' are 0.
    """
    a, p = arch, params
    multiply = functools.partial(ops.product, busy=busy, eps=a.rms_norm_eps)
    attend = functools.partial(ops.attend, q_norm=p.q_norm, k_norm=p.k_norm, eps=a.rms_norm_eps)
    rotation = decoder.rotation_tables(a, positions, jnp.float32)
    qkv_size = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim

    def one_layer(carry, layer):
        x, pool = carry
        qkv = multiply(x, p.qkv, qkv_size, layer, norm=p.attn_norm, bias=p.qkv_bias)
        out, pool = attend(qkv, rotation, layer, slots, pool)
        x = multiply(out, p.o, a.hidden_size, layer, bias=p.o_bias, residual=x)
        y = multiply(x, p.gate_up, a.intermediate_size, layer, norm=p.mlp_norm, gated=True)
        return (multiply(y, p.down, a.hidden_size, layer, residual=x), pool), None

    x = jnp.take(p.embedding, tokens, axis=0)
    (x, pool), _ = jax.lax.scan(one_layer, (x, pool), jnp.arange(a.num_layers))
    return multiply(x, p.head, a.vocab_size, 0, norm=p.final_norm), pool
