"""The experiment that takes a model through SFT, a reward model and PPO: its data, and slowly the whole of it."""

import json
import re
import runpy
import subprocess
import sys
import types

import numpy as np
import pytest

from jrl import jsonl
from jrl.rewards.rules import numbers
from tests.runs import ROOT

SCRIPT = f"{ROOT}/experiments/rlhf_three_stages/run.py"


@pytest.fixture(scope="module")
def script():
    return types.SimpleNamespace(**runpy.run_path(SCRIPT))


def value(expression: str) -> int:
    """What a sum or a product of digits comes to, by Python."""
    assert re.fullmatch(r"[0-9+*\- ]+", expression)
    return eval(expression)


def test_worked_answers_are_the_problem_and_its_result(script):
    config = script.load(f"{ROOT}/experiments/rlhf_three_stages/config.py:stage=base,tiny", {})
    train, _ = script.load_data(config, None, None)
    kinds = set()
    for example in train[:200]:
        expression, equals, result = script.worked(example.question, example.answer).partition(" = ")
        assert equals and expression in example.question and value(expression) == int(result)
        kinds |= {"*"} & set(expression) or {"+-"}
    assert kinds == {"*", "+-"}


def a_batch(texts, right):
    return types.SimpleNamespace(texts=np.array(texts, object), reward_parts={"last_number": np.array(right, np.float32)})


def test_pairs_are_of_the_prompts_own_samples_and_no_wrong_one_comes_twice(script):
    prompt = types.SimpleNamespace(columns={"question": "What is 3 + 4 ?"}, answer="7")
    batch = a_batch(["7", "3 + 4 = 7", "8", "8", "9", " ", "1", "2", "6"], [1, 1, 0, 0, 0, 0, 0, 0, 0])
    mine = np.array([True] * 8 + [False])
    pairs, lent = script.pairs_of(prompt, batch, mine)
    assert [(p["chosen"], p["rejected"]) for p in pairs] == [("7", "8"), ("3 + 4 = 7", "9"), ("7", "1")]
    assert not lent and {p["prompt"] for p in pairs} == {"What is 3 + 4 ?"}


def test_a_problem_without_a_right_sample_lends_its_worked_answer(script):
    prompt = types.SimpleNamespace(columns={"question": "What is 3 + 4 ?"}, answer="7")
    pairs, lent = script.pairs_of(prompt, a_batch(["8", "9"], [0, 0]), np.array([True, True]))
    assert lent and [(p["chosen"], p["rejected"]) for p in pairs] == [("3 + 4 = 7", "8"), ("3 + 4 = 7", "9")]
    assert script.pairs_of(prompt, a_batch(["7", "7"], [1, 1]), np.array([True, True])) == ([], False)


@pytest.mark.slow
def test_the_stages_follow_each_other_and_are_not_done_twice(script, tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    command = [sys.executable, SCRIPT, "--tiny", f"--runs={runs}", f"--out={out}"]

    def run() -> dict[str, int]:
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=580)
        assert done.returncode == 0, done.stderr[-2000:]
        return {file.parent.name: file.stat().st_mtime_ns for file in runs.glob("*/result.json")}

    times = run()
    stages = ("base", "sft", "pairs", "reward_model", "ppo", "ppo_verifier")
    result = json.loads((out / "result.json").read_text())
    assert tuple(result) == stages and set(times) == set(stages)
    assert len((out / "table.md").read_text().splitlines()) == 2 + len(stages)
    assert all(result[stage]["steps"] == 2 for stage in ("sft", "reward_model", "ppo", "ppo_verifier"))

    keys = {stage: json.loads((runs / stage / "config.json").read_text()) for stage in stages}
    assert {keys[s]["model.path"] for s in ("pairs", "reward_model", "ppo", "ppo_verifier")} == {f"{runs}/sft/hf"}
    assert keys["ppo"]["reward.model.path"] == f"{runs}/reward_model/hf"

    _, held_out = script.load_data(script.load(f"{SCRIPT.replace('run.py', 'config.py')}:stage=base,tiny", {}), None, None)
    pairs, others, examples = (list(jsonl.read(runs / f"{name}.jsonl")) for name in ("pairs", "pairs_held_out", "examples"))
    seen = {row["prompt"] for row in pairs + others} | {row["question"] for row in examples}
    assert examples and held_out and not seen & {example.question for example in held_out}
    assert pairs and others and not {row["prompt"] for row in pairs} & {row["prompt"] for row in others}
    for row in pairs + others:
        right = value(re.search("[0-9].*[0-9]", row["prompt"])[0])
        assert numbers(row["chosen"])[-1:] == [right] != numbers(row["rejected"])[-1:]

    (runs / "base" / "result.json").unlink()  # this stage alone is done again
    again = run()
    assert {stage for stage in stages if again[stage] != times[stage]} == {"base"}
