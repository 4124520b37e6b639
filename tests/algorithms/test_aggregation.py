"""Weights of the loss: each mode by plain loops, and that no split of the minibatch changes the sum."""

import jax
import numpy as np
import pytest

from jrl.algorithms.aggregation import MODES, weights
from jrl.errors import UserError

both = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
modes = pytest.mark.parametrize("mode", MODES)
MAX_LENGTH = 8


def reference(losses, mask, mode):
    """The loss as its name says, row by row."""
    rows = [[float(x) for x, m in zip(r, k, strict=True) if m] for r, k in zip(losses, mask, strict=True)]
    rows = [r for r in rows if r]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    per_row = {
        "seq-mean-token-sum": lambda r: sum(r),
        "seq-mean-token-mean": lambda r: sum(r) / len(r),
        "seq-mean-token-sum-norm": lambda r: sum(r) / MAX_LENGTH,
    }[mode]
    return sum(map(per_row, rows)) / len(rows)


def minibatch(seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((6, 8)) < rng.uniform(0.1, 1, (6, 1))
    mask[2] = False  # a row without loss tokens
    return rng.normal(size=mask.shape).astype(np.float32), mask


@both
@modes
def test_the_weighted_sum_is_the_loss_its_name_says(compiled, mode):
    losses, mask = minibatch()
    fn = jax.jit(weights, static_argnums=(1, 2)) if compiled else weights
    got = np.asarray(fn(mask, mode, MAX_LENGTH))
    assert got.dtype == np.float32 and (got[~mask] == 0).all()
    np.testing.assert_allclose(np.sum(got * losses), reference(losses, mask, mode), rtol=1e-4, atol=1e-6)


def test_by_hand():
    mask = np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)  # 4 tokens in 2 rows that count
    expected = {
        "token-mean": ([1 / 4] * 3, 1 / 4),
        "seq-mean-token-sum": ([1 / 2] * 3, 1 / 2),
        "seq-mean-token-mean": ([1 / 6] * 3, 1 / 2),
        "seq-mean-token-sum-norm": ([1 / 20] * 3, 1 / 20),
    }
    for mode, (first, second) in expected.items():
        np.testing.assert_allclose(weights(mask, mode, 10), [[0, *first], [0, second, 0, 0], [0] * 4], rtol=1e-6)


@modes
def test_no_split_into_microbatches_changes_the_loss(mode):
    losses, mask = minibatch(1)
    whole = np.asarray(weights(mask, mode, MAX_LENGTH), float)
    expected = np.sum(whole * losses)
    rng = np.random.default_rng(2)
    naive = []
    for parts in (1, 2, 3, 6):
        for _ in range(5):
            pieces = np.array_split(rng.permutation(len(losses)), parts)  # of any rows in any order
            np.testing.assert_allclose(sum(np.sum(whole[p] * losses[p]) for p in pieces), expected, rtol=1e-6)
            if parts > 1:
                alone = [mask & np.isin(np.arange(len(mask)), p)[:, None] for p in pieces]
                own = [np.sum(np.asarray(weights(m, mode, MAX_LENGTH)) * losses) for m in alone]
                naive.append(np.mean(own))
    # Tokens may be split as well as rows.
    cells = rng.permutation(losses.size)
    pieces = np.array_split(cells, 5)
    np.testing.assert_allclose(sum(np.sum(whole.flat[p] * losses.flat[p]) for p in pieces), expected, rtol=1e-6)
    # The negative control: the mean of each microbatch's own loss does depend on the split.
    assert np.ptp(naive) > 1e-3


@modes
def test_rows_without_loss_tokens_do_not_count(mode):
    mask = minibatch(3)[1]
    fn = jax.jit(weights, static_argnums=(1, 2))
    alone = fn(mask, mode, MAX_LENGTH)
    padded = np.concatenate([mask, np.zeros_like(mask)])
    np.testing.assert_array_equal(fn(padded, mode, MAX_LENGTH)[: len(mask)], alone)
    filled = np.concatenate([mask, np.eye(6, 8, dtype=bool)])  # the negative control: rows with one do
    assert not np.allclose(fn(filled, mode, MAX_LENGTH)[: len(mask)], alone)


@both
@modes
def test_an_empty_mask_gives_zeros(compiled, mode):
    fn = jax.jit(weights, static_argnums=(1, 2)) if compiled else weights
    got = np.asarray(fn(np.zeros((6, 8), bool), mode, MAX_LENGTH))
    assert (got == 0).all()  # and so not NaN


def test_bad_arguments():
    mask = np.ones((2, 3), bool)
    with pytest.raises(UserError, match="aggregation 'mean' is not known; use one of token-mean, seq-mean"):
        weights(mask, "mean")
    for length in (None, 0):
        with pytest.raises(UserError, match=f"divides by max_length, which is {length}"):
            weights(mask, "seq-mean-token-sum-norm", length)
    with pytest.raises(ValueError, match="^mask has shape"):
        weights(mask[0], "token-mean")
