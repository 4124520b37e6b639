"""How the chunks of prompts that are to be cached are put together into calls, on the host.

A call computes the same number of prompts of the same length on every replica; what is missing of either is padding.
"""

from typing import TYPE_CHECKING, TypeVar

from jrl.shapes import bucket, power_of_two_within

if TYPE_CHECKING:
    from jrl.rollout.sizes import Sizes

PREFILL_TOKENS = 4096  # of a replica: of prompts between two calls of the decode loop, and of one call with its padding

C = TypeVar("C")


def padded_length(tokens: int, page_size: int) -> int:
    """Of the array in which so many tokens of a prompt are computed: whole pages."""
    return -(-bucket(tokens, page_size) // page_size) * page_size


def longest_chunk(page_size: int) -> int:
    """The most tokens of a prompt in one call: whole pages, at least one, that are within PREFILL_TOKENS with their padding."""
    tokens = max(PREFILL_TOKENS // page_size, 1) * page_size
    while tokens > page_size and padded_length(tokens, page_size) > PREFILL_TOKENS:
        tokens -= page_size
    return tokens


def most_prompts(length: int) -> int:
    """How many prompts of a padded length a call takes of a replica at most: a power of two, as their number is rounded to."""
    return power_of_two_within(max(PREFILL_TOKENS // length, 1))


def next_call(work: list[list[tuple[C, int]]], sizes: "Sizes", scored: bool) -> list[list[tuple[C, int]]]:
    """The chunks of the next call: of the padded lengths that it can have, the one with which most of them come in.

    Args:
      work: of each replica (chunk, tokens), shortest first, of which some replica has one at least.
      scored: with logprobs.
    """

    def of_length(length: int) -> list[list[tuple[C, int]]]:
        most = sizes.most_prompts(length, scored)
        return [[c for c in chunks if sizes.length(c[1]) <= length][:most] for chunks in work]

    lengths = sorted({sizes.length(tokens) for chunks in work for _, tokens in chunks})
    return max(map(of_length, lengths), key=lambda batch: sum(map(len, batch)))
