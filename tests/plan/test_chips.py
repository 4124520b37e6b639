"""The table of chips, and how devices and names find their rows."""

import dataclasses

import pytest

from jrl.errors import UserError
from jrl.plan.chips import CHIPS, chip_named, chip_of


@dataclasses.dataclass
class Device:
    device_kind: str


def test_device_kinds_as_jax_reports_them():
    kinds = {
        "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x",
        "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200",
        "AMD Instinct MI300X": "mi300x",
    }  # fmt: skip
    assert {kind: chip_of(Device(kind)).name for kind in kinds} == kinds
    assert set(kinds.values()) == set(CHIPS)
    assert chip_of(Device("cpu")) is None


def test_an_unknown_name_is_refused():
    assert chip_named("V5P") is CHIPS["v5p"]
    with pytest.raises(UserError, match="--chip=v9: not known; choose one of v4, "):
        chip_named("v9")


def test_what_a_device_receives_by_the_size_of_its_group():
    v5p, v5e, h100 = CHIPS["v5p"], CHIPS["v5e"], CHIPS["h100"]
    # On a torus: half an axis' rate along a part of it, a whole one along a ring, more axes at once for more devices.
    assert [v5p.receive_rate(n) / v5p.link_rate for n in (2, 4, 16, 64, 256)] == [0.5, 1, 2, 3, 3]
    assert [v5e.receive_rate(n) / v5e.link_rate for n in (4, 16, 256)] == [0.5, 1, 2]
    # Through a switch: the same to everyone in the domain, and the network's beyond.
    assert h100.receive_rate(8) == h100.link_rate
    assert h100.receive_rate(16) == h100.receive_rate(2, spread=8) == h100.network_rate


def test_hops_grow_with_the_rings_or_with_the_doublings():
    assert [CHIPS["v5p"].hops(n) for n in (2, 4, 16, 64, 512)] == [1, 2, 4, 6, 12]
    assert [CHIPS["h100"].hops(n) for n in (2, 8, 64)] == [1, 3, 6]
