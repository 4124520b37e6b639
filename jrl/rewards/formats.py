"""Rewards for the form of a reply, whatever it says. N samples.

`think_answer` and `length_penalty` are called in place and take time in proportion to the reply. A regular expression can take
for ever, so `jrl.rewards.worker` loads this file by its path into a process that can be killed. It needs nothing of jrl.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> np.ndarray:
    """f32[N]: 1 where the reply is <think>...</think>, then <answer>...</answer>, each once, and only white space besides."""
    return np.array([_is_think_answer(text.strip()) for text in completions], np.float32)


def _is_think_answer(text: str) -> bool:
    if any(text.count(tag) != 1 for tag in _TAGS) or not text.startswith(_TAGS[0]) or not text.endswith(_TAGS[3]):
        return False
    thought, _, answer = text.partition(_TAGS[1])
    return answer.lstrip().startswith(_TAGS[2]) and _TAGS[0] in thought


def length_penalty(free: int, full: int) -> Callable[..., np.ndarray]:
    """The function that gives f32[N]: 0 up to `free` tokens, from there in a straight line to -1 at `full` tokens and beyond."""

    def penalty(prompts: Sequence[str], completions: Sequence[str], *, completion_tokens: Sequence[int], **_: Any) -> np.ndarray:
        over = (np.asarray(completion_tokens, np.float64) - free) / (full - free)
        return -np.clip(over, 0.0, 1.0).astype(np.float32)

    return penalty


def regex(pattern: str) -> Callable[..., float]:
    """The function of a sample that gives 1.0 where the expression is found in the reply; "." is any character, newlines too."""
    expression = re.compile(pattern, re.DOTALL)

    def found(completion: str, **_: Any) -> float:
        return float(expression.search(completion) is not None)

    return found
