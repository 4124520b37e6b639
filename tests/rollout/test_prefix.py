"""The prefix index: what begins alike is found, and nothing else."""

import numpy as np

from jrl.rollout.prefix import PrefixIndex

PAGE = 4


def filled(index, tokens, version=1):
    """Caches a sequence as a sample would, and lets go of it."""
    pages = index.take(tokens, version)
    pages += index.pages.allocate(-(-len(tokens) // PAGE) - len(pages))
    index.add(tokens, pages, version)
    index.pages.release(pages)
    index.check()
    return pages


def found(index, tokens, version=1):
    pages = index.take(np.asarray(tokens), version)
    index.pages.release(pages)
    index.check()
    return pages


def test_full_pages_of_the_same_beginning_are_found():
    index, tokens = PrefixIndex(20, PAGE), np.arange(10)
    pages = filled(index, tokens)
    assert index.pages.cached == 2 and index.pages.used == 0  # the third page is not full, so it is free again
    assert found(index, tokens) == pages[:2] == found(index, np.arange(100)) == found(index, np.arange(8))
    assert found(index, np.arange(7)) == pages[:1] and found(index, np.arange(3)) == []


def test_what_differs_is_not_found():
    index, tokens = PrefixIndex(20, PAGE), np.arange(8)
    pages = filled(index, tokens)
    assert found(index, tokens, version=2) == []  # other weights
    assert found(index, np.r_[1, np.arange(1, 8)]) == []
    assert found(index, np.r_[np.arange(7), 9]) == pages[:1]
    # The same tokens after others are another page: their keys and values depend on all that comes before.
    assert found(index, np.r_[np.arange(4, 8), np.arange(4, 8)]) == []


def test_found_pages_are_in_use_until_released():
    index, tokens = PrefixIndex(4, PAGE), np.arange(8)
    pages = filled(index, tokens)
    held = index.take(tokens, 1)
    assert held == pages and index.pages.used == 2 and index.pages.available == 1
    index.pages.release(held)
    assert index.pages.available == 3


def test_the_least_recently_used_goes_first_and_the_end_of_a_sequence_before_its_beginning():
    index = PrefixIndex(5, PAGE)
    old, new = np.arange(8), np.arange(100, 108)
    filled(index, old), filled(index, new)
    assert index.pages.free == 0 and index.pages.cached == 4
    found(index, old)  # used again: now `new` is the older one
    taken = index.pages.allocate(1)
    assert len(found(index, old)) == 2 and len(found(index, new)) == 1
    index.pages.release(taken)
    index.pages.release(index.pages.allocate(4))
    assert found(index, old) == found(index, new) == [] and index.pages.free == 4


def test_clear_forgets_everything_and_frees_it():
    index, tokens = PrefixIndex(10, PAGE), np.arange(8)
    filled(index, tokens)
    held = index.take(tokens, 1)
    index.clear()
    assert found(index, tokens) == [] and index.pages.used == 2
    index.pages.release(held)
    assert index.pages.free == 9 and index.pages.cached == 0
    index.check()


def test_the_same_contents_are_named_once():
    index, tokens = PrefixIndex(10, PAGE), np.arange(4)
    first, second = index.pages.allocate(1), index.pages.allocate(1)  # two prompts alike, cached side by side
    index.add(tokens, first, 1)
    index.add(tokens, second, 1)
    index.pages.release(first), index.pages.release(second)
    assert index.pages.cached == 1 and found(index, tokens) == first
    index.check()
