"""Arrays and values of several processes, which all run the same program over the devices of all (multi-controller JAX).

A global array is a part on each process's own devices. What is uploaded is known to all processes alike, and each sends what
its own devices hold; what is read back is gathered, so that all go on with the same numbers. On one process all of this is
`jax.device_put` and `jax.device_get`.
"""

import dataclasses
import functools
import pickle
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.activity import WAITING, doing
from jrl.errors import UserError
from jrl.shapes import power_of_two
from jrl.sharding.layout import Layout
from jrl.sharding.mesh import device_order

T = TypeVar("T")
LEAST_BYTES = 1 << 12  # of a message: sizes are powers of two from here on, which bounds the programs


def is_chief() -> bool:
    """Whether this process is the one that writes what there is once: logs, metrics, exports."""
    return jax.process_index() == 0


# Arrays ----------------------------------------------------------------------------------------------------------------


def put(tree: Any, shardings: Any) -> Any:
    """Host arrays, the same on every process, as global arrays placed as `shardings`, a tree of the same structure."""
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(shardings)):
        return jax.device_put(tree, shardings)
    return jax.tree.map(_put, tree, shardings)


def _put(x: Any, sharding: Any) -> jax.Array:
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def fetch(tree: Any) -> Any:
    """The whole arrays in host memory. Where others hold parts of them, all processes must ask for the same arrays in turn."""
    spread = [i for i, x in enumerate(jax.tree.leaves(tree)) if not (x.is_fully_addressable or x.is_fully_replicated)]
    if not spread:
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    whole = _replicate(tuple(leaves[i].sharding for i in spread))([leaves[i] for i in spread])
    for i, x in zip(spread, whole, strict=True):
        leaves[i] = x
    return jax.device_get(jax.tree.unflatten(structure, leaves))


@functools.lru_cache(maxsize=256)
def _replicate(shardings: tuple[NamedSharding, ...]):
    everywhere = [NamedSharding(sharding.mesh, PartitionSpec()) for sharding in shardings]
    return jax.jit(lambda leaves: leaves, out_shardings=everywhere)


# Values ----------------------------------------------------------------------------------------------------------------


def gather(value: T, what: str) -> list[T]:
    """Every process's value, in their order; all come here for it.

    Args:
      value: anything that can be pickled.
      what: that is waited for, in words.
    """
    if jax.process_count() == 1:
        return [value]
    with doing(WAITING + what):
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = _all_gather(np.array([data.size], np.uint32))[:, 0]
        message = np.zeros(max(power_of_two(int(sizes.max())), LEAST_BYTES), np.uint8)
        message[: data.size] = data
        rows = _all_gather(message)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _all_gather(row: np.ndarray) -> np.ndarray:
    """The rows of all processes [processes, n].

    By the first device of each, which learns: those that generate may be at work on something else.
    """
    order = device_order()
    firsts = [next(d for d in order if d.process_index == i) for i in range(jax.process_count())]
    mesh = Mesh(np.array(firsts, dtype=object), ("process",))
    part = jax.device_put(row[None], firsts[jax.process_index()])
    shape = (len(firsts), *row.shape)
    rows = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec("process")), [part])
    return fetch(rows)


def together(what: str) -> None:
    """Goes on when all processes have come here."""
    gather(None, what)


# Who generates what ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shares:
    """Which processes generate and score which of a step's prompts.

    Processes whose devices hold one rollout replica between them generate in lockstep, as an island; where a replica fits
    into a process, every process is an island and none waits for another.
    """

    islands: tuple[tuple[int, ...], ...]  # processes, in order
    me: int

    @property
    def alone(self) -> bool:
        """Whether this process generates without lockstep."""
        return len(self._mine) == 1

    @property
    def reports(self) -> bool:
        """Whether it is this process of its island that hands on what all of them have generated."""
        return self._mine[0] == self.me

    def generated(self, prompts: int) -> range:
        """Which of so many prompts this process generates responses to."""
        number = self.islands.index(self._mine)
        bounds = np.linspace(0, prompts, len(self.islands) + 1).astype(int)
        return range(int(bounds[number]), int(bounds[number + 1]))

    def scored(self, prompts: int) -> np.ndarray:
        """i[P]: those whose responses this process scores; of an island's, its processes take turns."""
        mine = np.asarray(self.generated(prompts), np.int64)
        return mine[self._mine.index(self.me) :: len(self._mine)]

    @property
    def _mine(self) -> tuple[int, ...]:
        return next(island for island in self.islands if self.me in island)


def shares(rollout: Layout) -> Shares:
    """Of the processes that a rollout mesh spans.

    Raises:
      UserError: a replica straddles processes without filling them.
    """
    islands: list[tuple[int, ...]] = []
    for replica in _replicas(rollout.mesh):
        island = tuple(sorted({device.process_index for device in replica}))
        if island not in islands:
            islands.append(island)
    own = [sum(device.process_index == i for device in rollout.mesh.devices.flat) for i in range(jax.process_count())]
    tensor = rollout.mesh.shape["tensor"]
    if any(tensor % count and count % tensor for count in own):
        raise UserError(
            f"config.rollout.mesh.tensor={tensor}: a process has {own[0]} devices; give a divisor or a multiple of that, so that"
            " a replica lies within a process or fills several"
        )
    return Shares(tuple(islands), jax.process_index())


def own_replicas(layout: Layout) -> Layout:
    """The part of a rollout mesh that this process generates on: the replicas that its devices belong to."""
    if jax.process_count() == 1:
        return layout
    here = [any(d.process_index == jax.process_index() for d in replica) for replica in _replicas(layout.mesh)]
    mesh = Mesh(layout.mesh.devices[np.array(here)], layout.mesh.axis_names, axis_types=layout.mesh.axis_types)
    return dataclasses.replace(layout, mesh=mesh)


def own_part(tree: Any, layout: Layout) -> Any:
    """What of weights on the mesh of all processes is on that of `own_replicas`: the same memory.

    Every replica holds whole weights, so the replicas of this process hold all of them.
    """
    if jax.process_count() == 1:
        return tree

    def own(x: Any) -> jax.Array:
        sharding = NamedSharding(layout.mesh, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [part.data for part in x.addressable_shards])

    return jax.tree.map(own, tree)


def _replicas(mesh: Mesh) -> list[list[jax.Device]]:
    """Devices by replica; the replica axis is the first."""
    return mesh.devices.reshape(mesh.devices.shape[0], -1).tolist()
