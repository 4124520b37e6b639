"""The verifiers of other packages, run as a training run does, in their process."""

import numpy as np
import pytest

from jrl.data import load_examples
from jrl.rewards import RewardManager


def test_reasoning_gym_scores_like_the_dataset_itself():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    options = {"min_numbers": 3, "max_numbers": 3}
    examples = load_examples("reasoning_gym:countdown", size=4, seed=3, options=options)
    dataset = reasoning_gym.create_dataset("countdown", size=4, seed=3, **options)
    replies = [examples[0].answer, f"So <answer> {examples[1].answer} </answer>", "1 + 1", "(((("]
    columns = {name: [e.columns[name] for e in examples] for name in examples[0].columns}
    result = RewardManager([("gym", "reasoning_gym", 1.0)], 40.0).score(["p"] * 4, replies, columns)
    bare = [examples[0].answer, examples[1].answer, *replies[2:]]
    expected = [
        dataset.score_answer(a, {k: e.columns[k] for k in ("question", "answer", "metadata")})
        for a, e in zip(bare, examples, strict=True)
    ]
    np.testing.assert_allclose(result.parts["gym"], expected)
    assert expected[:2] == [1.0, 1.0] and max(expected[2:]) < 1
    assert result.valid.all()


def test_last_number_works_on_reasoning_gym_answers():
    pytest.importorskip("reasoning_gym")
    examples = load_examples("reasoning_gym:chain_sum", size=30)
    manager = RewardManager([("number", "last_number", 1.0)], 1.0)
    replies = [f"The result is {e.answer}." for e in examples]
    answers = {"answer": [e.columns["answer"] for e in examples]}
    assert any(a.startswith("-") for a in answers["answer"])
    assert manager.score(["p"] * 30, replies, answers).total.all()
    assert not manager.score(["p"] * 30, [r.replace("is ", "is 1") for r in replies], answers).total.any()


def test_math_verify_compares_values():
    pytest.importorskip("math_verify")
    cases = [
        ("42", "The answer is 42.", 1),
        (r"\frac{1}{2}", "so $0.5$", 1),
        ("x^2+1", "it is $1 + x^2$", 1),
        (r"Then \boxed{\frac{3}{4}}", r"it is \boxed{0.75}", 1),
        ("She has 3.\n#### 72", "the answer is 72", 1),
        ("42", "The answer is 41.", 0),
        ("42", "", 0),
        (None, "42", np.nan),
    ]
    answers, replies, expected = zip(*cases, strict=True)
    manager = RewardManager([("math", "math_verify", 1.0)], 40.0)
    result = manager.score(["p"] * 8, replies, {"answer": answers})
    np.testing.assert_array_equal(result.parts["math"], np.nan_to_num(expected))
    np.testing.assert_array_equal(result.valid, ~np.isnan(expected))
    assert result.failures == {"math/nan": 1}
