"""The `tpu` attention backend: JAX's ragged paged attention kernel for TPU, for decode and chunked prefill alike.

The pool is `{"kv"}`, [R, L * pages, page_size, C, K']. As in the `xla` backend a layer's pages are its block of rows, so
that one array rides in the carry of the scan over layers. The rest is the kernel's layout: keys and values of a head
side by side (C = 2 J', keys at the even places), and shapes that fill the chip's tiles, so head sizes are padded to
K', a multiple of 128, and KV heads to J'. The zeros change no score, as they add nothing to a product, and what they
give is cut off; they do cost memory, e.g. 2.7 times for SmolLM2's 3 heads of 64.

The kernel knows one chip, so it runs in `jax.shard_map`: replicas over the batch, the tensor axis over heads. Every
shard stores the KV heads that its own query heads read.

Letters as in `jrl.models.attention`; R replicas, S sequences of a replica, n new tokens of each, W pages of a
sequence's table.

Source of the layout: `jax.experimental.pallas.ops.tpu.ragged_paged_attention` (https://github.com/jax-ml/jax).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import PartitionSpec

from jrl.errors import UserError
from jrl.models.arch import Arch
from jrl.models.decoder import Attend
from jrl.rollout import paged_attention
from jrl.rollout.backends import DecoderSteps, PoolArray
from jrl.sharding.layout import Layout

LANES = 128  # the minor dimension of a tile
DTYPES = ("bfloat16", "float32")
# Pages are fetched by one unrolled copy each, and a chip has 32 scalar registers to hold their addresses.
PAGES_PER_BLOCK = 16
BLOCK_BYTES = 2 << 20  # of one of the two buffers that pages are fetched to, of 16 MiB of vector memory or more
QUERIES_PER_BLOCK = 32
TABLE_BYTES = 512 << 10  # of the page table of one call; a chip has 1 MiB of scalar memory

# The pool is split like the query heads: where KV heads are fewer than shards, each shard stores a copy of its own.
POOL_AXES = ("batch", "pages", None, "act_heads", None)
Q_AXES = ("batch", "length", "act_heads", None)
KV_AXES = ("batch", "length", "act_kv_heads", None)


def padded_kv_heads(heads: int, dtype: Any) -> int:
    """The fewest KV heads, at least `heads`, whose keys and values together fill whole tiles of `dtype`."""
    packing = 4 // jnp.dtype(dtype).itemsize  # values in a 32-bit word
    while True:
        words = 2 * heads / packing
        if words in (1, 2, 4, 8) or words % 8 == 0:
            return heads
        heads += 1


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


class _Heads(NamedTuple):
    """The heads of one shard."""

    shards: int  # into which the query heads are split
    axes: tuple[str, ...]  # mesh axes that split them
    kv_split: bool  # whether the KV heads arrive split the same way, or whole
    group: int  # G, query heads per KV head
    queries: int
    kv: int
    kv_stored: int  # J', with padding
    per_kv: int  # query heads per KV head, with padding
    size: int  # K
    size_stored: int  # K'


def _split_axes(layout: Layout, axis: str, size: int) -> tuple[str, ...]:
    """The mesh axes of more than one device that split a logical axis of a given size."""
    entry = next(iter(layout.sharding((axis,), (size,)).spec), None)
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _heads(arch: Arch, layout: Layout, dtype: Any) -> _Heads:
    axes, kv_axes = _split_axes(layout, "act_heads", arch.num_heads), _split_axes(layout, "act_kv_heads", arch.num_kv_heads)
    shards, group = math.prod(layout.mesh.shape[a] for a in axes), arch.num_heads // arch.num_kv_heads
    queries = arch.num_heads // shards
    if kv_axes not in ((), axes) or (queries % group and group % queries):
        raise UserError(
            f"attention backend 'tpu': {arch.num_heads} query heads over {arch.num_kv_heads} KV heads cannot be split into"
            f" {shards} shards that read whole KV heads; choose a rollout.mesh.tensor that divides {arch.num_kv_heads} or is a"
            " multiple"
        )
    kv = max(queries // group, 1)
    stored, size_stored = padded_kv_heads(kv, dtype), -(-arch.head_dim // LANES) * LANES
    per_kv = queries // kv
    if jnp.dtype(dtype).itemsize == 4 and stored > 4:
        per_kv = max(per_kv, 2)  # the kernel takes 4 KV heads at once, and blocks of less than 8 query heads do not compile
    return _Heads(shards, axes, kv_axes == axes, group, queries, kv, stored, per_kv, arch.head_dim, size_stored)


class _Work(NamedTuple):
    """What a call writes and reads; every array has a leading axis R."""

    written: tuple[jax.Array, ...]  # page ids i32[R, ...], and offsets in them where single tokens are written
    pages: jax.Array  # i32[R, S, W]
    kv_lens: jax.Array  # i32[R, S], visible to the last new token of each sequence
    sequences: jax.Array  # i32[R], only so many of S are computed
    valid: jax.Array  # bool[R, S * n], tokens whose output is wanted


class TpuBackend(DecoderSteps):
    """Implements `jrl.rollout.backends.Backend` for TPUs.

    Args:
      dtype: of the pool, and of the queries, keys and values that `attend` is given.

    Raises:
      UserError: a dtype that the kernel lacks; heads that the mesh cannot split.
    """

    name = "tpu"
    row_pages = None

    def __init__(self, arch: Arch, layout: Layout, dtype: Any):
        if jnp.dtype(dtype).name not in DTYPES:
            raise UserError(f"attention backend 'tpu': dtype {jnp.dtype(dtype).name} is not supported; use {' or '.join(DTYPES)}")
        self.arch, self.layout, self.dtype = arch, layout, dtype
        self.heads = _heads(arch, layout, dtype)

    def pool_arrays(self, num_pages: int, page_size: int) -> dict[str, PoolArray]:
        heads, rows = self.heads, self.arch.num_layers * num_pages
        combined = heads.shards * 2 * heads.kv_stored
        shape = (self.layout.batch_shards, rows, page_size, combined, heads.size_stored)
        return {"kv": PoolArray(shape, POOL_AXES, self.dtype)}

    def decode_attend(
        self, table: paged_attention.Table, lens: jax.Array, active: jax.Array, num_pages: int, page_size: int, tokens: int = 1
    ) -> Attend:
        """Attention of a few new tokens per slot; arguments as in `jrl.rollout.paged_attention.decode_attend`.

        The work is in proportion to the slots' own lengths, whatever the width of the tables, and next to none for idle
        slots. The kernel knows no sharing: pages that slots have in common are read for each of them.
        """
        pages = paged_attention.pages_of_slots(table, active)
        pages = _pad(pages, 2, pages.shape[2] + -(-(tokens - 1) // page_size))  # for tokens that a slot has no page for
        lens = jnp.where(active, lens, 0)
        each = lens[..., None] + jnp.arange(tokens)  # [R, B, T]
        page = jnp.take_along_axis(pages, each // page_size, axis=-1)
        slots = jnp.full(pages.shape[:1], pages.shape[1], jnp.int32)
        flat = lambda x: x.reshape(len(x), -1)  # noqa: E731  [R, B T]
        written, valid = (flat(page), flat(each % page_size)), flat(jnp.broadcast_to(active[..., None], each.shape))
        return self._attend(_Work(written, pages, lens + tokens, slots, valid), num_pages)

    def prefill_attend(
        self, table: jax.Array, prior: jax.Array, start: jax.Array, lens: jax.Array, num_pages: int, page_size: int
    ) -> Attend:
        """Causal attention of the next tokens of prompts; arguments as in `jrl.rollout.paged_attention.prefill_attend`.

        Prompts that have new tokens come before those that have none. Outputs beyond `lens` are 0.
        """
        replicas, prompts, width = table.shape
        length = width * page_size
        pages = paged_attention.joined_pages(prior, table, start // page_size)
        # Padding is computed as if it were text, which moves no query that counts: what follows is invisible to it.
        work = _Work(
            (table,), pages, start + length, jnp.sum(lens > 0, axis=-1, dtype=jnp.int32),
            (jnp.arange(length) < lens[..., None]).reshape(replicas, prompts * length),
        )  # fmt: skip
        return self._attend(work, num_pages)

    def copy_pages(self, pool: Any, source: jax.Array, target: jax.Array, num_layers: int, num_pages: int) -> Any:
        """As `jrl.rollout.paged_attention.copy_pages`."""
        return paged_attention.copy_pages(pool, source, target, num_layers, num_pages)

    def _attend(self, work: _Work, num_pages: int) -> Attend:
        spec = self.layout.spec
        q_spec, pool_spec, rows = spec(Q_AXES), spec(POOL_AXES), spec(("batch",))
        kv_spec = spec(KV_AXES) if self.heads.kv_split else rows

        def on_shard(layer, q, k, v, pool, work):
            squeezed = jax.tree.map(lambda x: x[0], (q, k, v, pool, work))  # a shard is of one replica
            out, pool = self._write_and_read(layer * num_pages, *squeezed)
            return out[None], pool[None]

        mapped = jax.shard_map(
            on_shard,
            mesh=self.layout.mesh,
            in_specs=(PartitionSpec(), q_spec, kv_spec, kv_spec, pool_spec, jax.tree.map(lambda _: rows, work)),
            out_specs=(q_spec, pool_spec),
            check_vma=False,  # a kernel does not tell over which mesh axes its output varies
        )

        def attend(layer, q, k, v, pool):
            out, kv = mapped(layer, q, k, v, pool["kv"], work)
            return out, {"kv": kv}

        return attend

    def _write_and_read(self, base, q, k, v, pool, work: _Work):
        """On one shard: q [S * n, H, K], k and v [S * n, J, K], pool [L * pages, page_size, C, K']."""
        heads, tokens = self.heads, q.shape[0]
        if not heads.kv_split:
            first = jax.lax.axis_index(heads.axes) * heads.queries // heads.group if heads.axes else 0
            k, v = (jax.lax.dynamic_slice_in_dim(x, first, heads.kv, axis=1) for x in (k, v))
        new = jnp.stack([k, v], axis=2)  # [S * n, J, 2, K]
        new = _pad(_pad(new, 1, heads.kv_stored), 3, heads.size_stored).astype(pool.dtype)
        page, *offset = work.written
        pool = self._write(pool, base + page, offset, new)
        q = q.reshape(tokens, heads.kv, -1, heads.size)  # [S * n, J, G of this shard, K]
        out = self._kernel(self._padded_queries(q).astype(pool.dtype), pool, base + work.pages, work.kv_lens, work.sequences)
        out = out.reshape(tokens, heads.kv_stored, heads.per_kv, -1)[:, : heads.kv, : q.shape[2], : heads.size]
        # What the kernel skips is uninitialised memory; as a key of the next layer a NaN in it would spread.
        out = jnp.where(work.valid[:, None, None], out.reshape(tokens, -1, heads.size), 0)
        return out.astype(k.dtype), pool

    def _write(self, pool, page, offset, new):
        """Single tokens where there are offsets in the pages, whole pages where there are none."""
        if offset:
            return pool.at[(page, *offset)].set(new.reshape(-1, *pool.shape[2:]))
        page, new = page.reshape(-1), new.reshape(-1, *pool.shape[1:])

        # As one scatter, the compiler would choose another layout for the pool, and copy all of it there and back.
        def write_page(i, pool):
            return jax.lax.dynamic_update_slice_in_dim(pool, new[i][None], page[i], axis=0)

        return jax.lax.fori_loop(0, page.size, write_page, pool)

    def _padded_queries(self, q):
        """[T, J, G, K] -> [T, J' * G', K']."""
        heads = self.heads
        q = _pad(_pad(_pad(q, 1, heads.kv_stored), 2, heads.per_kv), 3, heads.size_stored)
        return q.reshape(q.shape[0], -1, heads.size_stored)

    def _kernel(self, q, pool, pages, kv_lens, sequences):
        """q [S * n, H', K'] of S sequences of n tokens each, whose pages are i32[S, W]; of them `sequences` are computed.

        The kernel holds the page table in scalar memory, so many sequences with long tables take several calls.
        """
        count, width = pages.shape
        n = q.shape[0] // count
        page_bytes = math.prod(pool.shape[1:]) * pool.dtype.itemsize
        most = max(TABLE_BYTES // (4 * -(-width // LANES) * LANES), 1)
        outs = []
        # bfloat16 products are exact at the default precision, and the compiler refuses any other for them
        precision = "default" if pool.dtype == jnp.bfloat16 else jax.config.jax_default_matmul_precision
        for begin in range(0, count, most):
            end = min(begin + most, count)
            with jax.default_matmul_precision(precision):
                out = ragged_paged_attention(
                    q[begin * n : end * n],
                    pool,
                    kv_lens[begin:end],
                    pages[begin:end],
                    jnp.arange(end - begin + 1, dtype=jnp.int32) * n,
                    jnp.clip(sequences - begin, 0, end - begin)[None],
                    sm_scale=self.heads.size**-0.5,
                    num_kv_pages_per_block=min(width, PAGES_PER_BLOCK, max(BLOCK_BYTES // page_bytes, 1)),
                    num_queries_per_block=min((end - begin) * n, QUERIES_PER_BLOCK),
                )
            outs.append(out)
        return jnp.concatenate(outs)
