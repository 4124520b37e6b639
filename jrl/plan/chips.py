"""What chips can do, from their makers' data sheets: the planner's only knowledge of hardware.

Rates are peaks. A device is what JAX calls one: a TPU v4 or v5p chip, both its cores together, but half a TPU7x chip.
"""

import dataclasses
import math

import jax

from jrl.errors import UserError

GB = 1e9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      flops: bfloat16 multiplications and additions per second, dense.
      hbm_bytes: memory.
      hbm_rate: bytes per second that it reads.
      link_rate: bytes per second that it receives along one axis of the torus (TPU), from both neighbours, or from all the
        other devices of its domain (GPU).
      torus_axes: axes of the torus, 0 for a switch.
      torus_wraps: devices along an axis from which on its ends are joined.
      domain: devices that `link_rate` joins; None for a whole slice.
      network_rate: bytes per second that it receives from beyond its domain.
      host_devices: devices of one host.
    """

    name: str
    backend: str
    flops: float
    hbm_bytes: float
    hbm_rate: float
    link_rate: float
    torus_axes: int
    torus_wraps: int
    domain: int | None
    network_rate: float
    host_devices: int

    def receive_rate(self, group: int, spread: int = 1) -> float:
        """Bytes per second that each of `group` devices receives in a collective among them.

        Args:
          spread: devices from one of the group to its next in the order of the mesh: the product of the axes further in.
        """
        if self.torus_axes:
            # A group fills one axis after another; along a part of one, whose ends are not joined, the devices at the ends
            # receive from one side only.
            axes = min(max(math.ceil(math.log(group, self.torus_wraps)), 1), self.torus_axes)
            return self.link_rate * axes * (1 if group >= self.torus_wraps else 0.5)
        inside = self.domain is None or group * spread <= self.domain
        return self.link_rate if inside else self.network_rate

    def hops(self, group: int) -> int:
        """Links that the last byte of a collective among `group` devices passes: around rings, or by doubling."""
        if not self.torus_axes:
            return math.ceil(math.log2(group))
        axes = min(max(math.ceil(math.log(group, self.torus_wraps)), 1), self.torus_axes)
        return math.ceil(axes * group ** (1 / axes) / 2)


def _tpu(name: str, tflops: float, hbm: float, hbm_rate: float, link: float, axes: int, wraps: int, per_host: int = 4) -> Chip:
    return Chip(name, "tpu", tflops * 1e12, hbm * GIB, hbm_rate * GB, link * GB, axes, wraps, None, 6.25 * GB, per_host)


def _gpu(name: str, tflops: float, hbm: float, hbm_rate: float, link: float, network: float) -> Chip:
    return Chip(name, "gpu", tflops * 1e12, hbm * GB, hbm_rate * GB, link * GB, 0, 0, 8, network * GB, 8)


# TPU: what a device receives from both neighbours along one axis. A v5e or v6e axis is joined at 16 devices, the others' at 4.
_TABLE = (
    _tpu("v4", 275, 32, 1228, 100, 3, 4),
    _tpu("v5e", 197, 16, 819, 100, 2, 16),
    _tpu("v5p", 459, 95, 2765, 200, 3, 4),
    _tpu("v6e", 918, 32, 1640, 200, 2, 16),
    _tpu("tpu7x", 1153, 96, 3690, 100, 3, 4, per_host=8),
    _gpu("a100", 312, 80, 2039, 300, 25),
    _gpu("h100", 989, 80, 3350, 450, 50),
    _gpu("h200", 989, 141, 4800, 450, 50),
    _gpu("b200", 2250, 180, 8000, 900, 50),
    _gpu("mi300x", 1307, 192, 5300, 448, 50),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _TABLE}

# `jax.Device.device_kind`, in lower case, contains one of these; the first that fits is meant.
_KINDS = (
    ("v5 lite", "v5e"), ("v5e", "v5e"), ("v6 lite", "v6e"), ("v6e", "v6e"), ("v5", "v5p"), ("v4", "v4"), ("tpu7", "tpu7x"),
    ("a100", "a100"), ("h100", "h100"), ("h200", "h200"), ("b200", "b200"), ("mi300", "mi300x"),
)  # fmt: skip


def chip_named(name: str) -> Chip:
    """Raises UserError for a chip that is not in the table."""
    if name.lower() not in CHIPS:
        raise UserError(f"--chip={name}: not known; choose one of {', '.join(CHIPS)}")
    return CHIPS[name.lower()]


def chip_of(device: jax.Device) -> Chip | None:
    """The chip of a device; None where the table has none, as for CPUs."""
    kind = device.device_kind.lower()
    return next((CHIPS[name] for part, name in _KINDS if part in kind), None)
