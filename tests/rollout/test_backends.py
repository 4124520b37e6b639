"""The choice of an attention backend, its reasons, and what all backends have in common."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest

from jrl.errors import UserError
from jrl.models.arch import KNOWN
from jrl.rollout.backends import BACKENDS, Backend, XlaBackend, choose_backend
from jrl.rollout.gpu_attention import GpuBackend
from jrl.rollout.tpu_attention import TpuBackend
from jrl.sharding.layout import Layout

SMOL = KNOWN["HuggingFaceTB/SmolLM2-135M"]
QWEN = KNOWN["Qwen/Qwen2.5-0.5B"]


def layout_of(replica=1, tensor=1):
    return Layout.rollout({"replica": replica, "tensor": tensor}, jax.devices()[: replica * tensor])


def choose(name, platform, dtype=jnp.bfloat16):
    backend, others = choose_backend(name, platform, SMOL, layout_of(), dtype)
    assert sorted([backend.name, *(other for other, _ in others)]) == sorted(BACKENDS)  # each has its verdict
    return backend.name, dict(others)


def test_auto_takes_the_kernel_on_a_tpu_and_xla_elsewhere():
    chosen, reasons = choose("auto", "tpu")
    assert chosen == "tpu" and "'tpu' can run" in reasons["xla"]
    for platform in ("cpu", "gpu"):
        chosen, reasons = choose("auto", platform)
        assert chosen == "xla" and f"this is {platform}" in reasons["tpu"]


def test_auto_falls_back_where_the_kernel_cannot_run_and_says_why():
    chosen, reasons = choose("auto", "tpu", jnp.float16)
    assert chosen == "xla" and "dtype float16" in reasons["tpu"]


def test_a_backend_asked_for_by_name_is_taken_or_refused():
    chosen, reasons = choose("xla", "tpu")
    assert chosen == "xla" and "asked for" in reasons["tpu"]
    with pytest.raises(UserError, match="this is cpu; choose 'xla' or 'auto'"):
        choose("tpu", "cpu")
    with pytest.raises(UserError, match="dtype float16"):
        choose("tpu", "tpu", jnp.float16)
    with pytest.raises(UserError, match="'flash' does not exist; choose auto, tpu, gpu, cpu, xla"):
        choose("flash", "tpu")


def test_integer_pages_are_for_xla():
    backend, reasons = choose_backend("auto", "tpu", SMOL, layout_of(), jnp.bfloat16, "int8")
    assert backend.name == "xla" and "kv='int8'" in dict(reasons)["tpu"]
    assert backend.pool_arrays(8, 16)["k"].dtype == jnp.int8
    with pytest.raises(UserError, match="^attention backend 'tpu': kv='int8' .*; choose 'xla', 'auto' or kv='same'$"):
        choose_backend("tpu", "tpu", SMOL, layout_of(), jnp.bfloat16, "int8")


@pytest.mark.parametrize("name", ["decode_attend", "prefill_attend", "copy_pages", "pool_arrays"])
def test_backends_take_the_same_arguments(name):
    wanted = list(inspect.signature(getattr(Backend, name)).parameters)[1:]
    for backend in (kind(SMOL, layout_of(), jnp.bfloat16) for kind in (XlaBackend, TpuBackend, GpuBackend)):
        assert list(inspect.signature(getattr(backend, name)).parameters) == wanted


@pytest.mark.parametrize("kind", [XlaBackend, TpuBackend, GpuBackend])
@pytest.mark.parametrize("replica, tensor", [(1, 1), (4, 1), (2, 2)])
def test_pools_are_split_over_replicas_and_heads(kind, replica, tensor):
    layout = layout_of(replica, tensor)
    for array in kind(QWEN, layout, jnp.bfloat16).pool_arrays(8, 16).values():
        shard = layout.sharding(array.axes, array.shape).shard_shape(array.shape)
        heads = array.axes.index("act_heads" if "act_heads" in array.axes else "act_kv_heads")
        assert array.shape[:2] == (replica, QWEN.num_layers * 8) and 16 in array.shape[2:4]
        assert shard == (1, *(n // tensor if i == heads else n for i, n in enumerate(array.shape) if i > 0))


@pytest.mark.parametrize(
    "kv_heads, tensor, stored", [(4, 4, 1), (2, 4, 1), (1, 4, 1), (2, 8, 1), (4, 2, 2), (3, 4, 3), (3, 2, 3)]
)
def test_a_device_stores_no_kv_heads_but_those_it_reads(kv_heads, tensor, stored):
    """Where the devices are a multiple of the KV heads each has one; where nothing divides it has them all."""
    arch, layout = dataclasses.replace(QWEN, num_heads=24, num_kv_heads=kv_heads), layout_of(1, tensor)
    for array in XlaBackend(arch, layout, jnp.bfloat16).pool_arrays(8, 16).values():
        shard = layout.sharding(array.axes, array.shape).shard_shape(array.shape)
        assert shard[array.axes.index("act_kv_heads")] == stored


def test_padding_is_counted_in_the_pools_bytes():
    def size(kind):
        return sum(jnp.zeros(a.shape, a.dtype).nbytes for a in kind(SMOL, layout_of(), jnp.bfloat16).pool_arrays(8, 16).values())

    # 3 KV heads of 64 become 4 of 128
    assert size(TpuBackend) * 3 * 64 == size(XlaBackend) * 4 * 128
