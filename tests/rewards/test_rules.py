"""Rules by hand-worked cases."""

import re
import time
from decimal import Decimal

import numpy as np
import pytest

from jrl.rewards import REWARDS
from jrl.rewards.rules import numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 42.", ["42"]),
        ("1,234 and 12,345,678.90", ["1234", "12345678.90"]),
        ("1,2,3 or 1234,567 or 1,2345", ["1", "2", "3", "1234", "567", "1", "2345"]),
        ("$5, -$5, $-5, €7.50", ["5", "-5", "-5", "7.50"]),
        ("-3 and = -3, (-4), \N{MINUS SIGN}5, +6", ["-3", "-3", "-4", "-5", "6"]),
        ("10-7 = 3, 10 - 7 = 3, x-2, (1)-2, 3.-4", ["10", "7", "3", "10", "7", "3", "2", "1", "2", "3", "4"]),
        ("3.0 .5 2e3 1.5e-2", ["3.0", "0.5", "2000", "0.015"]),
        (r"\boxed{7} **8** 9%", ["7", "8", "9"]),
        ("v1.2.3 ... . - + , none", ["1.2", "3"]),
        ("1e999999999999", ["1", "999999999999"]),
        ("", []),
    ],
)
def test_numbers(text, expected):
    assert numbers(text) == [Decimal(x) for x in expected]


def score(name, reply, answer):
    (reward,) = REWARDS[name](["p"], [reply], answer=[answer], other=[1])
    return reward


SOLUTION = "He has 5 + 1,229 = <<5+1229=1234>>1234.\n#### 1,234"


@pytest.mark.parametrize(
    ("name", "reply", "answer", "reward"),
    [
        ("exact_match", " 42\n", "42", 1),
        ("exact_match", "42.", "42", 0),
        ("last_number", "5 plus 7 is 12.", "12", 1),
        ("last_number", "12 is 5 plus 7", "12", 0),
        ("last_number", "It is -12", "12", 0),
        ("last_number", "It is 12.0 dollars", "12", 1),
        ("last_number", "no idea", "12", 0),
        ("last_number", "so 1234", SOLUTION, 1),
        ("last_number", "12", 12, 1),
        ("first_number", "12 is 5 plus 7", "12", 1),
        ("first_number", "5 plus 7 is 12", "12", 0),
        ("first_number", "", "12", 0),
        ("gsm8k_strict", "Thus\n#### 1234", SOLUTION, 1),
        ("gsm8k_strict", "#### 7\n#### $1,234 in all, of 9", SOLUTION, 1),
        ("gsm8k_strict", "1234", SOLUTION, 0),
        ("gsm8k_strict", "#### none", SOLUTION, 0),
        ("gsm8k_flexible", "that is $1,234.", SOLUTION, 1),
        ("gsm8k_flexible", "Check: 5\n#### 1234", SOLUTION, 1),
        ("gsm8k_flexible", "#### 1234\nCheck: 5", SOLUTION, 0),
        ("gsm8k_strict", "#### 1234\nCheck: 5", SOLUTION, 1),
        ("gsm8k_flexible", "1234 or 5", SOLUTION, 0),
    ],
)
def test_rules(name, reply, answer, reward):
    assert score(name, reply, answer) == reward


@pytest.mark.parametrize("name", ["exact_match", "last_number", "first_number", "gsm8k_strict", "gsm8k_flexible"])
def test_nothing_to_compare_with_is_nan_not_wrong(name):
    rewards = REWARDS[name](["p"] * 2, ["x", "7"], answer=[None, "#### 7" if name != "exact_match" else "7"])
    assert rewards.dtype == np.float32
    assert np.isnan(rewards[0]) and not np.isnan(rewards[1])
    assert name == "exact_match" or np.isnan(score(name, "7", "seven"))


@pytest.mark.parametrize("unit", ["1", "1,234", ",123", ",1234", "-$", "1e", "1,", ".", "####"])
def test_rules_are_fast_on_hostile_replies(unit):
    text = "1,123" + unit * 10_000 + "4"
    started = time.monotonic()
    score("gsm8k_flexible", text, "7")
    assert time.monotonic() - started < 5


def test_gsm8k_rules_agree_with_the_extraction_of_verl():
    """Its regular expressions, on replies whose numbers are written plainly."""
    replies = ["#### 18", "so 18", "18 then 3", "#### 18 or\n#### 3", "#### -18", "#### 1,018", "it is 18.", "none", "#### 18\n4"]
    for reply in replies:
        marked = re.findall(r"#### (-?[0-9.,]+)", reply)
        every = [x for x in re.findall(r"-?[0-9.,]+", reply) if x.strip(".,")]
        for name, found in (("gsm8k_strict", marked), ("gsm8k_flexible", every)):
            expected = bool(found) and found[-1].rstrip(".").replace(",", "") == "18"
            assert score(name, reply, "9 * 2\n#### 18") == expected, (name, reply)
