"""Two placements of one array, written in the same digits.

The position of a device in the common order of two meshes is a number in a mixed radix whose digits are fine enough for
both: a mesh of (2, 4) and one of (4, 2) over 8 devices have the digits 2, 2, 2. Likewise the position of a shard along a
dimension: its digits are called levels here, the first the coarsest. A placement then says which digit of the device fixes
which level of which dimension; a digit that fixes none is replicated over.

    W[embed, mlp] from (fsdp 4, tensor 2) to (replica 2, tensor 4), digits a b c of the device, each of size 2

              embed      mlp
    levels    e0  e1     m0  m1
    source    a   b      c   -
    target    -   -      b   c      c goes one level down, b takes its place and leaves e1, a leaves e0 and is free
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import NamedSharding

Digits = tuple[tuple[int, ...], ...]  # of each dimension: the digit that fixes each level, the coarsest first


@dataclasses.dataclass(frozen=True)
class Factors:
    """A source and a target in common digits. Digits are numbered from the outermost of the device order."""

    sizes: tuple[int, ...]  # of each digit; the product is the number of devices
    source: Digits
    target: Digits

    @property
    def levels(self) -> list[list[int]]:
        """The size of each level of each dimension."""
        longer = [max(pair, key=len) for pair in zip(self.source, self.target, strict=True)]
        return [[self.sizes[digit] for digit in digits] for digits in longer]


def factorize(source: NamedSharding, target: NamedSharding, ndim: int) -> Factors | None:
    """The common digits of two placements on one list of devices.

    None where there are none: meshes such as (2, 3) and (3, 2), or a dimension in 2 parts here and in 3 there.
    """
    devices = source.mesh.size
    cuts = sorted({*_cuts(source), *_cuts(target)}, reverse=True)  # numbers of devices inside one step of a digit
    if any(outer % inner for outer, inner in zip(cuts, cuts[1:], strict=False)):
        return None
    sizes = [outer // inner for outer, inner in zip(cuts, cuts[1:], strict=False)]
    order = list(range(len(sizes)))  # digits, the outermost first; a digit that is split keeps its number as the outer part
    placed = [[list(digits) for digits in _digits(sharding, ndim, cuts)] for sharding in (source, target)]
    while True:
        unequal = _unequal_level(sizes, *placed)
        if unequal is None:
            break
        step = math.gcd(*(sizes[digit] for digit in unequal))
        if step == 1:
            return None
        for digit in unequal:
            if sizes[digit] > step:
                inner = len(sizes)
                sizes.append(sizes[digit] // step)
                sizes[digit] = step
                for digits in (order, *placed[0], *placed[1]):
                    if digit in digits:
                        digits.insert(digits.index(digit) + 1, inner)
    assert math.prod(sizes) == devices
    number = {digit: i for i, digit in enumerate(order)}
    src, tgt = (tuple(tuple(number[digit] for digit in digits) for digits in side) for side in placed)
    return Factors(tuple(sizes[digit] for digit in order), src, tgt)


def _cuts(sharding: NamedSharding) -> list[int]:
    shape = tuple(sharding.mesh.shape.values())
    return [math.prod(shape[i:]) for i in range(len(shape) + 1)]


def _digits(sharding: NamedSharding, ndim: int, cuts: Sequence[int]) -> list[list[int]]:
    own = dict(zip(sharding.mesh.axis_names, zip(_cuts(sharding), _cuts(sharding)[1:], strict=False), strict=True))
    of_axis = {name: range(cuts.index(outer), cuts.index(inner)) for name, (outer, inner) in own.items()}
    return [[digit for name in names for digit in of_axis[name]] for names in axis_names(sharding, ndim)]


def axis_names(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that split each dimension."""
    entries = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]


def _unequal_level(sizes: list[int], source: list[list[int]], target: list[list[int]]) -> tuple[int, int] | None:
    for ours, theirs in zip(source, target, strict=True):
        for a, b in zip(ours, theirs, strict=False):
            if sizes[a] != sizes[b]:
                return a, b
    return None


def parts(sharding: NamedSharding, ndim: int) -> list[int]:
    """Into how many parts each dimension is split."""
    return [math.prod(sharding.mesh.shape[name] for name in names) for names in axis_names(sharding, ndim)]


def part_of_device(sharding: NamedSharding, ndim: int) -> np.ndarray:
    """int[devices, dimensions]: which part of each dimension a device holds, devices in the mesh's order."""
    shape = tuple(sharding.mesh.shape.values())
    at = dict(zip(sharding.mesh.axis_names, np.indices(shape).reshape(len(shape), -1), strict=True))
    index = np.zeros((sharding.mesh.size, ndim), np.int64)
    for dim, names in enumerate(axis_names(sharding, ndim)):
        for name in names:
            index[:, dim] = index[:, dim] * sharding.mesh.shape[name] + at[name]
    return index


def needed_minus_held(shape: Sequence[int], source: NamedSharding, target: NamedSharding) -> np.ndarray:
    """int64[devices]: elements of each device's target shard that its source shard lacks; the least that it must receive."""
    ndim = len(shape)
    needed, common = np.ones(source.mesh.size, np.int64), np.ones(source.mesh.size, np.int64)
    sides = [(parts(s, ndim), part_of_device(s, ndim)) for s in (source, target)]
    for dim, size in enumerate(shape):
        (p, have), (q, want) = ((count[dim], index[:, dim]) for count, index in sides)
        start, stop = want * (size // q), (want + 1) * (size // q)
        overlap = np.minimum(stop, (have + 1) * (size // p)) - np.maximum(start, have * (size // p))
        needed *= size // q
        common *= np.maximum(overlap, 0)
    return needed - common
