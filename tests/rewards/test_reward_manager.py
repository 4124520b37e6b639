"""Whatever a reward function does, the run goes on: the sample is masked, counted and reported."""

import importlib
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import reward_functions as user

from jrl.config import default_config
from jrl.data import Prompt
from jrl.errors import UserError
from jrl.rewards import RewardManager
from jrl.rewards.manager import REWARDS, Verifier, parse_functions
from jrl.rewards.per_sample import PerSample
from jrl.rewards.runners import MAX_ABANDONED, Process, Row

FILE = user.__file__


def score(functions, completions, timeout_s=10.0, **columns):
    if not isinstance(functions, RewardManager):
        functions = RewardManager([(getattr(f, "__name__", str(f)), f, 1.0) for f in functions], timeout_s)
    return functions.score(["p"] * len(completions), completions, columns)


def gone(pid, within_s):
    """Whether the process ends in time; a zombie counts as ended."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


# What is right -------------------------------------------------------------------------------------------------------


def test_weighted_sum_with_parts():
    functions = [("number", "last_number", 2.0), ("half", user.half, -0.5)]
    result = RewardManager(functions, 10).score(["p"] * 3, ["7", "8", "x 7"], {"answer": ["7"] * 3})
    np.testing.assert_array_equal(result.parts["number"], [1, 0, 1])
    np.testing.assert_array_equal(result.parts["half"], [0.5] * 3)
    np.testing.assert_array_equal(result.total, [1.75, -0.25, 1.75])
    assert result.total.dtype == np.float32 and result.valid.all() and result.failures == {}


def test_halves_stay_halves_beside_integers():
    result = score([user.integers, user.half], ["a", "b", "c"])
    np.testing.assert_array_equal(result.parts["integers"], [0, 1, 2])
    np.testing.assert_array_equal(result.total, [0.5, 1.5, 2.5])


@pytest.mark.parametrize("function", [f"{FILE}:lengths_from_column", "reward_functions:lengths_from_column"])
def test_functions_by_path_get_the_columns_they_name(function):
    columns = {"size": [3, 4], "other": [0, 0]}
    result = RewardManager([("size", function, 1.0)], 10).score(["p"] * 2, ["a", "b"], columns)
    np.testing.assert_array_equal(result.total, [3, 4])


def test_prompts_bring_texts_and_columns():
    rows = [{"answer": "1"}, {"answer": "1", "bonus": 2}]
    prompts = [Prompt((1,), f"t{i}", (), "1", row, f"{i}") for i, row in enumerate(rows)]
    seen = {}

    def spy(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [1, 1]

    manager = RewardManager([("spy", spy, 1.0)], 10)
    manager.score_prompts(prompts, np.array(["x", "y"], object), [3, 5])
    columns = {"answer": ["1", "1"], "bonus": [None, 2], "completion_tokens": [3, 5]}
    assert seen == {"prompts": ["t0", "t1"], "completions": ["x", "y"], **columns}


def test_config_names_functions_and_a_python_function_takes_their_place():
    section = default_config().reward
    section.functions = f"last_number, {FILE}:half*0.25"
    result = RewardManager.from_config(section).score(["p"], ["7"], {"answer": ["7"]})
    assert result.parts.keys() == {"last_number", "half"} and result.total == [1.125]
    result = RewardManager.from_config(section, user.half).score(["p"], ["7"], {})
    assert result.parts.keys() == {"half"} and result.total == [0.5]
    assert parse_functions("a, m:f*2,g.py:h*-1e-1") == [("a", "a", 1.0), ("f", "m:f", 2.0), ("h", "g.py:h", -0.1)]


# The process ---------------------------------------------------------------------------------------------------------


def test_process_is_another_one_reused_and_replaced_after_a_hang(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(pathlib.Path(FILE).read_text() + "\ndef both(p, c):\n    moody(p, c)\n    return process_id(p, c)\n")
    manager = RewardManager([("both", f"{file}:both", 1.0)], 1.0)
    first, second = (int(score(manager, ["x"]).total[0]) for _ in range(2))
    assert first == second != os.getpid()
    assert score(manager, ["hang"]).failures == {"both/timeout": 1}
    assert gone(first, within_s=2)
    third = score(manager, ["x"])
    assert third.valid.all() and int(third.total[0]) not in (first, os.getpid())


def test_process_holds_neither_jax_nor_jrl():
    importlib.import_module("jax")
    assert {"jax", "jrl"} <= sys.modules.keys(), "the negative control: here they are"
    process = Process(f"{FILE}:heavy_modules", module="math_verify")
    process.start()
    process.send("batch", ["p"], ["c"], {})
    assert process.receive(10) == [0.0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_ends_with_a_killed_parent():
    code = (
        "import sys, threading, time; sys.path[:0] = sys.argv[1:]\n"
        "import reward_functions as user; from jrl.rewards.runners import Process\n"
        "pid, moody = Process(f'{user.__file__}:process_id'), Process(f'{user.__file__}:moody')\n"
        "moody.start(); moody.send('batch', ['p'], ['hang'], {})\n"
        "pid.start(); pid.send('batch', ['p'], ['c'], {}); print(int(pid.receive(10)[0]), flush=True); time.sleep(60)\n"
    )
    path = [str(pathlib.Path(FILE).parent), str(pathlib.Path(FILE).parents[2])]
    with subprocess.Popen([sys.executable, "-c", code, *path], stdout=subprocess.PIPE, text=True) as parent:
        idle = int(parent.stdout.readline())
        children = [int(p) for p in pathlib.Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        assert idle in children and len(children) == 2
        parent.send_signal(signal.SIGKILL)
    assert all(gone(child, within_s=5) for child in children), "the hanging one too"


# What goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "completion", "kind", "text"),
    [
        (user.moody, "raise", "error", r"RuntimeError: out of patience \(.*reward_functions.py:"),
        (user.moody, "exit", "error", "SystemExit: bye"),
        (user.moody, "hang", "timeout", "killed"),
        (user.moody, "die", "crash", "died"),
        (user.shape_wrong, "x", "result", r"float64 of shape \(5,\), not 4 numbers"),
        (user.strings, "x", "result", "not 4 numbers"),
        (user.scalar, "x", "result", "returned float, not 4 numbers"),
        (user.nothing, "x", "result", "returned NoneType"),
        (user.lengths_from_column, "x", "error", "missing .* 'size'"),
    ],
)
def test_a_failing_function_masks_all_and_is_logged_once(caplog, function, completion, kind, text):
    manager = RewardManager([("fine", user.half, 1.0), ("bad", function, 1.0)], 1.0 if completion == "hang" else 10.0)
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        results = [score(manager, [completion, "x", "x", "x"]) for _ in range(2)]
    assert time.monotonic() - started < 20, "far below the minute that the function sleeps"
    for result in results:
        assert not result.valid.any() and not result.total.any()
        assert result.failures == {f"bad/{kind}": 4}
        np.testing.assert_array_equal(result.parts["fine"], [0.5] * 4)
    (record,) = caplog.records
    assert "4 samples masked" in record.getMessage() and re.search(text, record.getMessage())


def test_missing_values_mask_their_samples_only():
    result = score([user.gaps], ["a", "b", "c", "d"])
    np.testing.assert_array_equal(result.valid, [False, False, False, True])
    np.testing.assert_array_equal(result.total, [0, 0, 0, 0.5])
    assert result.failures == {"gaps/nan": 3}


def test_rule_without_a_reference_masks_the_sample():
    result = score(["last_number"], ["7", "7"], answer=["7", None])
    np.testing.assert_array_equal(result.valid, [True, False])
    assert result.failures == {"last_number/nan": 1}


@pytest.mark.parametrize("text", ["raise", "hang"])
def test_lambdas_and_closures_are_guarded_too(text):
    result = score([lambda prompts, completions: user.moody(prompts, completions)], [text, "x"], timeout_s=0.2)
    assert not result.valid.any()
    assert list(result.failures.values()) == [2]


def test_abandoned_threads_are_bounded():
    calls = []

    def hang(prompts, completions):
        calls.append(1)
        time.sleep(3)

    manager = RewardManager([("hang", hang, 1.0)], timeout_s=0.02)
    failures = [score(manager, ["x"]).failures for _ in range(MAX_ABANDONED + 3)]
    assert failures == [{"hang/timeout": 1}] * (MAX_ABANDONED + 3)
    assert len(calls) == MAX_ABANDONED


def test_verifier_loses_only_the_samples_that_hang_crash_or_raise():
    rows = PerSample([Row(Process(f"{FILE}:moody_row", module="math"))], share=1 / 4)
    completions = ["x", "hang", "x", "raise", "die", "x"]
    rewards, failures = rows.run(["p"] * 6, completions, {"answer": ["1"] * 6}, timeout_s=3.0)
    np.testing.assert_array_equal(rewards, [1, np.nan, 1, np.nan, np.nan, 1])
    assert [(f.kind, f.samples) for f in failures] == [("timeout", 1), ("error", 1), ("crash", 1)]


def test_verifier_keeps_to_the_deadline_of_the_whole():
    rows = PerSample([Row(Process(f"{FILE}:moody_row", module="math"))], share=1 / 4)
    rewards, failures = rows.run(["p"] * 8, ["x"] + ["hang"] * 7, {}, timeout_s=1.6)
    np.testing.assert_array_equal(np.isnan(rewards), [False] + [True] * 7)
    assert {f.kind for f in failures} == {"timeout"} and sum(f.samples for f in failures) == 7


# What is refused at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("last_numbers", "reward.functions=last_numbers: unknown; did you mean last_number"),
        ("reward_modle", "reward.functions=reward_modle: unknown; did you mean reward_model"),
        ("nowhere.py:f", "nowhere.py:f: no such file"),
        (f"{FILE}:nonesuch", "cannot be loaded: AttributeError.*nonesuch"),
        ("no_such_module:f", "cannot be loaded: ModuleNotFoundError"),
        (user.later, "must be a plain function"),
        (7, "must be a plain function"),
    ],
)
def test_bad_functions_are_named_before_the_run(function, message):
    with pytest.raises(UserError, match=message):
        RewardManager([("f", function, 1.0)], 1.0)


def test_functions_that_cannot_be_read_or_told_apart():
    for text in ("a*b", "a,,b", "", "a*nan"):
        with pytest.raises(UserError, match="is neither NAME nor NAME\\*WEIGHT"):
            parse_functions(text)
    with pytest.raises(UserError, match="last_number occurs more than once; give it once, with the sum of the weights"):
        RewardManager([("last_number", "last_number", 1.0)] * 2, 1.0)
    for text in ("a.py:score, b.py:score*0.5", "score, m:score"):
        first, second = text.removesuffix("*0.5").split(", ")
        with pytest.raises(UserError, match=f"{first} and {second} are both called score; rename one of the functions") as error:
            RewardManager(parse_functions(text), 1.0)
        assert "sum of the weights" not in str(error.value)


# Columns -------------------------------------------------------------------------------------------------------------


MISFITS = [
    (f"{FILE}:needs_truth", "needs the columns 'ground_truth', 'level'"),
    ("reward_functions:needs_truth", "needs the columns 'ground_truth', 'level'"),
    ("reasoning_gym", "needs the columns 'data_source', 'dataset_options', 'metadata'"),
    (user.lengths_from_column, "needs the column 'size'"),
    (lambda prompts, completions, ground_truth: [], "needs the column 'ground_truth'"),
    (user.takes_one, "cannot be called with .prompts, completions, ..columns.: too many positional arguments"),
    (user.forgets_prompts, "cannot be called with .prompts, completions, ..columns.: multiple values for argument 'answer'"),
]


@pytest.mark.parametrize(("function", "text"), MISFITS, ids=[str(i) for i in range(len(MISFITS))])
def test_a_function_that_can_never_be_called_with_the_datas_columns_is_refused(function, text):
    manager = RewardManager([("fine", user.half, 1.0), ("bad", function, 1.0)], 10.0)
    place = re.escape(f"config.reward.functions={function}" if isinstance(function, str) else "reward")
    with pytest.raises(UserError, match=f"^{place}: bad {text}; the data have answer, question$"):
        manager.check_columns({"question", "answer"})


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        (f"{FILE}:needs_truth", {"ground_truth", "level", "answer"}),
        (f"{FILE}:fills_in", {"answer"}),  # what the function inside needs comes from the decorator
        (user.half, {"answer", "prompts_of_old"}),
        (user.integers, set()),
        (lambda prompts, completions, answer=None: [0.0], {"question"}),
        (int, {"answer"}),  # has no signature
        ("last_number", {"question", "answer"}),
        ("math_verify", {"question", "answer"}),
        ("reasoning_gym", {"question", "answer", "metadata", "data_source", "dataset_options"}),
    ],
)
def test_functions_that_may_work_pass(function, columns):
    RewardManager([("f", function, 1.0)], 10.0).check_columns(columns)


def test_what_is_refused_for_its_columns_would_have_masked_every_sample():
    for function in (user.lengths_from_column, user.takes_one, user.forgets_prompts):
        result = score([function], ["a", "b"], answer=["1", "2"])
        assert not result.valid.any() and list(result.failures.values()) == [2]
    assert score([user.fills_in], ["a", "b"], answer=["1", "2"]).valid.all()


def test_the_check_leaves_the_worker_ready(tmp_path):
    manager = RewardManager([("pid", f"{FILE}:process_id", 1.0)], 10.0)
    (before,) = score(manager, ["x"]).total
    manager.check_columns({"answer"})
    assert score(manager, ["x"]).total == [before]


def test_a_verifier_whose_package_is_broken_is_found_by_the_check(tmp_path, monkeypatch):
    (tmp_path / "broken_verifier.py").write_text("raise OSError('no such library')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(REWARDS, "broken", Verifier("math_verify", "broken_verifier", "broken-verifier"))
    manager = RewardManager([("broken", "broken", 1.0)], 10.0)
    with pytest.raises(UserError, match="config.reward.functions=broken: broken cannot be loaded: OSError: no such library"):
        manager.check_columns({"answer"})


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for name in ("math_verify", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=r"pip install 'jrl\[rewards\]'"):
            RewardManager([(name, name, 1.0)], 1.0)
