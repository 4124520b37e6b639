import random

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jrl.errors import UserError
from jrl.sharding.mesh import ROLLOUT_AXES, TRAIN_AXES, device_order, make_mesh, resolve_sizes


def test_axes_are_named_and_auto():
    train = make_mesh("train", {"fsdp": 4, "tensor": 2})
    assert train.axis_names == TRAIN_AXES == ("data", "fsdp", "context", "tensor")
    assert dict(train.shape) == {"data": 1, "fsdp": 4, "context": 1, "tensor": 2}
    rollout = make_mesh("rollout", {"replica": -1, "tensor": 2})
    assert rollout.axis_names == ROLLOUT_AXES == ("replica", "tensor")
    assert dict(rollout.shape) == {"replica": 4, "tensor": 2}
    assert set(train.axis_types) | set(rollout.axis_types) == {AxisType.Auto}


def test_every_mesh_is_a_reshape_of_one_order():
    shuffled = random.Random(0).sample(jax.devices(), 8)
    order = device_order()
    assert list(device_order(shuffled)) == list(order)
    for kind, sizes in [
        ("train", {"data": 2, "fsdp": -1}),
        ("train", {"tensor": 8}),
        ("rollout", {"tensor": 4, "replica": 2}),
    ]:
        assert list(make_mesh(kind, sizes, shuffled).devices.flat) == list(order)


class FakeDevice:
    def __init__(self, id, process_index, slice_index):
        self.id, self.process_index, self.slice_index = id, process_index, slice_index


def test_devices_of_a_host_and_of_a_slice_are_neighbours():
    # Ids interleave hosts, and hosts interleave slices, as some platforms number them.
    devices = [FakeDevice(id=i, process_index=i % 4, slice_index=i % 2) for i in range(16)]
    order = device_order(devices)
    assert [d.slice_index for d in order] == [0] * 8 + [1] * 8
    assert [d.process_index for d in order] == [0] * 4 + [2] * 4 + [1] * 4 + [3] * 4


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("train", {"fsdp": 3}, r"data=1 fsdp=3 context=1 tensor=1 is 3 devices but there are 8"),
        ("train", {}, r"is 1 devices but there are 8.*-1"),
        ("train", {"fsdp": 16}, r"is 16 devices but there are 8"),
        ("train", {"replica": 8}, r"'replica'; the axes are data, fsdp, context, tensor"),
        ("rollout", {"fsdp": 8}, r"'fsdp'; the axes are replica, tensor"),
        ("train", {"fsdp": -1, "tensor": -1}, r"fsdp and tensor are both -1"),
        ("rollout", {"replica": -1, "tensor": 3}, r"replica=-1 cannot be filled.*8"),
        ("train", {"fsdp": 0}, r"fsdp=0 must be a positive whole number, or -1"),
        ("train", {"fsdp": -2}, r"fsdp=-2"),
        ("train", {"fsdp": 2.0}, r"fsdp=2.0"),
        ("train", {"fsdp": True}, r"fsdp=True"),
    ],
)
def test_bad_sizes_are_one_readable_line(kind, sizes, message):
    with pytest.raises(UserError, match=message) as error:
        make_mesh(kind, sizes)
    assert "\n" not in str(error.value)


def test_sizes_resolve_without_devices():
    assert resolve_sizes("train", {"fsdp": -1, "tensor": 4}, 256) == {"data": 1, "fsdp": 64, "context": 1, "tensor": 4}
    assert resolve_sizes("rollout", {"tensor": np.int64(2), "replica": -1}, 2) == {"replica": 1, "tensor": 2}
