"""The `xla` attention backend: the KV pool's layout, and the attention calls that read and write it.

The pool is `{"k", "v"}`, each [R, L * pages, J, S, K]: a layer's pages are its block of rows, so one array rides in the
carry of the scan over layers and is updated in place. Within a page each head's tokens lie together, as the products over
them want it: what is gathered from the pool is multiplied as it lies. Letters as in `jrl.models.attention`; R replicas, B
slots of a replica, N rows of their page tables, W pages of a row, S tokens of a page.

A pool of 8-bit integers has `{"k_scale", "v_scale"}` besides, f32[R, L * pages, J, S]: one scale for each head of each token.
Everybody sees a token's keys and values as they are stored, the call that writes them too, so that how a sequence was cut
into calls makes no difference.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.models.attention import NEG_INF, attention, causal_mask
from jrl.models.quantize import int8

POOL_AXES = ("batch", "pages", "act_kv_heads", None, None)
ROW_PAGES = 8  # of a row: with longer ones short slots would pay for the longest, with shorter ones there is more to merge


def _as_stored(pool: dict[str, jax.Array], k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
    """What the pool holds of keys and values [.., K], by its names: a scale [..] has the same axes but the last."""
    if "k_scale" not in pool:
        return {"k": k, "v": v}
    (k, k_scale), (v, v_scale) = int8(k, -1), int8(v, -1)
    return {"k": k, "k_scale": k_scale, "v": v, "v_scale": v_scale}


def _as_read(stored: dict[str, jax.Array], dtype: Any) -> list[jax.Array]:
    """Keys and values [.., K] of what a pool holds."""
    if "k_scale" not in stored:
        return [stored["k"], stored["v"]]
    return [(stored[name] * stored[f"{name}_scale"][..., None]).astype(dtype) for name in ("k", "v")]


def _gather(pool: dict[str, jax.Array], rows: jax.Array, dtype: Any) -> list[jax.Array]:
    """Keys and values [R, .., J, S, K] of the pages i32[R, ..]."""
    return _as_read({name: jax.vmap(lambda x, index: x[index])(x, rows) for name, x in pool.items()}, dtype)


class Table(NamedTuple):
    """Where the slots' tokens lie. Samples of one prompt share its full pages, and read them together, once for all.

    A slot's own pages are one row or several, so that the work follows what is in the slots and not the longest of them; the
    pages of a prefix likewise. Unused entries of the arrays of pages are 0.
    """

    own: Any  # i32[R, N, W], the slots' pages after those they share, slot after slot, each from a new row on
    owner: Any  # i32[R, N], the slot of each row, B of those that are not used; N is B only where every slot has one
    start: Any  # i32[R, B], each slot's first row
    skip: Any  # i32[R, B], how many pages it shares
    shared: Any  # i32[R, N', V], pages of the prefixes that several slots have in common, full ones, prefix after prefix
    prefix: Any  # i32[R, N'], the prefix of each such row, P of those that are not used; N' is P only where each has one
    members: Any  # i32[R, P, M], the slots that share it, any slot where there are fewer than M; P is 0 where none share any
    place: Any  # i32[R, B], p * M + m of each slot that is a member; P * M of the others


def pages_of_slots(table: Table, active: jax.Array) -> jax.Array:
    """i32[R, B, V + W]: the pages of each slot in the order of its tokens, then 0, of a table with one row a slot and prefix.

    Args:
      active: bool[R, B]; the others have none.
    """
    prefixes, members = table.members.shape[1:]
    shared = jnp.zeros((*active.shape, 0), table.own.dtype)
    if prefixes:  # those without a shared prefix take any, and none of its pages
        prefix = jnp.minimum(table.place // members, prefixes - 1)
        shared = jnp.take_along_axis(table.shared, prefix[..., None], axis=1)
    return jnp.where(active[..., None], joined_pages(shared, table.own, table.skip), 0)


def joined_pages(before: jax.Array, after: jax.Array, count: jax.Array) -> jax.Array:
    """i32[R, S, V + W]: of each row the first `count` i32[R, S] pages of `before` [R, S, V], then `after` [R, S, W], then 0."""
    width = before.shape[-1]
    place, count = jnp.arange(width + after.shape[-1]), count[..., None]
    source = jnp.where(place < count, place, width + place - count)
    return jnp.take_along_axis(jnp.concatenate([before, after, jnp.zeros_like(before)], axis=-1), source, axis=-1)


# (base, q, pool) -> partial softmaxes over some pages in the layer whose block of rows begins at `base`, as `_over_pages`.
Read = Callable[[jax.Array, jax.Array, dict[str, jax.Array]], tuple[jax.Array, jax.Array, jax.Array]]
# (pages, limit, tokens, page_size) -> how these pages are read, as `gathered`.
MakeRead = Callable[[jax.Array, jax.Array, int, int], Read]


def gathered(pages: jax.Array, limit: jax.Array, tokens: int, page_size: int) -> Read:
    """Gathers the pages, then multiplies.

    Args:
      pages: i32[R, N, W].
      limit: i32[R, N] tokens of each row that the first of T = `tokens` new tokens sees; each later one sees one more.
    """
    visible = jnp.arange(pages.shape[-1] * page_size) < (limit[..., None] + jnp.arange(tokens))[..., None]  # [R, N, T, W S]
    visible = visible.reshape(*visible.shape[:3], -1, page_size).swapaxes(2, 3)

    def read(base, q, pool):
        return _over_pages(q, *_gather(pool, base + pages, q.dtype), visible)

    return read


def _over_pages(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax attention over some of the keys, not yet divided by its sum.

    Args:
      q: [R, N, J, M, K], scaled; M queries of each KV head, those of one new token side by side.
      keys, values: [R, N, W, J, S, K].
      visible: bool[R, N, W, T, S], what each of T new tokens sees; T is 1 where all see the same.

    Returns:
      the largest score and the sum of weights relative to it, both f32[R, N, J, M], and the weighted sum [R, N, J, M, K].
    """
    every = jnp.broadcast_to(q[:, :, None], (*keys.shape[:4], *q.shape[-2:]))  # [R, N, W, J, M, K]
    scores = jnp.einsum("rnwjmk,rnwjsk->rnwjms", every, keys, preferred_element_type=jnp.float32)
    tokens = visible.shape[3]
    seen = visible if tokens == 1 else jnp.repeat(visible, q.shape[3] // tokens, axis=3)
    seen = seen[:, :, :, None]  # [R, N, W, 1, 1 or M, S]
    scores = jnp.where(seen, scores, NEG_INF)
    top = jnp.max(scores, axis=(2, 5), keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    out = jnp.einsum("rnwjms,rnwjsk->rnwjmk", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return jnp.squeeze(top, (2, 5)), jnp.sum(weights, axis=(2, 5)), jnp.sum(out, axis=2)


def decode_attend(
    make_read: MakeRead, table: Table, lens: jax.Array, active: jax.Array, num_pages: int, page_size: int, tokens: int = 1
):
    """Attention of T = `tokens` new tokens per slot, each to what is cached and to those before it.

    Args:
      make_read: how pages are read: by `gathered`, or a kernel.
      lens: i32[R, B] tokens already in the cache; the new ones are written from this position on, those that a slot has no
        page for to the null page.
      active: bool[R, B]; idle slots write to the null page.
    """
    (replicas, rows, width), slots = table.own.shape, lens.shape[1]
    owner = jnp.minimum(table.owner, slots - 1)
    of = lambda x: jnp.take_along_axis(x, owner, axis=1)  # noqa: E731  [R, B] to [R, N]
    own = jnp.where(of(active)[..., None], table.own, 0)
    owned = table.owner[:, None] == jnp.arange(slots)[:, None]  # [R, B, N]
    each = lens[..., None] + jnp.arange(tokens)  # [R, B, T] positions of the new tokens
    nth = jnp.maximum(each // page_size - table.skip[..., None], 0)  # of their pages among the slot's entries
    there = active[..., None] & (nth < jnp.sum(owned, axis=-1)[..., None] * width)
    place = jnp.where(there, nth + table.start[..., None] * width, 0).reshape(replicas, -1)  # among all entries
    page = jnp.take_along_axis(own.reshape(replicas, -1), place, axis=1)
    page = jnp.where(there.reshape(replicas, -1), page, 0)  # [R, B T]
    offset = (each % page_size).reshape(replicas, -1)
    first = (of(table.skip) + (jnp.arange(rows) - of(table.start)) * width) * page_size  # position of a row's first token
    limit = jnp.where(table.owner < slots, of(lens) + 1 - first, 0)
    read_own = make_read(own, limit, tokens, page_size)
    prefixes, members = table.members.shape[1:]
    several = table.shared.shape[1] > prefixes  # rows of a prefix
    if prefixes:  # whose pages are full, and seen by all new tokens of their members
        prefix = jnp.minimum(table.prefix, prefixes - 1)
        belongs = table.prefix[:, None] == jnp.arange(prefixes)[:, None]  # [R, P, N']
        read_shared = make_read(table.shared, jnp.sum(table.shared > 0, axis=-1) * page_size, 1, page_size)

    def attend(layer, q, k, v, pool):
        write = jax.vmap(lambda rows, row, off, new: rows.at[row, :, off].set(new.astype(rows.dtype)))
        read = jax.vmap(lambda rows, index: rows[index])
        base = layer * num_pages
        pool = {name: write(pool[name], base + page, offset, x) for name, x in _as_stored(pool, k, v).items()}
        kv_heads, size = k.shape[-2:]
        q = q.reshape(replicas, slots, tokens, kv_heads, -1, size).swapaxes(2, 3) * size**-0.5
        q = q.reshape(replicas, slots, kv_heads, -1, size)  # [R, B, J, T G, K]
        top, total, out = read_own(base, q if rows == slots else read(q, owner), pool)
        if rows > slots:
            top, total, out = _merge(owned, owner, top, total, out)
        if prefixes:
            together = jnp.moveaxis(read(q, table.members), 2, 3)  # [R, P, J, M, T G, K]
            together = together.reshape(replicas, prefixes, kv_heads, -1, size)
            parts = read_shared(base, read(together, prefix) if several else together, pool)
            if several:
                parts = _merge(belongs, prefix, *parts)
            alone = lambda x: jnp.moveaxis(x.reshape(*x.shape[:3], members, -1, *x.shape[4:]), 3, 2)  # noqa: E731
            t, z, o = (_to_slots(alone(x), table.place, none) for x, none in zip(parts, (NEG_INF, 0.0, 0.0), strict=True))
            most = jnp.maximum(top, t)
            a, b = jnp.exp(top - most), jnp.exp(t - most)
            total, out = total * a + z * b, out * a[..., None] + o * b[..., None]
        out = (out / total[..., None]).reshape(replicas, slots, kv_heads, tokens, -1, size).swapaxes(2, 3)
        return out.reshape(replicas, slots * tokens, -1, size).astype(k.dtype), pool

    return attend


def _merge(
    owned: jax.Array, owner: jax.Array, top: jax.Array, total: jax.Array, out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Partial softmaxes of rows to those of the slots, or prefixes, that own them.

    The sums are products with `owned`, bool[R, B, N]: additions one row at a time are slow everywhere.
    """
    most = jnp.max(jnp.where(owned[..., None, None], top[:, None], NEG_INF), axis=2)  # [R, B, J, G]
    share = jnp.exp(jnp.minimum(top - jax.vmap(lambda x, index: x[index])(most, owner), 0.0))  # [R, N, J, G]

    def add_up(x):
        flat = x.reshape(*x.shape[:2], -1)
        sums = jnp.einsum("rbn,rnf->rbf", owned.astype(x.dtype), flat, precision="highest")
        return sums.reshape(*sums.shape[:2], *x.shape[2:])

    return most, add_up(total * share), add_up(out * share[..., None])


def _to_slots(x: jax.Array, place: jax.Array, none: float) -> jax.Array:
    """[R, P, M, ...] to [R, B, ...]: the row of each slot, `none` for a slot that has no place."""
    flat = x.reshape(x.shape[0], -1, *x.shape[3:])
    padded = jnp.pad(flat, [(0, 0), (0, 1)] + [(0, 0)] * (flat.ndim - 2), constant_values=none)
    return jax.vmap(lambda rows, index: rows[index])(padded, place)


def prefill_attend(table: jax.Array, prior: jax.Array, start: jax.Array, lens: jax.Array, num_pages: int, page_size: int):
    """Causal attention of the next tokens of prompts, whose keys and values are written to pages, over what is cached before.

    Args:
      table: i32[R, P, t / page_size] pages of the new tokens, 0 where a prompt has none.
      prior: i32[R, P, W] pages before them; W is 0 where no prompt has any.
      start: i32[R, P] tokens cached before, whole pages.
      lens: i32[R, P] new tokens of each prompt; what lies beyond is written, to the end of the prompt's last page or to
        the null page, and never read before it is overwritten.
    """
    replicas, prompts, width = table.shape
    length = width * page_size
    mask = causal_mask(lens, length)  # [R, P, t, t]
    seen = jnp.arange(prior.shape[-1] * page_size) < start[..., None, None]  # [R, P, 1, S]

    def attend(layer, q, k, v, pool):
        split = lambda x: x.reshape(replicas, prompts, length, *x.shape[-2:])  # noqa: E731
        write = jax.vmap(lambda rows, row, new: rows.at[row].set(new.astype(rows.dtype)))
        pages = lambda x: x.reshape(replicas, prompts, width, page_size, *x.shape[2:]).swapaxes(3, 4)  # noqa: E731
        base = layer * num_pages
        stored = _as_stored(pool, k, v)
        pool = {name: write(pool[name], base + table, pages(x)) for name, x in stored.items()}
        blocks = [(*map(split, _as_read(stored, k.dtype)), mask)]
        if prior.shape[-1]:
            cached = (x.swapaxes(3, 4) for x in _gather(pool, base + prior, k.dtype))  # [R, P, W, S, J, K]
            blocks.append((*(x.reshape(replicas, prompts, -1, *k.shape[-2:]) for x in cached), seen))
        return attention(split(q), blocks).reshape(q.shape), pool

    return attend


def copy_pages(pool, source: jax.Array, target: jax.Array, num_layers: int, num_pages: int):
    """Copies page `source[r, c]` to page `target[r, c]` in every layer; both i32[R, C], the pair (0, 0) does nothing."""
    bases = (jnp.arange(num_layers) * num_pages)[:, None]

    def one_replica(rows, src, dst):
        return rows.at[(bases + dst).reshape(-1)].set(rows[(bases + src).reshape(-1)])

    return {name: jax.vmap(one_replica)(rows, source, target) for name, rows in pool.items()}
