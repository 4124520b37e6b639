"""The program that takes an array from one placement to another on the same devices, along a route of `jrl.sharding.routes`.

Large arrays go in chunks, so that what is needed beside the array and its result is bounded; each chunk is written into the
result in place. Chunks are cut where neither placement cuts: layers first.

On each device a chunk is seen in a shape in which every level of the route is an axis, those of a dimension followed by
what is left of it: `[2, 1, 96, 8, 64]` has two levels of the first dimension and one of the second.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jrl.sharding.routes import Route, find_route

CHUNK_BYTES = 64 * 2**20  # per device, for what a chunk needs beside the array and its result
LANES, SUBLANES = 128, 16  # a TPU keeps matrices in tiles of so many columns and rows; chunks of whole tiles are cheaper


@functools.lru_cache(maxsize=256)
def exchange(
    shape: tuple[int, ...], source: NamedSharding, target: NamedSharding, have: np.dtype, want: np.dtype, chunk_bytes: int
) -> jax.stages.Compiled:
    """The compiled function from an array of dtype `have` placed as `source` to one of dtype `want` placed as `target`.

    The two meshes have the same devices in the same order, and both placements divide `shape`. Each device receives what it
    needs and does not hold, in the smaller of the two dtypes. Beside the array and its result it takes about `chunk_bytes`,
    or as much as the smallest chunk needs: a chunk can be no smaller than one element of every part that either placement
    has.
    """
    route = find_route(source, target, len(shape))
    flat = Mesh(source.mesh.devices.reshape(route.sizes), _names(route), axis_types=(AxisType.Auto,) * len(route.sizes))
    everyone = PartitionSpec(_names(route))
    local = functools.partial(_exchange_shard, plan=_plan(route, shape, source, have, want, chunk_bytes))

    def program(x: jax.Array) -> jax.Array:
        # Between the shard_maps there is a leading axis of devices, which all three meshes split alike.
        x = _shard_map(lambda shard: shard[None], source.mesh, source.spec, PartitionSpec(source.mesh.axis_names))(x)
        x = _shard_map(lambda shard: local(shard[0])[None], flat, everyone, everyone)(x)
        return _shard_map(lambda shard: shard[0], target.mesh, PartitionSpec(target.mesh.axis_names), target.spec)(x)

    given = jax.ShapeDtypeStruct(shape, have, sharding=source)
    return jax.jit(program, out_shardings=target).lower(given).compile()


def _shard_map(f: Callable, mesh: Any, given: PartitionSpec, returned: PartitionSpec) -> Callable:
    return jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False)


def _names(route: Route) -> tuple[str, ...]:
    return tuple(f"digit{i}" for i in range(len(route.sizes)))


# Chunks ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How the shards of one array are cut into chunks. All tuples are by dimension."""

    route: Route
    rest: tuple[int, ...]  # what is left of each dimension beside its levels
    cuts: tuple[int, ...]  # into how many pieces that is cut
    held: tuple[int, ...]  # parts that a device has at the start: elements are parts times rest
    received: tuple[int, ...]  # and at the end
    wire: np.dtype  # that is sent
    dtype: np.dtype  # of the result
    as_bits: bool  # sent as whole numbers
    device: jax.Device  # one of those that exchange

    @property
    def steps(self) -> list[int]:
        return [size // count for size, count in zip(self.rest, self.cuts, strict=True)]


def _plan(route: Route, shape: Sequence[int], source: NamedSharding, have: np.dtype, want: np.dtype, chunk_bytes: int) -> _Plan:
    wire = want if want.itemsize <= have.itemsize else have  # cast where there are fewer bytes
    device = next(iter(source.mesh.local_devices), source.mesh.devices.flat[0])
    # XLA on CPU would send short floats as float32.
    as_bits = device.platform == "cpu" and jnp.issubdtype(wire, jnp.floating) and wire.itemsize < 4 and not route.silent
    rest = tuple(size // math.prod(levels) for size, levels in zip(shape, route.levels, strict=True))
    held, received = (tuple(map(math.prod, route.by_dimension(size))) for size in (route.held.size, route.received))
    plan = _Plan(route, rest, (1,) * len(rest), held, received, wire, want, as_bits, device)
    beside = _beside(plan, have)
    if beside <= chunk_bytes:
        return plan
    beside += 0 if not _gathers_in_place(plan) else 2 * math.prod(received) * math.prod(rest) * wire.itemsize
    cuts, missing = [1] * len(rest), -(-beside // chunk_bytes)
    # A dimension of which a device has several parts is cut in each of them, so one of few parts comes first.
    for dim in sorted(range(len(rest)), key=lambda dim: max(held[dim], received[dim])):
        cuts[dim] = _divisor(rest[dim], missing, {len(rest) - 1: LANES, len(rest) - 2: SUBLANES}.get(dim, 1) if dim else 1)
        missing = -(-missing // cuts[dim])
    return dataclasses.replace(plan, cuts=tuple(cuts))


def _beside(plan: _Plan, have: np.dtype) -> int:
    """Bytes that sending the whole array at once takes beside it and its result, an upper estimate."""
    route = plan.route
    if route.silent:
        return 0
    held, wanted, received = (math.prod(size) for size in (route.held.size, route.wanted.size, route.received))
    size = held * (have.itemsize + plan.wire.itemsize) if plan.wire != have else 0
    if route.trades or route.rounds:
        size += 2 * (held + wanted) * plan.wire.itemsize
    if route.gathers and not _gathers_in_place(plan):
        size += (1 + len(route.gathers)) * received * plan.wire.itemsize
    return size * math.prod(plan.rest)


def _gathers_in_place(plan: _Plan) -> bool:
    """Whether an all-gather is all there is, and its result, parts in a row, the target shard as it is."""
    route = plan.route
    if not route.gathers or route.trades or route.rounds or plan.as_bits or plan.wire != plan.dtype:
        return False
    last = max(_level_axes(route)[move.leaves] for move in route.gathers)
    return math.prod(_view(route, route.wanted.size, plan.rest)[: last + 1]) == 1


def _divisor(size: int, least: int, tile: int) -> int:
    """The smallest divisor of `size` that is at least `least`, or `size`; one that leaves whole tiles if there is any."""
    divisors = [n for n in range(1, size + 1) if size % n == 0 and (n >= least or n == size)]
    return next((n for n in divisors if size // n % tile == 0), divisors[0])


def _exchange_shard(x: jax.Array, plan: _Plan) -> jax.Array:
    """A device's target shard from its source shard."""
    shape = np.multiply(plan.received, plan.rest)
    if math.prod(plan.cuts) == 1:
        return _exchange_chunk(x, plan).reshape(shape)

    def one_chunk(i: jax.Array, out: jax.Array) -> jax.Array:
        at = [index * step for index, step in zip(jnp.unravel_index(i, plan.cuts), plan.steps, strict=True)]
        shard, out = (_pin(array, plan.device) for array in (x, out))
        return _pin(_put(out, _exchange_chunk(_take(shard, at, plan), plan), at, plan), plan.device)

    return jax.lax.fori_loop(0, math.prod(plan.cuts), one_chunk, jnp.zeros(shape, plan.dtype))


def _pin(x: jax.Array, device: jax.Device) -> jax.Array:
    """Says that `x` lies in memory as arrays of its shape do on this kind of device outside programs.

    Else XLA may prefer another order for what a loop reads and writes, and copy the whole array before or after.
    """
    layout = Layout.from_pjrt_layout(device.client.get_default_layout(np.dtype(x.dtype), x.shape, device))
    return with_layout_constraint(x, layout)


def _take(x: jax.Array, at: Sequence[jax.Array], plan: _Plan) -> jax.Array:
    """The chunk that begins `at` elements into every part of a source shard, its parts joined."""

    def joined(start: list[Any], size: list[int]) -> jax.Array:
        dim = len(start)
        if dim == x.ndim:
            return jax.lax.dynamic_slice(x, start, size)
        if plan.cuts[dim] == 1:
            return joined([*start, 0], [*size, x.shape[dim]])
        begins = [at[dim] + part * plan.rest[dim] for part in range(plan.held[dim])]
        slices = [joined([*start, begin], [*size, plan.steps[dim]]) for begin in begins]
        return jnp.concatenate(slices, axis=dim) if len(slices) > 1 else slices[0]

    return joined([], [])


def _put(out: jax.Array, chunk: jax.Array, at: Sequence[jax.Array], plan: _Plan) -> jax.Array:
    """The target shard with a chunk written into it, `at` elements into every part.

    Shards keep their shape: XLA would copy a large array to see it in another one.
    """
    parts = [n if count > 1 else 1 for n, count in zip(plan.received, plan.cuts, strict=True)]
    chunk = chunk.reshape([n * s if count > 1 else full for n, s, count, full in zip(
        plan.received, plan.steps, plan.cuts, out.shape, strict=True)])  # fmt: skip
    size = [full // n for full, n in zip(chunk.shape, parts, strict=True)]
    for part in itertools.product(*map(range, parts)):
        cut = chunk[tuple(slice(i * n, (i + 1) * n) for i, n in zip(part, size, strict=True))]
        out = jax.lax.dynamic_update_slice(out, cut, [a + i * r for a, i, r in zip(at, part, plan.rest, strict=True)])
    return out


# One chunk ------------------------------------------------------------------------------------------------------------


def _exchange_chunk(x: jax.Array, plan: _Plan) -> jax.Array:
    """Of the source shard, cut to `plan.steps` of every part, in any shape -> of the target shard, by levels."""
    route, names, axes = plan.route, _names(plan.route), _level_axes(plan.route)
    x = _cast(x, plan.wire).reshape(_view(route, route.held.size, plan.steps))
    if plan.as_bits:
        x = jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(plan.wire).bits}")
    for move in route.slices:
        x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(names[move.digit]), 1, axes[move.enters])
    if route.trades:
        digits, leaves, enters = zip(*((names[m.digit], axes[m.leaves], axes[m.enters]) for m in route.trades), strict=True)
        x = _trade(x, digits, leaves, enters)
    if route.rounds:
        x = _send_blocks(x, route, axes, names)
    if route.gathers:
        x = _gather(x, [names[m.digit] for m in route.gathers], [axes[m.leaves] for m in route.gathers])
    return (jax.lax.bitcast_convert_type(x, plan.wire) if plan.as_bits else x).astype(plan.dtype)


def _view(route: Route, size: Sequence[int], rest: Sequence[int]) -> list[int]:
    """The shape of a shard in which every level is an axis."""
    return [n for sizes, left in zip(route.by_dimension(size), rest, strict=True) for n in (*sizes, left)]


def _level_axes(route: Route) -> list[int]:
    """The axis of each level in a view."""
    return [level + dim for dim, levels in enumerate(route.by_dimension(range(len(route.held.size)))) for level in levels]


def _cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """The chunk in `dtype`, by a rounding that XLA leaves where it is.

    A plain cast of a slice it may turn into a slice of the whole array, cast before the loop, whatever barriers there are.
    """
    if x.dtype == dtype:
        return x
    have, want = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if have.nexp == want.nexp:  # else the rounding would lose the smallest numbers
        x = jax.lax.reduce_precision(x, want.nexp, want.nmant)
    return jax.lax.optimization_barrier(x.astype(dtype))


def _trade(x: jax.Array, names: Sequence[str], leaves: Sequence[int], enters: Sequence[int]) -> jax.Array:
    """One all-to-all over all digits: axes `enters` shrink to this device's part, axes `leaves` become whole."""
    first = range(len(names))
    front = jnp.moveaxis(x, enters, first)  # [parts, one for each device, ...]
    flat = front.reshape(-1, *front.shape[len(names) :])
    front = jax.lax.all_to_all(flat, tuple(names), 0, 0, tiled=True).reshape(front.shape)
    x = jnp.moveaxis(front, first, enters)
    for a, b in zip(enters, leaves, strict=True):
        x = jnp.swapaxes(x, a, b)
    return x


def _gather(x: jax.Array, names: Sequence[str], leaves: Sequence[int]) -> jax.Array:
    """Axes `leaves`, ascending and of size 1, become whole: an all-gather for each run of neighbours."""
    shape = list(x.shape)
    for _, run in itertools.groupby(range(len(leaves)), key=lambda i: leaves[i] - i):
        members = list(run)
        first = leaves[members[0]]
        shape[first : first + len(members)] = [jax.lax.axis_size(names[i]) for i in members]
        x = jax.lax.all_gather(x, tuple(names[i] for i in members), axis=first, tiled=True).reshape(shape)
    return x


def _send_blocks(x: jax.Array, route: Route, axes: Sequence[int], names: tuple[str, ...]) -> jax.Array:
    """The blocks of `route.wanted`, each from this device or from another."""
    me = jax.lax.axis_index(names)
    levels = range(len(axes))
    front = jnp.moveaxis(x, axes, levels)
    rest = front.shape[len(axes) :]
    blocks, out = front.reshape(-1, *rest), jnp.zeros((math.prod(route.wanted.size), *rest), x.dtype)

    def mine(table: np.ndarray) -> Any:
        return table[0] if (table == table[0]).all() else jnp.asarray(table)[me]

    def block(array: jax.Array, table: np.ndarray) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(array, mine(table), keepdims=False)

    for r in route.rounds:
        arrived = block(blocks, r.copy)
        if r.pairs:
            sent, copied = jax.lax.ppermute(block(blocks, r.send), names, r.pairs), r.sender == np.arange(len(r.sender))
            arrived = jnp.where(mine(copied), arrived, sent) if copied.any() else sent
        if (r.sender < 0).any():
            arrived = jnp.where(mine(r.sender < 0), block(out, r.place), arrived)
        out = jax.lax.dynamic_update_index_in_dim(out, arrived, mine(r.place), 0)
    return jnp.moveaxis(out.reshape(*route.wanted.size, *rest), levels, axes)
