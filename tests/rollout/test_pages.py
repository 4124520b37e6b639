"""The page allocator: every page is free or held, never both, never lost."""

from collections import Counter

import numpy as np
import pytest

from jrl.rollout.pages import PageAllocator


def test_pages_are_shared_until_the_last_holder_lets_go():
    pages = PageAllocator(5)
    assert pages.free == 4 and pages.used == 0
    held = pages.allocate(2)
    assert held == [1, 2] and (pages.free, pages.used) == (2, 2)
    pages.share(held)
    pages.release(held)
    assert (pages.free, pages.used) == (2, 2)
    pages.release([1])
    assert (pages.free, pages.used) == (3, 1)
    pages.release([2])
    assert (pages.free, pages.used) == (4, 0)
    assert sorted(pages.allocate(4)) == [1, 2, 3, 4]  # all of them, and never the null page
    pages.check()


@pytest.mark.parametrize("num_pages", [0, 1])
def test_a_pool_needs_a_page_beside_the_null_page(num_pages):
    with pytest.raises(ValueError, match="null page"):
        PageAllocator(num_pages)


def test_misuse_raises_and_changes_nothing():
    pages = PageAllocator(4)
    first = pages.allocate(1)
    with pytest.raises(RuntimeError, match="asked for 3 pages with 2 available"):
        pages.allocate(3)
    pages.release(first)
    with pytest.raises(RuntimeError, match="released more often"):
        pages.release(first)
    with pytest.raises(RuntimeError, match="is free"):
        pages.share(first)
    assert (pages.free, pages.used) == (3, 0)
    pages.check()


def test_check_notices_what_is_wrong():
    lost, doubled = PageAllocator(4), PageAllocator(4)
    lost._free.popleft()
    doubled._references[2] = 1
    for broken in (lost, doubled):
        with pytest.raises(AssertionError):
            broken.check()


def test_random_use_against_a_count_of_holders():
    rng, pages, holders = np.random.default_rng(0), PageAllocator(12), []
    for _ in range(2000):
        action = rng.integers(3)
        if action == 0 and pages.free:
            holders.append(pages.allocate(int(rng.integers(1, pages.free + 1))))
        elif action == 1 and holders:
            part = holders[rng.integers(len(holders))]
            pages.share(part)
            holders.append(list(part))
        elif action == 2 and holders:
            pages.release(holders.pop(rng.integers(len(holders))))
        counted = Counter(page for part in holders for page in part)
        assert pages.used == len(counted) and pages.free == 11 - len(counted) and 0 not in counted
        pages.check()
