"""The `xla` attention backend: the KV pool's layout, and the attention calls that read and write it.

The pool is `{"k", "v"}`, each [R, L * pages, page_size, J, K]: a layer's pages are its block of rows, so one array
rides in the carry of the scan over layers and is updated in place. Letters as in `jrl.models.attention`; R replicas,
B slots of a replica, W pages of a slot's table.
"""

import jax
import jax.numpy as jnp

from jrl.models.arch import Arch
from jrl.models.attention import NEG_INF, attention, causal_mask

POOL_AXES = ("batch", "pages", None, "act_kv_heads", None)


def pool_shape(arch: Arch, replicas: int, num_pages: int, page_size: int) -> tuple[int, ...]:
    return (replicas, arch.num_layers * num_pages, page_size, arch.num_kv_heads, arch.head_dim)


def decode_attend(table: jax.Array, lens: jax.Array, num_pages: int, page_size: int):
    """Attention of one new token per slot.

    Args:
      table: i32[R, B, W] page ids, 0 beyond a slot's last page.
      lens: i32[R, B] tokens already in the cache; the new one is written at this position.

    The values are weighted by a fused multiply and sum rather than a batched matmul: with one query a slot the work is
    reading them once, and on CPU so thin a matmul takes longer.
    """
    replicas, slots, width = table.shape
    page = jnp.take_along_axis(table, (lens // page_size)[..., None], axis=-1)[..., 0]  # [R, B]
    offset = lens % page_size
    visible = jnp.arange(width * page_size) <= lens[..., None]  # [R, B, S]

    def attend(layer, q, k, v, pool):
        write = jax.vmap(lambda rows, row, off, new: rows.at[row, off].set(new.astype(rows.dtype)))
        read = jax.vmap(lambda rows, index: rows[index])
        base = layer * num_pages
        pool = {"k": write(pool["k"], base + page, offset, k), "v": write(pool["v"], base + page, offset, v)}
        kv_heads, size = k.shape[-2:]
        shape = (replicas, slots, width * page_size, kv_heads, size)  # [R, B, S, J, K]
        keys, values = (read(pool[name], base + table).reshape(shape) for name in ("k", "v"))
        q = q.reshape(replicas, slots, kv_heads, -1, size) * size**-0.5  # [R, B, J, G, K]
        scores = jnp.einsum("rbjgk,rbsjk->rbsjg", q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(visible[..., None, None], scores, NEG_INF), axis=2)
        out = jnp.sum(weights[..., None] * values[:, :, :, :, None], axis=2)  # [R, B, J, G, K]
        return out.reshape(replicas, slots, -1, size).astype(k.dtype), pool

    return attend


def prefill_attend(table: jax.Array, lens: jax.Array, length: int, num_pages: int, page_size: int):
    """Causal attention within prompts, whose keys and values are written to pages.

    Args:
      table: i32[R, P, length / page_size] page ids, 0 where a prompt has no page.
      lens: i32[R, P] tokens of each prompt; what lies beyond is written, to the end of the prompt's last page or to
        the null page, and never read before it is overwritten.
    """
    replicas, prompts, width = table.shape
    mask = causal_mask(lens, length)  # [R, P, t, t]

    def attend(layer, q, k, v, pool):
        split = lambda x: x.reshape(replicas, prompts, length, *x.shape[-2:])  # noqa: E731
        write = jax.vmap(lambda rows, row, new: rows.at[row].set(new.astype(rows.dtype)))
        pages = lambda x: x.reshape(replicas, prompts, width, page_size, *x.shape[-2:])  # noqa: E731
        rows = layer * num_pages + table
        pool = {"k": write(pool["k"], rows, pages(k)), "v": write(pool["v"], rows, pages(v))}
        out = attention(split(q), [(split(k), split(v), mask)])
        return out.reshape(q.shape), pool

    return attend


def copy_pages(pool, source: jax.Array, target: jax.Array, num_layers: int, num_pages: int):
    """Copies page `source[r, c]` to page `target[r, c]` in every layer; both i32[R, C], the pair (0, 0) does nothing."""
    bases = (jnp.arange(num_layers) * num_pages)[:, None]

    def one_replica(rows, src, dst):
        return rows.at[(bases + dst).reshape(-1)].set(rows[(bases + src).reshape(-1)])

    return {name: jax.vmap(one_replica)(rows, source, target) for name, rows in pool.items()}
