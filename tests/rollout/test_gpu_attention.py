"""The GPU backend without a GPU: the kernel's numbers in Pallas' interpreter, and lowered for CUDA.

The reference is the `xla` backend over the same pool, which the tests of the TPU backend hold against dense attention.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import force_gpu_interpret_mode
from jax.experimental.pallas import mosaic_gpu as plgpu

from jrl.errors import UserError
from jrl.models.arch import KNOWN
from jrl.rollout import gpu_attention
from jrl.rollout.backends import XlaBackend, choose_backend
from jrl.rollout.gpu_attention import GpuBackend
from jrl.rollout.paged_attention import Table
from jrl.sharding.layout import Layout

PAGE, PAGES, LAYERS = 16, 12, 2


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel on CPU, in Pallas' model of a GPU.

    Two operations that the model lacks are replaced: an array in a chosen layout, and the product on the tensor cores where an
    operand is transposed or in registers.
    """

    def product(a, b, transposed=False):
        return jnp.dot(a[...], b[...].T if transposed else b[...], preferred_element_type=jnp.float32)

    def iota(dtype, shape, axis, layout):
        return jax.lax.broadcasted_iota(dtype, shape, axis)

    monkeypatch.setattr(plgpu, "broadcasted_iota", iota)
    monkeypatch.setattr(gpu_attention, "_product", product)
    with force_gpu_interpret_mode():
        yield


def small_arch(heads=9, kv_heads=3, head_dim=64):
    sizes = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_layers=LAYERS)
    return dataclasses.replace(KNOWN["HuggingFaceTB/SmolLM2-135M"], vocab_size=32, hidden_size=16, intermediate_size=32, **sizes)


def layout_of(tensor=1):
    return Layout.rollout({"replica": 1, "tensor": tensor}, jax.devices()[:tensor])


NONE = np.zeros((0, 1))


def table(own, owner, start, skip, shared=NONE, members=NONE, place=(0, 0, 0), prefix=None):
    prefix = np.arange(len(shared)) if prefix is None else prefix
    return Table(*(jnp.asarray(x, jnp.int32)[None] for x in (own, owner, start, skip, shared, prefix, members, place)))


# Three slots of 39, 21 and 18 cached tokens; the last one is idle.
LENS = [39, 21, 18]
APART = table([[5, 2, 9], [7, 3, 0], [0, 0, 0]], [0, 1, 2], [0, 1, 2], [0, 0, 0])
ROWS = table([[5], [2], [9], [7], [3], [0], [0]], [0, 0, 0, 1, 1, 2, 3], [0, 3, 5], [0, 0, 0])
# The first two begin with page 5; the second prefix has no members.
SHARED = table([[2, 9], [3, 0], [0, 0]], [0, 1, 2], [0, 1, 2], [1, 1, 0], [[5, 0], [0, 0]], [[1, 0], [2, 2]], [1, 0, 4])
# The first two, now of 39 and 35, begin with pages 5 and 2, each in a row of its own.
LONG = table([[9], [3], [0]], [0, 1, 2], [0, 1, 2], [2, 2, 0], [[5], [2], [0]], [[1, 0]], [1, 0, 2], [0, 0, 1])


class Inputs:
    """Random queries, keys, values and a pool, rounded to 16 bits."""

    def __init__(self, arch, tokens=1, dtype=jnp.bfloat16):
        rng = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
        self.tokens, new = tokens, len(LENS) * tokens
        self.q = draw(1, new, arch.num_heads, arch.head_dim)
        self.k, self.v = draw(1, new, arch.num_kv_heads, arch.head_dim), draw(1, new, arch.num_kv_heads, arch.head_dim)
        shape = (1, LAYERS * PAGES, arch.num_kv_heads, PAGE, arch.head_dim)
        self.pool = {"k": draw(*shape), "v": draw(*shape)}

    def run(self, backend, pages, lens=LENS, layer=1):
        """(output of the busy slots' tokens, pool after it)"""
        lens, active = jnp.asarray([lens]), jnp.asarray([[True, True, False]])

        def attend(pages, layer, pool):
            call = backend.decode_attend(pages, lens, active, PAGES, PAGE, self.tokens)
            return call(layer, self.q, self.k, self.v, pool)

        out, pool = jax.jit(attend)(pages, layer, self.pool)
        assert np.isfinite(np.asarray(out, np.float32)).all()
        return np.asarray(out, np.float32)[0, : 2 * self.tokens], pool


def difference(a, b):
    return float(np.abs(a - b).max())


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, pages, tokens",
    [
        (9, 3, 64, SHARED, 1),  # SmolLM2's heads
        (2, 1, 64, LONG, 1),
        (4, 2, 64, ROWS, 3),  # some of the new tokens cross a page's border
        pytest.param(14, 2, 64, APART, 1, marks=pytest.mark.slow),  # those of Qwen2.5-0.5B
        pytest.param(8, 1, 128, SHARED, 5, marks=pytest.mark.slow),  # more than 64 queries read the prefix
        pytest.param(2, 2, 256, APART, 1, marks=pytest.mark.slow),
    ],
)
def test_decoding_gives_what_xla_gives(interpreted, heads, kv_heads, head_dim, pages, tokens):
    """Up to rounding of weights and outputs to 16 bits."""
    arch = small_arch(heads, kv_heads, head_dim)
    x = Inputs(arch, tokens)
    lens = [39, 35, 18] if pages is LONG else LENS
    want, pool = x.run(XlaBackend(arch, layout_of(), jnp.bfloat16), pages, lens)
    got, pool_after = x.run(GpuBackend(arch, layout_of(), jnp.bfloat16), pages, lens)
    assert np.abs(want).max() > 0.5 and difference(got, want) < 0.02
    assert all((pool[name] == pool_after[name]).all() for name in pool)


def test_a_prefix_of_several_blocks_is_added_up(interpreted, monkeypatch):
    """Of 64 tokens instead of 128; the last one is beyond what anybody sees."""
    monkeypatch.setattr(gpu_attention, "BLOCK_TOKENS", 4 * PAGE)
    arch = small_arch(2, 1)
    pages = table([[0], [0], [0]], [0, 1, 2], [0, 1, 2], [5, 5, 0], [[5, 2, 9, 7, 3, 0, 0, 0]], [[0, 1]], [0, 1, 2])
    x, lens = Inputs(arch), [5 * PAGE, 5 * PAGE, 3]
    want, _ = x.run(XlaBackend(arch, layout_of(), jnp.bfloat16), pages, lens)
    got, _ = x.run(GpuBackend(arch, layout_of(), jnp.bfloat16), pages, lens)
    assert difference(got, want) < 0.02
    for changed in ([5, 2, 9, 3, 7, 0, 0, 0], [5, 2, 9, 7, 4, 0, 0, 0]):  # another order is the same sum, another page is not
        got, _ = x.run(GpuBackend(arch, layout_of(), jnp.bfloat16), pages._replace(shared=jnp.asarray([[changed]])), lens)
        assert (difference(got, want) < 0.02) == (set(changed) == {0, 2, 3, 5, 7, 9})


def test_a_wrong_page_or_length_is_seen(interpreted):
    arch = small_arch(2, 1)
    x, backend = Inputs(arch), GpuBackend(arch, layout_of(), jnp.bfloat16)
    want, _ = x.run(XlaBackend(arch, layout_of(), jnp.bfloat16), APART)
    assert difference(x.run(backend, APART)[0], want) < 0.02
    wrong = APART._replace(own=APART.own.at[0, 0, 0].set(4))
    for pages, lens, layer in ((wrong, LENS, 1), (APART, [38, 20, 18], 1), (APART, LENS, 0)):
        assert difference(x.run(backend, pages, lens, layer)[0], want) > 0.1


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, page_size, tokens, tensor",
    [(9, 3, 64, 16, 1, 1), (32, 8, 128, 16, 5, 4), (8, 4, 256, 64, 1, 2), (14, 2, 64, 128, 1, 4), (7, 1, 192, 32, 2, 1)],
)
def test_the_kernel_lowers_for_cuda(heads, kv_heads, head_dim, page_size, tokens, tensor):
    """That decides its layouts and counts its shared memory: the errors that need no GPU. Heads are split over `tensor` GPUs."""
    arch, layout = small_arch(heads, kv_heads, head_dim), layout_of(tensor if heads % tensor == 0 else 1)
    backend, dtype = GpuBackend(arch, layout, jnp.bfloat16), jnp.bfloat16
    pool = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in backend.pool_arrays(PAGES, page_size).items()}
    q, k = (jax.ShapeDtypeStruct((1, 3 * tokens, n, head_dim), dtype) for n in (heads, kv_heads))

    def attend(q, k, v, pool):
        lens, active = jnp.asarray([LENS]), jnp.ones((1, 3), bool)
        return backend.decode_attend(SHARED, lens, active, PAGES, page_size, tokens)(0, q, k, v, pool)

    text = jax.jit(attend).trace(q, k, k, pool).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2  # rows of their own, and shared prefixes


def test_shared_memory_is_counted_when_lowering(monkeypatch):
    monkeypatch.setattr(gpu_attention, "_block_tokens", lambda head_dim: 128)
    half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    whole = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    traced = jax.jit(functools.partial(gpu_attention.over_pages, tokens=1)).trace(
        half(1, 1, 8, 256), half(4, 1, 16, 256), half(4, 1, 16, 256), whole(1, 8), whole(1)
    )
    with pytest.raises(ValueError, match="shared memory"):
        traced.lower(lowering_platforms=("cuda",))


def test_what_cannot_be_done_is_refused():
    def make(dtype=jnp.bfloat16, page_size=16, **sizes):
        return GpuBackend(small_arch(**sizes), layout_of(), dtype).pool_arrays(PAGES, page_size)

    assert make(page_size=128)["k"].shape == make(page_size=16, head_dim=64)["k"].shape[:3] + (128, 64)
    with pytest.raises(UserError, match="dtype float32"):
        make(jnp.float32)
    with pytest.raises(UserError, match="heads of 80"):
        make(head_dim=80)
    for page_size, head_dim in ((8, 64), (48, 64), (128, 256)):
        fitting = "16, 32, 64, 128" if head_dim == 64 else "16, 32, 64"
        with pytest.raises(UserError, match=f"pages of {page_size} tokens .* page_size of {fitting}$"):
            make(page_size=page_size, head_dim=head_dim)


def test_it_is_chosen_by_name_only_and_says_that_it_has_not_been_measured(caplog):
    def choose(name, platform, kv="same", mesh=None):
        devices = mesh or jax.sharding.AbstractMesh((1, 1), ("replica", "tensor"))
        layout = dataclasses.replace(layout_of(), mesh=devices)
        return choose_backend(name, platform, small_arch(), layout, jnp.bfloat16, kv)

    backend, reasons = choose("auto", "gpu")
    assert backend.name == "xla" and "not been measured" in dict(reasons)["gpu"] and not caplog.records
    assert choose("gpu", "gpu")[0].name == "gpu" and "not been measured" in caplog.text
    with pytest.raises(UserError, match="this is cpu; choose 'xla' or 'auto'"):
        choose("gpu", "cpu")
    with pytest.raises(UserError, match="kv='int8'"):
        choose("gpu", "gpu", "int8")
    with pytest.raises(UserError, match="for Hopper GPUs"):
        choose("gpu", "gpu", mesh=layout_of().mesh)  # of CPUs
