"""Reward functions that a worker process can import: they stand in for a user's module."""

import functools
import os
import sys
import time

import numpy as np


def half(prompts, completions, **columns):
    return [0.5] * len(completions)


def integers(prompts, completions):
    return np.arange(len(completions))


def lengths_from_column(prompts, completions, size):
    return [float(s) for s in size]


def needs_truth(prompts, completions, ground_truth, *, level, strictness=1):
    return [float(g in c) for c, g in zip(completions, ground_truth, strict=True)]


def takes_one(completions):
    return [1.0] * len(completions)


def forgets_prompts(completions, answer):
    return [1.0] * len(completions)


@functools.wraps(needs_truth)
def fills_in(prompts, completions, **columns):
    return needs_truth(prompts, completions, ground_truth=completions, level=0)


def process_id(prompts, completions):
    return [os.getpid()] * len(completions)


def heavy_modules(prompts, completions):
    return [float("jax" in sys.modules or "jrl" in sys.modules)] * len(completions)


def moody(prompts, completions):
    """Does to the whole batch what any completion says."""
    for text in completions:
        act(text)
    return [1.0] * len(completions)


def moody_row(completion, **columns):
    """Does to one sample what it says."""
    act(completion)
    return 1.0


def slow_length(completion, *, size, prompt="", **columns):
    """Of one sample; later for longer ones that come earlier."""
    time.sleep(size / 50)
    return len(prompt) + len(completion) + size / 8


def row_process_id(completion, note=None):
    return os.getpid() if note is None else -1.0


def act(text):
    if text == "raise":
        raise RuntimeError("out of patience")
    if text == "exit":
        sys.exit("bye")
    if text == "hang":
        time.sleep(60)
    if text == "die":
        os._exit(3)


def shape_wrong(prompts, completions):
    return [1.0] * (len(completions) + 1)


def strings(prompts, completions):
    return ["1.0"] * len(completions)


def scalar(prompts, completions):
    return 1.0


def nothing(prompts, completions):
    return None


def gaps(prompts, completions):
    return [None, float("nan"), float("inf"), 0.5]


async def later(prompts, completions):
    return [1.0] * len(completions)
