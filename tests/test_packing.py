"""Packing: every row once, its prompt beside it, its columns at their tokens, and never over the budget but alone."""

import dataclasses

import jax
import numpy as np
import pytest

from jrl.packing import groups_by_prompt, laid_in_rows, pack, pack_groups, pack_rows, row_counts, unpack
from jrl.shapes import bucket
from jrl.types import Completion, make_rollout


def random_rollout(seed=0, counts=(3, 1, 6, 2, 4), longest=60):
    """Ragged groups; tokens are all different, so that a misplaced one shows."""
    rng, done, prompts = np.random.default_rng(seed), [], []
    fresh = iter(range(1, 10**6))
    new = lambda n: np.fromiter(fresh, np.int32, n)  # noqa: E731
    for request, count in enumerate(counts):
        prompts.append(new(int(rng.integers(1, 40))))
        for sample in range(count):
            n = int(rng.integers(1, longest + 1))
            x = np.zeros(n, np.float32)
            done.append(Completion(request, sample, new(n), x, x, np.zeros(n, np.int32), "length"))
    return make_rollout(prompts, done)


def with_lengths(groups):
    """Groups of responses of these lengths to prompts of ten tokens."""
    done = []
    for request, lengths in enumerate(groups):
        for sample, n in enumerate(lengths):
            x = np.zeros(n, np.float32)
            done.append(Completion(request, sample, np.full(n, 5, np.int32), x, x, np.zeros(n, np.int32), "length"))
    return make_rollout([np.full(10, 100 + i, np.int32) for i in range(len(groups))], done)


def packed(rollout, rows=None, shards=1, budget=256, **columns):
    return list(pack(rollout, columns, np.arange(len(rollout)) if rows is None else rows, shards, budget))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("budget", [16, 150, 400, 100_000])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_packed_once_beside_its_prompt(seed, budget, shards):
    rollout = random_rollout(seed)
    values = np.where(rollout.loss_mask, rollout.tokens * 0.5, np.nan).astype(np.float32)
    rows = np.random.default_rng(seed).permutation(len(rollout))[:-2]
    seen = []
    for m in packed(rollout, rows, shards, budget, value=values):
        assert m.tokens.shape[0] == shards == m.prompt_tokens.shape[0]
        assert m.shape == (*m.prompt_tokens.shape[1:], *m.tokens.shape[1:])
        used = np.zeros(m.tokens.shape, int)
        for s, n in np.ndindex(m.row.shape):
            row, count = m.row[s, n], m.lens[s, n]
            if row < 0:
                assert count == 0 and not m.columns["value"][s, n].any()
                continue
            seen.append(row)
            r, begin = divmod(m.starts[s, n], m.tokens.shape[2])
            p, size, place = m.prompt_of[s, r], rollout.prompt_lens[row], slice(begin, begin + count)
            assert m.prompt_lens[s, p] == size and count == rollout.response_lens[row] == len(m.tokens[s, r, place])
            np.testing.assert_array_equal(m.prompt_tokens[s, p, :size], rollout.tokens[row, :size])
            np.testing.assert_array_equal(m.tokens[s, r, place], rollout.tokens[row, size : size + count])
            np.testing.assert_array_equal(m.offsets[s, r, place], np.arange(count))
            np.testing.assert_array_equal(m.columns["value"][s, n, :count], m.tokens[s, r, place] * 0.5)
            assert not m.columns["value"][s, n, count:].any()
            used[s, r, place] += 1
        assert used.max() == 1 and not m.tokens[used == 0].any() and (m.offsets[used == 0] == -1).all()
    assert sorted(seen) == sorted(rows.tolist())


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("budget", [16, 100, 200, 500])
def test_a_microbatch_keeps_to_the_budget_unless_it_is_one_row(budget, shards):
    sizes = [m.shape for seed in range(4) for m in packed(random_rollout(seed), None, shards, budget)]
    assert all(p * u + n * t <= budget or (p, n) == (1, 1) for p, u, n, t in sizes)
    assert budget < 500 or max(p * u + n * t for p, u, n, t in sizes) > budget / 2  # and uses it


def test_one_prompt_is_packed_once_for_its_group():
    rollout = random_rollout(counts=(6, 6))
    (m,) = packed(rollout, budget=100_000)
    assert m.shape[0] == 2 and m.row.shape == (1, 12) and (m.row >= 0).all()
    of_response = m.prompt_of[0, m.starts[0] // m.shape[3]]
    assert np.bincount(of_response).tolist() == [6, 6]
    assert all(len(set(rollout.group_ids[m.row[0, of_response == p]])) == 1 for p in (0, 1))


def test_short_responses_lie_end_to_end_beside_a_long_one():
    """One of 64 tokens and seven of 8: two rows instead of eight, and whole groups fill a microbatch four times as well."""
    rollout = with_lengths([(64, *[8] * 7)] * 16)
    (m,) = packed(rollout, budget=100_000)
    assert m.shape == (16, 16, 32, 64) and m.row.shape == (1, 128)
    assert [m.shape for m in packed(rollout, budget=8 * (16 + 2 * 64))] == [(8, 16, 16, 64)] * 2
    uniform = with_lengths([(64,) * 8] * 16)
    assert [m.shape for m in packed(uniform, budget=8 * (16 + 2 * 64))] == [(2, 16, 16, 64)] * 8  # nothing to gain there


def test_the_room_for_a_groups_rows_has_few_sizes():
    assert [row_counts(n) for n in (1, 2, 5, 8)] == [[1], [2, 1], [5, 3, 2, 1], [8, 4, 2, 1]]
    seen = {m.shape[2] // m.shape[0] for seed in range(20) for m in packed(random_rollout(seed, counts=(8,) * 4), budget=4000)}
    assert seen <= {8, 4, 2, 1} and len(seen) > 1


@pytest.mark.parametrize("length", [60, 100])
def test_rows_hold_every_response_once_and_there_are_hardly_more_than_needed(length):
    lens = np.random.default_rng(length).integers(1, 61, 50)
    rows = laid_in_rows(list(range(50)), lens, length)
    assert sorted(sum(rows, [])) == list(range(50)) and max(lens[row].sum() for row in rows) <= length
    least = -(-lens.sum() // length)
    assert least <= len(rows) <= 11 / 9 * least + 1  # first-fit decreasing (Johnson 1973) against no less than the optimum


def test_rows_of_one_group_with_other_prompts_are_kept_apart():
    """As with dynamic sampling, where group ids are given by the caller: what is shared is decided by the tokens."""
    a = random_rollout(counts=(2, 2))
    ids = np.zeros(4, np.int32)
    groups = groups_by_prompt(type(a)(**{**vars(a), "group_ids": ids}), np.arange(4), 16)
    assert sorted(sorted(g) for g in groups) == [[0, 1], [2, 3]]


def test_long_responses_come_first_and_shapes_are_few():
    rollout = random_rollout(counts=(2,) * 40, longest=100)
    microbatches = packed(rollout, budget=600)
    lengths = [m.shape[3] for m in microbatches]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 1
    assert len(microbatches) >= 2 * len({m.shape for m in microbatches})
    some = np.random.default_rng(0).permutation(80)[:40]
    assert {m.shape[1] for m in packed(rollout, some, budget=600)} == {microbatches[0].shape[1]}
    # Ragged parts of groups make no sizes of their own: rows are 8, 4, 2 or 1 for each prompt.
    rollout = random_rollout(counts=(8,) * 8, longest=16)
    ragged = [np.flatnonzero(np.random.default_rng(i).random(64) < 0.7) for i in range(20)]
    assert {m.shape[2] / m.shape[0] for rows in ragged for m in packed(rollout, rows, budget=4000)} <= {8, 4, 2, 1}


@pytest.mark.parametrize("budget", [100, 100_000])
def test_unpack_puts_results_back_where_they_belong(budget):
    rollout = random_rollout()
    out = np.full(rollout.tokens.shape, -1.0, np.float32)
    for m in packed(rollout, shards=2, budget=budget):
        flat = m.tokens.reshape(len(m.tokens), -1) + 0.5
        values = flat[:, :1, None] + np.zeros((*m.row.shape, m.shape[3]))  # beyond a response's end; it must not arrive
        for s, n in np.ndindex(m.row.shape):
            values[s, n, : m.lens[s, n]] = flat[s, m.starts[s, n] :][: m.lens[s, n]]
        unpack(out, values, m, rollout.prompt_lens)
    np.testing.assert_array_equal(out, np.where(rollout.loss_mask, rollout.tokens + 0.5, -1.0))


def test_no_rows_make_no_microbatch_and_a_microbatch_is_a_pytree():
    rollout = random_rollout()
    assert packed(rollout, np.array([], int)) == []
    m = packed(rollout, value=np.zeros(rollout.tokens.shape, np.float32))[0]
    assert len(jax.tree.leaves(m)) == 9 and jax.tree.map(lambda x: x, m).shape == m.shape


# Several sequences in a row --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("budget", [16, 300, 100_000])
def test_every_sequence_is_packed_once_beside_others(budget, shards):
    rollout = random_rollout()
    places = np.arange(rollout.tokens.shape[1])
    there = places < rollout.lens[:, None]
    named = np.where(there, 1000 * (1 + np.arange(len(rollout)))[:, None] + places, 0)  # thousands tell the sequence
    rollout = dataclasses.replace(rollout, tokens=named.astype(np.int32))
    values = np.where(there, named * 0.5, np.nan).astype(np.float32)
    rows = np.random.default_rng(0).permutation(len(rollout))[:-2]
    seen, used, rows_used = [], 0, 0
    for m in pack_rows(rollout, {"value": values}, rows, shards, budget):
        assert m.tokens.shape[0] == shards and m.tokens.shape[2] == bucket(rollout.tokens.shape[1], 16)
        assert m.shape[2] == 1 or m.shape[2] * m.shape[3] <= budget
        assert not m.prompt_lens.any()
        for s, n in np.ndindex(m.tokens.shape[:2]):
            begin, end = 0, int((m.offsets[s, n] >= 0).sum())
            rows_used += end > 0
            while begin < end:
                row = m.tokens[s, n, begin] // 1000 - 1
                span = slice(begin, begin + rollout.lens[row])
                np.testing.assert_array_equal(m.tokens[s, n, span], rollout.tokens[row, : rollout.lens[row]])
                np.testing.assert_array_equal(m.columns["value"][s, n, span], m.tokens[s, n, span] * 0.5)
                np.testing.assert_array_equal(m.offsets[s, n, span], np.arange(rollout.lens[row]))
                seen.append(row)
                begin = span.stop
            assert begin == end and not m.columns["value"][s, n, end:].any()
            used += int(end)
    assert sorted(seen) == sorted(rows.tolist()) and used == rollout.lens[rows].sum()
    assert rows_used < len(rows)  # some rows do hold several


def test_rows_of_sequences_have_few_shapes_whatever_the_batch():
    shapes = set()
    for seed in range(8):
        rollout = random_rollout(seed)
        rollout = dataclasses.replace(rollout, tokens=np.pad(rollout.tokens, ((0, 0), (0, 128 - rollout.tokens.shape[1]))))
        shapes |= {m.shape for m in pack_rows(rollout, {}, np.arange(len(rollout)), 1, 520)}
    assert shapes <= {(1, 16, n, 128) for n in (1, 2, 3)}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("budget", [16, 150, 400])
def test_pairs_stay_together_side_by_side(budget, shards):
    for seed in range(4):
        rollout, seen = random_rollout(seed, counts=(2,) * 7), []
        for m in pack_groups(rollout, {}, np.random.default_rng(seed).permutation(len(rollout)), shards, budget):
            assert m.row.shape[1] % 2 == 0
            for pair in m.row.reshape(-1, 2):
                assert (pair < 0).all() or (pair >= 0).all() and pair[0] // 2 == pair[1] // 2
                seen += [int(row) for row in pair if row >= 0]
        assert sorted(seen) == list(range(14))
    # The negative control: without that, a budget that is too small for two splits pairs.
    split = [m.row for m in packed(random_rollout(0, counts=(2,) * 7), None, 1, 16)]
    assert budget > 16 or any((rows >= 0).sum() == 1 for rows in split)
