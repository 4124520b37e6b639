"""Attention over one or several blocks of keys, the part of the forward that callers plug in.

Letters: d data shards, n sequences of a shard, t queries of a sequence, s keys, J key-value heads, G query heads per
key-value head (H = J G), K head size.
"""

import jax
import jax.numpy as jnp

NEG_INF = -1e30  # finite: a query with no visible key gives a uniform average instead of NaN, and its row is masked anyway
QUERY_CHUNK = 512  # queries whose scores exist at once; longer sequences go chunk by chunk


def _attend_queries(q, keys, values, masks):
    d, n, t, heads, size = q.shape
    kv_heads = keys[0].shape[-2]
    q = q.reshape(d, n, t, kv_heads, heads // kv_heads, size) * size**-0.5
    scores = [
        jnp.where(mask[:, :, None, None], jnp.einsum("dntjgk,dnsjk->dnjgts", q, k, preferred_element_type=jnp.float32), NEG_INF)
        for k, mask in zip(keys, masks, strict=True)
    ]
    top = jnp.max(jnp.stack([jnp.max(s, axis=-1) for s in scores]), axis=0)[..., None]
    weights = [jnp.exp(s - jax.lax.stop_gradient(top)) for s in scores]
    total = sum(jnp.sum(w, axis=-1) for w in weights)  # [d, n, J, G, t]
    out = sum(
        jnp.einsum("dnjgts,dnsjk->dntjgk", w.astype(v.dtype), v, preferred_element_type=jnp.float32)
        for w, v in zip(weights, values, strict=True)
    )
    out = out / jnp.moveaxis(total, -1, 2)[..., None]
    return out.reshape(d, n, t, heads, size).astype(q.dtype)


def attention(q: jax.Array, blocks: list[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """Softmax attention whose keys lie in several blocks, normalised over all of them together.

    Args:
      q: [d, n, t, H, K].
      blocks: tuples of keys [d, n, s, J, K], values [d, n, s, J, K] and a mask bool[d, n, t or 1, s], True where seen.

    Returns:
      [d, n, t, H, K] in q's dtype. Scores and their sum are float32 and are computed again in the backward pass, so
      that no [t, s] array is kept per layer; above `QUERY_CHUNK` queries they exist for one chunk of them at a time.
    """
    keys, values, masks = (list(x) for x in zip(*blocks, strict=True))
    d, n, t, heads, size = q.shape
    if t <= QUERY_CHUNK:
        return jax.checkpoint(_attend_queries, prevent_cse=False)(q, keys, values, masks)
    chunks = -(-t // QUERY_CHUNK)
    length = -(-t // chunks)  # equal chunks: bucketed lengths such as 768 then need no padding, others less than one each

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * length - t)] + [(0, 0)] * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(*x.shape[:2], chunks, length, *x.shape[3:]), 2, 0)

    by_query = {i: split(mask) for i, mask in enumerate(masks) if mask.shape[2] > 1}  # the others hold for every chunk

    @jax.checkpoint
    def one_chunk(chunk):
        return _attend_queries(chunk[0], keys, values, [chunk[1].get(i, mask) for i, mask in enumerate(masks)])

    out = jax.lax.map(one_chunk, (split(q), by_query))
    return jnp.moveaxis(out, 0, 2).reshape(d, n, chunks * length, heads, size)[:, :, :t]


def causal_mask(lens: jax.Array, t: int, part: int | jax.Array = 0, parts: int = 1) -> jax.Array:
    """bool[..., t / parts, t]: query i sees key j when j <= i and j < lens; `lens` is i32[...].

    Queries are those of one of equal `parts` of the sequence, the `part`-th.
    """
    steps, queries = jnp.arange(t), part * (t // parts) + jnp.arange(t // parts)
    return (steps[None, :] <= queries[:, None]) & (steps < lens[..., None, None])


def own_response_mask(offsets: jax.Array, part: int | jax.Array = 0, parts: int = 1) -> jax.Array:
    """bool[..., t / parts, t]: of responses that lie end to end in a row, each query sees its own up to itself.

    Args:
      offsets: i32[..., t], a token's place in its response; -1 where there is none.
      part: queries are those of one of equal `parts` of the row.
    """
    t = offsets.shape[-1]
    steps, queries = jnp.arange(t), part * (t // parts) + jnp.arange(t // parts)
    first = queries - jax.lax.dynamic_slice_in_dim(offsets, part * (t // parts), t // parts, axis=-1)
    return (steps <= queries[:, None]) & (steps >= first[..., None])
