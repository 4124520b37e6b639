"""Which sizes the arrays have that an engine gives to its compiled programs; for each combination that occurs one is compiled.

`FineSizes` pad little, and compile what a workload turns out to need: right where the same lengths come again and again, as
in training. `FewSizes` are known from the start, so that all their programs can be compiled before the first request
(`jrl.rollout.warmup`): right for a server, whose requests are all different. They pad more, each size being up to four times
the one below it, and leave out what would multiply their number: the prefixes that samples share are read for each of them.
"""

from collections.abc import Iterator
from typing import Protocol

from jrl.rollout.prefill import longest_chunk, most_prompts, padded_length
from jrl.rollout.scheduler import OPEN_PREFIXES
from jrl.shapes import bucket, power_of_two

BEST = (0, 1, 5, 20)  # how many likeliest tokens a program reports
LEAST_LENGTH = 64  # tokens of the shortest prompts, where sizes are few
LEAST_BEFORE = 8  # pages
STEP = 4  # from one size to the next


class Sizes(Protocol):
    """Each rounds up what is asked for."""

    best: tuple[int, ...]  # how many likeliest tokens are reported
    shares: bool  # whether prefixes that samples share are read once for all of them

    def length(self, tokens: int) -> int:
        """Tokens of the prompts of a prefill call, whole pages."""

    def most_prompts(self, length: int, scored: bool) -> int:
        """How many prompts of that length a call takes of a replica at most; `scored`: with their logprobs."""

    def prompts(self, count: int, length: int) -> int:
        """Prompts of a prefill call."""

    def before(self, pages: int) -> int:
        """Pages cached before, of each prompt; 0 for 0."""

    def copies(self, pages: int) -> int:
        """Pages copied at once."""

    def row(self, longest: int) -> int:
        """Pages of a row of a decode call's table, whose slots have so many at most."""

    def rows(self, needed: int) -> int:
        """Rows of a replica's slots, where some have several."""


class FineSizes:
    """Implements `Sizes` for a replica of so many slots, each of at most `width` pages."""

    best: tuple[int, ...] = BEST
    shares: bool = True

    def __init__(self, slots: int, width: int, page_size: int, row_pages: int | None):
        self._slots, self._page_size, self._most = slots, page_size, min(width, row_pages or width)

    def length(self, tokens: int) -> int:
        return padded_length(tokens, self._page_size)

    def most_prompts(self, length: int, scored: bool) -> int:
        del scored
        return most_prompts(length)

    def prompts(self, count: int, length: int) -> int:
        del length
        return power_of_two(count)

    def before(self, pages: int) -> int:
        return power_of_two(pages) if pages else 0

    def copies(self, pages: int) -> int:
        return bucket(pages)

    def row(self, longest: int) -> int:
        return min(bucket(max(longest, 1)), self._most)

    def rows(self, needed: int) -> int:
        return max(bucket(needed), self._slots + 1)


def ladder(least: int, most: int) -> tuple[int, ...]:
    """`least`, four times as much, and so on below `most`; then `most`."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= STEP
    return (*sizes, most)


class FewSizes:
    """Implements `Sizes` likewise."""

    best: tuple[int, ...] = (BEST[0], BEST[-1])
    shares: bool = False

    def __init__(self, slots: int, width: int, page_size: int, row_pages: int | None):
        self._slots, self._row = slots, min(width, row_pages or width)
        longest = min(longest_chunk(page_size), width * page_size)
        self._lengths = ladder(min(-(-LEAST_LENGTH // page_size) * page_size, longest), longest)
        self._together = power_of_two(max(slots, OPEN_PREFIXES))
        self._before = (0, *ladder(min(LEAST_BEFORE, width), width))
        self._rows = ladder(slots, slots * -(-width // self._row))

    def length(self, tokens: int) -> int:
        return _least(self._lengths, tokens)

    def most_prompts(self, length: int, scored: bool) -> int:
        return 1 if scored else min(most_prompts(length), self._together)

    def prompts(self, count: int, length: int) -> int:
        return 1 if count == 1 else self.most_prompts(length, False)

    def before(self, pages: int) -> int:
        return _least(self._before, pages)

    def copies(self, pages: int) -> int:
        del pages
        return self._slots

    def row(self, longest: int) -> int:
        del longest
        return self._row

    def rows(self, needed: int) -> int:
        return _least(self._rows, max(needed, self._slots + 1))

    def prefill_calls(self, scored: bool) -> Iterator[tuple[int, int, int]]:
        """(prompts, length, pages cached before), all there are."""
        for length in self._lengths:
            for count in sorted({1, self.most_prompts(length, scored)}):
                yield from ((count, length, before) for before in self._before)

    def tables(self) -> Iterator[tuple[int, int]]:
        """(rows, pages of a row), all there are."""
        return ((rows, self._row) for rows in self._rows)


def _least(sizes: tuple[int, ...], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
