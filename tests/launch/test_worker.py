"""The process on one host: what it is told, what is told of it, and that it does not outlive its worker."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jrl.errors import UserError
from jrl.launch.worker import TrainingProcess

ROOT = pathlib.Path(__file__).parent.parent.parent
WAIT_S = 20


def started(folder, code):
    worker = TrainingProcess()
    environment = {"PYTHONPATH": str(ROOT), "OF_THE_DRIVER": "yes"}
    worker.start(["-c", code], str(folder), "run", 0, environment, "=== process 0")
    return worker


def reports(worker, until=lambda report: report.status is not None):
    """The lines so far, and the report that ends the wait."""
    lines, deadline = [], time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        report = worker.poll()
        lines += report.lines
        if until(report):
            return lines, report
        time.sleep(0.01)
    raise AssertionError(f"nothing but {lines}")


def test_output_status_and_summary(tmp_path):
    code = """
import os, pathlib, sys
print(os.getcwd(), os.environ["OF_THE_DRIVER"])
print("a warning", file=sys.stderr)
run = pathlib.Path("run"); run.mkdir(); (run / "config.json").write_text("{}")
print("step 1", file=sys.stderr)
print('{"steps": 1}')
"""
    lines, report = reports(started(tmp_path, code))
    assert sorted(lines) == sorted([f"{tmp_path} yes", "a warning", "step 1", '{"steps": 1}'])
    assert (report.status, report.summary, report.last_words) == (0, {"steps": 1}, ["a warning", "step 1"])
    # The log has what was written before there was a directory for it, too.
    log = (tmp_path / "run" / "logs" / "process-0.log").read_text().splitlines()
    assert log[0] == "=== process 0" and sorted(log[1:]) == sorted(lines)


def test_an_earlier_run_in_the_directory_is_left_alone_until_it_is_renamed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"old": true}')
    code = """
import os, pathlib, sys, time
print("early", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
os.rename("run", "run.1")
os.mkdir("run"); pathlib.Path("run/config.json").write_text("{}")
"""
    worker = started(tmp_path, code)
    _, report = reports(worker, lambda report: "early" in report.lines)
    assert not report.began
    (tmp_path / "go").touch()
    _, report = reports(worker)
    assert report.began and report.status == 0
    assert [p.name for p in (tmp_path / "run.1").iterdir()] == ["config.json"]
    assert "early" in (tmp_path / "run" / "logs" / "process-0.log").read_text()


def test_a_process_that_never_took_the_directory_leaves_nothing_there(tmp_path):
    _, report = reports(started(tmp_path, "import sys; sys.exit('error: no')"))
    assert (report.status, report.began, report.last_words) == (1, False, ["error: no"])
    assert list(tmp_path.iterdir()) == []


def test_signals(tmp_path):
    code = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("ready", flush=True)
time.sleep(60)
"""
    worker = started(tmp_path, code)
    reports(worker, lambda report: "ready" in report.lines)
    worker.send_signal(signal.SIGTERM)
    assert reports(worker)[1].status == 5
    worker.send_signal(signal.SIGTERM)  # to nobody
    worker = started(tmp_path, code)
    worker.kill()
    assert worker.poll().status == -signal.SIGKILL


def test_interrupts_reach_it_though_the_worker_blocks_them(tmp_path):
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        worker = started(tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
        reports(worker, lambda report: "ready" in report.lines)
        worker.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in reports(worker)[1].last_words[-1]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def test_it_ends_with_its_worker(tmp_path):
    code = f"""
import os, sys, time
from jrl.launch.worker import TrainingProcess
worker = TrainingProcess()
worker.start(["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"], {str(tmp_path)!r}, "run", 0,
             {{"PYTHONPATH": {str(ROOT)!r}}}, "title")
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert pathlib.Path(f"/proc/{child}").exists()
        parent.kill()
    deadline = time.monotonic() + WAIT_S
    while pathlib.Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.01)


def _state(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_a_directory_that_the_host_does_not_have(tmp_path):
    with pytest.raises(UserError, match="no directory .*nowhere on this host.*shared|share"):
        started(tmp_path / "nowhere", "pass")


def test_free_ports_are_free(tmp_path):
    import socket

    with socket.socket() as sock:
        sock.bind(("", TrainingProcess().free_port()))


def test_the_latest_rows_of_a_run_that_is_being_written(tmp_path):
    from jrl.launch.worker import _latest_rows

    rows = [{"step": i, "kind": "train", "x": i * 0.5} for i in range(9)] + [{"step": 9, "kind": "eval", "y": 1.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 10, "ki')
    assert _latest_rows(path) == [rows[8], rows[9]]
    assert os.path.getsize(path) < 1 << 18  # longer ones are read from their end
