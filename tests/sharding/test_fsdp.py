"""Fully sharded weights, read off compiled programs of the learner's update: what is sent, how often, and in which dtype."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learner import Forward
from jrl.sharding.fsdp import FullySharded
from jrl.sharding.hlo import collectives
from jrl.sharding.layout import Layout
from tests.learners import ARCH, compiled, make_learner, tpu_devices

WIDE = dataclasses.replace(ARCH, hidden_size=256, intermediate_size=640, num_layers=5, num_heads=4, num_kv_heads=2,
                           head_dim=64, vocab_size=1280)  # fmt: skip
SIZES, CHUNK = (1, 96, 3, 64), 96  # (P, u, N, t) of a shard: 288 tokens, and 2 chunks of the logits of 192
SMALL = 32 * 2**10  # bytes: norms and biases, token ids, logits' row sums


def matrices(arch, layout, itemsize) -> tuple[int, int]:
    """Bytes, on a device along tensor, of a layer's matrices and of the head."""
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    layer = arch.hidden_size * (2 * q + 2 * kv + 3 * arch.intermediate_size)
    tensor = layout.mesh.shape["tensor"]
    return layer * itemsize // tensor, arch.vocab_size * arch.hidden_size * itemsize // tensor


def received(text, **wanted):
    """Bytes that a device receives in large collectives, by how often they run: {(kind, times): bytes of one time}."""
    found: dict = {}
    for c in collectives(text):
        if c.received.max() > SMALL:
            found[c.kind, c.times] = found.get((c.kind, c.times), 0) + int(c.received.max())
    return found


def large_collectives(layout, arch):
    return received(compiled(make_learner(layout, arch, logit_chunk=CHUNK), SIZES)[1])


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_layers_weights_are_gathered_in_its_turn_and_the_heads_once(tied):
    arch, layout = dataclasses.replace(WIDE, tie_embeddings=tied), Layout.train({"fsdp": 8})
    layer, head = matrices(arch, layout, 4)
    rows = (96 + 3 * 64) * arch.hidden_size * 4  # of the embedding, for one shard's tokens
    times = arch.num_layers
    expected = {
        ("all-gather", times): 2 * layer * 7 // 8,  # forward, and once again backward
        ("all-reduce", times): 2 * layer * 7 // 8,  # of gradients: a CPU has no better way to give each device its part
        ("all-gather", 1): head * 7 // 8,
        ("reduce-scatter", 1): head * 7 // 8,
        ("all-to-all", 1): 2 * rows * 7 // 8,
    }
    found = large_collectives(layout, arch)
    assert found.keys() == expected.keys()
    assert all(abs(found[key] - n) <= 0.02 * n for key, n in expected.items()), (found, expected)


@pytest.mark.slow
def test_the_partitioner_by_itself_gathers_the_head_for_each_chunk(monkeypatch):
    monkeypatch.setattr(Forward, "_split", lambda self: None)
    layout = Layout.train({"fsdp": 8})
    alone, (_, head) = large_collectives(layout, WIDE), matrices(WIDE, layout, 4)
    assert alone.get(("all-gather", 2), 0) > head // 2 or alone.get(("all-reduce", 2), 0) > head // 2, alone


# Programs of a chip that is not there are written to the compilation cache, but cannot be read back.
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize(
    ("topology", "sizes", "hidden"),
    [
        ("v5e:2x4", {"fsdp": 8}, 512),
        pytest.param("v5e:2x4", {"data": 2, "fsdp": 2, "context": 2}, 1024, marks=pytest.mark.slow),
        pytest.param("v5p:2x2x2", {"data": 2, "fsdp": 4}, 2048, marks=pytest.mark.slow),
        pytest.param("v5p:2x2x2", {"data": 2, "fsdp": 2, "context": 2}, 2048, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", {"data": 4, "fsdp": 16}, 1024, marks=pytest.mark.slow),
        pytest.param("v6e:2x4", {"data": 2, "fsdp": 4}, 1024, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tpus_gather_and_scatter_the_dtype_of_computation(topology, sizes, hidden):
    """Received in all: weights twice and gradients once, 2 bytes each, over the devices that split them; nothing is whole.

    It is the TPU compiler that makes reduce-scatters of sums, and there are cases in which it does not: among all devices of a
    torus with three axes (v5p 2x2x2 with fsdp 8), and for two of a layer's matrices on v5p 4x4x4, fsdp 16, hidden size 2048.
    """
    arch = dataclasses.replace(WIDE, hidden_size=hidden, intermediate_size=3 * hidden, num_heads=hidden // 64, num_layers=3)
    layout = Layout.train(sizes, tpu_devices(topology))
    _, text = compiled(make_learner(layout, arch, jnp.bfloat16, logit_chunk=CHUNK), SIZES)
    split, copies = layout.shards("embed"), layout.mesh.shape["data"]
    layer, head = matrices(arch, layout, 2)
    found: dict = {}
    for (kind, times), n in received(text).items():
        found[kind] = found.get(kind, 0) + n * times
    part = (split - 1) / split
    keys = 4 * (96 + 3 * 64) * arch.num_kv_heads * arch.head_dim * 2 * (1 - 1 / layout.shards("length")) * arch.num_layers
    assert found["all-gather"] == pytest.approx((2 * arch.num_layers * layer + head) * part + keys, rel=0.02)
    # A product's gradient may travel round a ring as it is made, which is a scatter of the sum by permutes.
    scattered = found.get("reduce-scatter", 0) + found.get("collective-permute", 0)
    assert scattered == pytest.approx((arch.num_layers * layer + head) * part + keys / 2, rel=0.03)
    # What is summed among copies is what one device holds; the embedding's gradient in float32, since it is made of few rows.
    summed = 2 * (copies - 1) / copies * (arch.num_layers * layer + head + 2 * head) / split
    assert found.get("all-reduce", 0) == pytest.approx(summed, rel=0.03)


def rows_and_gradient(split, table, tokens, cotangent):
    rows, back = jax.vjp(lambda t: split.rows(t, ("vocab", "embed"), tokens), table)
    return rows, back(cotangent)[0]


@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "context": 2}, {"tensor": 8}], ids=str)
def test_rows_of_a_split_table(sizes):
    """Against indexing in NumPy, forward and back; tokens repeat, so gradients of rows add up."""
    layout, rng = Layout.train(sizes), np.random.default_rng(0)
    table = rng.standard_normal((16, 24), np.float32)
    tokens = rng.integers(0, 16, (layout.batch_shards, 8)).astype(np.int32)
    cotangent = rng.standard_normal((*tokens.shape, 24), np.float32)
    split = FullySharded(layout, jnp.float32)
    place = lambda x, axes: jax.device_put(x, layout.sharding(axes, x.shape))  # noqa: E731
    rows, gradient = jax.jit(lambda *args: rows_and_gradient(split, *args))(
        place(table, ("vocab", "embed")), place(tokens, ("batch", "length")), cotangent
    )
    np.testing.assert_array_equal(rows, table[tokens])
    expected = np.zeros_like(table)
    np.add.at(expected, tokens, cotangent)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    assert gradient.sharding.is_equivalent_to(layout.sharding(("vocab", "embed")), 2)


@pytest.mark.parametrize("contract", [0, 1])
def test_the_gradient_of_a_product_used_in_a_loop(contract):
    """Against float64 in NumPy: three chunks of a batch with one weight."""
    layout, rng = Layout.train({"data": 2, "fsdp": 2, "tensor": 2}), np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 8, 16)).astype(np.float32)  # [chunks, d, t, D]
    w, g = rng.standard_normal((16, 24)).astype(np.float32), rng.standard_normal((3, 4, 8, 24)).astype(np.float32)
    axes = ("embed", "vocab") if contract == 0 else ("vocab", "embed")
    stored = jax.device_put(w if contract == 0 else w.T, layout.sharding(axes))

    def total(stored, dtype):
        product = FullySharded(layout, dtype).product(stored, axes, contract)
        return jnp.sum(jax.lax.map(lambda part: jnp.sum(product(part[0].astype(dtype)) * part[1]), (x, g)))

    expected = np.einsum("cbtd,cbtv->dv", x.astype(np.float64), g)
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.02)):
        value, gradient = jax.jit(jax.value_and_grad(lambda s, dtype=dtype: total(s, dtype)))(stored)
        gradient = np.asarray(gradient) if contract == 0 else np.asarray(gradient).T
        np.testing.assert_allclose(gradient, expected, atol=tolerance * np.abs(expected).max())
        assert float(value) == pytest.approx(float(np.sum(np.einsum("cbtd,dv->cbtv", x, w) * g)), rel=tolerance, abs=tolerance)
