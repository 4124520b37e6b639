"""The command on clusters of this machine: real runs killed and told to leave, hosts that die, metrics, breakpoints."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

ray = pytest.importorskip("ray")

from jrl.launch import ray as launcher  # noqa: E402
from tests.runs import QUIET, ROOT, TINY, digests, trained  # noqa: E402

pytestmark = pytest.mark.slow
STEPS = 24
# One device, and a new cluster of this machine, whatever else runs here.
ENVIRONMENT = {**os.environ, "XLA_FLAGS": "", "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)}


def command(folder, *flags, **keys):
    keys = QUIET | {"run_dir": str(folder), "steps": STEPS, "checkpoint.every_steps": 2, "eval.every_steps": 0} | keys
    settings = [f"--config.{name}={value}" for name, value in keys.items()]
    return [sys.executable, "-m", "jrl.launch.ray", f"--config={TINY}", *settings, *flags]


def start(args):
    return subprocess.Popen(args, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(what, process=None, seconds=240):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def steps_done(folder):
    file = folder / "metrics.jsonl"
    return file.read_text().count('"kind": "train"') if file.exists() else 0


def training_processes(folder):
    """Those of jrl.main, or of a stand-in, of the run in a directory."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            args = path.read_text().split("\0")
        except OSError:
            continue
        if any(str(folder) in arg for arg in args) and "jrl.launch.ray" not in args:
            found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run as nobody has touched it, without Ray."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    args = [arg.replace("jrl.launch.ray", "jrl.main") for arg in command(folder)]
    subprocess.run(args, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
    return folder


def test_a_killed_run_goes_on_from_its_checkpoint_and_nothing_shows_it(whole, tmp_path):
    folder = tmp_path / "run"
    process = start(command(folder))
    wait_for(lambda: (folder / "checkpoints" / "2").exists(), process)
    (pid,) = training_processes(folder)
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["steps"] == STEPS and out.count("\n") == 1
    assert re.search(r"process 0 on \S+ was ended by SIGKILL; restart 1 of 3, from the last checkpoint", err)
    assert 2 <= int(re.search(r"resumed at step (\d+)", err)[1]) < STEPS
    assert trained(folder) == trained(whole) and digests(folder, STEPS) == digests(whole, STEPS)
    assert training_processes(folder) == []


def test_a_run_that_was_told_to_leave_has_saved(whole, tmp_path):
    folder = tmp_path / "run"
    process = start(command(folder))
    wait_for(lambda: steps_done(folder) >= 1, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told["interrupted"] == "SIGTERM" and 1 <= told["steps"] < STEPS
    assert digests(folder, told["steps"]) and training_processes(folder) == []
    out, err = start(command(folder, "--config.resume=True")).communicate(timeout=300)
    assert f"resumed at step {told['steps']}" in err and json.loads(out)["steps"] == STEPS
    assert trained(folder) == trained(whole) and digests(folder, STEPS) == digests(whole, STEPS)


def test_one_of_two_processes_is_killed_and_both_go_on(tmp_path):
    folder = tmp_path / "run"
    process = start(command(folder, "--hosts=2"))
    wait_for(lambda: (folder / "checkpoints" / "2").exists(), process, seconds=400)
    (pid,) = [pid for pid in training_processes(folder) if b"JAX_PROCESS_ID=1\0" in _environment(pid)]
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert json.loads(out)["steps"] == STEPS
    assert re.search(r"process 1 on \S+ was ended by SIGKILL; restart 1 of 3, from the last checkpoint", err)
    assert 2 <= int(re.search(r"resumed at step (\d+)", err)[1]) < STEPS
    assert len(trained(folder)) == STEPS and training_processes(folder) == []


def test_rollout_workers_are_of_the_same_cluster(tmp_path):
    folder = tmp_path / "run"
    keys = {"rollout.workers": 1, "max_staleness": 1, "steps": 4}
    out, err = start(command(folder, **keys)).communicate(timeout=400)
    assert json.loads(out.splitlines()[-1])["steps"] == 4, err
    most = [row["rollout/staleness_max"] for row in trained(folder)]
    assert most[0] == 0 and max(most) == 1


def _environment(pid):
    return pathlib.Path(f"/proc/{pid}/environ").read_bytes()


def test_a_driver_that_is_killed_takes_its_processes_along(tmp_path):
    folder = tmp_path / "run"
    process = start(command(folder, steps=500))
    wait_for(lambda: steps_done(folder) >= 1, process)
    assert training_processes(folder)
    process.kill()
    process.communicate()
    wait_for(lambda: not training_processes(folder), seconds=60)


def test_a_mistake_in_the_data_is_told_once(tmp_path):
    process = start(command(tmp_path / "run", **{"data.train": str(tmp_path / "none.jsonl"), "data.options": "{}"}))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and out == "" and "restart" not in err
    assert err.splitlines()[-1].startswith("error: ") and "none.jsonl" in err.splitlines()[-1]


# With stand-ins -----------------------------------------------------------------------------------------------------------


def launch(folder, *switches, steps=6, **settings):
    settings = {"hosts": 2, "timeout_s": 60.0} | settings
    return launcher.Launch(
        launcher.Settings(**settings), [str(folder), str(steps), *switches], str(folder), "tests.launch.stand_in"
    )


def test_a_host_that_dies_is_named_and_another_takes_its_place(tmp_path, monkeypatch, capsys):
    from ray.cluster_utils import Cluster

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(launcher, "POLL_TIMEOUT_S", 20.0)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        hosts = [cluster.add_node(num_cpus=1) for _ in range(3)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        assert launcher._strategy() == "STRICT_SPREAD"

        def kill_the_host_of_a_process():
            wait_for(lambda: steps_done(tmp_path / "run") >= 4)
            nodes = {actor["node_id"] for actor in _actors()}
            cluster.remove_node(next(host for host in hosts if host.node_id in nodes), allow_graceful=False)

        threading.Thread(target=kill_the_host_of_a_process, daemon=True).start()
        assert launch(tmp_path / "run", "--slow=0", steps=60).run()["steps"] == 60
        said = capsys.readouterr().err
        assert re.search(r"process \d on \S+: worker \d on \S+: gone: .*node.*; restart 1 of 3, from the last checkpoint", said)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _actors():
    from ray._private.state import actors

    alive = [actor for actor in actors().values() if actor["State"] == "ALIVE"]
    return [{"node_id": actor["Address"]["NodeID"]} for actor in alive]


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.chdir(ROOT)
    ray.init(address="local", num_cpus=2, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_a_worker_that_is_killed_takes_its_process_along(cluster, tmp_path, capsys):
    folder = tmp_path / "run"

    def kill_a_worker():
        wait_for(lambda: steps_done(folder) >= 4)
        children = {pid: int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in
                    training_processes(folder)}  # fmt: skip
        os.kill(next(iter(children.values())), signal.SIGKILL)

    threading.Thread(target=kill_a_worker, daemon=True).start()
    assert launch(folder, "--slow=0", steps=60).run()["steps"] == 60
    said = capsys.readouterr().err
    assert re.search(r"process \d on \S+: worker \d on \S+: gone: .*; restart 1 of 3, from the last checkpoint", said)
    assert training_processes(folder) == []


def test_the_metrics_are_where_ray_shows_them(cluster, tmp_path):
    port = ray.nodes()[0]["MetricsExportPort"]
    seen = []

    def look():
        def there():
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
            seen[:] = [line for line in text.splitlines() if line.startswith("ray_jrl_train_accuracy{")]
            return seen

        wait_for(there)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=look, daemon=True).start()
    launch(tmp_path / "run", "--slow=0", steps=1000, hosts=1).run()
    assert len(seen) == 1 and f'run="{tmp_path / "run"}"' in seen[0] and 0 <= float(seen[0].split()[-1]) < 1


def test_a_breakpoint_is_reached_by_ray_debug(cluster, tmp_path, capfd):
    folder = tmp_path / "run"
    said = []

    def converse():
        log = folder / "logs" / "process-1.log"
        wait_for(lambda: log.exists() and "RemotePdb session open" in log.read_text())
        args = ["ray", "debug", f"--address={ray.get_runtime_context().gcs_address}"]
        args[0] = str(pathlib.Path(sys.executable).with_name("ray"))
        with subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            os.set_blocking(process.stdout.fileno(), False)
            for expected, answer in (("press enter to refresh", "0"), ("(Pdb)", "p step, ME"), ("(Pdb)", "c")):
                told = b""
                deadline = time.monotonic() + 60
                while expected.encode() not in told and time.monotonic() < deadline:
                    told += process.stdout.read() or b""
                    time.sleep(0.05)
                said.append(told.decode())
                process.stdin.write(f"{answer}\n".encode())
                process.stdin.flush()
            time.sleep(1)
            process.kill()

    thread = threading.Thread(target=converse, daemon=True)
    thread.start()
    outcome = launch(folder, "--stop=1", debug=True).run()
    thread.join(10)
    assert outcome["steps"] == 6
    assert "stand_in.py" in said[0] and "(2, 1)" in said[2]
