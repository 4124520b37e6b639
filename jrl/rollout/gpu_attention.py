"""The `gpu` attention backend: decoding reads pages with a kernel for NVIDIA's Hopper GPUs; everything else is `xla`'s.

Where `xla` gathers pages into a new array and reads it again, the kernel brings each page from the pool into shared memory
once. A block of threads takes up to BLOCK_TOKENS of a row's tokens, of one KV head: it fetches their keys and values page by
page, multiplies on the tensor cores, and returns a softmax that is not yet divided by its sum. A row of the table is one such
block or a few, long prefixes are many, and `jrl.rollout.paged_attention` adds the parts up, as it does for `xla`; so one long
sequence keeps many blocks busy, and prefixes that samples share are fetched once for all of them. Several new tokens of a slot
(speculation) are so many more queries. Prompts are computed as by `xla`.

Written in Pallas on Mosaic GPU, not on Triton: Pallas' Triton is deprecated from jax 0.11 on, and Mosaic GPU can be checked
without a GPU at least as far: its interpreter models shared memory and barriers, and lowering for CUDA decides layouts and
counts shared memory. What no machine without a GPU can tell is whether the result runs, and how fast. Until that has been
measured this backend is chosen only by its name. Left out: GPUs other than Hopper, as the products are Hopper's `wgmma`;
float32, which the tensor cores would round; integer pages.

Letters as in `jrl.rollout.paged_attention`, here of one replica; C blocks of a row, X tokens of a block.

Source of the kernel's parts: the Mosaic GPU reference of Pallas (https://docs.jax.dev/en/latest/pallas/gpu/reference.html).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec

from jrl.errors import UserError
from jrl.models.arch import Arch
from jrl.models.attention import NEG_INF
from jrl.rollout import paged_attention
from jrl.rollout.backends import PoolArray, XlaBackend
from jrl.sharding.layout import Layout

DTYPES = ("bfloat16", "float16")
QUERIES = 64  # rows of a product on the tensor cores
LEAST_QUERIES = 8  # rows of a tile in shared memory
BLOCK_TOKENS = 128  # of keys and values in shared memory at once, fewer where heads are larger than 128
LANES = 64  # values of 16 bits in a row of a tile
LOG2_E = math.log2(math.e)


class GpuBackend(XlaBackend):
    """Implements `jrl.rollout.backends.Backend` for GPUs; pool and prefill are those of `XlaBackend`.

    Raises:
      UserError: a dtype, head size or page size that the kernel's tiles do not fit.
    """

    name = "gpu"

    def __init__(self, arch: Arch, layout: Layout, dtype: Any):
        super().__init__(arch, layout, dtype)
        if jnp.dtype(dtype).name not in DTYPES:
            raise UserError(f"attention backend 'gpu': dtype {jnp.dtype(dtype).name} is not supported; use {' or '.join(DTYPES)}")
        if arch.head_dim not in (64, 128, 192, 256):
            raise UserError(f"attention backend 'gpu': heads of {arch.head_dim} do not fit its tiles of {LANES}; choose 'xla'")

    def pool_arrays(self, num_pages: int, page_size: int) -> dict[str, PoolArray]:
        fitting = [n for n in (16, 32, 64, 128) if n <= _block_tokens(self.arch.head_dim)]
        if page_size not in fitting:
            raise UserError(
                f"attention backend 'gpu': pages of {page_size} tokens do not fit its tiles; choose 'xla', or a page_size of"
                f" {', '.join(map(str, fitting))}"
            )
        return super().pool_arrays(num_pages, page_size)

    def make_read(self, pages: jax.Array, limit: jax.Array, tokens: int, page_size: int) -> paged_attention.Read:
        """As `jrl.rollout.paged_attention.gathered`, with the kernel; a kernel knows one device, hence `shard_map`."""
        rows = self.layout.spec(("batch",))
        heads = ("batch", None, "act_kv_heads", None, None)

        def on_shard(base, q, k, v, pages, limit):
            parts = over_pages(q[0], k[0], v[0], base + pages[0], limit[0], tokens)
            return tuple(part[None] for part in parts)

        def read(base, q, pool):
            split = self.layout.sharding(heads, q.shape).spec  # KV heads of q are the pool's
            pool_split = self.layout.sharding(paged_attention.POOL_AXES, pool["k"].shape).spec
            mapped = jax.shard_map(
                on_shard,
                mesh=self.layout.mesh,
                in_specs=(PartitionSpec(), split, pool_split, pool_split, rows, rows),
                out_specs=(split, split, split),
                check_vma=False,  # a kernel does not tell over which mesh axes its output varies
            )
            return mapped(base, q, pool["k"], pool["v"], pages, limit)

        return read


def _block_tokens(head_dim: int) -> int:
    """Shared memory holds their keys and values, the queries and the output in float32: 176 KiB of 227 at the most."""
    return BLOCK_TOKENS if head_dim <= 128 else BLOCK_TOKENS // 2


def over_pages(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, limit: jax.Array, tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax attention over some pages, not yet divided by its sum.

    Args:
      q: [N, J, M, K], scaled; M queries of each KV head, those of one new token side by side.
      k, v: [pages of the pool, J, S, K].
      pages: i32[N, W].
      limit: i32[N] tokens of each row that the first of T = `tokens` new tokens sees, each later one one more; a row in which
        no token sees any is left out, and its parts are those of an empty sum.

    Returns:
      the largest score and the sum of weights relative to it, both f32[N, J, M], and the weighted sum f32[N, J, M, K].
    """
    queries, page_size = q.shape[2], k.shape[2]
    least = max(LANES // page_size, 1)  # pages of a tile of weights
    per_block = min(-(-pages.shape[1] // least) * least, _block_tokens(q.shape[3]) // page_size)
    held = pages.shape[1] * page_size  # tokens
    pages = jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % per_block)))
    q = jnp.pad(q, ((0, 0), (0, 0), (0, -queries % (QUERIES if queries > QUERIES else LEAST_QUERIES)), (0, 0)))
    run = _make_kernel(q.shape, q.dtype, page_size, held, per_block, queries // tokens, tokens)
    top, total, out = run(q, k, v, pages, limit)
    block = jnp.arange(top.shape[1]) * per_block * page_size
    there = (limit[:, None] + tokens - 1 > block)[..., None, None]  # [N, C, 1, 1]; nothing is written elsewhere
    top = jnp.where(there, top, NEG_INF)
    most = jnp.max(top, axis=1)
    share = jnp.exp(top - most[:, None])
    total = jnp.sum(jnp.where(there, total * share, 0.0), axis=1)
    out = jnp.sum(jnp.where(there[..., None], out * share[..., None], 0.0), axis=1)
    return most[..., :queries], total[..., :queries], out[..., :queries, :]


@functools.cache
def _make_kernel(q_shape: tuple[int, ...], dtype: Any, page_size: int, held: int, per_block: int, group: int, tokens: int):
    """The kernel (q, k, v, pages, limit) -> (top, total, out), each [N, C, J, M, ..] in float32.

    Args:
      held: tokens of a row; what the last of its blocks has beyond them is padding.
      per_block: pages of a block.
      group: queries of one new token; tokens: T.
    """
    rows, heads, queries, size = q_shape
    height, width = min(queries, QUERIES), per_block * page_size  # of the scores of one block, X = width
    blocks = -(-held // width)

    def body(q, k, v, pages, limit, top, total, out, q_here, k_here, v_here, top_here, total_here, out_here, q_in, k_in, v_in):
        n, c, j, part = (lax.axis_index(name) for name in ("row", "block", "head", "part"))
        first = limit[n] - c * width
        at = pl.ds(part * height, height)

        @pl.when(first + tokens - 1 > 0)
        def _():
            plgpu.copy_gmem_to_smem(q.at[n, j, at], q_here.at[pl.ds(0, height)], q_in)
            for source, here, arrived in ((k, k_here, k_in), (v, v_here, v_in)):
                for i in range(per_block):
                    page = pages[n, c * per_block + i]
                    plgpu.copy_gmem_to_smem(source.at[page, j], here.at[pl.ds(i * page_size, page_size)], arrived)
            plgpu.barrier_wait(q_in)
            plgpu.barrier_wait(k_in)
            # What lies in rows beyond `height` is anything, and stays in these rows.
            scores = _product(q_here, k_here, transposed=True) * LOG2_E
            iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, scores.shape, layout=plgpu.Layout.WGMMA)
            more = lax.div(iota(0) + part * height, jnp.int32(group)) if tokens > 1 else 0
            seen = iota(1) < jnp.minimum(first + more, held - c * width)
            scores = jnp.where(seen, scores, NEG_INF)
            highest = scores.max(axis=1)
            weights = jnp.where(seen, jnp.exp2(scores - lax.broadcast_in_dim(highest, scores.shape, [0])), 0.0)
            top_here[...] = highest / LOG2_E
            total_here[...] = weights.sum(axis=1)
            plgpu.barrier_wait(v_in)
            out_here[...] = _product(weights.astype(dtype), v_here)
            plgpu.commit_smem()
            for here, there in ((top_here, top), (total_here, total), (out_here, out)):
                plgpu.copy_smem_to_gmem(here.at[pl.ds(0, height)], there.at[n, c, j, at])
            plgpu.wait_smem_to_gmem(0)

    tiles = (plgpu.TilingTransform((LEAST_QUERIES, LANES)), plgpu.SwizzleTransform(128))
    numbers = (rows, blocks, heads, queries)
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (numbers, numbers, (*numbers, size))],
        scratch_types=[
            plgpu.SMEM((QUERIES, size), dtype, transforms=tiles), plgpu.SMEM((width, size), dtype, transforms=tiles),
            plgpu.SMEM((width, size), dtype, transforms=tiles), plgpu.SMEM((QUERIES,), jnp.float32),
            plgpu.SMEM((QUERIES,), jnp.float32), plgpu.SMEM((QUERIES, size), jnp.float32),
            plgpu.Barrier(), plgpu.Barrier(num_arrivals=per_block), plgpu.Barrier(num_arrivals=per_block),
        ],
        grid=(rows, blocks, heads, -(-queries // height)),
        grid_names=("row", "block", "head", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),  # of 2^x
    )  # fmt: skip


def _product(a: Any, b: Any, transposed: bool = False) -> jax.Array:
    """a [64, n] in shared memory or registers times b [n, m] in shared memory, or [m, n] transposed: f32[64, m]."""

    def run(sums):
        plgpu.wgmma(sums, a, b.transpose((1, 0)) if transposed else b)
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[0 if transposed else 1]), jnp.float32))
