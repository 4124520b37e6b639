"""Weights as parts in host memory: how they travel to processes that share no mesh with the learner's.

    own_shards(params)                           # on each process of the learner: what its devices hold
    from_shards([shards, ...], like, shardings)  # elsewhere, from those of all processes

Each part is sent by one process alone, whatever is replicated, and nobody ever holds whole weights for the sake of sending.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of an array: values, and the index of the first of them along each axis."""

    start: tuple[int, ...]
    values: np.ndarray

    def overlap(self, start: tuple[int, ...], stop: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Where the part lies within [start, stop), counted from start, and which of its own values that are; None if nowhere."""
        low = tuple(map(max, self.start, start))
        high = tuple(min(s + n, end) for s, n, end in zip(self.start, self.values.shape, stop, strict=True))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        at = lambda origin: tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))  # noqa: E731
        return at(start), at(self.start)


def own_shards(tree: Any) -> list[list[Shard]]:
    """By leaf, in the tree's order: what this process's devices hold, and of equal copies the first one of all processes."""
    own = [[part for part in leaf.addressable_shards if part.replica_id == 0] for leaf in jax.tree.leaves(tree)]
    for part in (part for parts in own for part in parts):
        part.data.copy_to_host_async()  # all at once; below, each is waited for
    return [[Shard(tuple(s.start or 0 for s in part.index), np.asarray(part.data)) for part in parts] for parts in own]


def from_shards(parts: Sequence[list[list[Shard]]], like: Any, shardings: Any) -> Any:
    """The arrays, on this process's devices.

    Args:
      parts: `own_shards` of all processes, in any order.
      like: a tree of arrays or shapes, as the one that was sent; shardings: where each is to lie.

    Raises:
      ValueError: the parts do not make up an array.
    """
    leaves, structure = jax.tree.flatten(like)
    gathered = [[shard for shards in of_all for shard in shards] for of_all in zip(*parts, strict=True)]
    arrays = [
        _array(shards, leaf.shape, sharding)
        for leaf, shards, sharding in zip(leaves, gathered, jax.tree.leaves(shardings), strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def _array(shards: list[Shard], shape: tuple[int, ...], sharding: Any) -> jax.Array:
    made: dict[tuple, np.ndarray] = {}  # devices that hold the same part read the same copy

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = [s.indices(n) for s, n in zip(index or (), shape, strict=True)]
        at = tuple(b[0] for b in bounds), tuple(b[1] for b in bounds)
        if at not in made:
            made[at] = _region(shards, shape, *at)
        return made[at]

    return jax.make_array_from_callback(shape, sharding, part)


def _region(shards: list[Shard], shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...]) -> np.ndarray:
    """What lies in [start, stop) of an array: a shard as it is where it is just that, otherwise a copy."""
    size = tuple(b - a for a, b in zip(start, stop, strict=True))
    for shard in shards:
        if shard.start == start and shard.values.shape == size:
            return shard.values
    region, filled = np.empty(size, shards[0].values.dtype if shards else np.float32), 0
    for shard in shards:
        if found := shard.overlap(start, stop):
            there, own = found
            region[there] = shard.values[own]
            filled += math.prod(s.stop - s.start for s in there)
    if filled != region.size:
        raise ValueError(f"of {region.size} values of an array of shape {shape}, {filled} have come: a process's part is missing")
    return region
