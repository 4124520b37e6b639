"""Bucketed lengths: every array that reaches a compiled program has one of a few sizes, so programs are few."""

import logging

log = logging.getLogger("jrl")

LENGTH_STEP = 16  # the least padded length, tokens


def length_step(parts: int = 1) -> int:
    """The least padded length of sequences that are cut into equal `parts`: what `bucket` makes of it divides by them."""
    return -(-LENGTH_STEP // (2 * parts)) * 2 * parts


def bucket(n: int, least: int = 1) -> int:
    """The smallest of least, 1.5 least, 2 least, 3 least, 4 least, ... that is >= n; `least` even unless it is 1."""
    size = max(least, 1)
    while size < n:
        half = size + size // 2
        if size > 1 and half >= n:
            return half
        size *= 2
    return size


def power_of_two(n: int) -> int:
    """The smallest that is at least n >= 1: coarser than `bucket`, for sizes that multiply the number of programs."""
    return 1 << (n - 1).bit_length()


def power_of_two_within(n: int) -> int:
    """The largest that is at most n >= 1."""
    return 1 << (n.bit_length() - 1)


def default_slots(sequences: int, replicas: int) -> int:
    """Slots of a rollout replica where the config leaves them open: for all of a step's sequences, at most 64."""
    return min(-(-sequences // replicas), 64)


class ProgramLog:
    """Counts the compiled programs of one component; each new one is logged, none should appear after warm-up."""

    def __init__(self, name: str):
        self.name, self.seen = name, set()

    def note(self, *key) -> bool:
        """Whether a program of these sizes is new, and about to be compiled."""
        new = key not in self.seen
        if new:
            self.seen.add(key)
            log.debug("%s: program %d: %s", self.name, len(self.seen), key)
        return new

    def __len__(self) -> int:
        return len(self.seen)
