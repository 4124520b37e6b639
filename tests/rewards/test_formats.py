"""Rewards of form, by hand-worked cases, as configured."""

import time

import numpy as np
import pytest

from jrl.config import default_config, load, override
from jrl.errors import UserError
from jrl.rewards import REWARDS, RewardManager


def section(**changes):
    made = default_config().reward
    for name, value in changes.items():
        made[name] = value
    return made


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1),
        (" <think></think><answer></answer>\n", 1),
        ("<think>a</think> so <answer>4</answer>", 0),
        ("<think>a</think><answer>4</answer> done", 0),
        ("well <think>a</think><answer>4</answer>", 0),
        ("<answer>4</answer><think>a</think>", 0),
        ("<think>a<answer>4</think></answer>", 0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("<think><think>a</think><answer>4</answer>", 0),
        ("<think>a</think><answer>4", 0),
        ("", 0),
    ],
)
def test_think_answer(reply, reward):
    assert REWARDS["think_answer"](["p"], [reply], answer=["4"]) == [reward]


def test_length_penalty_is_a_line_between_two_lengths():
    rewards = RewardManager([("length_penalty", "length_penalty", 1.0)], 1.0, section(length_free=10, length_full=30))
    rewards.check_columns({"answer"})
    result = rewards.score(["p"] * 6, ["x"] * 6, {"completion_tokens": [0, 10, 15, 20, 30, 99]})
    np.testing.assert_array_equal(result.total, np.float32([0, 0, -0.25, -0.5, -1, -1]))
    with pytest.raises(UserError, match=r"reward.length_full.* more than reward.length_free=1024"):
        load("configs/tiny.py", {"reward.functions": "last_number,length_penalty", "reward.length_free": "1024"})


def test_regex_is_searched_for_and_one_that_hangs_costs_only_its_sample():
    config = default_config()
    override(config, "reward.pattern", r"^(\d+)+$|Answer: .*4")
    rewards = RewardManager([("regex", "regex", 1.0)], 8.0, config.reward)
    began = time.monotonic()
    result = rewards.score(["p"] * 4, ["12", "no\nAnswer: \n4", "4", "1" * 40 + "x"], {})
    assert time.monotonic() - began < 8
    np.testing.assert_array_equal(result.total, [1, 1, 1, 0])
    np.testing.assert_array_equal(result.valid, [True, True, True, False])
    assert result.failures == {"regex/timeout": 1}
    for pattern, message in (
        ("(", r"reward.pattern=\(: no regular expression: missing \)"),
        ("", "needs an expression; give one"),
    ):
        with pytest.raises(UserError, match=message):
            RewardManager([("regex", "regex", 1.0)], 4.0, section(pattern=pattern))
