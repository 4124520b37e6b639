"""Sweeps that run: one failure costs one run, what is left is what a second start does, signals save, and nothing is lost."""

import csv
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from jrl.sweep import grid, results
from jrl.sweep.__main__ import main
from tests.runs import QUIET, ROOT, TINY, digests, environment, lines


@pytest.fixture(autouse=True)
def loggers():
    """Puts back what a command does to the loggers of its process."""
    root, mine = logging.root, logging.getLogger("jrl")
    before = root.handlers[:], root.level, mine.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    mine.setLevel(before[2])


@pytest.fixture
def stand_in(monkeypatch):
    """Processes that do as tests/fake_run.py says instead of training."""
    command = grid.Run.command
    monkeypatch.setattr(grid.Run, "command", lambda run: [sys.executable, "-m", "tests.fake_run", *command(run)[3:]])
    monkeypatch.chdir(ROOT)


def sweep(directory, kinds, *args):
    """The exit status of a sweep whose arms do what `kinds` says, with two seeds."""
    return main([f"--config={TINY}", f"--grid=data.prompt_suffix={kinds}", "--seeds=2", f"--sweep_dir={directory}", *args])


def summary(capsys):
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured.err


def starts(directory, kind):
    """How each start of the arm's runs began, by seed."""
    folder = directory / f"data.prompt_suffix={kind}"
    return [
        [line.split()[0] for line in file.read_text().splitlines() if not line.startswith("ended")]
        for file in sorted(folder.glob("starts*.txt"))
    ]


def statuses(directory):
    with (directory / results.CSV).open(newline="") as file:
        return {(row["data.prompt_suffix"], int(row["seed"])): row["status"] for row in csv.DictReader(file)}


def signal_once_there(file, number):
    """A thread that sends a signal to this process as soon as the file is there."""

    def send():
        end = time.monotonic() + 100
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_failed_arm_costs_itself_alone_and_a_second_start_does_what_is_left(stand_in, tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert sweep(folder, "ok,broken,killed") == 1
    found, err = summary(capsys)
    assert (found["runs"], found["finished"], found["failed"], found["best"]) == (6, 2, 4, {"data.prompt_suffix": "ok"})
    assert statuses(folder) == {
        (kind, seed): "finished" if kind == "ok" else "failed" for kind in ("ok", "broken", "killed") for seed in (0, 1)
    }
    assert "1 of 6 started: prompt_suffix=ok, seed 0\n" in err
    assert re.search(r"1 of 6 finished: prompt_suffix=ok, seed 0, \d+s \(accuracy_after [\d.]+\); 5 left, about \d+s\n", err)
    assert "6 of 6 failed: prompt_suffix=killed, seed 1" in err and "4 of 6 runs are not finished" in err
    log = folder / "data.prompt_suffix=broken" / "seed1.stderr.log"
    said = "    Traceback (most recent call last):\n    MemoryError: \\x1b[31mout of <memory>\n"
    assert f"failed: prompt_suffix=broken, seed 1 ({log})\n{said}" in err and "\x1b" not in err
    assert "\x1b[31mout of <memory>" in log.read_text()
    assert "MemoryError: \\x1b[31mout of &lt;memory&gt;" in (folder / "index.html").read_text()

    (folder / "data.prompt_suffix=broken" / "repaired").write_text("")
    assert sweep(folder, "ok,broken,killed") == 0
    found, err = summary(capsys)
    assert found["finished"] == 6 and "failed" not in found and "2 of 6 runs are finished already" in err
    assert starts(folder, "ok") == [["fresh"], ["fresh"]], "nothing that is finished is done again"
    assert starts(folder, "broken") == [["fresh", "fresh"]] * 2, "it had not begun"
    assert starts(folder, "killed") == [["fresh", "resumed"]] * 2
    assert set(statuses(folder).values()) == {"finished"}


def test_more_values_and_seeds_are_runs_added(stand_in, tmp_path, capsys):
    folder = tmp_path / "sweep"
    assert sweep(folder, "ok") == 0
    assert sweep(folder, "ok,more", "--seeds=3") == 0
    assert summary(capsys)[0]["finished"] == 6
    assert starts(folder, "ok") == [["fresh"]] * 3 and starts(folder, "more") == [["fresh"]] * 3
    assert sweep(folder, "ok,more", "--seeds=3", "--config.steps=9") == 2
    assert "holds another sweep: it has config.steps=3, this one 9" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_sweep_continues_later(stand_in, tmp_path, capsys, number):
    folder, handlers = tmp_path / "sweep", [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    running = folder / "data.prompt_suffix=slow" / "seed0" / "metrics.jsonl"
    thread = signal_once_there(running, number)
    status = sweep(folder, "ok,slow")
    thread.join()
    found, err = summary(capsys)
    assert status == 0 and found["signal"] == number.name and found["interrupted"] == 1
    assert f"{number.name}: passed on to" in err and "the same command again continues" in err
    assert (running.parent / "saved").exists()
    assert statuses(folder)["slow", 0] == "interrupted" and not starts(folder, "slow")[1:], "nothing was started after it"
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    # As if the run of the other seed had begun, which else would wait for a signal.
    begun = folder / "data.prompt_suffix=slow" / "seed1"
    begun.mkdir()
    (begun / "config.json").write_text("{}")
    assert sweep(folder, "ok,slow") == 0
    assert starts(folder, "slow") == [["fresh", "resumed"], ["resumed"]] and set(statuses(folder).values()) == {"finished"}


def test_one_after_another_unless_said_otherwise(stand_in, tmp_path):
    assert sweep(tmp_path / "sweep", "a,b") == 0
    files = (tmp_path / "sweep").glob("*/starts*.txt")
    times = sorted(tuple(float(line.split()[1]) for line in file.read_text().splitlines()) for file in files)
    assert len(times) == 4 and all(ended <= began for (_, ended), (began, _) in itertools.pairwise(times))


def test_several_at_a_time(stand_in, tmp_path):
    kinds = "together,together_,together__"  # none of them ends before all of them have begun
    assert sweep(tmp_path / "sweep", kinds, "--seeds=1", "--parallel=3") == 0


def test_a_config_that_changes_under_the_sweep_starts_nothing_more(stand_in, tmp_path, capsys):
    file = tmp_path / "config.py"
    text = f"import runpy\ndef get_config():\n    c = runpy.run_path({TINY!r})['get_config']()\n    c.steps = 5\n    return c\n"
    file.write_text(text)
    made = grid.make_sweep(str(file), {}, {"data.prompt_suffix": ["ok"]}, 1, tmp_path / "sweep")
    grid.check_unchanged(made.runs[0])
    file.write_text(text.replace("5", "6"))
    with pytest.raises(grid.UserError, match="changed after the sweep began, config.steps from 5 to 6"):
        grid.check_unchanged(made.runs[0])


REAL = QUIET | {"steps": 1, "checkpoint.every_steps": 1, "eval.at_start": False, "eval.every_steps": 0}


def real(directory, *args, **changes):
    """The command line of a sweep of the tiny model."""
    keys = [f"--config.{name}={value}" for name, value in (REAL | changes).items()]
    return [sys.executable, "-m", "jrl.sweep", f"--config={TINY}", "--seeds=2", f"--sweep_dir={directory}", *keys, *args]


def of_one_device():
    return environment(XLA_FLAGS="")


@pytest.mark.parametrize("seeds", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sweep_of_real_runs_of_which_one_arm_cannot_run(tmp_path, seeds):
    good, bad, folder = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "sweep"
    good.write_text("def f(prompts, completions, **columns):\n    return [len(c) % 3 for c in completions]\n")
    bad.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    args = real(folder, f"--grid=reward.functions={good}:f,{bad}:f", f"--seeds={seeds}", "--parallel=2")
    done = subprocess.run(args, cwd=ROOT, env=of_one_device(), text=True, capture_output=True, timeout=500)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["finished"], found["failed"], found["by"]) == (seeds, seeds, "accuracy_after")
    assert done.stderr.count("the worker process died") == seeds, "what the runs have said last"
    with (folder / results.CSV).open(newline="") as file:
        rows = list(csv.DictReader(file))
    after = []
    for row in rows:
        directory = folder / row["directory"]
        if row["status"] == "failed":
            assert row["reward.functions"] == f"{bad}:f"
            continue
        result = json.loads((directory / "result.json").read_text())
        after.append(result["accuracy_after"])
        assert {k: row[k] for k in result} == {k: "" if v is None else str(v) for k, v in result.items()}
        assert float(row["train/accuracy"]) == lines(directory / "metrics.jsonl")[0]["train/accuracy"]
        assert json.loads((directory / "config.json").read_text())["seed"] == int(row["seed"])
        assert (directory / "report.html").exists()
    text = (folder / "index.html").read_text()
    assert found["mean"] == pytest.approx(sum(after) / seeds) and results.text(*results.interval(after)) in text


@pytest.mark.slow
def test_a_sweep_of_real_runs_is_stopped_and_continued_without_loss(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "sweep"
    settings = {"steps": 5, "log.samples": True}
    for directory in (whole, folder):
        args = real(directory, "--grid=learner.learning_rate=1e-4", **settings)
        process = subprocess.Popen(args, cwd=ROOT, env=of_one_device(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        run = directory / "learner.learning_rate=0.0001" / "seed0"
        if directory is folder:
            while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["signal"] == "SIGTERM" and found["interrupted"] == 1 and found["waiting"] == 1
    done = subprocess.run(args, cwd=ROOT, env=of_one_device(), text=True, capture_output=True, timeout=500)
    assert done.returncode == 0 and "1 of 2 resumed" in done.stderr and "2 of 2 started" in done.stderr, done.stderr
    for seed in (0, 1):
        one, other = (d / "learner.learning_rate=0.0001" / f"seed{seed}" for d in (whole, folder))
        assert digests(one, 5) == digests(other, 5)


@pytest.fixture
def ray():
    ray = pytest.importorskip("ray")
    yield ray
    ray.shutdown()


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_with_ray(stand_in, tmp_path, capsys, monkeypatch, ray):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = tmp_path / "sweep"
    assert sweep(folder, "ok", "--ray", "--num_gpus=99") == 2
    assert "--num_gpus=99: this machine has" in capsys.readouterr().err
    assert sweep(folder, "ok,broken,killed", "--ray", "--num_cpus=0.5") == 1
    found, err = summary(capsys)
    assert (found["finished"], found["failed"]) == (2, 4) and err.count("MemoryError") == 2
    (folder / "data.prompt_suffix=broken" / "repaired").write_text("")
    assert sweep(folder, "ok,broken,killed", "--ray") == 0
    assert starts(folder, "ok") == [["fresh"]] * 2 and starts(folder, "killed") == [["fresh", "resumed"]] * 2
    folder = tmp_path / "stopped"
    running = folder / "data.prompt_suffix=slow" / "seed0" / "metrics.jsonl"
    thread = signal_once_there(running, signal.SIGTERM)
    assert sweep(folder, "slow", "--ray", "--seeds=1") == 0
    thread.join()
    assert summary(capsys)[0]["interrupted"] == 1 and (running.parent / "saved").exists()
    assert sweep(folder, "slow", "--ray", "--seeds=1") == 0 and starts(folder, "slow") == [["fresh", "resumed"]]
