"""Several processes on one machine, joined as those of several hosts are: they are the run of one process, and none hangs."""

import json
import signal
import subprocess
import time

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.launch.cluster import _detect
from jrl.launch.health import STOPPED
from jrl.sharding.hosts import Shares
from tests.clusters import cluster_environment, free_port, members, run_alone, run_together
from tests.runs import ROOT, command, lines, sampled, start, trained
from tests.stage_runs import SHORT, conversations, pairs

STEPS = 3
SETTINGS = {
    "steps": STEPS,
    "checkpoint__every_steps": 1,
    "eval__every_steps": 0,
    "algorithm__kl_in": "loss",
    "algorithm__kl_coef": 0.01,
}
FAST = {"hosts__silence_s": 6.0}  # to notice in; the rest of a minute is for slow machines


def assert_alike(a, b, first=0):
    """The same tokens, and numbers but for the order in which devices of several processes are summed."""
    mine, others = ([row for row in sampled(folder) if row[0] >= first] for folder in (a, b))
    assert [row[:3] for row in mine] == [row[:3] for row in others]
    np.testing.assert_allclose(np.concatenate([r[3] for r in mine]), np.concatenate([r[3] for r in others]), atol=2e-5)
    for x, y in zip(trained(a)[first:], trained(b)[first:], strict=True):
        assert x.keys() == y.keys()
        for name in x.keys() - {"kind"}:
            assert x[name] == pytest.approx(y[name], rel=1e-3, abs=2e-5), (x["step"], name)


def evaluations(folder):
    return [m for m in lines(folder / "metrics.jsonl") if m["kind"] == "eval"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_alone(folder, 4, **SETTINGS)
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two") / "run"
    return folder, run_together(folder, 2, 2, **SETTINGS)


def test_two_processes_are_one(alone, two):
    folder, processes = two
    assert_alike(folder, alone)
    assert [m.keys() for m in evaluations(folder)] == [m.keys() for m in evaluations(alone)]
    # One of them speaks, in the same words as one alone; and all of the export is there.
    assert json.loads(processes[0].out.read_text().splitlines()[-1])["steps"] == STEPS
    # But for what Gloo's threads write, whose lines may run into each other.
    gloos = ("[Gloo]", "peer ranks")
    rest = [line for line in processes[1].out.read_text().splitlines() if line and not any(part in line for part in gloos)]
    assert rest == []
    assert "step 3/3" in processes[0].err.read_text() and "step" not in processes[1].err.read_text()
    states = lines(folder / "hosts.jsonl")
    assert [state["process"] for state in states] == [0, 1] and all(state["heard_s_ago"] < 30 for state in states)


def test_generated_and_scored_once(two):
    """Every sample comes from one process, and both have generated."""
    folder, _ = two
    rows = [(row["step"], row["group"], tuple(row["tokens"])) for row in lines(folder / "samples.jsonl")]
    assert len(rows) == STEPS * 16 and len({row[:2] for row in rows}) == STEPS * 4


@pytest.mark.slow
def test_checkpoints_are_read_by_another_number_of_processes(alone, two, tmp_path):
    folder, _ = two
    folder.rename(tmp_path / "run")
    (tmp_path / "run").joinpath("result.json").unlink()
    run_alone(tmp_path / "run", 4, **(SETTINGS | {"steps": STEPS + 1}), resume=True)
    more = tmp_path / "more"
    run_alone(more, 4, **(SETTINGS | {"steps": STEPS + 1}))
    assert_alike(tmp_path / "run", more)
    run_together(more, 4, 1, **(SETTINGS | {"steps": STEPS + 2}), resume=True)
    run_alone(tmp_path / "run", 4, **(SETTINGS | {"steps": STEPS + 2}), resume=True)
    assert_alike(tmp_path / "run", more)
    assert len(trained(more)) == STEPS + 2


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "data"), [("sft", conversations), ("reward_model", pairs)])
def test_stages_before_rl(tmp_path, stage, data):
    """The numbers of one process, and its checkpoint is gone on with by two."""
    rows = {"data.train": data(tmp_path / "rows.jsonl"), "data.options": {}, "data.train_size": 0, "data.eval_size": 4}
    base = SHORT | rows | {"eval.every_steps": 2, "learner.mesh.data": 1, "learner.mesh.fsdp": -1}
    settings: dict = {"config": f"{ROOT}/configs/{stage}.py", "base": base}
    run_alone(tmp_path / "one", 4, **settings)
    run_together(tmp_path / "two", 2, 2, **settings)
    one, two = ([m for m in lines(tmp_path / name / "metrics.jsonl")] for name in ("one", "two"))
    assert len(one) == len(two) >= 6
    for x, y in zip(one, two, strict=True):
        assert x.keys() == y.keys()
        for name in (name for name in x if not name.startswith(("timing_s/", "perf/", "kind"))):
            assert x[name] == pytest.approx(y[name], rel=1e-3, abs=2e-5), (x["step"], name)
    run_together(tmp_path / "one", 2, 2, **settings, steps=6, resume=True)
    run_alone(tmp_path / "two", 4, **settings, steps=6, resume=True)
    losses = [[m["train/loss"] for m in trained(tmp_path / name)] for name in ("one", "two")]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
def test_a_replica_that_spans_processes_generates_in_lockstep(alone, tmp_path):
    run_together(tmp_path / "run", 4, 1, rollout__mesh__tensor=2, **SETTINGS)
    assert_alike(tmp_path / "run", alone)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_when_one_is_killed_all_stop_and_say_which(tmp_path, victim):
    folder = tmp_path / "run"
    lean = {"eval__at_start": False, "algorithm__kl_in": "none", "algorithm__kl_coef": 0.0}
    settings = SETTINGS | FAST | lean | {"steps": 50, "learner__mesh__fsdp": 1, "learner__mesh__data": 3}
    with members(folder, 3, 1, **settings) as started:
        while len(lines(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []) < 3:
            assert started[0].process.poll() is None, started[0].err.read_text()
            time.sleep(0.1)
        started[victim].process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        for i, member in enumerate(started):
            if i == victim:
                continue
            # Where JAX aborts a process before it can speak, its recorder does, some seconds later.
            assert member.wait(60) in (STOPPED, -signal.SIGABRT)
            assert time.monotonic() - killed < 60
            while not (f"process {victim} on " in (told := member.err.read_text()) and "in step " in told):
                assert time.monotonic() - killed < 60, told
                time.sleep(0.2)
        time.sleep(3)
        assert "ended without a word, in step" in started[victim].err.read_text()
    if victim:
        return
    done = len([m for m in lines(folder / "metrics.jsonl") if m["kind"] == "train"])
    run_together(folder, 2, 2, **(SETTINGS | lean | {"steps": done + 2}), resume=True)
    assert [m["step"] for m in trained(folder)] == list(range(done + 2))


@pytest.mark.slow
def test_each_process_generates_ahead_on_devices_of_its_own(tmp_path):
    """And a checkpoint with a queue of two processes is gone on with by one."""
    folder = tmp_path / "run"
    settings = SETTINGS | {"max_staleness": 1, "pools__rollout": 4, "learner__mesh__fsdp": 4, "steps": 4}
    run_together(folder, 2, 4, **settings)
    told = trained(folder)
    assert len(told) == 4 and max(m["rollout/staleness_max"] for m in told) <= 1
    turn = tmp_path / "turn"
    run_alone(turn, 4, **(SETTINGS | {"steps": 4}))
    order = lambda at: [(r["step"], r["group"], r["uid"]) for r in lines(at / "samples.jsonl")]  # noqa: E731
    assert order(folder) == order(turn)
    assert [row[2] for row in sampled(folder) if row[0] == 0] == [row[2] for row in sampled(turn) if row[0] == 0]
    run_alone(folder, 8, **settings, resume=True, resume_step=2)
    assert order(folder) == order(turn)


@pytest.mark.slow
def test_a_signal_to_one_saves_and_leaves_in_all(alone, tmp_path):
    folder = tmp_path / "run"
    with members(folder, 2, 2, **(SETTINGS | {"steps": 40})) as started:
        while not (folder / "samples.jsonl").exists() or not (folder / "samples.jsonl").read_text():
            assert started[0].process.poll() is None, started[0].err.read_text()
            time.sleep(0.05)
        started[1].process.send_signal(signal.SIGTERM)
        assert [member.wait(60) for member in started] == [0, 0], [m.err.read_text() for m in started]
        told = json.loads(started[0].out.read_text().splitlines()[-1])
    assert told["interrupted"] == "SIGTERM" and told["steps"] < 40
    assert (folder / "checkpoints" / str(told["steps"])).exists()


def test_configs_that_differ_are_refused_in_all(tmp_path):
    with members(tmp_path / "run", 2, 1, of={1: {"steps": 7}}, **SETTINGS) as started:
        assert sorted(member.wait(60) for member in started) == [2, 2]
        for member in started:
            assert "config.steps=7 in process 1, but 3 in process 0" in member.err.read_text()


@pytest.mark.slow
def test_a_reward_that_fails_in_one_is_masked(tmp_path):
    """Each process scores its own samples, so half of them have no reward."""
    (tmp_path / "reward.py").write_text(
        "import os\n\ndef reward(prompts, completions):\n"
        "    if os.environ['JAX_PROCESS_ID'] == '1':\n        raise SystemExit(9)\n    return [1.0] * len(completions)\n"
    )
    with members(tmp_path / "run", 2, 1, reward__functions=f"{tmp_path}/reward.py:reward", **(SETTINGS | FAST)) as started:
        assert [member.wait(120) for member in started] == [0, 0]  # a reward cannot stop a run: its samples are masked
    first = lines(tmp_path / "run" / "metrics.jsonl")
    assert [m["reward/failed"] for m in first if m["kind"] == "train"] == [8] * STEPS


@pytest.mark.slow
def test_one_that_waits_in_vain_says_for_what(tmp_path):
    port = free_port()
    process = start(command(tmp_path / "run", hosts__connect_s=4), env=cluster_environment(1, 2, port, 1), stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"waiting for the other processes at localhost:{port}: not all have come in hosts.connect_s=4; see that" in err


def test_shares():
    """Each prompt is generated by one island and scored by one process."""
    for islands in (((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 1, 2),)):
        everyone = [Shares(islands, me) for island in islands for me in island]
        for prompts in (0, 1, 2, 7, 8):
            made = [i for s in everyone if s.reports for i in s.generated(prompts)]
            assert made == list(range(prompts))
            assert sorted(i for s in everyone for i in s.scored(prompts)) == list(range(prompts))
            assert all(set(s.scored(prompts)) <= set(s.generated(prompts)) for s in everyone)
    assert Shares(((0,), (1,)), 1).alone and not Shares(((0, 1),), 1).alone


def test_what_the_environment_says():
    three = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert _detect({}) is None
    assert _detect(three) == {"coordinator_address": "host:1", "num_processes": 2, "process_id": 1}
    assert _detect(three | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None
    assert _detect(three | {"JRL_CLUSTER": "off"}) is None
    assert _detect({"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert _detect({"SLURM_STEP_NUM_TASKS": "4"}) == {"cluster_detection_method": "slurm"}
    assert _detect({"TPU_WORKER_HOSTNAMES": "a,b"}) == {} == _detect({"JRL_CLUSTER": "tpu"})
    assert _detect({"TPU_WORKER_HOSTNAMES": "a"}) is None
    for wrong, told in (
        ({"JAX_PROCESS_ID": "1"}, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES must be set too"),
        (three | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2: must be from 0 to JAX_NUM_PROCESSES - 1 = 1"),
        (three | {"JAX_PROCESS_ID": "x"}, "JAX_PROCESS_ID=x: must be a whole number"),
        (three | {"JAX_COORDINATOR_ADDRESS": "host"}, "must be HOST:PORT"),
        ({"JRL_CLUSTER": "yes"}, "must be tpu or off"),
    ):
        with pytest.raises(UserError, match=told):
            _detect(wrong)
