"""Layers one by one: the same memory, the same forward, the same run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.models import decoder
from jrl.models.attention import attention, causal_mask
from jrl.models.load import RANDOM
from jrl.models.unstack import LEAST_TOKENS, unstack_layers, worth_it
from jrl.sharding.layout import Layout
from tests.runs import a_run, sampled

# What of a tiny model starts on a boundary of 64 bytes in the middle of the stack, as every real model's weights do.
ARCH = dataclasses.replace(RANDOM["tiny"], family="qwen2", num_layers=3, qkv_bias=True)


def params_on(layout):
    params = decoder.init_params(ARCH, 0, layout)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def addresses(x):
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


@pytest.mark.parametrize("mesh", [{}, {"replica": 2, "tensor": 4}], ids=["one device", "8 devices"])
def test_views_stand_on_the_memory_of_the_stack(mesh):
    layout = Layout.rollout(mesh, None if mesh else jax.devices()[:1])
    params = params_on(layout)
    layers = unstack_layers(params)["layers"]
    assert len(layers) == ARCH.num_layers
    for i, layer in enumerate(layers):
        for name in ("q", "down"):
            stacked, view = params["layers"][name]["kernel"], layer[name]["kernel"]
            np.testing.assert_array_equal(view, stacked[i])
            size = view.addressable_shards[0].data.nbytes
            assert addresses(view) == {d: start + i * size for d, start in addresses(stacked).items()}
            assert addresses(stacked[i]) != addresses(view)  # control: an ordinary cut is a copy
            assert view.sharding.spec == layout.sharding(decoder.param_axes(ARCH)["layers"][name]["kernel"][1:]).spec


def test_the_forward_is_the_same():
    layout = Layout.rollout({}, jax.devices()[:1])
    params = params_on(layout)
    tokens = jnp.arange(12).reshape(1, 12)
    mask = causal_mask(jnp.array([[12]]), 12)

    def attend(layer, q, k, v, seen):
        out = attention(q[:, None], [(k[:, None], v[:, None], mask)])[:, 0]
        return out, seen.at[layer].set(jnp.sum(out))

    def run(params):
        return decoder.forward(ARCH, params, tokens, tokens, attend, jnp.zeros(ARCH.num_layers))

    scanned, one_by_one = run(params), run(unstack_layers(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one_by_one, scanned)
    layers = unstack_layers(params)["layers"]
    other = run({**params, "layers": layers[::-1]})
    assert np.abs(other[0] - scanned[0]).max() > 1e-2  # control: their order matters


@pytest.mark.slow
def test_a_run_draws_the_same_samples(tmp_path):
    """The updates donate what the views stand on; every step's samples would tell if one were left."""
    for choice in ("on", "off"):
        a_run(tmp_path / choice, steps=3, rollout__unroll_layers=choice, rollout__attention="xla").train()
    ours, scanned = sampled(tmp_path / "on"), sampled(tmp_path / "off")
    assert [s[:3] for s in ours] == [s[:3] for s in scanned] and len({s[0] for s in ours}) == 3
    for a, b in zip(ours, scanned, strict=True):
        np.testing.assert_allclose(a[3], b[3], atol=1e-4)


def test_when_it_is_worth_it():
    assert worth_it("auto", "cpu", LEAST_TOKENS) and not worth_it("auto", "cpu", LEAST_TOKENS - 1)
    assert worth_it("on", "cpu", 1) and not worth_it("off", "cpu", 1000) and not worth_it("auto", "tpu", 1000)
    with pytest.raises(UserError, match="on a CPU only, and this is gpu; choose auto"):
        worth_it("on", "gpu", 1000)
