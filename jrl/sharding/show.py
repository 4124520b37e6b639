"""Where everything lies: python -m jrl.sharding.show --config=configs/x.py [--config.KEY=VALUE ...] [--devices=N] [--hosts=N]

For each mesh of a run the devices in their grid, and for each parameter its shape, logical axes, split, the part that one
device has, and its bytes. No device is touched, so the picture of a pod can be drawn on a laptop.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jrl import config as config_lib
from jrl import platform
from jrl.errors import UserError, entry_point
from jrl.flags import check_values, read_flags, without_config
from jrl.main import parse as parse_config
from jrl.models import decoder
from jrl.models.load import read_arch
from jrl.plan.plan import abstract_layouts, model_of, num_devices, size_text
from jrl.rollout.weights import int8_arrays
from jrl.sharding.layout import Layout, path_name
from jrl.sharding.mesh import describe
from jrl.stages import stage_of

ABOUT_ALL = (
    "Shows the meshes of a run and where each parameter lies on them; of the model it reads no more than its config.json."
    " --config=FILE and --config.KEY=VALUE are as for python -m jrl.main."
)
ABOUT = {
    "devices": "number of devices; 0: as the config's meshes say, or those of this machine",
    "hosts": "among which they are divided evenly",
}
MOST_ROWS = 16  # of a grid


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags besides `--config`."""

    devices: int = 0
    hosts: int = 1


def parse(args: Sequence[str]) -> tuple[Settings, Any]:
    """Flags and validated config.

    Raises:
      UserError: a flag or a key that does not exist or has a value that does not fit.
    """
    mine, of_config = without_config(args)
    settings = read_flags(Settings, "python -m jrl.sharding.show", ABOUT_ALL, ABOUT, mine)
    check_values(settings, {"devices": 0, "hosts": 1})
    command = parse_config(of_config)
    if command.config is None:
        raise UserError("--config is missing: python -m jrl.sharding.show --config=configs/x.py; --help says more")
    return settings, config_lib.with_preset(config_lib.load(command.config, command.overrides))


def picture(config, devices: int = 0, hosts: int = 1) -> str:
    """The text for a validated config.

    Raises:
      UserError: meshes that do not fit the devices or the model; hosts that do not divide the devices.
    """
    devices = devices or num_devices(config)
    if devices % hosts:
        raise UserError(f"--hosts={hosts}: {devices} devices cannot be divided evenly among them; give a divisor")
    models: list[tuple[list[str], Layout]] = []
    for name, layout in abstract_layouts(config, devices).items():
        same = [names for names, other in models if other is layout and not {"critic", "reward"} & {name, *names}]
        if same:  # the same parameters on the same mesh
            same[0].append(name)
        else:
            models.append(([name], layout))
    parts = (
        [*_mesh_lines(" and ".join(names), layout, hosts), "", *_weight_lines(config, names[0], layout)]
        for names, layout in models
    )
    return "\n\n\n".join("\n".join(lines) for lines in parts)


def _mesh_lines(name: str, layout: Layout, hosts: int) -> Iterator[str]:
    """The grid: a row for each place along all axes but the innermost, whose devices stand in the row."""
    shape = dict(layout.mesh.shape)
    *outer, (inner, width) = shape.items()
    shown = [(axis, size) for axis, size in outer if size > 1]
    count = math.prod(shape.values())
    yield f"mesh of {name}: {describe(shape)}, {count} device{'s' * (count > 1)} on {hosts} host{'s' * (hosts > 1)}"
    yield "  " + "".join(f"{axis:>8}" for axis, _ in shown) + f"    along {inner}: device" + (" (host)" if hosts > 1 else "")
    rows = list(itertools.product(*(range(size) for _, size in shown)))
    for number, place in enumerate(rows[:MOST_ROWS]):
        ids = range(number * width, (number + 1) * width)
        cells = (f"{i} ({i * hosts // count})" if hosts > 1 else str(i) for i in ids)
        yield "  " + "".join(f"{i:>8}" for i in place) + "    " + "  ".join(cells)
    if len(rows) > MOST_ROWS:
        yield f"  ... {len(rows) - MOST_ROWS} more rows, in the same order"


def _weight_lines(config, name: str, layout: Layout) -> Iterator[str]:
    """A line for each parameter, and their sums."""
    shapes, axes, shardings = _weights(config, name, layout)
    rows: list[tuple[str, ...]] = [("parameter", "dtype", "shape", "logical axes", "split", "of one device", "bytes of it")]
    total = here = 0
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, x), names, sharding in zip(leaves, axes, shardings, strict=True):
        part = sharding.shard_shape(x.shape)
        size = math.prod(part) * x.dtype.itemsize
        total, here = total + math.prod(x.shape) * x.dtype.itemsize, here + size
        split = _sizes([_ways(entry) for entry in (*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))])
        rows.append((path_name(path), x.dtype.name, _sizes(x.shape), " ".join(names), split, _sizes(part), size_text(size)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield "  " + "  ".join([*cells, row[-1].rjust(widths[-1])])
    yield f"  parameters in all {size_text(total)}, on one device {size_text(here)}"


def _weights(config, name: str, layout: Layout) -> tuple[Any, list, list]:
    """Shape and dtype, logical axes, and sharding of each weight, as the model called `name` holds them."""
    arch = read_arch(config.reward.model.path if name == "reward" else config.model.path)
    dtype, int8 = platform.compute_dtype(config.model.compute_dtype), name == "rollout" and config.rollout.weights == "int8"
    kind: Any = stage_of(config).model if config.stage != "rl" else model_of(config, name)
    kind = decoder.Int8Decoder if int8 else kind
    shapes = decoder.abstract_params(arch, kind)
    axes = decoder.param_axes(arch, kind)
    if int8:
        shapes, _ = int8_arrays(arch, layout, dtype)
    elif name == "rollout":
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    return shapes, names, jax.tree.leaves(layout.tree(axes, shapes))


def _ways(entry: Any) -> str:
    return "-" if entry is None else entry if isinstance(entry, str) else "+".join(entry)


def _sizes(values: Sequence[Any]) -> str:
    return " ".join(map(str, values)) or "-"


@entry_point
def main(args: Sequence[str]) -> None:
    """Prints the picture of a config's meshes."""
    settings, config = parse(args)
    jax.config.update("jax_platforms", "cpu")  # no accelerator of this machine is wanted, nor should it be taken
    print(picture(config, settings.devices, settings.hosts))


if __name__ == "__main__":
    sys.exit(main())
