"""Logical axes to mesh axes: one table per kind of mesh, the only place that decides how arrays are split.

Weights and activations name their axes (`("embed", "mlp")`); a `Layout` turns the names into shardings of its mesh.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jrl.errors import UserError
from jrl.sharding.mesh import Kind, describe, make_mesh

Axes = tuple[str | None, ...]
Table = Mapping[str, str | tuple[str, ...] | None]

# What both meshes split alike: the output side of attention and MLP, and the vocabulary, over the tensor axis.
_WEIGHTS = {
    "layers": None,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "norm": None,
    "head_dim": None,
}
_ACTIVATIONS = {
    "act_embed": None,
    "act_heads": "tensor",
    "act_kv_heads": "tensor",
    "act_mlp": "tensor",
    "act_vocab": "tensor",
}

# What is whole on every device where the mesh does not divide it: with more devices along tensor than KV heads, each query
# head still finds its own.
_WHOLE_IF_UNEVEN = {"act_kv_heads"}

# Training: sequences over data and fsdp, each sequence's tokens over context. Weights, with their gradients and moments, are
# split over fsdp and context along their hidden size: devices along context work on other tokens of the same sequences, so to
# the weights they are more of fsdp (they use all of a weight, and each has a part of the gradient's sum). Splitting over both
# costs a gather over more devices, of as many bytes, and divides what is held by the devices along context.
TRAIN_TABLE: Table = {
    **_WEIGHTS, **_ACTIVATIONS, "embed": ("fsdp", "context"), "batch": ("data", "fsdp"), "length": "context",
}  # fmt: skip
# Rollout: every replica holds whole weights, split over tensor alone; slots and pages belong to one replica.
ROLLOUT_TABLE: Table = {
    **_WEIGHTS,
    **_ACTIVATIONS,
    "embed": None,
    "batch": "replica",
    "length": None,
    "slots": None,
    "pages": None,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the table that places arrays on it."""

    mesh: Mesh
    table: Table = dataclasses.field(hash=False)
    kind: Kind

    @classmethod
    def train(cls, sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> "Layout":
        """The training layout over {data, fsdp, context, tensor} sizes; errors: `make_mesh`'s."""
        return cls(make_mesh("train", sizes, devices), TRAIN_TABLE, "train")

    @classmethod
    def rollout(cls, sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> "Layout":
        """The rollout layout over {replica, tensor} sizes; errors: `make_mesh`'s."""
        return cls(make_mesh("rollout", sizes, devices), ROLLOUT_TABLE, "rollout")

    @property
    def batch_shards(self) -> int:
        """Into how many parts the batch axis is split: data * fsdp, or replica."""
        return self.shards("batch")

    def shards(self, axis: str) -> int:
        """Into how many parts the mesh splits a logical axis."""
        return math.prod(self.mesh.shape[name] for name in self._mesh_axes(axis))

    def spec(self, axes: Axes) -> PartitionSpec:
        """The partition of an array whose dimensions are called `axes` (None: not split).

        Mesh axes of size 1 and trailing unsplit dimensions are left out, as XLA leaves them out of the shardings that
        it infers; so equal placements are equal specs, and a step's outputs feed the next step without recompiling.

        Raises:
          UserError: a name that the table lacks, or two dimensions that would use one mesh axis.
        """
        entries: list[str | tuple[str, ...] | None] = []
        owner: dict[str, str | None] = {}  # mesh axis -> the logical axis that uses it
        for axis in axes:
            names = self._mesh_axes(axis)
            for name in names:
                if name in owner:
                    raise UserError(
                        f"{self.kind} layout: axes {axes} put both {owner[name]!r} and {axis!r} on mesh axis {name!r};"
                        " an array can use a mesh axis once"
                    )
                owner[name] = axis
            used = tuple(name for name in names if self.mesh.shape[name] > 1)
            entries.append(used if len(used) > 1 else used[0] if used else None)
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def sharding(self, axes: Axes, shape: Sequence[int] | None = None) -> NamedSharding:
        """The placement of an array with these logical axes; with its shape given, checked that it divides.

        KV heads of activations are not split at all where the mesh does not divide them.

        Raises:
          UserError: as `spec`; a shape of another rank; a dimension that its mesh axes do not divide.
        """
        if shape is not None:
            self._check_rank(axes, tuple(shape))
            uneven = lambda axis, size: axis in _WHOLE_IF_UNEVEN and size % self.shards(axis)  # noqa: E731
            axes = tuple(None if uneven(axis, size) else axis for axis, size in zip(axes, shape, strict=True))
            self._check_divides(axes, tuple(shape))
        return NamedSharding(self.mesh, self.spec(axes))

    def tree(self, axes_tree: Any, shapes_tree: Any) -> Any:
        """`sharding` for a whole tree: tuples of logical axes, and anything with `.shape` in the same structure.

        Raises:
          UserError: as `sharding`, prefixed by the parameter's path.
        """

        def one(path, axes: Axes, leaf) -> NamedSharding:
            try:
                return self.sharding(axes, leaf.shape)
            except UserError as error:
                raise UserError(f"{path_name(path)}: {error}") from None

        return jax.tree_util.tree_map_with_path(one, axes_tree, shapes_tree, is_leaf=lambda x: isinstance(x, tuple))

    def constrain(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Tells the partitioner, inside jit, that `x` has this placement; nothing to tell on one device."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes, x.shape))

    def splitting(self, *axes: str | None) -> tuple[str, ...]:
        """The mesh axes of more than one device that split any of these logical axes, outermost first."""
        used = {name for axis in axes for name in self._mesh_axes(axis) if self.mesh.shape[name] > 1}
        return tuple(name for name in self.mesh.axis_names if name in used)

    def _mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        if axis is None:
            return ()
        if axis not in self.table:
            known = ", ".join(sorted(self.table))
            raise UserError(f"{self.kind} layout: no logical axis is called {axis!r}; the table has {known}")
        names = self.table[axis]
        return () if names is None else (names,) if isinstance(names, str) else names

    def _check_rank(self, axes: Axes, shape: tuple[int, ...]) -> None:
        if len(shape) != len(axes):
            raise UserError(f"{self.kind} layout: shape {shape} has {len(shape)} dimensions but axes {axes} name {len(axes)}")

    def _check_divides(self, axes: Axes, shape: tuple[int, ...]) -> None:
        for axis, size in zip(axes, shape, strict=True):
            names = self._mesh_axes(axis)
            parts = math.prod(self.mesh.shape[name] for name in names)
            if size % parts:
                split = describe({name: self.mesh.shape[name] for name in names})
                raise UserError(
                    f"{self.kind} layout: {axis!r} of size {size} does not divide into {parts} parts ({split});"
                    f" choose a {self.kind} mesh in which the product of {', '.join(names)} divides {size}"
                )


def path_name(path: Any) -> str:
    """`layers/q/kernel` for a key path of a pytree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def device_list(sharding: Sharding) -> tuple[jax.Device, ...]:
    """The devices in the order of their shards: compiled programs run on one such list."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda d: d.id))
