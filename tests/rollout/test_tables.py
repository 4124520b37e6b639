"""Page tables of the decode call: every page of every slot once, and no more room than what is used."""

import numpy as np
import pytest

from jrl.rollout.sizes import FineSizes
from jrl.rollout.tables import TableMaker


def maker(row_pages, slots):
    """For slots of at most 64 pages."""
    return TableMaker(FineSizes(slots, 64, 16, row_pages), row_pages)


def slots_pages(rng, slots, longest):
    """Pages of each slot, 1 to a few and one slot with many; ids are distinct."""
    counts = rng.integers(0, 5, slots)
    counts[rng.integers(slots)] = longest
    ids = iter(rng.permutation(np.arange(1, counts.sum() + 1)).tolist())
    return [[next(ids) for _ in range(n)] for n in counts]


@pytest.mark.parametrize("row_pages", [None, 1, 2, 8])
@pytest.mark.parametrize("longest", [0, 1, 4, 61])
def test_rows_are_the_slots_pages_in_order(row_pages, longest):
    rng = np.random.default_rng(longest)
    pages = [slots_pages(rng, 6, longest) for _ in range(2)]
    own, owner, start = maker(row_pages, 6)._rows(pages)
    assert own.shape[:2] == owner.shape and start.shape == (2, 6)
    for r, of_slots in enumerate(pages):
        for b, wanted in enumerate(of_slots):
            mine = own[r][owner[r] == b].reshape(-1)
            assert mine[: len(wanted)].tolist() == wanted and not mine[len(wanted) :].any()
            assert np.flatnonzero(owner[r] == b)[0] == start[r, b]  # at least one row, and the first is where it is said
        assert not own[r][owner[r] == 6].any()
    if own.shape[1] == 6:
        assert (owner == np.arange(6)).all()  # what decoding takes for granted where there are no more rows than slots


def test_one_long_slot_does_not_make_the_others_wide():
    pages = [[[1] * 4] * 31 + [[1] * 64]]
    used = sum(map(len, pages[0]))
    in_rows, whole = (maker(row_pages, 32)._rows(pages)[0].size for row_pages in (8, None))
    assert whole == 32 * 64 and in_rows <= 1.5 * (used + 8 * 32)
    short = maker(8, 32)._rows([[[1] * 4] * 32])[0]
    assert short.shape == (1, 32, 4)  # and where nobody is long, one row each, no wider than needed


def prefixes_of(*members):
    """Prefixes of two pages, one for each number of slots given."""
    slots = iter(range(sum(members)))
    return [([next(slots) for _ in range(n)], [2 * i + 1, 2 * i + 2]) for i, n in enumerate(members)]


def test_many_small_groups_do_not_make_large_ones_dear():
    """What is computed for prefixes stays near the number of slots, whatever came before, in few shapes."""
    tables, shapes = maker(8, 128), set()
    for sets in ([4] * 32, [16] * 8, [16] * 5 + [3], [2] * 4, [4] * 30, [128]):
        shared, _, members, place = tables._shared([prefixes_of(*sets)], 128)
        shapes.add(members.shape)
        assert members.shape[1] * members.shape[2] <= 128
        filled = place[0][place[0] < members[0].size]
        assert members[0].reshape(-1)[filled].tolist() == list(range(sum(sets)))  # every slot in its own place
        assert [row[:2].tolist() for row in shared[0][: len(sets)]] == [pages for _, pages in prefixes_of(*sets)]
    assert shapes == {(1, 32, 4), (1, 8, 16), (1, 1, 128)}  # four of the six find a room that was there


def prefixes_of_pages(*counts):
    """Prefixes of so many pages, each of two slots; ids are distinct."""
    ids = iter(range(1, sum(counts) + 1))
    return [([2 * i, 2 * i + 1], [next(ids) for _ in range(n)]) for i, n in enumerate(counts)]


@pytest.mark.parametrize("row_pages", [None, 1, 2, 8])
@pytest.mark.parametrize("longest", [1, 2, 8, 9, 61])
def test_rows_of_prefixes_are_their_pages_in_order(row_pages, longest):
    sets = [prefixes_of_pages(3, longest, 1), prefixes_of_pages(2)]
    shared, prefix, members, _ = maker(row_pages, 12)._shared(sets, 12)
    assert shared.shape[:2] == prefix.shape and shared.shape[1] >= members.shape[1]
    for r, of_replica in enumerate(sets):
        for p, (_, pages) in enumerate(of_replica):
            assert [page for page in shared[r][prefix[r] == p].reshape(-1) if page] == pages
            assert shared[r][prefix[r] == p].size - len(pages) < shared.shape[2]  # only the last row has room
        assert not shared[r][prefix[r] == members.shape[1]].any()
    if shared.shape[1] == members.shape[1]:  # what decoding takes for granted: each prefix in the row of its number
        assert [prefix[0][p] for p in range(3)] == [0, 1, 2]
    else:
        assert shared.shape[2] == row_pages


def test_one_long_prefix_does_not_make_the_others_long():
    """A group with a prompt of 2,048 tokens beside seven with 64: all but the last prompt token are cached, 16 to a page."""
    sets = [prefixes_of_pages(127, *[3] * 7)]
    used = 127 + 7 * 3
    in_rows, whole = (maker(row_pages, 64)._shared(sets, 64)[0].size for row_pages in (8, None))
    assert whole == 8 * 128 and whole / used > 6.9
    assert in_rows == 32 * 8 and in_rows / used < 1.75
    # In few shapes: the rows of all prefixes together are rounded to a power of two.
    shapes = {maker(8, 64)._shared([prefixes_of_pages(n, *[3] * 7)], 64)[0].shape for n in range(1, 129)}
    assert shapes == {(1, 8, 4), (1, 8, 8), (1, 16, 8), (1, 32, 8)}


def test_what_was_forgotten_shapes_nothing():
    fresh, used = maker(8, 128), maker(8, 128)
    used._shared([prefixes_of(*[4] * 30)], 128)
    wanted = fresh._shared([prefixes_of(*[2] * 20)], 128)[2].shape
    used.forget()
    assert used._shared([prefixes_of(*[2] * 20)], 128)[2].shape == wanted
    kept = maker(8, 128)
    kept._shared([prefixes_of(*[4] * 30)], 128)
    assert kept._shared([prefixes_of(*[2] * 20)], 128)[2].shape != wanted  # control: what was not, does
