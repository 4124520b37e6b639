"""A fingerprint of parameters that does not depend on how they are laid out.

    digest(x) = sum over elements i of mix(bits(x_i) xor mix(i))   mod 2^32

`bits` is the element's bit pattern, `i` its row-major position in the global array, `mix` a bijection of 32-bit words
that spreads every bit over the word. Addition modulo 2^32 has no order, so devices may sum their shards in any way. One
changed element always changes the sum, because `mix` is one to one; two that trade places do so with probability
1 - 2^-32. A plain product of bits and an odd position hash would never see x and -x trade places: their difference,
the top bit alone, times the even difference of two odd hashes is 0 modulo 2^32.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jrl.sharding.hosts import fetch
from jrl.sharding.layout import device_list, path_name
from jrl.sharding.memory_kinds import HOST
from jrl.sharding.offload import near

CHUNK_ELEMENTS = 2**18  # hashed at once on each device: small beside a weight, large beside a loop's overhead


def digest(tree: Any, dtype: Any = None) -> dict[str, int]:
    """The fingerprint of every array of a tree.

    Args:
      tree: arrays of any dtype up to 64 bits, split in any way.
      dtype: floating arrays are cast to it first, so that fp32 masters can be compared with a published bf16 copy.

    Returns:
      path ("layers/q/kernel") -> whole number below 2^32. Positions count modulo 2^32 too: in an array of more than
      4 Gi elements, two that lie exactly that far apart may trade places unseen.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    groups: dict[Any, list[int]] = {}  # a program runs on one list of devices; what comes from host memory comes alone
    for i, (_, x) in enumerate(leaves):
        groups.setdefault((device_list(x.sharding), i if x.sharding.memory_kind == HOST else -1), []).append(i)
    sums = np.zeros(len(leaves), np.uint32)
    for group in groups.values():
        program = _program(tuple(leaves[i][1].sharding for i in group), None if dtype is None else jnp.dtype(dtype))
        sums[group] = fetch(program([leaves[i][1] for i in group]))  # waits, so one is gone when the next one comes
    return {path_name(path): int(total) for (path, _), total in zip(leaves, sums, strict=True)}


@functools.lru_cache(maxsize=64)
def _program(shardings: tuple[Sharding, ...], dtype: Any):
    """Arrays with these shardings -> uint32[number of arrays], one compiled program for them all."""

    def run(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([_digest(near(x), s, dtype) for x, s in zip(leaves, shardings, strict=True)])

    return jax.jit(run)


def _digest(x: jax.Array, sharding: Sharding, dtype: Any) -> jax.Array:
    shape = x.shape
    if x.size == 0:
        return jnp.uint32(0)
    if not isinstance(sharding, NamedSharding):
        return _digest_shard(x, shape, (), dtype)
    # Each device hashes its own shard where it lies: a loop over chunks of the global array would gather it.
    spec = tuple(sharding.spec) + (None,) * (x.ndim - len(sharding.spec))
    names = tuple(() if s is None else (s,) if isinstance(s, str) else tuple(s) for s in spec)

    def local(shard: jax.Array) -> jax.Array:
        return jax.lax.psum(_digest_shard(shard, shape, names, dtype), sum(names, ()))

    whole = jax.shard_map(local, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=PartitionSpec(), check_vma=False)
    return whole(x)


def _digest_shard(x: jax.Array, global_shape: tuple[int, ...], names: tuple[tuple[str, ...], ...], dtype: Any):
    """The sum over one shard; `names` are the mesh axes that split each dimension. Holds one chunk besides `x`."""
    x, global_shape, names = jnp.atleast_1d(x), global_shape or (1,), names or ((),) * max(x.ndim, 1)
    index = []  # of each dimension: global position of the shard's elements along it, times its stride
    for axis, size in enumerate(x.shape):
        start = jax.lax.axis_index(names[axis]) * size if names[axis] else 0
        stride = np.uint32(math.prod(global_shape[axis + 1 :]) % 2**32)
        index.append((jnp.arange(size, dtype=jnp.uint32) + jnp.asarray(start, jnp.uint32)) * stride)
    row_index = functools.reduce(lambda rows, i: (rows[:, None] + i).reshape(-1), index[:-1], jnp.zeros(1, jnp.uint32))
    rows, columns = row_index.size, x.shape[-1]
    x = x.reshape(rows, columns)
    step = _chunk_rows(rows, columns)

    def add_chunk(i: jax.Array, total: jax.Array) -> jax.Array:
        chunk = jax.lax.dynamic_slice_in_dim(x, i * step, step)
        where = jax.lax.dynamic_slice_in_dim(row_index, i * step, step)[:, None] + index[-1]
        words = _words(chunk if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else chunk.astype(dtype))
        where = where[..., None] * np.uint32(words.shape[-1]) + jnp.arange(words.shape[-1], dtype=jnp.uint32)
        return total + jnp.sum(_mix(words ^ _mix(where)), dtype=jnp.uint32)

    return jax.lax.fori_loop(0, rows // step, add_chunk, jnp.uint32(0))


def _chunk_rows(rows: int, columns: int) -> int:
    """The largest divisor of `rows` that keeps a chunk within `CHUNK_ELEMENTS`; at least one row."""
    most = max(1, min(rows, CHUNK_ELEMENTS // max(columns, 1)))
    return next(step for step in range(most, 0, -1) if rows % step == 0)


def _words(x: jax.Array) -> jax.Array:
    """The bit pattern of each element as uint32[*x.shape, words]: one word, two for 64 bits, a random key's own."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
        return x.reshape(*x.shape[:2], -1)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).reshape(*x.shape, -1)


def _mix(h: jax.Array) -> jax.Array:
    """The 32-bit finalizer of MurmurHash3 (https://github.com/aappleby/smhasher/wiki/MurmurHash3)."""
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
