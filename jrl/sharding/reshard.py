"""Moves a tree of arrays: from the train mesh to the rollout mesh, to another dtype, to other devices.

Three cases, leaf by leaf:

1. placement and dtype already as wanted: the result shares the leaf's memory (no bytes move);
2. the same list of devices: a program casts and exchanges shards between devices; each receives what it needs and does not
   hold, and nothing else (`jrl.sharding.exchange`);
3. other devices: the source devices first regroup the leaf into parts that match the destination's shards (case 2),
   then each part goes to the devices that want it.

Leaves move one after another, so that beside the tree and its result there is only what one leaf's program needs, and in case
3 its regrouped parts.

What is left out: in case 3 a part stays in its process, so the source devices of each must be able to hold all parts that its
target devices want; and placements that are no `NamedSharding`, or typed random keys, go as XLA's partitioner likes.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jrl.errors import UserError
from jrl.sharding.exchange import CHUNK_BYTES, exchange
from jrl.sharding.layout import device_list, path_name


def reshard(tree: Any, shardings: Any, dtype: Any = None, chunk_bytes: int = CHUNK_BYTES) -> Any:
    """The tree with every array in the placement asked for.

    Args:
      tree: arrays.
      shardings: one sharding for all, or a tree of them in the same structure.
      dtype: floating arrays are cast to it; None keeps every dtype.
      chunk_bytes: about what a device may need beside the tree and its result.

    Returns:
      A tree of new arrays, except that leaves which need neither move nor cast share their memory with the input: to
      donate or delete the one invalidates the other.

    Raises:
      UserError: other structures; a dimension that does not divide. Nothing has moved by then.
    """
    named, targets = _leaves(tree, shardings)
    moved = _move([leaf for _, leaf in named], targets, dtype, chunk_bytes)
    return jax.tree_util.tree_unflatten(jax.tree.structure(tree), moved)


def exchanges(tree: Any, shardings: Any, dtype: Any = None, chunk_bytes: int = CHUNK_BYTES) -> dict[str, jax.stages.Compiled]:
    """The programs that `reshard` runs for the leaves that stay on their devices.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct`s with a sharding, whose devices may be those of a topology; the rest as in
        `reshard`.

    Returns:
      path ("layers/q/kernel") -> its program, without the leaves that share memory with the result. Leaves of equal shape,
      dtype and placement have the same one.
    """
    programs = {}
    for (name, leaf), target in zip(*_leaves(tree, shardings), strict=True):
        want = _target_dtype(leaf.dtype, dtype)
        same = leaf.dtype == want and leaf.sharding.is_equivalent_to(target, leaf.ndim)
        if not same and device_list(leaf.sharding) == device_list(target):
            programs[name] = exchange(leaf.shape, leaf.sharding, target, leaf.dtype, want, chunk_bytes)
    return programs


def _leaves(tree: Any, shardings: Any) -> tuple[list[tuple[str, Any]], list[Sharding]]:
    """Every leaf with its name, and its target; errors as `reshard`."""
    named = [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    structure: Any = jax.tree.structure(tree)
    if isinstance(shardings, Sharding):
        targets = [shardings] * len(named)
    else:
        targets = jax.tree.leaves(shardings)
        if jax.tree.structure(shardings) != structure:
            raise UserError(
                f"reshard: the arrays are {structure} but the shardings {jax.tree.structure(shardings)};"
                " pass trees of one structure"
            )
    for (name, leaf), target in zip(named, targets, strict=True):
        _check_divides(name, leaf.shape, target)
    return named, targets


def _move(leaves: Sequence[jax.Array], targets: Sequence[Sharding], dtype: Any, chunk_bytes: int) -> list[jax.Array]:
    moved: list[jax.Array] = []
    on_their_way: list[jax.Array] = []
    for leaf, target in zip(leaves, targets, strict=True):
        want = _target_dtype(leaf.dtype, dtype)
        if device_list(leaf.sharding) == device_list(target):
            moved.append(_regroup(leaf, target, want, chunk_bytes))
            continue
        # The regrouped parts of the leaf before are given up before this one's are made.
        jax.block_until_ready(on_their_way)
        matching = _matching(leaf.shape, leaf.sharding, target)
        on_their_way = [_send(_regroup(leaf, matching, want, chunk_bytes), target)]
        moved += on_their_way
    return moved


def _target_dtype(have: Any, want: Any) -> np.dtype:
    return have if want is None or not jnp.issubdtype(have, jnp.floating) else jnp.dtype(want)


def _check_divides(name: str, shape: tuple[int, ...], target: Sharding) -> None:
    try:
        target.shard_shape(shape)
    except ValueError:
        raise UserError(
            f"reshard: {name} of shape {shape} does not divide over {target}; choose mesh sizes that divide every"
            " dimension they split"
        ) from None


# One list of devices ------------------------------------------------------------------------------------------------


def _regroup(x: jax.Array, target: Sharding, dtype: np.dtype, chunk_bytes: int) -> jax.Array:
    source = x.sharding
    if source.is_equivalent_to(target, x.ndim):
        return jax.device_put(x if x.dtype == dtype else x.astype(dtype), target)
    named = isinstance(source, NamedSharding) and isinstance(target, NamedSharding)
    if not named or not x.size or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return _identity(target, dtype)(x)
    source, result = source.with_memory_kind("device"), target.with_memory_kind("device")  # where devices can send from
    moved = exchange(x.shape, source, result, x.dtype, dtype, chunk_bytes)(jax.device_put(x, source))
    return jax.device_put(moved, target)


@functools.lru_cache(maxsize=64)
def _identity(target: Sharding, dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x.astype(dtype), out_shardings=target)


# Other devices ------------------------------------------------------------------------------------------------------


def _matching(shape: tuple[int, ...], source: Sharding, target: Sharding) -> NamedSharding:
    """A placement on the source's devices whose parts are unions of the target's shards, as small as they can be.

    Each dimension is split into as many parts as the target's, or, where the devices do not suffice, into a divisor of
    that number; devices left over hold copies.
    """
    devices = np.array(device_list(source), dtype=object)
    parts, left = [], devices.size
    for size, shard in zip(shape, target.shard_shape(shape), strict=True):
        parts.append(math.gcd(size // shard if shard else 1, left))
        left //= parts[-1]
    names = tuple(f"dim{axis}" for axis in range(len(shape)))
    mesh = Mesh(devices.reshape(left, *parts), ("copies", *names), axis_types=(AxisType.Auto,) * (1 + len(names)))
    return NamedSharding(mesh, PartitionSpec(*names))


def _send(x: jax.Array, target: Sharding) -> jax.Array:
    """Every target device's shard, cut from a part of `x` of its process that contains it, copies of a part taking turns."""
    holders: dict[tuple, list[jax.Array]] = {}
    for part in x.addressable_shards:
        holders.setdefault(_bounds(part.index, x.shape), []).append(part.data)
    turns = {bounds: itertools.cycle(copies) for bounds, copies in holders.items()}
    cut, devices = [], []
    for device, index in target.addressable_devices_indices_map(x.shape).items():
        wanted = _bounds(index or (), x.shape)
        bounds = next((b for b in turns if all(lo <= a and z <= hi for (lo, hi), (a, z) in zip(b, wanted, strict=True))), None)
        if bounds is None:
            raise UserError(
                f"reshard: devices of process {jax.process_index()} want parts that other processes' source devices have; give"
                " both meshes devices of every process, and split over no more than the source has in one"
            )
        part = next(turns[bounds])
        cut.append(part if bounds == wanted else part[_inside(wanted, bounds)])
        devices.append(device)
    return jax.make_array_from_single_device_arrays(x.shape, target, jax.device_put(cut, devices))


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(start, stop) along each dimension of a tuple of slices."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _inside(wanted: tuple[tuple[int, int], ...], bounds: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(a - lo, z - lo) for (a, z), (lo, _) in zip(wanted, bounds, strict=True))
