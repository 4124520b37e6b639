"""Named meshes over one order of the devices.

Every mesh is a reshape of the same one-dimensional array, so that moving between two of them never renumbers devices:
a compiled program may then take its inputs from one mesh and give its outputs to the other.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jrl.errors import UserError

Kind = Literal["train", "rollout"]

# Innermost last: tensor groups are the closest devices. Experts belong before tensor, pipeline stages first of all.
TRAIN_AXES = ("data", "fsdp", "context", "tensor")
ROLLOUT_AXES = ("replica", "tensor")
AXES: dict[str, tuple[str, ...]] = {"train": TRAIN_AXES, "rollout": ROLLOUT_AXES}


def device_order(devices: Sequence[jax.Device] | None = None) -> np.ndarray:
    """The devices (by default all) as a flat array ordered by slice, host and id, whatever order they came in.

    The devices of one host are neighbours in it, and the hosts of one slice are, so the innermost mesh axis stays on
    the fastest links.
    """
    devices = jax.devices() if devices is None else list(devices)
    ordered = sorted(devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id))
    order = np.empty(len(ordered), dtype=object)  # np.array(list) would look for sequences inside the devices
    order[:] = ordered
    return order


def make_mesh(kind: Kind, sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh whose axes are `TRAIN_AXES` or `ROLLOUT_AXES`, all of them Auto.

    Args:
      kind: "train" or "rollout".
      sizes: axis name -> number of devices along it; an absent axis has size 1, and one axis may be -1, which takes
        the devices that the others leave.
      devices: the devices to use, all of them; by default every device of every process.

    Raises:
      UserError: an unknown axis, a size that is neither positive nor -1, two -1, or a product other than the number of
        devices.
    """
    order = device_order(devices)
    shape = resolve_sizes(kind, sizes, order.size)
    return Mesh(order.reshape(tuple(shape.values())), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def resolve_sizes(kind: Kind, sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Axis name -> size for every axis of a kind of mesh over `num_devices`; touches no device.

    Errors are those of `make_mesh`.
    """
    given, axes = dict(sizes), AXES[kind]
    for name, size in given.items():
        if name not in axes:
            raise UserError(f"{kind} mesh: no axis is called {name!r}; the axes are {', '.join(axes)}")
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or (size < 1 and size != -1):
            raise UserError(f"{kind} mesh: {name}={size!r} must be a positive whole number, or -1 for what is left")
    shape = {name: int(given.get(name, 1)) for name in axes}
    free = [name for name, size in shape.items() if size == -1]
    if len(free) > 1:
        raise UserError(f"{kind} mesh: {' and '.join(free)} are both -1; give all but one of them a size")
    taken = math.prod(size for size in shape.values() if size != -1)
    if free:
        if num_devices % taken:
            raise UserError(
                f"{kind} mesh: {free[0]}=-1 cannot be filled, {describe(shape)} takes groups of {taken} and"
                f" {num_devices} devices are not a multiple; choose sizes that divide {num_devices}"
            )
        shape[free[0]] = num_devices // taken
    elif taken != num_devices:
        raise UserError(
            f"{kind} mesh: {describe(shape)} is {taken} devices but there are {num_devices};"
            " change a size, or set one of them to -1"
        )
    return shape


def describe(shape: Mapping[str, int]) -> str:
    """`data=1 fsdp=4 tensor=2`, for messages."""
    return " ".join(f"{name}={size}" for name, size in shape.items())
