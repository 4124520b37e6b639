"""The TPU backend without a TPU: the kernel's numbers in Pallas' interpreter, and what the TPU compiler makes of it.

The reference attends to the whole sequence at once, in NumPy float64, head by head: no pages, no padding.
"""

import dataclasses
import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from jrl.errors import UserError
from jrl.models import decoder
from jrl.models.arch import KNOWN
from jrl.rollout import tpu_attention
from jrl.rollout.backends import XlaBackend
from jrl.rollout.paged_attention import Table
from jrl.rollout.tpu_attention import TpuBackend, padded_kv_heads
from jrl.sharding.layout import ROLLOUT_TABLE, Layout

PAGE = 4  # tokens
PAGES = 16


@functools.cache  # the programs of one backend are compiled once for all tests
def backend_of(arch, dtype=jnp.float32):
    return TpuBackend(arch, layout_of(), dtype)


class Loaded:
    """Pages in vector memory as an array, with what the kernel does to their reference."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype

    def reshape(self, *shape):
        return Loaded(self.array.reshape(*shape))

    def bitcast(self, dtype):
        """Two rows of 16 bits share a row of words, the first of them in the lower halves."""
        rows, size = self.array.shape
        return jax.lax.bitcast_convert_type(self.array.reshape(rows // 2, 2, size).swapaxes(1, 2), dtype)

    def __getitem__(self, index):
        return self.array[index]


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel on CPU, in Pallas' model of a TPU.

    Two operations that the model lacks are replaced: reading a reference reshaped or bitcast, and a masked store to a
    block that is higher than wide. The generic interpreter (`interpret=True`) would not do: between steps of the grid it
    forgets the scalars in which the kernel hands on which buffer it fetched to.
    """

    def masked_store(ref, value, mask):
        ref[...] = jnp.where(mask, value, ref[...])

    class ReadAtOnce(kernel.MultiPageAsyncCopyDescriptor):
        def wait(self):
            return Loaded(super().wait()[...])

    monkeypatch.setattr(kernel, "MultiPageAsyncCopyDescriptor", ReadAtOnce)
    monkeypatch.setattr(pltpu, "store", masked_store)
    # Without its jit, so that no interpreted trace stays behind in a cache.
    monkeypatch.setattr(tpu_attention, "ragged_paged_attention", inspect.unwrap(tpu_attention.ragged_paged_attention))
    with pltpu.force_tpu_interpret_mode():
        yield


def small_arch(heads=9, kv_heads=3, head_dim=64, layers=2):
    sizes = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_layers=layers)
    return dataclasses.replace(KNOWN["HuggingFaceTB/SmolLM2-135M"], vocab_size=32, hidden_size=16, intermediate_size=32, **sizes)


def layout_of(replica=1, tensor=1, **table):
    layout = Layout.rollout({"replica": replica, "tensor": tensor}, jax.devices()[: replica * tensor])
    return dataclasses.replace(layout, table={**ROLLOUT_TABLE, **table})


def dense(q, keys, values, position):
    """One query [H, K] at `position` over keys and values [s, J, K]: [H, K]."""
    group = q.shape[0] // keys.shape[1]
    out = np.empty(q.shape)
    for h, query in enumerate(q.astype(np.float64)):
        scores = keys[: position + 1, h // group] @ query / math.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[h] = weights @ values[: position + 1, h // group] / weights.sum()
    return out


@functools.partial(jax.jit, static_argnums=0)
def layers(make, pool, q, k, v, *args):
    """The attention of every layer, as the decoder's scan calls it; q, k and v have a leading axis L."""
    attend = make(*args, PAGES, PAGE)

    def one_layer(pool, x):
        out, pool = attend(*x, pool)
        return pool, out

    return jax.lax.scan(one_layer, pool, (jnp.arange(len(q)), q, k, v))


class Sequences:
    """Random queries, keys and values [R, S, T, heads, K] of every layer, and a pool full of numbers that are not theirs."""

    def __init__(self, backend, replicas, count, length, seed=0):
        self.backend, self.arch, self.dtype = backend, backend.arch, backend.dtype
        rng, arch = np.random.default_rng(seed), backend.arch
        shape = (arch.num_layers, replicas, count, length)
        self.q, self.k, self.v = (
            rng.normal(size=(*shape, n, arch.head_dim)).astype(np.float32)
            for n in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        )
        arrays = backend.pool_arrays(PAGES, PAGE)
        self.pool = {
            name: jax.device_put(jnp.asarray(rng.normal(size=a.shape) * 100, a.dtype), backend.layout.sharding(a.axes, a.shape))
            for name, a in arrays.items()
        }

    def run(self, make, args, index):
        """Every layer's attention of the tokens `index` i32[R, S, n]; [L, R, S, n, H, K]."""
        replicas, count, n = index.shape
        r, s = np.arange(replicas)[:, None, None], np.arange(count)[:, None]
        pick = lambda x: jnp.asarray(x[:, r, s, index].reshape(len(x), replicas, count * n, *x.shape[4:]), self.dtype)  # noqa: E731
        args = jax.tree.map(jnp.asarray, args)
        self.pool, out = layers(make, self.pool, pick(self.q), pick(self.k), pick(self.v), *args)
        return np.asarray(out, np.float32).reshape(-1, *index.shape, self.arch.num_heads, self.arch.head_dim)

    def error(self, out, index, lens):
        """Largest difference from the reference over the first `lens` i32[R, S] tokens of each."""
        worst = 0.0
        for layer, r, s in np.ndindex(*out.shape[:3]):
            for i in range(lens[r][s]):
                position = index[r, s, i]
                want = dense(self.q[layer, r, s, position], self.k[layer, r, s], self.v[layer, r, s], position)
                worst = max(worst, float(np.abs(out[layer, r, s, i] - want).max()))
        return worst


# Two slots' pages, in no order; the third slot is idle.
TABLE = np.array([[[5, 2, 9], [7, 3, 1], [0, 0, 0]]])


def prefill(x, start, lens, table=TABLE, length=2 * PAGE):
    """Caches `lens` tokens of each sequence from `start`: the outputs, and the positions of their rows."""
    replicas, prompts = np.shape(start)
    start, lens = np.asarray(start), np.asarray(lens)
    before = start.max() // PAGE
    new, prior = np.zeros((replicas, prompts, length // PAGE), int), np.zeros((replicas, prompts, before), int)
    for r, p in np.ndindex(replicas, prompts):
        first, last = start[r, p] // PAGE, -(-(start[r, p] + lens[r, p]) // PAGE)
        new[r, p, : last - first] = table[r, p, first:last]
        prior[r, p, :first] = table[r, p, :first]
    index = np.minimum(start[..., None] + np.arange(length), x.q.shape[3] - 1)
    return x.run(x.backend.prefill_attend, (new, prior, start, lens), index), index


def unshared(table):
    """The slots' pages as a `Table` in which nobody shares any."""
    replicas, slots = table.shape[:2]
    zeros = functools.partial(np.zeros, dtype=np.int32)
    members, shared = zeros((replicas, 0, 1)), zeros((replicas, 0, 1))
    rows = np.tile(np.arange(slots, dtype=np.int32), (replicas, 1))
    return Table(table, rows, rows, zeros((replicas, slots)), shared, zeros((replicas, 0)), members, zeros((replicas, slots)))


def decode(x, lens, table=None, tokens=1):
    table = unshared(TABLE) if table is None else table
    lens, active = np.asarray(lens), np.take_along_axis(table.own[..., 0], table.start, axis=1) > 0
    make = x.backend.decode_attend if tokens == 1 else functools.partial(x.backend.decode_attend, tokens=tokens)
    index = np.minimum(lens[..., None] + np.arange(tokens), x.q.shape[3] - 1)
    return x.run(make, (table, lens, active), index), index


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, pages_per_block, queries_per_block",
    [
        (9, 3, 64, 2, 5),  # SmolLM2's heads; several blocks of keys and of queries
        pytest.param(14, 2, 64, 16, 32, marks=pytest.mark.slow),  # those of Qwen2.5-0.5B
        pytest.param(5, 5, 160, 16, 32, marks=pytest.mark.slow),  # two blocks of heads, and every kind of padding
    ],
)
def test_prefill_in_chunks_then_decoding_equal_dense_attention(
    interpreted, monkeypatch, heads, kv_heads, head_dim, pages_per_block, queries_per_block
):
    monkeypatch.setattr(tpu_attention, "PAGES_PER_BLOCK", pages_per_block)
    monkeypatch.setattr(tpu_attention, "QUERIES_PER_BLOCK", queries_per_block)
    x = Sequences(TpuBackend(small_arch(heads, kv_heads, head_dim), layout_of(), jnp.float32), 1, 3, 12)
    out, index = prefill(x, [[0, 0, 0]], [[6, 4, 0]])
    assert x.error(out, index, [[6, 4, 0]]) < 1e-5
    assert not out[:, 0, 2].any() and not out[:, 0, 0, 6:].any()  # no text, no output
    out, index = prefill(x, [[4, 4, 0]], [[5, 1, 0]])  # the second chunk begins at a page, so two tokens come again
    assert x.error(out, index, [[5, 1, 0]]) < 1e-5
    for lens in ([[9, 5, 3]], [[10, 6, 3]]):
        out, index = decode(x, lens)
        assert x.error(out, index, [[1, 1, 0]]) < 1e-5 and np.isfinite(out).all()


def test_a_wrong_page_or_a_wrong_length_is_seen(interpreted):
    x = Sequences(backend_of(small_arch(2, 1)), 1, 3, 12)
    prefill(x, [[0, 0, 0]], [[7, 8, 0]])
    pool = x.pool
    out, index = decode(x, [[7, 8, 0]])
    assert x.error(out, index, [[1, 1, 0]]) < 1e-5
    for table, lens in ((TABLE[:, [1, 0, 2]], [[7, 8, 0]]), (TABLE[..., [1, 0, 2]], [[7, 8, 0]]), (TABLE, [[6, 7, 0]])):
        x.pool = pool
        out, _ = decode(x, lens, unshared(table))
        assert x.error(out, index, [[1, 1, 0]]) > 1e-2


# The same pages as in TABLE, but with the first two slots' first page in common and the third slot busy without it.
SHARED = Table(
    own=np.array([[[2, 9], [3, 1], [8, 0]]]), owner=np.array([[0, 1, 2]]), start=np.array([[0, 1, 2]]),
    skip=np.array([[1, 1, 0]]), shared=np.array([[[5, 0]]]), prefix=np.array([[0]]), members=np.array([[[1, 0]]]),
    place=np.array([[1, 0, 2]]),
)  # fmt: skip


def test_a_shared_prefix_is_read_by_its_members_and_by_nobody_else(interpreted):
    x = Sequences(backend_of(small_arch(2, 1)), 1, 3, 12)
    x.k[:, :, 1, :PAGE], x.v[:, :, 1, :PAGE] = x.k[:, :, 0, :PAGE], x.v[:, :, 0, :PAGE]
    table = np.array([[[5, 2, 9], [5, 3, 1], [8, 0, 0]]])
    prefill(x, [[0, 0, 0]], [[6, 5, 2]], table)
    pool = x.pool
    out, index = decode(x, [[6, 5, 2]], SHARED)
    assert x.error(out, index, [[1, 1, 1]]) < 1e-5
    x.pool = pool
    out, _ = decode(x, [[6, 5, 2]], SHARED._replace(shared=np.array([[[7, 0]]])))
    assert x.error(out, index, [[0, 0, 1]]) < 1e-5 < 1e-2 < x.error(out, index, [[1, 1, 0]])


# The same pages again, each a row of its own.
ROWS = Table(
    own=np.array([[[5], [2], [9], [7], [3], [1], [0]]]), owner=np.array([[0, 0, 0, 1, 1, 1, 2]]), start=np.array([[0, 3, 6]]),
    skip=np.zeros((1, 3), int), shared=np.zeros((1, 0, 1), int), prefix=np.zeros((1, 0), int),
    members=np.zeros((1, 0, 1), int), place=np.zeros((1, 3), int),
)  # fmt: skip


@pytest.mark.parametrize("kind, table", [(TpuBackend, SHARED), (XlaBackend, SHARED), (XlaBackend, ROWS)])
def test_several_new_tokens_see_what_is_cached_and_those_before_them(interpreted, kind, table):
    """The second crosses a page's border; the first runs out of its pages, and changes no other but the null page."""
    x = Sequences(kind(small_arch(4, 2), layout_of(), jnp.float32), 1, 3, 12)
    x.k[:, :, 1, :PAGE], x.v[:, :, 1, :PAGE] = x.k[:, :, 0, :PAGE], x.v[:, :, 0, :PAGE]
    first = [5, 5, 8] if table is SHARED else [5, 7, 0]
    pages = np.array([[[first[0], 2, 9], [first[1], 3, 1], [first[2], 0, 0]]])
    lens, known = [[10, 5, 0]], [[2, 4, 0]]
    prefill(x, [[0, 0, 0]], lens, pages, 3 * PAGE)
    pool = x.pool
    out, index = decode(x, lens, table, tokens=4)
    assert x.error(out, index, known) < 1e-5 and np.isfinite(out).all()
    changed = {int(page) % PAGES for n in pool for page in np.argwhere(np.array(pool[n] != x.pool[n]))[:, 1]}
    assert {0, 1} <= changed <= {0, 9, 3, 1, 8}  # 8 is the third slot's own, if it has one; the prefill has filled 9 and 3
    x.pool = pool
    x.k[:, :, 1, 5] += 1  # the second's first new token is seen by its later ones, too
    out, _ = decode(x, lens, table, tokens=4)
    x.k[:, :, 1, 5] -= 1
    assert x.error(out[:, :, :, 1:], index[..., 1:], [[0, 3, 0]]) > 1e-2


def test_bfloat16_is_as_good_as_its_rounding(interpreted):
    x = Sequences(backend_of(small_arch(9, 3), dtype=jnp.bfloat16), 1, 3, 12)
    out, index = prefill(x, [[0, 0, 0]], [[6, 4, 0]])
    assert 1e-5 < x.error(out, index, [[6, 4, 0]]) < 0.05


@pytest.mark.parametrize(
    "heads, kv_heads, mesh",
    [
        (4, 2, layout_of(2, 2)),
        (8, 2, layout_of(1, 4)),  # fewer KV heads than shards: each has its own one
        pytest.param(3, 3, layout_of(2, 2, act_kv_heads=None, act_heads=None), marks=pytest.mark.slow),  # all on every shard
    ],
)
def test_every_mesh_gives_dense_attention(interpreted, heads, kv_heads, mesh):
    replicas = mesh.batch_shards
    x = Sequences(TpuBackend(small_arch(heads, kv_heads), mesh, jnp.float32), replicas, 3, 12)
    table = np.concatenate([TABLE, TABLE + 1])[:replicas]
    lens = [[6, 4, 0], [3, 5, 0]][:replicas]
    out, index = prefill(x, [[0, 0, 0]] * replicas, lens, table)
    assert x.error(out, index, lens) < 1e-5
    out, index = decode(x, lens, unshared(table))
    assert x.error(out, index, [[1, 1, 0]] * replicas) < 1e-5


def test_a_page_table_beyond_scalar_memory_takes_several_calls(interpreted, monkeypatch):
    calls, kernel = [], tpu_attention.ragged_paged_attention
    monkeypatch.setattr(tpu_attention, "ragged_paged_attention", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    monkeypatch.setattr(tpu_attention, "TABLE_BYTES", 2 * 4 * tpu_attention.LANES)
    x = Sequences(TpuBackend(small_arch(2, 1), layout_of(), jnp.float32), 1, 3, 12)
    out, index = prefill(x, [[0, 0, 0]], [[6, 4, 0]])
    assert x.error(out, index, [[6, 4, 0]]) < 1e-5 and len(calls) == 2


def test_a_copied_page_serves_as_the_original(interpreted):
    x = Sequences(backend_of(small_arch(2, 1)), 1, 3, 12)
    prefill(x, [[0, 0, 0]], [[6, 4, 0]])
    pairs = jnp.array([[2, 0]]), jnp.array([[11, 0]])
    x.pool = x.backend.copy_pages(x.pool, *pairs, x.arch.num_layers, PAGES)
    table = np.where(TABLE == 2, 11, TABLE)
    out, index = decode(x, [[6, 4, 0]], unshared(table))
    assert x.error(out, index, [[1, 1, 0]]) < 1e-5


@pytest.mark.slow
def test_the_decoder_gives_the_same_hidden_states_as_over_the_xla_backend(interpreted):
    arch = small_arch(4, 2, 16)
    params = decoder.init_params(arch, 0)
    tokens, start = jnp.arange(8).reshape(1, 8) % 5, jnp.zeros((1, 1), jnp.int32)
    table, prior = jnp.array([[[5, 2]]]), jnp.zeros((1, 1, 0), jnp.int32)
    hidden = {}
    for backend in (XlaBackend(arch, layout_of(), jnp.float32), backend_of(arch)):
        pool = {name: jnp.zeros(a.shape, a.dtype) for name, a in backend.pool_arrays(PAGES, PAGE).items()}
        attend = backend.prefill_attend(table, prior, start, jnp.array([[6]]), PAGES, PAGE)
        forward = functools.partial(decoder.forward, arch, params, dtype=jnp.float32, constrain=decoder.unconstrained)
        first, pool = forward(tokens, jnp.arange(8)[None], attend, pool)
        attend = backend.decode_attend(unshared(table), jnp.array([[6]]), jnp.array([[True]]), PAGES, PAGE)
        second, _ = forward(tokens[:, :1], jnp.array([[6]]), attend, pool)
        hidden[backend.name] = np.concatenate([first[:, :6], second], axis=1)
    np.testing.assert_allclose(hidden["tpu"], hidden["xla"], atol=2e-5)


def test_heads_are_padded_to_what_fills_a_tile_and_no_further():
    assert [padded_kv_heads(n, jnp.bfloat16) for n in (1, 2, 3, 4, 5, 8, 12)] == [1, 2, 4, 4, 8, 8, 16]
    assert [padded_kv_heads(n, jnp.float32) for n in (1, 2, 3, 4, 5, 8, 12)] == [1, 2, 4, 4, 8, 8, 12]


def test_what_cannot_be_done_is_refused():
    with pytest.raises(UserError, match="dtype float16"):
        backend_of(small_arch(), dtype=jnp.float16)
    with pytest.raises(UserError, match="act_heads"):
        TpuBackend(small_arch(9, 3), layout_of(1, 2), jnp.float32)
    with pytest.raises(UserError, match="12 query heads over 4 KV heads .* rollout.mesh.tensor"):
        TpuBackend(small_arch(12, 4), layout_of(1, 6), jnp.float32)


# Against the TPU compiler ------------------------------------------------------------------------------------------------


def topology_layout(monkeypatch, topology, tensor):
    pytest.importorskip("libtpu", reason="the TPU compiler is in the extra `aot`")
    from jax.experimental import topologies

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is touched, so other processes may compile as well
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Layout.rollout({"replica": -1, "tensor": tensor}, devices)


def compiled(layout, arch, dtype, page_size, slots=16, width=32, chunk=0, num_pages=512, new=1):
    """The scan over layers with the attention alone, compiled; and the bytes of the pool on one device.

    Of a chunk of prompts, or where that is 0 of `new` tokens of each slot.
    """
    backend, replicas = TpuBackend(arch, layout, dtype), layout.batch_shards

    def shaped(shape, axes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(axes, shape))

    rows = lambda *shape: shaped((replicas, slots, *shape), ("batch",) + (None,) * (len(shape) + 1))  # noqa: E731
    if chunk:
        make, args = backend.prefill_attend, (rows(chunk // page_size), rows(width), rows(), rows())
    else:
        table = jax.tree.map(lambda x: shaped((replicas, *x.shape[1:]), ("batch",) + (None,) * (x.ndim - 1)), SHARED)
        table = table._replace(own=rows(width), skip=rows(), place=rows())
        make, args = backend.decode_attend, (table, rows(), shaped((replicas, slots), ("batch", None), jnp.bool_))
        make = functools.partial(make, tokens=new)
    tokens = slots * max(chunk, new)
    q = shaped((replicas, tokens, arch.num_heads, arch.head_dim), ("batch", None, "act_heads", None), dtype)
    k = shaped((replicas, tokens, arch.num_kv_heads, arch.head_dim), ("batch", None, "act_kv_heads", None), dtype)
    pool = {name: shaped(a.shape, a.axes, a.dtype) for name, a in backend.pool_arrays(num_pages, page_size).items()}

    def layers(q, k, v, pool, *args):
        attend = make(*args, num_pages, page_size)

        def one_layer(carry, layer):
            return attend(layer, carry[0], k, v, carry[1]), None

        return jax.lax.scan(one_layer, (q, pool), jnp.arange(arch.num_layers))[0]

    program = jax.jit(layers, donate_argnums=3).lower(q, k, k, pool, *args).compile()
    return program, sum(math.prod(p.sharding.shard_shape(p.shape)) * p.dtype.itemsize for p in pool.values())


SMOL, QWEN, LLAMA = "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.1-8B"
TOPOLOGIES = ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"]


def check_program(program, pool_bytes, activation_bytes=0):
    memory, text = program.memory_analysis(), program.as_text()
    assert "tpu_custom_call" in text  # the kernel is in it
    assert not any(f"{name}(" in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    assert memory.alias_size_in_bytes >= pool_bytes  # the pool is given back where it was
    assert memory.temp_size_in_bytes < pool_bytes / 4 + activation_bytes


# Programs of a chip that is not there are written to the compilation cache, but cannot be read back.
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name, tensor", [(SMOL, 1), (QWEN, 2), (LLAMA, 4)])
def test_decoding_compiles_for_tpus_in_place_and_without_talk_between_chips(monkeypatch, topology, name, tensor):
    arch = dataclasses.replace(KNOWN[name], num_layers=4)
    check_program(*compiled(topology_layout(monkeypatch, topology, tensor), arch, jnp.bfloat16, 16))


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "name, tensor, new",
    [
        (SMOL, 1, 5),
        *(pytest.param(name, tensor, new, marks=pytest.mark.slow) for name, tensor, new in ((QWEN, 2, 2), (LLAMA, 4, 9))),
    ],
)
def test_several_new_tokens_of_a_slot_compile_for_tpus_likewise(monkeypatch, topology, name, tensor, new):
    """What speculation asks for."""
    arch = dataclasses.replace(KNOWN[name], num_layers=4)
    check_program(*compiled(topology_layout(monkeypatch, topology, tensor), arch, jnp.bfloat16, 16, new=new))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "name, tensor", [(SMOL, 1), (QWEN, 1), (QWEN, 2), (LLAMA, 1), (LLAMA, 8), ("HuggingFaceTB/SmolLM2-1.7B", 1)]
)
@pytest.mark.parametrize("page_size, chunk", [(16, 0), (16, 256), (128, 0), (128, 256)])
def test_everything_compiles_for_tpus(monkeypatch, topology, dtype, name, tensor, page_size, chunk):
    arch = dataclasses.replace(KNOWN[name], num_layers=4)
    layout = topology_layout(monkeypatch, topology, tensor)
    # queries, keys, values and outputs of a chunk, some of them padded
    activations = 8 * max(chunk, 1) * 4 * 2 * arch.num_heads // tensor * 128 * jnp.dtype(dtype).itemsize
    check_program(*compiled(layout, arch, dtype, page_size, slots=4, chunk=chunk), activations)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_long_tables_of_many_slots_fit_scalar_memory(monkeypatch):
    arch = dataclasses.replace(KNOWN[LLAMA], num_layers=2)
    layout = topology_layout(monkeypatch, "v5e:2x4", 8)
    check_program(*compiled(layout, arch, jnp.bfloat16, 16, slots=256, width=2048, num_pages=4096))
