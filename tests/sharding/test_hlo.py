"""Traffic read from HLO text, against numbers worked by hand: from programs compiled here, and from forms that only other
compilers write."""

import functools
import importlib.util
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jrl.sharding.hlo import Traffic, collective_bytes, received_bytes

KIB = 1024


@functools.cache
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def compiled(f, spec, out, shape=(64, 64)) -> str:
    """HLO of a shard_map over float32 of `shape`: 16 KiB by default."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh(), spec))
    return jax.jit(jax.shard_map(f, mesh=mesh(), in_specs=spec, out_specs=out, check_vma=False)).lower(x).compile().as_text()


def uniform(kind, size, count=1):
    return {kind: Traffic(count, float(size), size)}


@pytest.mark.parametrize(
    ("f", "spec", "out", "expected"),
    [
        # Four devices with 4 KiB each gather 16: 12 arrive.
        (lambda x: jax.lax.all_gather(x, "b", tiled=True), P("b"), P(), uniform("all-gather", 12 * KIB)),
        (lambda x: jax.lax.all_gather(x, "b", axis=1, tiled=True), P(None, "b"), P(), uniform("all-gather", 12 * KIB)),
        # Two devices with 2 KiB each.
        (lambda x: jax.lax.all_gather(x, "a", tiled=True), P(("b", "a")), P("b"), uniform("all-gather", 2 * KIB)),
        # Of 4 KiB a device keeps a quarter and gets the rest from three others.
        (lambda x: jax.lax.all_to_all(x, "b", 0, 1, tiled=True), P(None, "b"), P("b"), uniform("all-to-all", 3 * KIB)),
        # 16 KiB on each of four: a quarter of the sum, of which three parts come from elsewhere, is 4 KiB a step, 3 steps.
        (lambda x: jax.lax.psum_scatter(x, "b", tiled=True), P(), P("b"), uniform("reduce-scatter", 12 * KIB)),
        (lambda x: jax.lax.psum(x, "a"), P(), P(), uniform("all-reduce", 16 * KIB)),
        (lambda x: jax.lax.psum(x, ("a", "b")), P(), P(), uniform("all-reduce", 28 * KIB)),
    ],
)
def test_each_kind(f, spec, out, expected):
    assert collective_bytes(compiled(f, spec, out)) == expected


def test_permute_counts_targets_only():
    pairs = [(0, 3), (3, 0), (1, 2), (5, 5)]
    text = compiled(lambda x: jax.lax.ppermute(x, ("a", "b"), pairs), P("b"), P("b"))
    assert collective_bytes(text) == {"collective-permute": Traffic(1, 1.5 * KIB, 4 * KIB)}
    np.testing.assert_array_equal(received_bytes(text), [4 * KIB, 0, 4 * KIB, 4 * KIB, 0, 0, 0, 0])


def nested(x):  # [6, 64, 16] a device
    def inner(j, sums):
        i, out = sums
        return i, out + jax.lax.all_gather(x[i] * j, "b", axis=1, tiled=True)

    def outer(i, out):
        return jax.lax.fori_loop(0, 5, inner, (i, out))[1]

    return jax.lax.fori_loop(2, 6, outer, jnp.zeros((64, 64)))


def test_loops_multiply():
    text = compiled(nested, P(None, None, "b"), P(), (6, 64, 64))
    assert collective_bytes(text) == uniform("all-gather", 20 * 12 * KIB, 20)
    # TPU's compiler does not write trip counts down; they follow from the counters.
    bare = re.sub(r'"known_trip_count":\{[^}]*\}', "", text)
    assert "known_trip_count" in text and "known_trip_count" not in bare
    assert collective_bytes(bare) == collective_bytes(text)


def test_loops_that_data_ends_have_to_be_told():
    def until(x):
        return jax.lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: y + jax.lax.pmean(y, "b"), x)

    text = compiled(until, P("b"), P("b"))
    with pytest.raises(ValueError, match="depends on data"):
        collective_bytes(text)
    assert collective_bytes(text, unknown_trips=7) == uniform("all-reduce", 7 * 6 * KIB, 7)


def test_the_dearer_branch_counts():
    def choose(x):
        gathered = lambda: jax.lax.all_gather(x, "b", tiled=True)  # noqa: E731
        summed = lambda: jax.lax.psum(jnp.tile(x, (4, 1)), "b")  # noqa: E731
        return jax.lax.cond(x[0, 0] > 0, gathered, summed)

    assert collective_bytes(compiled(choose, P("b"), P())) == uniform("all-reduce", 24 * KIB)


def test_what_the_partitioner_writes():
    """Its replica groups are in the iota form, and its permutes have all devices as targets."""
    other = Mesh(mesh().devices.reshape(4, 2), ("c", "d"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh(), P(("a", "b"))))
    text = jax.jit(lambda x: x, out_shardings=NamedSharding(other, P("c"))).lower(x).compile().as_text()
    assert "replica_groups=[4,2]<=[8]" in text
    assert collective_bytes(text) == uniform("all-gather", 2 * KIB)


def test_nothing_to_send():
    text = jax.jit(lambda x: x * 2).lower(jnp.ones(4)).compile().as_text()
    assert collective_bytes(text) == {} and received_bytes(text).tolist() == [0]
    with pytest.raises(ValueError, match="no HLO text"):
        collective_bytes("module @jit_f {}")


HEAD = "HloModule m, num_partitions=8\n\n%sum (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
HEAD += "  %b = f32[] parameter(1)\n  ROOT %c = f32[] add(%a, %b)\n}\n"
ENTRY = "\nENTRY %main (x: f32[4,256]) -> f32[4,256] {\n  %x = f32[4,256]{1,0:T(4,128)} parameter(0)\n"
TAIL = "  ROOT %y = f32[4,256]{1,0} copy(%x)\n}\n"  # x has 4 KiB


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("f32[8,256]{1,0} all-gather(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}", ("all-gather", 4)),
        ("f32[16,256]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}", ("all-gather", 12)),
        ("f32[8,256]{1,0} all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", ("all-gather", 4)),
        ("f32[16,256] all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", ("all-gather", 12)),
        ("f32[32,256] all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, dimensions={0}", ("all-gather", 28)),
        ("f32[8,256] all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, dimensions={0}", ("all-gather", 4)),
        ("f32[16,256] all-gather(%x), replica_groups=mesh[a=2,b=4] {a,b:(2)2}, dimensions={0}", ("all-gather", 12)),
        ("f32[32,256]{1,0} all-gather(%x), replica_groups={}, dimensions={0}", ("all-gather", 28)),
        ("(f32[4,256], f32[4,256]) all-reduce(%x, /*index=1*/%x), replica_groups=[2,4]<=[8], to_apply=%sum", ("all-reduce", 12)),
        ("(f32[4,256], f32[8,256]) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={0}", ("all-gather", 4)),
        ("f32[4,256] all-reduce-start(%x), replica_groups=[4,2]<=[8], to_apply=%sum", ("all-reduce", 4)),
        ("((f32[4,256]), f32[4,256]) all-to-all-start(%x), replica_groups=[2,4]<=[8], dimensions={0}", ("all-to-all", 3)),
        ("f32[8,256]{1,0} all-gather-done(%x)", None),
        ("f32[4,256] collective-broadcast(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("collective-broadcast", 2)),
        ("f32[4,256] collective-permute(%x, %x, %x, %x), slice_sizes={{1,256}}, source_target_pairs={{0,1},{1,2},{2,3},{3,4},"
         "{4,5},{5,6},{6,7},{7,0}}", ("collective-permute", 1)),
    ],
)  # fmt: skip
def test_forms_of_other_compilers(line, expected):
    traffic = collective_bytes(f"{HEAD}{ENTRY}  %z = {line}\n{TAIL}")
    if expected is None:
        assert traffic == {}
    else:
        kind, size = expected
        assert {k: (t.count, t.mean_bytes) for k, t in traffic.items()} == {kind: (1, size * KIB)}


def test_async_wrappers_are_entered_once():
    wrapped = "\n%wrapped (p: f32[4,256]) -> f32[1,256] {\n  %p = f32[4,256]{1,0} parameter(0)\n  ROOT %r = f32[1,256]{1,0} "
    wrapped += "reduce-scatter(%p), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum\n}\n"
    lines = "  %s = ((f32[4,256]{1,0}), f32[1,256]{1,0}, u32[]) async-start(%x), calls=%wrapped\n"
    lines += "  %u = ((f32[4,256]{1,0}), f32[1,256]{1,0}, u32[]) async-update(%s), calls=%wrapped\n"
    lines += "  %d = f32[1,256]{1,0} async-done(%u), calls=%wrapped\n"
    assert collective_bytes(HEAD + wrapped + ENTRY + lines + TAIL) == uniform("reduce-scatter", 3 * KIB)


def fusion(name: str, channel: int) -> str:
    """A fused computation with an all-gather of 4 KiB among two."""
    lines = f"\n%{name} (p: f32[4,256]) -> f32[8,256] {{\n  %p = f32[4,256]{{1,0}} parameter(0)\n  ROOT %g.{name} = f32[8,256]"
    return f"{lines} all-gather(%p), channel_id={channel}, replica_groups=[4,2]<=[8], dimensions={{0}}\n}}\n"


@pytest.mark.parametrize(("second_channel", "count"), [(5, 1), (6, 2)])
def test_fusions_that_carry_one_collective_count_once(second_channel, count):
    """As a v5e's compiler writes an all-gather that runs beside matrix products: start, steps and done all contain it."""
    fusions = fusion("start", 5) + fusion("step", second_channel) + fusion("done", 5)
    lines = "".join(f"  %{name}.1 = f32[8,256] fusion(%x), kind=kCustom, calls=%{name}\n" for name in ("start", "step", "done"))
    assert collective_bytes(HEAD + fusions + ENTRY + lines + TAIL) == uniform("all-gather", count * 4 * KIB, count)


def test_reduce_scatters_in_tpu_dress_count_each_though_they_share_a_channel():
    fused = "\n%all-reduce-scatter.1 (p: f32[4,256]) -> f32[1,256] {\n  %p = f32[4,256]{1,0} parameter(0)\n"
    fused += "  %zero = s32[] constant(0)\n"
    fused += "  %r = f32[4,256] all-reduce(%p), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%sum\n"
    fused += "  ROOT %s = f32[1,256] dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={1,256}\n}\n"
    line = "  %f = f32[1,256]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1\n"
    assert collective_bytes(HEAD + fused + ENTRY + line + TAIL) == uniform("reduce-scatter", 3 * KIB)
    both = fused + fused.replace("scatter.1", "scatter.2"), line + line.replace("%f", "%g").replace("scatter.1", "scatter.2")
    assert collective_bytes(HEAD + both[0] + ENTRY + both[1] + TAIL) == uniform("reduce-scatter", 2 * 3 * KIB, 2)


TPU_STEP = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jrl.sharding.hlo import collective_bytes
devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices).reshape(8, 2)
mesh = Mesh(devices, ("f", "t"), axis_types=(AxisType.Auto,) * 2)
at = lambda spec: NamedSharding(mesh, spec)
put = lambda x, spec: jax.lax.with_sharding_constraint(x, at(spec))
def step(up, down, x):
    def loss(weights):
        @jax.checkpoint
        def layer(x, w):
            up, down = (put(a.astype(jnp.bfloat16), spec) for a, spec in zip(w, (P(None, "t"), P("t"))))
            return x + put(jax.nn.silu(put(x @ up, P("f", None, "t"))) @ down, P("f")), None
        return jax.lax.scan(layer, x, weights)[0].astype(jnp.float32).mean()
    value, (a, b) = jax.value_and_grad(loss)((up, down))
    return value, up - put(a, P(None, "f", "t")), down - put(b, P(None, "t", "f"))
shaped = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=at(spec))
args = (shaped((8, 2048, 8192), "float32", P(None, "f", "t")), shaped((8, 8192, 2048), "float32", P(None, "t", "f")),
        shaped((32, 2048, 2048), "bfloat16", P("f")))
text = jax.jit(step).lower(*args).compile().as_text()
assert "AsyncCollectiveStart" in text and "all-reduce-scatter" in text and "known_trip_count" not in text
traffic = collective_bytes(text)
# A gathered weight has 2048 x 4096 bf16 = 16 MiB: two a layer, forwards and backwards, 8 layers; gradients go back as many.
assert traffic["all-gather"] == type(traffic["all-gather"])(32, 32 * 14 * 2**20, 32 * 14 * 2**20), traffic
assert traffic["reduce-scatter"] == type(traffic["all-gather"])(16, 16 * 14 * 2**20, 16 * 14 * 2**20), traffic
print("agreed")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the TPU compiler")
def test_a_training_step_compiled_for_tpu():
    env = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run([sys.executable, "-c", TPU_STEP], env=env, capture_output=True, text=True, timeout=500)
    assert done.stdout.strip() == "agreed", done.stderr[-2000:]
