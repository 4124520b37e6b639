"""Runs on a Ray cluster of this machine: groups of workers, restarts, signals. Without a model, but for the slow ones."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

ray = pytest.importorskip("ray")

from jrl.errors import UserError  # noqa: E402
from jrl.launch import ray as launcher  # noqa: E402
from jrl.launch.group import WorkerError, WorkerGroup  # noqa: E402
from tests.launch.counter import Counter  # noqa: E402

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def cluster():
    """One host with room for four workers."""
    before = os.getcwd()
    os.chdir(ROOT)  # where the workers find the tests' modules
    ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
    os.chdir(before)


@pytest.fixture(scope="module")
def counters(cluster):
    with WorkerGroup(Counter, 2, {"CPU": 1}, args=(10,), strategy="PACK", timeout_s=30) as group:
        yield group


# Groups ------------------------------------------------------------------------------------------------------------------


def test_all_are_called_and_each_answers_in_its_place(counters):
    pids = counters.call("pid")
    assert len({*pids, os.getpid()}) == 3
    assert counters.call("add", 5) == [15, 15]
    assert counters.call_one(1, "add", number=1) == 16
    assert counters.call("add", 0) == [15, 16]
    assert len(counters) == 2 and counters.hosts == [ray.util.get_node_ip_address()] * 2


def test_an_error_names_the_worker_and_its_host(counters):
    pid = counters.call_one(1, "pid")
    host = re.escape(counters.hosts[1])
    with pytest.raises(WorkerError, match=f"^worker 1 on {host}: KeyError: 'no such thing'$") as caught:
        counters.call("fail_on", pid)
    assert (caught.value.rank, caught.value.died) == (1, False)
    assert "fail_on" in str(caught.value.__cause__), "the traceback of the worker is lost"
    first, second = counters.outcomes("fail_on", pid)
    assert first == "well" and isinstance(second, WorkerError)


def test_a_late_answer_is_not_waited_for(counters):
    pid = counters.call_one(0, "pid")
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 0 on .*: no answer to sleep_on within 0.3 s"):
        counters.call("sleep_on", pid, 4.0, timeout_s=0.3)
    assert time.monotonic() - began < 3
    assert counters.call("add", 0, timeout_s=30) == counters.call("add", 0)  # it is asked again once it is done


def test_a_worker_that_dies_is_told_from_one_that_raises(cluster):
    with WorkerGroup(Counter, 1, {"CPU": 1}, args=(0,), strategy="PACK", timeout_s=30) as group:
        with pytest.raises(
            WorkerError, match="^worker 0 on .*: gone: The actor is dead because its worker process has died.$"
        ) as caught:
            group.call("die")
        assert caught.value.died
    group.shutdown()  # again is as good as once


def test_what_the_cluster_does_not_have_is_said(cluster):
    with pytest.raises(UserError, match=r"waited 1 s for 1 x \(1 CPU, 2 GPU\), each on a host .*1 hosts, with 4 CPU, 0 GPU"):
        WorkerGroup(Counter, 1, {"CPU": 1, "GPU": 2}, args=(0,), timeout_s=1)


@pytest.mark.slow
def test_resources_come_back(cluster, counters):
    for _ in range(2):  # each takes all that the first group has left
        with WorkerGroup(Counter, 2, {"CPU": 1}, args=(0,), strategy="PACK", timeout_s=30) as group:
            assert group.call("add", 1) == [1, 1]


def test_a_class_that_cannot_be_made(cluster):
    with pytest.raises(WorkerError, match="^worker 0 on .*: could not be made: ValueError: invalid .* 'ten'$"):
        WorkerGroup(Counter, 1, {"CPU": 1}, args=("ten",), strategy="PACK", timeout_s=30)


# Runs ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launch(cluster, tmp_path, monkeypatch, capsys):
    """A run of two stand-ins: (its outcome or error, what was said of it)."""
    monkeypatch.setattr(launcher, "POLL_EVERY_S", 0.05)

    def start(*switches, steps=6, meanwhile=None, **settings):
        made = launcher.Launch(
            launcher.Settings(hosts=2, **({"timeout_s": 30.0} | settings)),
            [str(tmp_path / "run"), str(steps), *switches], str(tmp_path / "run"), "tests.launch.stand_in",
        )  # fmt: skip
        if meanwhile:
            threading.Thread(target=meanwhile, daemon=True).start()
        try:
            outcome = made.run()
        except (UserError, launcher.GaveUp) as error:
            outcome = error
        return outcome, capsys.readouterr().err

    return start


def steps_done(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_of_two(launch, tmp_path):
    outcome, said = launch()
    assert outcome == {"steps": 6, "began_at": 0} and "restart" not in said
    host = ray.util.get_node_ip_address()
    assert f"[process 0 on {host}] step 6/6" in said and f"[process 1 on {host}] step 6/6" in said
    for process in (0, 1):
        assert "step 6/6" in (tmp_path / "run" / "logs" / f"process-{process}.log").read_text()
    address, _, port = json.loads((tmp_path / "run" / "config.json").read_text())["address"].rpartition(":")
    assert address == host
    with socket.socket() as sock:
        sock.bind((address, int(port)))  # it was a port that can be listened on


def test_a_killed_process_is_named_and_all_start_again_from_the_checkpoint(launch, tmp_path):
    outcome, said = launch("--kill=1")
    assert outcome == {"steps": 6, "began_at": 2}
    told = r"process 1 on \S+ was ended by SIGKILL; restart 1 of 3, from the last checkpoint\n(  \| .*\n)*  \| step 3/6\n"
    assert re.search(told, said)
    assert steps_done(tmp_path / "run")[-4:] == [2, 3, 4, 5]
    log = (tmp_path / "run" / "logs" / "process-1.log").read_text()
    assert "attempt 1" in log and "attempt 2" in log


@pytest.mark.slow
def test_restarts_have_an_end(launch):
    outcome, said = launch("--fail=0", restarts=0)
    assert isinstance(outcome, launcher.GaveUp)
    told = str(outcome).splitlines()
    assert re.match(r"process 0 on \S+ ended with exit status 1; that was the last of 1 attempts; --config.resume=True", told[0])
    assert told[-1] == "  | RuntimeError: the reactor is out of coolant" and "restart 1" not in said


def test_a_mistake_is_not_tried_again(launch):
    outcome, said = launch("--mistake=1")
    assert isinstance(outcome, UserError) and str(outcome) == "config.data.train='nothing.jsonl': no such file"
    assert "restart" not in said


@pytest.mark.slow
def test_a_run_that_had_not_begun_does_not_resume_an_earlier_one(launch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "checkpoint").write_text("4")  # of the earlier run
    outcome, said = launch("--early=1")
    assert "restart 1 of 3, from the beginning" in said and outcome == {"steps": 6, "began_at": 0}


def test_sigterm_lets_the_run_save_and_leave(launch, tmp_path):
    def when_it_runs():
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    outcome, said = launch("--slow=0", steps=600, meanwhile=when_it_runs)
    assert outcome["interrupted"] == "SIGTERM" and 0 < outcome["steps"] < 600
    assert (tmp_path / "run" / "checkpoint").read_text() == str(outcome["steps"])
    assert "SIGTERM: the run will save and leave" in said and "restart" not in said
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.slow
def test_hosts_that_never_come(launch):
    outcome, _ = launch(timeout_s=1.0, gpus_per_host=8)
    assert isinstance(outcome, UserError) and "waited 1 s for 2 x (1 CPU, 8 GPU)" in str(outcome)


# The command line -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--config=configs/tiny.py", "--config.stepz=3"], "did you mean steps"),
        (["--config=configs/none.py"], "no such file"),
        (["--hosts=2"], "--config is missing"),
        (["--config=configs/tiny.py", "--hosts=0"], "--hosts=0: must be at least 1"),
        (["--config=configs/tiny.py", "--hosts", "two"], "--hosts"),
        (["--config=configs/tiny.py", "--hots=2"], "--hots=2: there is no such flag"),
        (["--config=configs/tiny.py", "--gpus_per_host=1", "--tpus_per_host=4"], "one or the other"),
        (["--config=configs/tiny.py", "--env=NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set here"),
        (["--config=configs/tiny.py", "--dry_run"], "python -m jrl.main does it"),
    ],
)
def test_a_mistake_stops_before_ray_is_asked(args, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("a cluster was asked for"))
    assert launcher.main(args) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("error: ") and err.count("\n") == 1


def test_flags_of_both_kinds_are_told_apart():
    mine, others = launcher.split(["--hosts", "2", "--config", "a.py", "--config.seed=1", "--cpus_per_host=3", "--noconfig.x"])
    assert mine == ["--hosts", "2", "--cpus_per_host=3"]
    assert others == ["--config", "a.py", "--config.seed=1", "--noconfig.x"]


def test_processes_are_numbered_as_libtpu_numbers_hosts():
    assert launcher._process_numbers([2, 0, 1]) == [2, 0, 1]
    assert launcher._process_numbers([None, None]) == [0, 1]
    assert launcher._process_numbers([0, 0]) == [0, 1]  # several slices: the numbers are of each


def test_importing_jrl_needs_no_ray():
    code = "import sys; sys.modules['ray'] = None; import jrl, jrl.main, jrl.config, jrl.launch.ray, jrl.launch.worker"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
