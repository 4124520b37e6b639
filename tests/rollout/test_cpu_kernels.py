"""The CPU backend's kernels: each against NumPy, a decoder's step against the decoder, and what happens without a compiler."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.models import decoder
from jrl.models.arch import KNOWN
from jrl.models.load import RANDOM
from jrl.rollout import cpu_backend, paged_attention, sampler
from jrl.rollout.backends import XlaBackend, choose_backend
from jrl.rollout.native import library, ops
from jrl.sharding.layout import Layout

TINY = RANDOM["tiny"]
LAYERS = 2


@pytest.fixture(autouse=True)
def kernels(request):
    if "compiler" not in request.node.name and (reason := library.reason_against()):
        pytest.skip(reason)


def layout_of(replica=1):
    return Layout.rollout({"replica": replica, "tensor": 1}, jax.devices()[:replica])


def draw(seed, *shape):
    return np.random.default_rng((seed, *shape)).standard_normal(shape, dtype=np.float32)


def packed(*weights, transposed=False):
    """Of [L, K, N] each, taking turns."""
    layers, k, n = weights[0].shape
    room = jnp.zeros(ops.packed_shape(layers, k, n, len(weights)))
    for i, w in enumerate(weights):
        w = w.swapaxes(1, 2) if transposed else w
        room = ops.pack(room, w, ops.Part(first=i, step=len(weights)), transposed=transposed)
    return room


# Products ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "m, k, n", [(1, 16, 48), (3, 5, 7), (8, 64, 96), (13, 130, 50), (32, 200, 193), (33, 64, 1), (7, 127, 145)]
)
def test_a_product_is_numpys(m, k, n, transposed):
    x, w = draw(1, m, k), draw(2, LAYERS, k, n)
    busy = np.ones(m, bool)
    for layer in range(LAYERS):
        got = ops.product(x, packed(w, transposed=transposed), n, layer, busy)
        np.testing.assert_allclose(got, x.astype(np.float64) @ w[layer], rtol=1e-5, atol=1e-5 * k**0.5)
    assert np.abs(got - x @ w[0]).max() > 0.1  # the layers are not alike


def test_what_stands_around_a_product():
    m, k, n = 11, 70, 60
    x, residual, w, up = draw(1, m, k), draw(2, m, n), draw(3, LAYERS, k, n), draw(4, LAYERS, k, n)
    norm, bias, eps = draw(5, LAYERS, k), draw(6, LAYERS, n), 1e-2
    busy = np.arange(m) % 3 != 1
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps) * norm[1]
    got = ops.product(x, packed(w), n, 1, busy, norm=norm, bias=bias, residual=residual, eps=eps)
    want = normed @ w[1] + bias[1] + residual
    np.testing.assert_allclose(got, np.where(busy[:, None], want, 0), atol=1e-4)
    got = ops.product(x, packed(w, up), n, 1, busy, norm=norm, eps=eps, gated=True)
    gate = normed @ w[1]
    want = gate / (1 + np.exp(-gate)) * (normed @ up[1])
    np.testing.assert_allclose(got, np.where(busy[:, None], want, 0), atol=1e-3, rtol=1e-5)


def test_matrices_beside_each_other_and_silu_of_large_numbers():
    parts = [draw(i, LAYERS, 20, n) for i, n in enumerate((50, 3, 61))]
    room, offset = jnp.zeros(ops.packed_shape(LAYERS, 20, 114)), 0
    for w in parts:
        room, offset = ops.pack(room, w, ops.Part(offset=offset)), offset + w.shape[-1]
    x, busy = draw(9, 5, 20), np.ones(5, bool)
    np.testing.assert_allclose(ops.product(x, room, 114, 1, busy), x @ np.concatenate(parts, -1)[1], atol=1e-4)
    gate = np.array([-1e4, -100.0, -80.0, -1.0, 0.0, 1.0, 80.0, 100.0, 1e4], np.float32)[None, None]
    got = ops.product(np.ones((1, 1), np.float32), packed(gate, np.ones_like(gate)), 9, 0, busy[:1], gated=True)
    want = gate[0, 0] / (1 + np.exp(np.minimum(-gate[0, 0].astype(np.float64), 500)))
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-30)


def test_a_row_does_not_depend_on_its_company():
    """To the last bit, whatever stands beside it and wherever it stands."""
    w, x = packed(draw(1, 1, 100, 130)), draw(2, 40, 100)
    whole = np.asarray(ops.product(x, w, 130, 0, np.ones(40, bool)))
    for rows in ([3], [3, 39], range(5, 31), range(0, 40, 3)):
        busy = np.isin(np.arange(40), list(rows))
        np.testing.assert_array_equal(ops.product(x, w, 130, 0, busy)[busy], whole[busy])
        np.testing.assert_array_equal(ops.product(x[busy], w, 130, 0, busy[busy]), whole[busy])


# Attention -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads, kv_heads, size, page, tokens",
    [(9, 3, 64, 16, 1), (4, 4, 16, 4, 1), (7, 1, 20, 8, 3), (12, 2, 128, 16, 2), (2, 1, 6, 2, 1)],
)
def test_attention_is_numpys_and_the_pool_holds_what_is_new(heads, kv_heads, size, page, tokens):
    slots, width, num_pages = 5, 6, 40
    lens = np.array([0, 1, page - 1, page * (width - 1), 3 * page], np.int32)
    busy = np.array([True, True, True, True, False])
    pages = np.random.default_rng(0).permutation(np.arange(1, num_pages))[: slots * width].reshape(slots, width).astype(np.int32)
    pages[2, 1:] = 0  # has no page for what comes after its first one
    pools = {n: draw(i, 1, LAYERS * num_pages, kv_heads, page, size) for i, n in enumerate("kv")}
    q, k, v = draw(3, slots * tokens, heads, size), *(draw(i, slots * tokens, kv_heads, size) for i in (4, 5))
    slots_of = ops.Slots(jnp.asarray(lens), jnp.asarray(busy), jnp.asarray(pages), num_pages)
    attend = cpu_backend.PagedAttention(slots_of)
    [out], pool = attend(1, q[None], k[None], v[None], jax.tree.map(jnp.array, pools))
    want = {n: x.copy() for n, x in pools.items()}
    for b in range(slots):
        for t in range(tokens):
            at, row = lens[b] + t, b * tokens + t
            if not busy[b]:
                assert not np.asarray(out[row]).any()
            elif at // page < width and pages[b, at // page]:
                want["k"][0, num_pages + pages[b, at // page], :, at % page] = k[row]
                want["v"][0, num_pages + pages[b, at // page], :, at % page] = v[row]
    for n in "kv":
        np.testing.assert_array_equal(pool[n], want[n])
    for b in np.flatnonzero(busy):
        rows = num_pages + pages[b]
        keys, values = (want[n][0, rows].swapaxes(1, 2).reshape(-1, kv_heads, size).astype(np.float64) for n in "kv")
        for t in range(tokens):
            seen = lens[b] + t + 1
            if (seen - 1) // page >= width or not pages[b, (seen - 1) // page]:
                assert np.isfinite(out[b * tokens + t]).all()
                continue
            for h in range(heads):
                j = h // (heads // kv_heads)
                scores = keys[:seen, j] @ q[b * tokens + t, h] / size**0.5
                weights = np.exp(scores - scores.max())
                np.testing.assert_allclose(out[b * tokens + t, h], weights / weights.sum() @ values[:seen, j], atol=1e-5)


# Sampling ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [3, 16, 256, 300, 1000, 5003])
def test_it_samples_what_the_sampler_samples(vocab):
    m = 200
    logits, uniform = 3 * draw(vocab, m, vocab), np.random.default_rng(1).random(m, np.float32)
    logits[::7, : vocab // 2] = logits[1::7, vocab // 2 :] = -np.inf
    uniform[:3] = 0, np.nextafter(np.float32(1), np.float32(0)), 0.5
    temperature = np.where(np.arange(m) % 5 == 0, 0, 0.7).astype(np.float32)
    busy = np.arange(m) % 11 != 10
    token, logprob = ops.sample(logits, temperature, uniform, busy)
    want, logprobs = sampler.sample(logits, temperature, uniform)
    assert not np.asarray(token)[~busy].any() and not np.asarray(logprob)[~busy].any()
    busy[1] = False  # at the very end rounding decides, but never for a token that cannot be
    assert np.isfinite(logprob[1])
    np.testing.assert_array_equal(np.asarray(token)[busy], np.asarray(want)[busy])
    np.testing.assert_allclose(np.asarray(logprob)[busy], np.asarray(logprobs)[busy], atol=2e-5)
    assert (np.asarray(token)[busy][::7] != 0).any() and len(set(np.asarray(token).tolist())) > min(vocab, 20) / 2


def test_what_is_not_a_number_stays_so():
    """Broken weights are to be seen in the logprobs; the token is one of the vocabulary all the same."""
    logits, ones = draw(1, 4, 700), np.ones(4, np.float32)
    logits[1, 5] = logits[2, 699] = np.nan
    token, logprob = ops.sample(logits, ones, ones / 2, ones > 0)
    assert np.isnan(logprob).tolist() == [False, True, True, False] and (np.asarray(token) < 700).all()
    x = draw(2, 3, 40)
    x[1, 7] = np.nan
    w = packed(draw(3, 1, 40, 50), draw(4, 1, 40, 50))
    got = ops.product(x, w, 50, 0, ones[:3] > 0, norm=np.ones((1, 40), np.float32), gated=True)
    assert np.isnan(got[1]).all() and np.isfinite(np.asarray(got)[[0, 2]]).all()


# A step of the decoder -----------------------------------------------------------------------------------------------

ARCHS = {
    "tied": TINY,
    "untied": dataclasses.replace(TINY, tie_embeddings=False, vocab_size=101),
    "qwen2": dataclasses.replace(TINY, family="qwen2", qkv_bias=True, head_dim=12),
    "qwen3": dataclasses.replace(TINY, family="qwen3", qk_norm=True, qkv_bias=True, o_bias=True, intermediate_size=50),
    "llama with biases": dataclasses.replace(TINY, family="llama", qkv_bias=True, o_bias=True, mlp_bias=True),
}


@pytest.mark.parametrize("name", ARCHS)
def test_a_step_is_the_decoders(name):
    arch, layout, slots, page, num_pages = ARCHS[name], layout_of(), 3, 4, 9
    params = decoder.init_params(arch, 0, layout)
    params = jax.tree.map(lambda x: x + 0.1 * draw(7, *x.shape), params)  # no bias is zero, no norm one
    table = paged_attention.Table(
        own=np.arange(1, 7).reshape(1, slots, 2), owner=np.arange(slots)[None], start=np.arange(slots)[None],
        skip=np.zeros((1, slots), np.int32), shared=np.zeros((1, 0, 1), np.int32), prefix=np.zeros((1, 0), np.int32),
        members=np.zeros((1, 0, 1), np.int32), place=np.zeros((1, slots), np.int32),
    )  # fmt: skip
    lens, busy, tokens = np.array([[5, 0, 3]], np.int32), np.array([[True, True, False]]), np.array([[3, 60, 5]], np.int32)
    results = []
    for kind in (XlaBackend, cpu_backend.CpuBackend):
        backend = kind(arch, layout, jnp.float32)
        shape = backend.pool_arrays(num_pages, page)["k"].shape
        pool = {"k": jnp.asarray(draw(1, *shape)), "v": jnp.asarray(draw(2, *shape))}
        read = backend.decode_params(params, False)
        assert isinstance(read, cpu_backend.Packed) == (backend.name == "cpu" and not arch.mlp_bias)

        @jax.jit
        def step(read, pool, table, backend=backend):
            return backend.logits(read, tokens, lens, backend.decode_attend(table, lens, busy, num_pages, page), pool, busy)

        results.append(step(read, pool, table))
    (want, pool), (got, other) = results
    assert got.shape == want.shape == (1, slots, arch.vocab_size)
    np.testing.assert_allclose(got[0, :2], want[0, :2], atol=1e-4 * np.abs(want).max())
    for n in "kv":
        used = np.s_[0, [layer * num_pages + p for layer in range(arch.num_layers) for p in range(1, 5)]]
        np.testing.assert_allclose(other[n][used], pool[n][used], atol=1e-4)


# Where it runs -------------------------------------------------------------------------------------------------------


def test_it_is_chosen_where_it_can_run_and_others_say_why_not():
    choose = lambda dtype=jnp.float32, kv="same", layout=None: choose_backend(  # noqa: E731
        "auto", "cpu", KNOWN["Qwen/Qwen2.5-0.5B"], layout or layout_of(), dtype, kv
    )
    assert choose()[0].name == "cpu" and "preferred" in dict(choose()[1])["xla"]
    for options, part in (
        ({"dtype": jnp.bfloat16}, "dtype bfloat16"),
        ({"kv": "int8"}, "kv='int8'"),
        ({"layout": layout_of(2)}, "the rollout mesh has 2"),
    ):
        backend, reasons = choose(**options)
        assert backend.name == "xla" and part in dict(reasons)["cpu"]
    with pytest.raises(UserError, match="this is tpu; choose 'xla' or 'auto'"):
        choose_backend("cpu", "tpu", TINY, layout_of(), jnp.float32)


@pytest.mark.parametrize(
    "compiler, reason", [("", "need a C\\+\\+ compiler"), ("false", "false does not compile its kernels: no message")]
)
def test_without_a_compiler_it_is_xla_and_the_log_says_why(monkeypatch, tmp_path, compiler, reason):
    false = pathlib.Path("/bin/false")
    monkeypatch.setenv("PATH", str(false.parent) if compiler and false.exists() else str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(library.Unavailable, match=reason):
        library.panel.__wrapped__()
    monkeypatch.setattr(library, "reason_against", lambda: "there is no compiler")
    backend, reasons = choose_backend("auto", "cpu", TINY, layout_of(), jnp.float32)
    assert backend.name == "xla" and "there is no compiler" in dict(reasons)["cpu"]
    with pytest.raises(UserError, match="there is no compiler; choose 'xla' or 'auto'"):
        choose_backend("cpu", "cpu", TINY, layout_of(), jnp.float32)
