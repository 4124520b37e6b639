"""The parts of resharding: common digits, rounds of blocks, casts, chunks; on any meshes and partitions, not only ours."""

import importlib.util
import math
import os
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrl.sharding.exchange import CHUNK_BYTES, exchange
from jrl.sharding.factors import Factors, factorize, needed_minus_held
from jrl.sharding.hlo import collective_bytes, received_bytes
from jrl.sharding.reshard import reshard
from jrl.sharding.rounds import Boxes, schedule
from tests.sharding.pairs import least_bytes

F32, BF16 = np.dtype(np.float32), np.dtype(jnp.bfloat16)


def mesh(*shape: int, names: str = "abcdef") -> Mesh:
    devices = np.array(jax.devices()[: math.prod(shape)])
    return Mesh(devices.reshape(shape), tuple(names[: len(shape)]), axis_types=(AxisType.Auto,) * len(shape))


def at(shape: tuple[int, ...], *spec) -> NamedSharding:
    return NamedSharding(mesh(*shape), P(*spec))


def a_placement(rng: random.Random, devices: int, ndim: int) -> NamedSharding:
    """Any mesh over the devices, its axes in any dimension or none, in any order."""
    shape, left = [], devices
    while left > 1:
        shape.append(rng.choice([n for n in range(2, left + 1) if left % n == 0]))
        left //= shape[-1]
    grid, dims = mesh(*shape), [[] for _ in range(ndim)]
    for name in rng.sample(grid.axis_names, len(shape)):
        if rng.random() < 0.75:
            rng.choice(dims).append(name)
    return NamedSharding(grid, P(*map(tuple, dims)))


@pytest.mark.parametrize("devices", [8, 6])  # over 6, meshes of (2, 3) and (3, 2) have no common digits
def test_any_two_placements(devices):
    rng, seen = random.Random(devices), set()
    for _ in range(14):
        ndim = rng.choice([1, 2, 3])
        shape = tuple(devices * rng.choice([1, 2, 3]) for _ in range(ndim))
        source, target = (a_placement(rng, devices, ndim) for _ in range(2))
        dtype, chunk_bytes = rng.choice([F32, BF16]), rng.choice([CHUNK_BYTES, 1024])
        x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        program = exchange(shape, source, target, F32, dtype, chunk_bytes)
        text = program.as_text()
        seen |= {*collective_bytes(text), factorize(source, target, ndim) is None}
        least = least_bytes(shape, source, target, dtype.itemsize)
        np.testing.assert_array_equal(received_bytes(text), least)
        np.testing.assert_array_equal(needed_minus_held(shape, source, target) * dtype.itemsize, least)
        moved = program(jax.device_put(x, source))
        assert moved.sharding == target
        np.testing.assert_array_equal(np.asarray(moved), x.astype(dtype))
    assert seen >= ({"all-gather", "all-to-all", False} if devices == 8 else {True, False}) | {"collective-permute"}


def test_digits_by_hand():
    train, rollout = at((4, 2), "a", "b"), at((2, 4), None, "b")  # W[embed, mlp] of the module's docstring
    assert factorize(train, rollout, 2) == Factors((2, 2, 2), ((0, 1), (2,)), ((), (1, 2)))
    assert factorize(at((8,), "a"), at((4, 2), "b"), 1) == Factors((2, 2, 2), ((0, 1, 2),), ((2,),))  # cut to equal levels
    assert factorize(at((2, 3), "a"), at((3, 2), "a"), 1) is None
    assert factorize(at((6,), "a"), at((3, 2), None, "b"), 2) == Factors((3, 2), ((0, 1), ()), ((), (1,)))


def test_fewest_collectives():
    """What is sent, pair by pair, as worked out by hand."""

    def kinds(source: NamedSharding, target: NamedSharding) -> dict[str, int]:
        text = exchange((4, 48, 48), source, target, F32, F32, CHUNK_BYTES).as_text()
        return {kind: traffic.count for kind, traffic in collective_bytes(text).items()}

    rows, tensor = at((8,), None, "a"), at((4, 2), None, None, "b")
    assert kinds(rows, at((8,))) == {"all-gather": 1}
    assert kinds(at((8,)), rows) == {}
    assert kinds(rows, tensor) == {"all-to-all": 1, "all-gather": 1}
    assert kinds(tensor, rows) == {"all-to-all": 1}
    assert kinds(at((2, 4), None, ("a", "b")), at((2, 4), None, ("b", "a"))) == {"collective-permute": 1}
    assert kinds(at((4, 2), None, "a", "b"), at((2, 4), None, None, "b")) == {"collective-permute": 2, "all-gather": 1}


@pytest.mark.parametrize("seed", range(6))
def test_rounds(seed):
    """Everyone gets each wanted block once, nobody sends or receives two in a round, and no round is superfluous."""
    rng = np.random.default_rng(seed)
    devices, grid = 24, (6, 4)
    parts, wanted_parts = [(6, 2), (3, 4), (2, 1), (6, 4)][seed % 4], [(2, 4), (3, 1), (1, 2)][seed % 3]

    def boxes(parts) -> Boxes:
        size = tuple(g // p for g, p in zip(grid, parts, strict=True))
        every = np.array([np.unravel_index(i % math.prod(parts), parts) for i in range(devices)])
        return Boxes(rng.permutation(every) * size, size)

    held, wanted = boxes(parts), boxes(wanted_parts)
    rounds = schedule(held, wanted)
    got = [[] for _ in range(devices)]
    sent = np.zeros(devices, int)
    for r in rounds:
        senders = [s for s, d in r.pairs]
        assert len(set(senders)) == len(senders) and all(s != d for s, d in r.pairs)
        sent[senders] += 1
        for d, s in enumerate(r.sender):
            if s >= 0:
                block = held.blocks(s)[(r.copy if s == d else r.send)[s]]
                assert wanted.blocks(d)[r.place[d]] == block
                assert s == d or block not in held.blocks(d)
                got[d].append(block)
    assert all(sorted(blocks) == wanted.blocks(d) for d, blocks in enumerate(got))
    assert len(rounds) == max(len(wanted.blocks(0)), sent.max())


def test_a_cast_is_the_plain_one():
    """Halves to even, the smallest numbers, infinities; NaN stays NaN."""
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    bits[:6] = 0x3F808000, 0x3F818000, 0x00000001, 0x00008000, 0x7F800000, 0x7F7FFFFF
    x = jax.device_put(bits.view(np.float32).reshape(64, 64), at((8,), "a"))
    for dtype in (jnp.bfloat16, jnp.float16):
        moved = np.asarray(reshard(x, at((4, 2), None, "b"), dtype))
        with np.errstate(all="ignore"):
            plain = np.asarray(x).astype(dtype)
        finite = ~np.isnan(plain)
        np.testing.assert_array_equal(moved.view(np.uint16)[finite], plain.view(np.uint16)[finite])
        assert np.isnan(moved[~finite]).all() and (~finite).any()


def test_fewer_bytes_travel_when_a_cast_widens_too():
    source, target = at((8,), "a"), at((4, 2), None, "b")
    programs = [exchange((64, 64), source, target, *dtypes, CHUNK_BYTES) for dtypes in ((F32, BF16), (BF16, F32), (F32, F32))]
    assert [int(received_bytes(p.as_text()).max()) for p in programs] == [3584, 3584, 7168]
    x = np.arange(4096, dtype=np.float32).reshape(64, 64).astype(BF16)
    np.testing.assert_array_equal(programs[1](jax.device_put(x, source)), x.astype(np.float32))


@pytest.mark.parametrize("shape", [(12, 32, 48), (1, 384, 48), (384, 48)])
def test_chunks_bound_memory_whatever_is_cut(shape):
    """Over layers, within a layer, and in an array that has none; the smaller the chunk, the more of them."""
    spec = ("a", "b") if len(shape) == 2 else (None, "a", "b")
    source, target = at((4, 2), *spec), at((2, 4), *(None,) * (len(shape) - 1), "b")
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    count = {}
    for chunk_bytes in (CHUNK_BYTES, 8192, 2048):
        program = exchange(shape, source, target, F32, F32, chunk_bytes)
        count[chunk_bytes] = collective_bytes(program.as_text())["all-gather"].count
        assert program.memory_analysis().temp_size_in_bytes <= chunk_bytes
        np.testing.assert_array_equal(program(jax.device_put(x, source)), x)
    assert count[CHUNK_BYTES] == 1 < count[8192] < count[2048]
    whole = exchange(shape, source, target, F32, F32, CHUNK_BYTES).memory_analysis().temp_size_in_bytes
    assert whole > 8192  # control: without chunks it does take more


def test_a_gather_of_the_first_dimension_takes_nothing_beside():
    program = exchange((64, 64), at((8,), "a"), at((8,)), F32, F32, 1024)
    assert program.memory_analysis().temp_size_in_bytes == 0
    assert collective_bytes(program.as_text())["all-gather"].count == 1


def test_host_memory_on_either_side():
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    source, target = at((8,), "a"), at((4, 2), None, "b")
    for a, b in (("pinned_host", "device"), ("device", "pinned_host")):
        wanted = target.with_memory_kind(b)
        moved = reshard(jax.device_put(x, source.with_memory_kind(a)), wanted)
        assert moved.sharding == wanted
        np.testing.assert_array_equal(moved, x)


def test_what_has_no_elements_or_is_a_key():
    source, target = at((8,), "a"), at((4, 2), "b")
    keys = jax.random.split(jax.random.key(0), 8)
    moved = reshard({"none": jax.device_put(np.zeros((8, 0)), source), "keys": jax.device_put(keys, source)}, target)
    assert moved["none"].shape == (8, 0) and moved["none"].sharding == moved["keys"].sharding == target
    np.testing.assert_array_equal(jax.random.key_data(moved["keys"]), jax.random.key_data(keys))


TPU_WEIGHTS = """
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jrl.sharding.exchange import CHUNK_BYTES, exchange
from jrl.sharding.factors import needed_minus_held
from jrl.sharding.hlo import received_bytes
devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5p:4x4x4").devices)
def at(shape, *spec):
    return NamedSharding(Mesh(devices.reshape(shape), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2), P(*spec))
f32, bf16 = np.dtype("float32"), jax.numpy.dtype("bfloat16")
for train in ((16, 4), (64, 1)):
    for rollout in ((8, 8), (16, 4), (32, 2)):
        for shape, a, b in (
            ((64, 5120, 5120), (None, "outer", "inner"), (None, None, "inner")),
            ((64, 27648, 5120), (None, "inner", "outer"), (None, "inner")),
            ((152064, 5120), ("inner", "outer"), ("inner",)),
            ((5120, 152064), ("outer", "inner"), (None, "inner")),
        ):
            source, target = at(train, *a), at(rollout, *b)
            program = exchange(shape, source, target, f32, bf16, CHUNK_BYTES)
            assert np.array_equal(received_bytes(program.as_text()), 2 * needed_minus_held(shape, source, target)), (shape, a, b)
            temp = program.memory_analysis().temp_size_in_bytes
            assert temp <= CHUNK_BYTES, (train, rollout, shape, temp)
print("agreed")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
def test_the_weights_of_a_32b_model_on_64_tpus():
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run([sys.executable, "-c", TPU_WEIGHTS], env=env, capture_output=True, text=True, timeout=590)
    assert done.stdout.strip() == "agreed", done.stderr[-2000:]
