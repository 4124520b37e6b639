"""Samples that are scored one by one, early, side by side."""

import threading
import time

import numpy as np
import pytest
import reward_functions as user

from jrl.config import default_config
from jrl.data import Prompt
from jrl.rewards import RewardManager
from jrl.rewards.per_sample import PerSample
from jrl.rewards.worker import RewardFailure

SIZES = [9, 1, 4, 0, 4, 2]
PROMPTS = [
    Prompt((1,), f"t{i % 2}", (), None, {"size": size} | ({"extra": 1} if i else {}), f"{i}") for i, size in enumerate(SIZES)
]
TEXTS = ["same", "same", "b" * 3, "", "b" * 3, "c"]
EXPECTED = [2 + len(text) + size / 8 for text, size in zip(TEXTS, SIZES, strict=True)]


def manager(function, workers=2, timeout_s=10.0):
    section = default_config().reward
    section.workers = workers
    return RewardManager([("f", function, 1.0)], timeout_s, section)


@pytest.mark.parametrize("function", [user.slow_length, f"{user.__file__}:slow_length"])
def test_the_parameters_say_that_a_function_is_of_one_sample(function):
    rewards = manager(function)
    rewards.check_columns({"size"})
    result = rewards.score_prompts(PROMPTS, TEXTS, [0] * 6)
    np.testing.assert_allclose(result.total, EXPECTED)


def test_results_depend_on_no_order_of_finishing_and_each_sample_is_scored_once():
    orders = [range(6), range(5, -1, -1), (3, 0, 5), ()]
    scored = []

    class Counting:
        def start(self):
            pass

        def misfit(self, columns):
            return ""

        def run(self, prompts, completions, columns, timeout_s):
            scored.append(completions[0])
            reward = user.slow_length(completions[0], prompt=prompts[0], size=columns["size"][0])
            return np.array([reward], np.float32), []

    for order in orders:
        rewards = manager("last_number")
        rewards._functions = [("f", PerSample([Counting() for _ in range(3)]), 1.0)]
        for i in order:
            rewards.submit(PROMPTS[i], TEXTS[i], 1)
        result = rewards.score_prompts(PROMPTS, TEXTS, [1] * 6)
        np.testing.assert_allclose(result.total, EXPECTED)
        assert sorted(scored) == sorted(TEXTS)
        scored.clear()


def test_what_was_submitted_is_done_while_others_are_still_made():
    rewards = manager(user.slow_length)
    rewards.score_prompts(PROMPTS, TEXTS, [1] * 6)  # starts the processes
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        rewards.submit(prompt, text, 1)
    time.sleep(1)  # generation goes on
    began = time.monotonic()
    np.testing.assert_allclose(rewards.score_prompts(PROMPTS, TEXTS, [1] * 6).total, EXPECTED)
    waited = time.monotonic() - began
    began = time.monotonic()
    np.testing.assert_allclose(rewards.score_prompts(PROMPTS, TEXTS, [1] * 6).total, EXPECTED)
    whole = time.monotonic() - began
    assert waited < whole / 2 and whole > 0.1, "the second time nothing was on the way: the negative control"


def test_several_run_at_a_time_and_no_more_than_there_are_workers():
    def processes(workers):
        rewards = manager(user.row_process_id, workers)
        return set(rewards.score(["p"] * 12, [str(i) for i in range(12)], {}).total.tolist())

    assert len(processes(1)) == 1
    assert 1 <= len(processes(3)) <= 3
    together = threading.Barrier(3, timeout=10)

    class Meeting:
        def start(self):
            pass

        def run(self, prompts, completions, columns, timeout_s):
            together.wait()
            return np.ones(len(prompts), np.float32), []

    rewards, failures = PerSample([Meeting() for _ in range(3)]).run(["p"] * 6, ["x"] * 6, {}, 10.0)
    assert rewards.tolist() == [1] * 6 and failures == []


def test_the_deadline_starts_with_the_last_sample_and_failures_are_of_samples():
    class Moody:
        def start(self):
            pass

        def run(self, prompts, completions, columns, timeout_s):
            if completions[0] == "hang":
                time.sleep(timeout_s)
                raise RewardFailure("timeout", "hung")
            return np.ones(len(prompts), np.float32), []

    runner = PerSample([Moody()], share=1 / 4)
    for text in ("hang", "x"):
        runner.submit("p", text, {}, 1.0)
    time.sleep(0.5)
    rewards, failures = runner.run(["p"] * 8, ["x", "hang"] + ["hang"] * 6, {}, 1.0)
    np.testing.assert_array_equal(rewards, [1] + [np.nan] * 7)
    assert [f.samples for f in failures] == [1] * 7 and {f.kind for f in failures} == {"timeout"}
    assert "not reached" in failures[-1].text and "not reached" not in failures[0].text


def test_each_call_has_a_deadline_of_its_own_and_does_not_wait_for_what_another_will_ask_for():
    class Slow:
        def start(self):
            pass

        def run(self, prompts, completions, columns, timeout_s):
            time.sleep(0.1)
            return np.array([float(completions[0])], np.float32), []

    runner = PerSample([Slow()])
    for i in reversed(range(12)):
        runner.submit("p", str(i), {}, 1.0)
    for begin in (0, 6):
        asked = [str(i) for i in range(begin, begin + 6)]
        rewards, failures = runner.run(["p"] * 6, asked, {}, 1.0)
        assert rewards.tolist() == list(range(begin, begin + 6)) and failures == []


def test_a_scorer_that_cannot_be_loaded_is_not_tried_for_every_sample():
    tried = []

    class Broken:
        def start(self):
            tried.append(1)
            raise RewardFailure("load", "no such library")

    rewards, failures = PerSample([Broken()]).run(["p"] * 5, ["x"] * 5, {}, 10.0)
    assert np.isnan(rewards).all() and len(tried) == 1 and [f.kind for f in failures] == ["load"] * 5


def test_columns_that_a_row_lacks():
    rewards = manager(user.row_process_id)
    result = rewards.score(["p"] * 2, ["x", "y"], {"note": [None, "n"]})
    assert result.total[0] > 0 and result.total[1] == -1


def test_lambdas_of_one_sample():
    rewards = manager(lambda completion, size: len(completion) + size)
    rewards.check_columns({"size"})
    np.testing.assert_array_equal(rewards.score(["p"] * 2, ["x", "yy"], {"size": [1, 2]}).total, [2, 4])
