"""Context parallelism: attention where the devices along the mesh axis `context` hold different tokens of the same sequences.

Each device keeps its queries and gathers the keys and values of the whole sequence: one all-gather a layer and direction, of
what several query heads share. The gradient of keys and values returns by a reduce-scatter. Written out instead of left to
XLA's partitioner, which sums gradients too early, once for each response that shares a prompt.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.sharding.layout import Layout

Heads = tuple[jax.Array, jax.Array, jax.Array]


def over_context(layout: Layout, attend: Callable, qkv: Heads, others: Any) -> jax.Array:
    """The queries' outputs [d, T, H, K], as `attend` computes them for one part of the sequences at a time.

    Args:
      attend: (part i32[], qkv, others) -> [d, T / parts, H, K]; its queries are those of the part (T / parts of them), its keys
        and values those of all parts, and heads may be fewer.
      qkv: queries [d, T, H, K], keys and values [d, T, J, K]; equal pieces of T are the parts.
      others: arrays [d, ...], which all parts see whole.
    """
    axes = layout.splitting("length")
    if not axes:
        return attend(0, qkv, others)
    place = lambda x, kind: layout.sharding(("batch", "length", kind, None), x.shape).spec  # noqa: E731
    places = tuple(place(x, kind) for x, kind in zip(qkv, ("act_heads", "act_kv_heads", "act_kv_heads"), strict=True))

    def one_part(qkv, others):
        q, *kv = qkv
        k, v = (_of_my_queries(layout, jax.lax.all_gather(x, axes, axis=1, tiled=True), q.shape[2], qkv_heads) for x in kv)
        return attend(jax.lax.axis_index(axes), (q, k, v), others)

    qkv_heads = qkv[0].shape[2], qkv[1].shape[2]
    rows = jax.tree.map(lambda _: layout.spec(("batch",)), others)
    return jax.shard_map(one_part, mesh=layout.mesh, in_specs=(places, rows), out_specs=places[0])(qkv, others)


def _of_my_queries(layout: Layout, x: jax.Array, queries: int, heads: tuple[int, int]) -> jax.Array:
    """Of keys or values [d, T, J, K] those heads that this device's query heads read.

    Args:
      queries: how many query heads it has.
      heads: how many query and KV heads there are on all devices.
    """
    (query_heads, kv_heads), split = heads, layout.shards("act_heads")
    if kv_heads % split == 0:
        return x  # they are split like the query heads
    first = jax.lax.axis_index(layout.splitting("act_heads")) * queries
    shared = query_heads // kv_heads
    if shared % queries == 0:
        return jax.lax.dynamic_slice_in_dim(x, first // shared, 1, axis=2)
    return jnp.take(x, (first + jnp.arange(queries)) // shared, axis=2)
