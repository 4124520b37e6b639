"""What this process is doing, in words: for timers, and for others that wait for it."""

import contextlib
import time
from collections.abc import Iterator

WAITING = "waiting for the others: "  # how an activity begins that ends when other processes come to the same place

_stack: list[tuple[str, float]] = [("starting", time.monotonic())]
_step = 0


@contextlib.contextmanager
def doing(name: str) -> Iterator[None]:
    """Inside, this is what the main thread does; around it, what it did before."""
    _stack.append((name, time.monotonic()))
    try:
        yield
    finally:
        _stack.pop()


def at_step(step: int) -> None:
    """The step that begins now, or the first of a run."""
    global _step
    _step = step
    _stack[0] = ("between phases", time.monotonic())


def current() -> tuple[str, int, float]:
    """The innermost activity, the step, and how many seconds the activity has taken."""
    name, since = _stack[-1]
    return name, _step, time.monotonic() - since
