"""Rewards by rule: a reply is right (1.0) or not (0.0). N samples.

Each takes the reference answers as the column `answer` and returns f32[N], NaN where that column gives nothing to
compare with, so that the sample is masked and counted. No reply can make them hang: no repetition is nested in the
regular expressions in a way that would make them slow.
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

# A sign counts only where no operand precedes it: "10-7" holds 10 and 7, "= -7" holds -7.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])([-+])[$€£]?)?"
    r"([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
    r"([eE][-+]?[0-9]{1,4}(?![0-9]))?"
)
_MARK = "####"  # GSM8K writes the result of a solution after it


def numbers(text: str) -> list[Decimal]:
    """All numbers of a text, in order: 1,234, $5, -3, 3.0, .5, 2e3; a period that ends a sentence is no part of one."""
    found = []
    for sign, digits, exponent in _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-")):
        try:
            found.append(Decimal(sign + digits.replace(",", "") + exponent))
        except InvalidOperation:  # more digits than Decimal's limits allow
            continue
    return found


def exact_match(prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[Any], **_: Any) -> np.ndarray:
    """The reply is the answer, white space around both aside."""
    return _compare(completions, answer, reply=str.strip, reference=str.strip)


def last_number(prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[Any], **_: Any) -> np.ndarray:
    """The last number of the reply equals the last number of the answer."""
    return _compare(completions, answer, reply=_last, reference=_last)


def first_number(prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[Any], **_: Any) -> np.ndarray:
    """The first number of the reply equals the last number of the answer."""
    return _compare(completions, answer, reply=_first, reference=_last)


def gsm8k_strict(prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[Any], **_: Any) -> np.ndarray:
    """The number after the reply's last "####" equals the one after the answer's.

    Both GSM8K rules take what verl's of that name take, and compare it as a number: 1,234.0 is 1234. Unlike verl's they read the
    whole reply, not its last 300 characters.
    """
    return _compare(completions, answer, reply=_marked, reference=_result)


def gsm8k_flexible(prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[Any], **_: Any) -> np.ndarray:
    """The reply's last number equals the one after the answer's "####", wherever the reply has one itself."""
    return _compare(completions, answer, reply=_last, reference=_result)


def _compare(
    completions: Sequence[str], answer: Sequence[Any], reply: Callable[[str], Any], reference: Callable[[str], Any]
) -> np.ndarray:
    """f32[N]: 1 where `reply(completion) == reference(answer)`; NaN where the reference is None."""
    rewards = np.zeros(len(completions), np.float32)
    for i, (text, right) in enumerate(zip(completions, answer, strict=True)):
        wanted = None if right is None else reference(str(right))
        rewards[i] = np.nan if wanted is None else reply(text) == wanted
    return rewards


def _first(text: str) -> Decimal | None:
    return next(iter(numbers(text)), None)


def _last(text: str) -> Decimal | None:
    return next(reversed(numbers(text)), None)


def _marked(text: str) -> Decimal | None:
    _, mark, result = text.rpartition(_MARK)
    return _first(result) if mark else None


def _result(text: str) -> Decimal | None:
    marked = _marked(text)
    return _last(text) if marked is None else marked
