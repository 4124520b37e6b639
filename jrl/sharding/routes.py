"""Which way an array takes from one placement to another on the same devices, so that each receives least.

A device needs its target shard and holds its source shard; what it must receive is the one minus the other
(`jrl.sharding.factors.needed_minus_held`), and on these routes it receives no more. In the digits of
`jrl.sharding.factors`, there are

    slice        a digit fixed nothing and now fixes a level: each device cuts out its part, nothing moves
    all-to-all   a digit leaves one level and enters another
    permute      a digit takes a level over from another digit
    all-gather   a digit leaves a level and fixes nothing from now on

All-gathers come last, when everything else has made the shards as small as they get. Before them one of two things happens.
Where no level changes its digit, slices and one all-to-all do it. Otherwise blocks are sent from device to device
(`jrl.sharding.rounds`): a permutation followed by an all-to-all would send some of them twice. The same is done, without
all-gathers, where the two placements have no common digits.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import NamedSharding

from jrl.sharding.factors import Factors, factorize, part_of_device, parts
from jrl.sharding.rounds import Boxes, Round, schedule


@dataclasses.dataclass(frozen=True)
class Move:
    """A digit that enters or leaves a level."""

    digit: int
    leaves: int = -1
    enters: int = -1


@dataclasses.dataclass(frozen=True)
class Route:
    """What happens to the shards of an array of any size. Levels are counted through all dimensions, one after another."""

    sizes: tuple[int, ...]  # of each digit of the device
    levels: tuple[tuple[int, ...], ...]  # sizes of the levels of each dimension
    held: Boxes  # of levels: what devices have at the start
    wanted: Boxes  # and before the all-gathers
    slices: tuple[Move, ...] = ()
    trades: tuple[Move, ...] = ()  # the all-to-all
    rounds: tuple[Round, ...] = ()  # instead of slices and trades
    gathers: tuple[Move, ...] = ()  # by ascending level

    @property
    def received(self) -> tuple[int, ...]:
        """How much of each level a device has at the end."""
        size = list(self.wanted.size)
        for move in self.gathers:
            size[move.leaves] = self.sizes[move.digit]
        return tuple(size)

    @property
    def silent(self) -> bool:
        """Whether nothing is sent."""
        return not (self.trades or self.gathers or any(r.pairs for r in self.rounds))

    def by_dimension(self, size: Sequence[int]) -> list[tuple[int, ...]]:
        """Numbers by level, sorted into the dimensions."""
        ends = np.cumsum([0, *map(len, self.levels)])
        return [tuple(size[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


@functools.lru_cache(maxsize=256)
def find_route(source: NamedSharding, target: NamedSharding, ndim: int) -> Route:
    """The way between two placements whose meshes have the same devices in the same order."""
    factors = factorize(source, target, ndim)
    return _route_by_blocks(source, target, ndim) if factors is None else _route_by_digits(factors)


def _route_by_blocks(source: NamedSharding, target: NamedSharding, ndim: int) -> Route:
    """Without common digits: one level a dimension, the least common multiple of both numbers of parts."""
    p, q = np.array(parts(source, ndim)), np.array(parts(target, ndim))
    grid = np.lcm(p, q)
    held = Boxes(part_of_device(source, ndim) * (grid // p), tuple((grid // p).tolist()))
    wanted = Boxes(part_of_device(target, ndim) * (grid // q), tuple((grid // q).tolist()))
    levels = tuple((size,) for size in grid.tolist())
    return Route((source.mesh.size,), levels, held, wanted, rounds=tuple(schedule(held, wanted)))


def _route_by_digits(factors: Factors) -> Route:
    levels = factors.levels
    source, target = _flat(factors.source, levels), _flat(factors.target, levels)
    enters = {digit: level for level, digit in target.items()}
    leaves = {digit: level for level, digit in source.items()}
    wanted, gathers = dict(target), []
    for level in source:
        if level in target:
            continue
        # The level's digit takes the place of another one, that of a third, ...: the last is free at the end, or enters anew.
        digit = source[level]
        while digit in enters and enters[digit] in source:
            digit = source[enters[digit]]
        if digit not in enters:
            gathers.append(Move(digit, leaves=level))
            wanted[level] = digit
    sizes = [size for dim in levels for size in dim]
    route = Route(
        factors.sizes, tuple(map(tuple, levels)), _boxes(factors.sizes, sizes, source), _boxes(factors.sizes, sizes, wanted),
        gathers=tuple(gathers),
    )  # fmt: skip
    if any(source[level] != digit for level, digit in wanted.items() if level in source):
        return dataclasses.replace(route, rounds=tuple(schedule(route.held, route.wanted)))
    entering = [(digit, level) for level, digit in wanted.items() if level not in source]
    slices = tuple(Move(digit, enters=level) for digit, level in entering if digit not in leaves)
    trades = tuple(Move(digit, leaves[digit], level) for digit, level in entering if digit in leaves)
    return dataclasses.replace(route, slices=slices, trades=trades)


def _flat(side: Sequence[Sequence[int]], levels: Sequence[Sequence[int]]) -> dict[int, int]:
    """Level, counted through all dimensions -> the digit that fixes it."""
    first = np.cumsum([0, *map(len, levels)]).tolist()
    return {first[dim] + j: digit for dim, digits in enumerate(side) for j, digit in enumerate(digits)}


def _boxes(sizes: Sequence[int], levels: Sequence[int], fixed: Mapping[int, int]) -> Boxes:
    """What each device has if these levels are fixed by these digits and the others are whole."""
    devices = math.prod(sizes)
    digit = np.indices(sizes).reshape(len(sizes), devices)
    start = np.zeros((devices, len(levels)), np.int64)
    for level, d in fixed.items():
        start[:, level] = digit[d]
    return Boxes(start, tuple(1 if level in fixed else size for level, size in enumerate(levels)))
