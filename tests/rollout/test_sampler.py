"""The sampler against the exact cumulative distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jrl.rollout.sampler import inverse_cdf, sample, uniforms

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
