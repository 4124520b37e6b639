"""Killed, interrupted and resumed: the run that comes out is the one that was never touched."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.runs import ROOT, a_run, assert_same_runs, command, digests, lines, sampled, start

EVERY = 2  # steps between checkpoints
STEPS = 6
SETTINGS = {"steps": STEPS, "checkpoint__every_steps": EVERY, "eval__every_steps": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The unbroken run, in a process of its own as the broken ones are."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = start(command(folder, **SETTINGS))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == STEPS
    return folder


def resume(folder, caplog) -> int:
    """Finishes the run, and says from which step."""
    with caplog.at_level("INFO", "jrl"):
        trainer = a_run(folder, resume=True, **SETTINGS)
        assert trainer.train()["steps"] == STEPS
    resumed = [r.args[0] for r in caplog.records if r.message.startswith("resumed at step")]
    return resumed[0] if resumed else 0


def finished_steps(folder) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count('"kind": "train"') if file.exists() else 0


@pytest.mark.parametrize(
    ("moment", "step", "left"),
    [
        ("in_save", 4, 2),  # that of step 4 is half written, so the run goes back to step 2
        pytest.param("in_update", 3, 2, marks=pytest.mark.slow),
        pytest.param("in_generation", 5, 4, marks=pytest.mark.slow),
        # The metrics of the step are on disk, its samples are not.
        pytest.param("between_logs", 5, 4, marks=pytest.mark.slow),
        pytest.param("between_steps", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_kill_9_loses_at_most_one_interval_and_nothing_shows_it(whole, tmp_path, caplog, moment, step, left):
    folder = tmp_path / "run"
    args = [sys.executable, "-m", "tests.killed_run", moment, str(step), *command(folder, **SETTINGS)[3:]]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = finished_steps(folder)
    if moment == "in_save":
        assert any(f"{step}." in p.name for p in (folder / "checkpoints").iterdir()), "the save had already ended"
    resumed = resume(folder, caplog)
    assert resumed == left and before - resumed <= EVERY
    assert_same_runs(folder, whole, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kill_9_at_any_moment(whole, tmp_path, caplog, seed):
    folder = tmp_path / "run"
    process = start(command(folder, **SETTINGS))
    while finished_steps(folder) < 1 + seed % 4:
        assert process.poll() is None
        time.sleep(0.002)
    time.sleep(random.Random(seed).uniform(0, 0.6))
    process.kill()
    process.communicate()
    before = finished_steps(folder)
    resumed = resume(folder, caplog)
    assert before - resumed <= EVERY
    assert_same_runs(folder, whole, STEPS)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_leaves(whole, tmp_path, caplog, number):
    folder = tmp_path / "run"
    process = start(command(folder, **SETTINGS))
    while finished_steps(folder) < 1:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told["interrupted"] == number.name and 1 <= told["steps"] < STEPS
    assert f"{number.name}: saved step {told['steps']}" in err and "--config.resume=True" in err
    assert digests(folder, told["steps"])
    assert resume(folder, caplog) == told["steps"]  # nothing is lost
    assert_same_runs(folder, whole, STEPS)


def test_a_corrupt_checkpoint_is_skipped_with_a_line(whole, tmp_path, caplog):
    folder = tmp_path / "run"
    a_run(folder, **(SETTINGS | {"steps": 4})).train()
    file = max((folder / "checkpoints" / "4" / "state" / "d").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    assert resume(folder, caplog) == 2
    assert [r for r in caplog.records if "checkpoint of step 4 skipped, it is not whole" in r.message]
    assert_same_runs(folder, whole, STEPS)


def test_a_new_run_sets_an_old_one_aside(whole, tmp_path):
    folder = tmp_path / "run"
    settings = {"steps": 1, "eval__at_start": False}
    a_run(folder, **settings).train()
    first = sampled(folder)
    a_run(folder, seed=1, **settings).train()
    assert sampled(tmp_path / "run.1") == first != sampled(folder)
    assert lines(tmp_path / "run.1" / "metrics.jsonl") and os.listdir(tmp_path / "run.1" / "checkpoints")
