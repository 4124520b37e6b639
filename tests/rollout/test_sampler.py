"""The sampler against the exact cumulative distribution, and against one computed by sorting where it is cut."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jrl.rollout.sampler import (
    best_logprobs,
    control_rows,
    inverse_cdf,
    ordered_bits,
    sample,
    sample_controlled,
    threshold,
    uniforms,
)
from jrl.rollout.sampling import Sampling

KEY = jax.random.key(5)
SIZES = [1, 5, 256, 257, 600]  # below, at and above one block of the sum


def exact_choice(p, u):
    """The first index whose cumulative sum exceeds u * total, in float64."""
    return np.searchsorted(np.cumsum(p.astype(np.float64)), u * p.astype(np.float64).sum(), side="right")


@pytest.mark.parametrize("size", SIZES)
def test_inverse_cdf_is_the_exact_one(size):
    # Whole numbers that sum to a power of two: every sum and product is exact, so even the steps themselves must agree.
    rng = np.random.default_rng(size)
    counts = rng.multinomial(1024, rng.dirichlet(np.full(size, 0.3))).astype(np.float32)
    u = np.arange(1024, dtype=np.float32) / 1024
    chosen = np.asarray(jax.jit(inverse_cdf)(jnp.tile(counts, (1024, 1)), u))
    np.testing.assert_array_equal(chosen, exact_choice(counts, u))
    np.testing.assert_array_equal(np.bincount(chosen, minlength=size), counts)


def test_inverse_cdf_by_hand():
    p = jnp.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])  # cumulative 0 1 1 3 4 4
    u = np.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-24], np.float32)
    choose = jax.jit(inverse_cdf)
    np.testing.assert_array_equal(choose(jnp.tile(p, (2, 3, 1)), u.reshape(2, 3)), [[1, 1, 3], [3, 4, 4]])
    assert (choose(jnp.full((2, 3, 6), jnp.nan), u.reshape(2, 3)) < 6).all()


def tree_cumsum(x, axis):
    """The running sum in another order of additions, that of some accelerators: it may rise where a term is zero."""
    return jax.lax.associative_scan(jnp.add, x, axis=axis)


@pytest.mark.parametrize("size", [257, 4096])
@pytest.mark.parametrize("tree", [False, True], ids=["cumsum", "tree"])
def test_what_has_probability_zero_is_never_chosen(size, tree, monkeypatch):
    """Also with uniforms put on the steps of the sums, where rounding could favour a neighbour."""
    if tree:
        monkeypatch.setattr(jnp, "cumsum", tree_cumsum)
    rng = np.random.default_rng(size)
    p = rng.random(size).astype(np.float32) * (rng.random(size) < 0.3)
    p[-200:] = 0
    if size > 1024:
        p[512:1024] = 0  # whole blocks of zeros
    steps = np.cumsum(p.astype(np.float64)) / p.astype(np.float64).sum()
    near = [np.clip(steps + d, 0, 1 - 2**-24) for d in np.arange(-8, 9) * 2**-25]
    u = np.concatenate(near).astype(np.float32)
    choose = jax.jit(jax.vmap(inverse_cdf, (None, 0)))
    chosen = np.concatenate([choose(p, part) for part in u.reshape(17, -1)])
    assert (p[chosen] > 0).all()
    wrong = chosen != exact_choice(p, u.astype(np.float64))
    gap = np.abs(steps[:, None] - u[wrong]).min(axis=0)
    assert (gap < 1e-6).all()  # a choice may differ only within rounding of a step
    assert len(set(chosen.tolist())) > 0.9 * (p > 0).sum()


def test_the_samples_have_the_distribution_of_the_logits():
    rng = np.random.default_rng(0)
    logits, n = rng.normal(0, 2.0, 300).astype(np.float32), 40_000
    u = uniforms(KEY, np.arange(n, dtype=np.uint32), np.zeros(n, np.int32))
    drawn, _ = jax.jit(jax.vmap(sample, (None, None, 0)))(logits, jnp.float32(0.7), u)
    counts = np.bincount(drawn, minlength=300)

    def p_value(temperature):
        p = np.exp(logits.astype(np.float64) / temperature)
        p /= p.sum()
        rare = p * n < 5  # too few to expect: counted together
        observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, p * n))
        return stats.chisquare(observed, expected).pvalue

    assert p_value(0.7) > 0.01
    assert p_value(0.72) < 1e-6


def test_uniforms_depend_on_key_request_and_position_alone():
    request, position = np.array([[3, 9, 2**32 - 1]], np.uint32), np.array([[0, 4, 7]], np.int32)
    u = np.asarray(uniforms(KEY, request, position))
    assert u.shape == (1, 3) and u.dtype == np.float32
    for i, (r, p) in enumerate(zip(request[0], position[0], strict=True)):
        by_hand = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(KEY, r), p))
        assert u[0, i] == by_hand
    order = np.array([2, 0, 1])
    np.testing.assert_array_equal(uniforms(KEY, request[:, order], position[:, order]), u[:, order])
    others = [(jax.random.key(6), request, position), (KEY, request + 1, position), (KEY, request, position + 1)]
    for other in others:
        assert (np.asarray(uniforms(*other)) != u).all()


def test_uniforms_fill_the_unit_interval():
    request, position = np.meshgrid(np.arange(100, dtype=np.uint32), np.arange(100, dtype=np.int32))
    u = np.asarray(uniforms(KEY, request, position)).ravel()
    assert u.min() >= 0 and u.max() < 1 and len(np.unique(u)) > 9900
    assert stats.kstest(u, "uniform").pvalue > 0.01 and stats.kstest(u**1.05, "uniform").pvalue < 1e-3


def test_each_slot_has_its_own_temperature_and_greedy_reports_temperature_one():
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (2, 3, 300)).astype(np.float32)
    temperature = np.array([[0.0, 0.5, 1.0], [2.0, 0.0, 0.7]], np.float32)
    u = rng.random((2, 3), np.float32)
    token, logprob = jax.jit(sample)(logits, temperature, u)
    for at in np.ndindex(2, 3):
        row = logits[at].astype(np.float64) / (temperature[at] or 1.0)
        logp = row - row.max() - np.log(np.exp(row - row.max()).sum())
        expected = row.argmax() if temperature[at] == 0 else exact_choice(np.exp(logp), u[at])
        assert token[at] == expected
        assert logprob[at] == pytest.approx(logp[expected], abs=1e-5)


def test_extreme_logits_give_finite_logprobs():
    logits = np.full((3, 300), -1e4, np.float32)
    logits[:, 290] = 1e4
    token, logprob = jax.jit(sample)(logits, np.array([0.0, 1.0, 0.1], np.float32), np.array([0.0, 0.0, 1 - 2**-24], np.float32))
    np.testing.assert_array_equal(token, [290] * 3)
    np.testing.assert_array_equal(logprob, [0.0] * 3)


# Controls ----------------------------------------------------------------------------------------------------------

EOS = 3
sample_all = jax.jit(sample_controlled)


def changed_logits(logits, sampling, prompt=(), response=(), ignore_eos=False):
    """f64[V]: the definition, token by token."""
    x = logits.astype(np.float64)
    for token in {*prompt, *response}:
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token, count in Counter(response).items():
        x[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    for token, bias in dict(sampling.logit_bias).items():
        x[token] += bias
    if sampling.allowed_tokens is not None:
        x[[t for t in range(len(x)) if t not in sampling.allowed_tokens]] = -np.inf
    ends = list({*sampling.stop_ids, *(() if ignore_eos else (EOS,))})
    if len(response) < sampling.min_tokens and np.isfinite(np.delete(x, ends)).any():
        x[ends] = -np.inf
    return x


def exact_probabilities(logits, temperature, sampling, *sequence):
    """f64[V]: the distribution that should be sampled from, by sorting."""
    x = changed_logits(logits, sampling, *sequence)
    if temperature == 0:
        return np.eye(len(x))[x.argmax()]
    p = np.exp((x - x.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    p[order[sampling.top_k or len(p) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]  # probability of the likelier ones
    p[order[before >= sampling.top_p]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


def controls_of(slots):
    """Controls [R, B] of slots [R][B], each (sampling, prompt, response, ...)."""
    rows = [[control_rows(*slot[:3], vocab_size=slot[-1]) for slot in line] for line in slots]
    return jax.tree.map(lambda *x: np.stack(x), *(jax.tree.map(lambda *x: np.stack(x), *line) for line in rows))


def run(logits, temperature, u, slots, ignore_eos=None):
    """`sample_controlled` of slots [R][B] of (sampling, prompt, response), as NumPy."""
    vocab, shape = logits.shape[-1], u.shape
    controls = controls_of([[(*slot, vocab) for slot in line] for line in slots])
    made = np.array([[len(response) for _, _, response in line] for line in slots], np.int32)
    ignore_eos = np.zeros(shape, bool) if ignore_eos is None else ignore_eos
    temperature = np.broadcast_to(np.asarray(temperature, np.float32), shape)
    return jax.device_get(sample_all(logits, temperature, u, made, np.array([EOS], np.int32), ignore_eos, controls))


def random_slot(rng, vocab):
    """A sampling with some of everything, a prompt and a response."""
    some = lambda value, otherwise: value if rng.random() < 0.25 else otherwise  # noqa: E731
    pick = lambda n: tuple(rng.integers(vocab, size=n).tolist())  # noqa: E731
    sampling = Sampling(
        top_k=some(int(rng.integers(1, vocab + 5)), 0),
        top_p=some(rng.uniform(0.05, 0.99), 1.0),
        min_p=some(rng.uniform(0.01, 0.5), 0.0),
        min_tokens=int(rng.integers(0, 12)),
        repetition_penalty=some(rng.uniform(0.5, 2), 1.0),
        presence_penalty=some(rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(rng.uniform(-2, 2), 0.0),
        logit_bias=some(dict(zip(pick(4), rng.normal(0, 3, 4), strict=True)), {}),
        allowed_tokens=some(pick(vocab), None),
        stop_ids=some(pick(2), ()),
    )
    sampling.validate(vocab)
    return sampling, pick(rng.integers(0, 10)), pick(rng.integers(0, 12))


def test_the_distribution_is_the_one_found_by_sorting():
    """Every control at random, 40 kinds of slots side by side, 48 uniforms each."""
    rng, vocab, kinds, draws = np.random.default_rng(4), 37, 40, 48
    slots = [random_slot(rng, vocab) for _ in range(kinds)]
    logits = rng.normal(0, 2, (kinds, 1, vocab)).astype(np.float32).repeat(draws, 1)
    temperature = rng.choice([0.0, 0.5, 1.0, 1.7], (kinds, 1)).astype(np.float32).repeat(draws, 1)
    ignore_eos = (rng.random((kinds, 1)) < 0.3).repeat(draws, 1)
    u = rng.random((kinds, draws), np.float32)
    token, logprob, sampler_logprob, _ = run(logits, temperature, u, [[s] * draws for s in slots], ignore_eos)
    cut, whole = [], 0
    for kind, slot in enumerate(slots):
        row, warmth = logits[kind, 0], temperature[kind, 0]
        p = exact_probabilities(row, warmth, *slot, ignore_eos[kind, 0])
        steps = np.cumsum(p)
        clear = np.abs(steps[:, None] - u[kind]).min(axis=0) > 1e-5
        np.testing.assert_array_equal(token[kind, clear], exact_choice(p, u[kind])[clear])
        np.testing.assert_allclose(sampler_logprob[kind], np.log(p[token[kind]]), atol=2e-5)
        full = row.astype(np.float64) / (warmth or 1.0)
        full -= full.max() + np.log(np.exp(full - full.max()).sum())
        np.testing.assert_allclose(logprob[kind], full[token[kind]], atol=2e-5)
        cut.append((p == 0).sum())
        whole += clear.sum()
    assert whole > 0.99 * u.size and len(set(cut)) > 10


@pytest.fixture(scope="module")
def drawn():
    """Draws of one slot with everything asked for: (sampling, prompt, response, logits, counts of tokens)."""
    asked = Sampling(
        top_k=8, top_p=0.9, min_p=0.1, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias={2: 0.8, 5: -0.7}, allowed_tokens=range(1, 12), stop_ids=(9,), min_tokens=5,
    )  # fmt: skip
    sequence, n = ((1, 6), (6, 6, 7)), 30_000
    logits = np.array([2.5, 1.0, 0.3, 2.0, 0.9, 1.4, 1.9, 1.2, -0.5, 1.5, 0.7, 0.2], np.float32)
    u = np.array(uniforms(KEY, np.arange(n, dtype=np.uint32), np.full(n, 3, np.int32)))[None]
    row = control_rows(asked, *sequence, len(logits))
    controls = jax.tree.map(lambda x: np.broadcast_to(x, (1, n, *np.shape(x))), row)
    made, ones, no = np.full((1, n), 3, np.int32), np.full((1, n), 0.8, np.float32), np.zeros((1, n), bool)
    token, *_ = sample_all(np.broadcast_to(logits, (1, n, 12)), ones, u, made, np.array([EOS], np.int32), no, controls)
    return asked, sequence, logits, np.bincount(token[0], minlength=12)


def p_value(counts, p):
    """Of Pearson's chi-square; 0 where something impossible was drawn."""
    if counts[p == 0].any():
        return 0.0
    return stats.chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue


def test_the_samples_have_the_distribution_asked_for(drawn):
    asked, sequence, logits, counts = drawn
    assert p_value(counts, exact_probabilities(logits, 0.8, asked, *sequence)) > 0.01
    assert (counts > 0).sum() == 7


@pytest.mark.parametrize(
    "name, value",
    [
        ("top_k", 5), ("top_p", 0.8), ("min_p", 0.4), ("repetition_penalty", 1.2), ("presence_penalty", 0.3),
        ("frequency_penalty", 0.2), ("logit_bias", {2: 0.7, 5: -0.7}), ("allowed_tokens", range(12)), ("stop_ids", ()),
        ("min_tokens", 3),
    ],
)  # fmt: skip
def test_and_no_other(drawn, name, value):
    asked, sequence, logits, counts = drawn
    other = dataclasses.replace(asked, **{name: value})
    assert p_value(counts, exact_probabilities(logits, 0.8, other, *sequence)) < 1e-6


def test_penalties_by_hand():
    # Prompt and response: positive halved, negative doubled. Response: less a half, and a quarter for each occurrence.
    asked = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 1.5})
    logits = np.array([2.0, -2.0, 1.0, 0.0, -1.0, 3.0], np.float32)
    changed = np.array([1.0, -4.0, 0.5 - 0.5 - 0.5, 0.0, 0.5, 1.5 - 0.5 - 0.25])
    slot = (asked, (0, 1), (2, 2, 5))
    u = (np.arange(64, dtype=np.float32) / 64)[None]
    token, logprob, sampler_logprob, _ = run(np.tile(logits, (1, 64, 1)), 1.0, u, [[slot] * 64])
    assert set(token[0]) >= {0, 2, 3, 4, 5}
    np.testing.assert_allclose(sampler_logprob[0], (changed - np.log(np.exp(changed).sum()))[token[0]], atol=1e-6)
    np.testing.assert_allclose(logprob[0], (logits - np.log(np.exp(logits).sum()))[token[0]], atol=1e-6)
    (greedy,), *_ = run(np.tile(logits, (1, 64, 1)), 0.0, u, [[slot] * 64])
    assert set(greedy) == {0}  # not 5, which the model likes best


def test_each_cut_is_of_what_the_one_before_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    u = (np.arange(64, dtype=np.float32) / 64)[None]
    asked = {
        Sampling(top_p=0.55): {0, 1},
        Sampling(top_k=2, top_p=0.55): {0},  # 4/7 of what is left
        Sampling(top_p=0.95, min_p=0.6): {0, 1},
        Sampling(top_k=3, top_p=0.95, min_p=0.4): {0, 1, 2},
        Sampling(top_k=3, top_p=0.75, min_p=0.4): {0, 1},
        Sampling(top_k=3, top_p=0.95, min_p=1.0): {0},
    }
    for sampling, kept in asked.items():
        token, *_ = run(np.tile(logits, (1, 64, 1)), 1.0, u, [[(sampling, (), ())] * 64])
        assert set(token[0]) == kept, sampling


def test_ties_at_the_threshold_are_kept():
    logits = np.array([1.0, 2.0, 1.0, 0.0, -0.0, 1.0, -3.0, -3.0], np.float32)
    u = (np.arange(64, dtype=np.float32) / 64)[None]
    asked = {1: {1}, 2: {0, 1, 2, 5}, 4: {0, 1, 2, 5}, 5: {0, 1, 2, 3, 4, 5}, 7: set(range(8)), 100: set(range(8))}
    for k, kept in asked.items():  # the two zeros are equal
        token, *_ = run(np.tile(logits, (1, 64, 1)), 4.0, u, [[(Sampling(top_k=k), (), ())] * 64])
        assert set(token[0]) == kept
    for p, kept in {1e-12: {1}, 0.3: {0, 1, 2, 5}}.items():
        token, *_ = run(np.tile(logits, (1, 64, 1)), 4.0, u, [[(Sampling(top_p=p), (), ())] * 64])
        assert set(token[0]) == kept


def test_the_threshold_is_exact_over_the_whole_range_of_floats():
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**32, (40, 100), np.uint32)
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x), x, -np.inf).astype(np.float32)
    x[np.abs(x) < 1e-37] = 0  # what a device may take for zero
    x[:, :30], x[:, 90:94] = rng.choice(x[:, 30:].ravel(), (40, 30)), [0.0, -0.0, 0.0, -0.0]
    k = rng.integers(1, 101, 40)
    both = jax.jit(lambda x, k: (ordered_bits(x), threshold(ordered_bits(x), jnp.ones_like(x), k)))
    keys, found = both(x, k.astype(np.float32))
    np.testing.assert_array_equal(np.argsort(keys, axis=-1, kind="stable"), np.argsort(x, axis=-1, kind="stable"))
    for row in range(40):
        kth = np.sort(x[row])[-k[row]]
        np.testing.assert_array_equal(keys[row] >= found[row], x[row] >= kth)


def test_a_response_does_not_end_early_unless_nothing_else_is_allowed():
    logits = np.zeros((1, 6, 8), np.float32)
    logits[..., EOS], logits[..., 5] = 9.0, 8.0
    least = Sampling(min_tokens=2, stop_ids=(5,))
    ends_only = Sampling(min_tokens=2, stop_ids=(5,), allowed_tokens=(EOS, 5))
    slots = [(least, (), response) for response in ((), (1,), (1, 1), (1,))] + [(ends_only, (), (1,)), (Sampling(), (), ())]
    ignore_eos = np.array([[False, False, False, True, False, False]])
    token, logprob, sampler_logprob, _ = run(logits, 0.0, np.zeros((1, 6), np.float32), [slots], ignore_eos)
    np.testing.assert_array_equal(token, [[0, 0, EOS, EOS, EOS, EOS]])
    assert np.isfinite(logprob).all() and not sampler_logprob.any()


def test_a_slot_that_asks_for_nothing_gets_what_it_would_get_alone():
    rng, vocab = np.random.default_rng(6), 600
    shape = (2, 64)
    logits = rng.normal(0, 3, (*shape, vocab)).astype(np.float32)
    temperature = rng.choice([0.0, 0.6, 1.0], shape).astype(np.float32)
    steps = np.cumsum(np.exp(logits[1].astype(np.float64)), axis=-1)
    u = rng.random(shape, np.float32)
    u[1] = np.take_along_axis(steps, rng.integers(vocab, size=(64, 1)), -1)[:, 0] / steps[:, -1] * (1 - 2**-22)  # on a step
    demanding = Sampling(top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.5, min_tokens=9, logit_bias={0: 5.0})
    asks = rng.random(shape) < 0.5
    slots = [[(demanding if a else Sampling(), (1, 2), (3, 4)) for a in line] for line in asks]
    token, logprob, sampler_logprob, _ = run(logits, temperature, u, slots)
    alone, alone_logprob = jax.jit(sample)(logits, temperature, u)
    np.testing.assert_array_equal(token[~asks], np.asarray(alone)[~asks])
    np.testing.assert_allclose(logprob[~asks], np.asarray(alone_logprob)[~asks], atol=1e-6)
    warm = ~asks & (temperature > 0)
    np.testing.assert_allclose(sampler_logprob[warm], logprob[warm], atol=1e-6)
    assert (token != np.asarray(alone))[asks].any()


def test_a_resumed_slot_has_the_controls_it_would_have_had():
    """What the device counted token by token is what the host counts from the response."""
    rng, vocab, asked = np.random.default_rng(7), 12, Sampling(frequency_penalty=0.5, repetition_penalty=1.2)
    logits = rng.normal(0, 1, (1, 3, vocab)).astype(np.float32)
    prompt, responses = (4, 4, 5), [[], [], []]
    controls = controls_of([[(asked, prompt, (), vocab)] * 3])
    warmth, eos, ignore_eos = np.ones((1, 3), np.float32), np.array([EOS], np.int32), np.zeros((1, 3), bool)
    for made in range(20):
        u = rng.random((1, 3), np.float32)
        token, *_, controls = sample_all(logits, warmth, u, np.full((1, 3), made, np.int32), eos, ignore_eos, controls)
        for response, t in zip(responses, token[0].tolist(), strict=True):
            response.append(t)
    resumed = controls_of([[(asked, prompt, response, vocab) for response in responses]])
    jax.tree.map(np.testing.assert_array_equal, resumed, controls)
    np.testing.assert_array_equal(np.nonzero(resumed.prompted[0, 0])[0], [4, 5])
    assert resumed.counts.sum() == 60 and resumed.counts.max() > 1


def test_the_best_tokens_are_the_likeliest_with_the_logprobs_of_the_sampler():
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 2, (2, 3, 300)).astype(np.float32)
    temperature = np.array([[0.0, 0.5, 1.0]] * 2, np.float32)
    tokens, logprobs = jax.jit(best_logprobs, static_argnums=2)(logits, temperature, 4)
    np.testing.assert_array_equal(tokens, np.argsort(-logits, axis=-1)[..., :4])
    scaled = logits.astype(np.float64) / np.where(temperature == 0, 1, temperature)[..., None]
    expected = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, np.asarray(tokens), -1), atol=1e-5)
