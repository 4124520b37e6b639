"""What programs of a policy may do, tried by programs that want more; and what their tests say."""

import ast
import contextlib
import json
import math
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from jrl.config import default_config
from jrl.errors import UserError
from jrl.rewards import RewardManager, jail, manager, sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs namespaces")

OPTIONS = {
    "wall_s": 1.0, "memory_mb": 256, "processes": 8, "file_mb": 4, "files": 16, "output_kb": 64, "all_or_nothing": False,
    "allow_weak": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def room():
    try:
        made = sandbox.Sandbox(OPTIONS)
    except OSError as error:
        pytest.skip(f"no namespaces here: {error}")
    yield made
    made.close()


def run(room, source, stdin="", wall_s=5.0):
    return room.run(source, stdin, wall_s)


NAME = f"jrl{os.getpid()}"
NAMED = f"import ctypes; ctypes.CDLL(None).prctl(15, b'{NAME}')\n"  # children have the name too


def named():
    """Processes of this machine that began with `NAMED`."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == NAME:
                found.append(int(entry.name))
    return found


BOMB = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"

# What is kept -----------------------------------------------------------------------------------------------------------------


def test_an_ordinary_program_runs(room):
    result = run(room, "import threading\nopen('f', 'w').write('x')\nprint(input()[::-1], open('f').read())", "olleh")
    assert result == {"ended": "exit", "code": 0, "output": "hello x\n"}
    assert run(room, "raise SystemExit(7)")["code"] == 7
    assert run(room, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")["code"] == 128 + signal.SIGTERM


def test_every_promise_is_seen_to_hold_and_each_would_be_seen_to_break(room, tmp_path):
    weakness, kept = sandbox.check(OPTIONS)
    assert weakness == "" and len(kept) == 8 and all(kept.values())
    # The negative control: the same probe without a sandbox.
    with tempfile.NamedTemporaryFile() as secret:
        asked = json.dumps([secret.name, os.getppid(), 1, 1 << 20, 1 << 10])
        bare = subprocess.run([sys.executable, "-c", sandbox._PROBE], input=asked, capture_output=True, text=True, cwd=tmp_path)
    held = {promise for promise, holds in json.loads(bare.stdout).items() if holds}
    assert held <= {"no network", "no rights", "no signals to others"}, "the machine may have no network, and the tests no rights"


def test_a_fork_bomb_is_stopped_by_the_kernel_and_nothing_of_it_is_left(room):
    count = "import os\nn = 0\ntry:\n  while True:\n    if not os.fork():\n      import time; time.sleep(60)\n    n += 1\n"
    result = run(room, count + "except BlockingIOError:\n  print(n)")
    assert int(result["output"]) == OPTIONS["processes"] - 1
    began = time.monotonic()
    assert run(room, NAMED + BOMB, wall_s=0.5)["ended"] in ("wall", "processes")
    assert time.monotonic() - began < 20 and named() == []
    threads = (
        "import threading, time\nn = 0\nsleep = lambda: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    threads += "try:\n  for n in range(99): sleep()\n"
    assert 0 < int(run(room, threads + "except RuntimeError:\n  print(n)")["output"]) < OPTIONS["processes"]


def test_wall_and_cpu_time(room):
    deaf = "import signal\nsignal.pthread_sigmask(0, range(1, 65))\n"
    for source in ("while True: pass", "import time; time.sleep(60)", deaf + "while True: pass"):
        began = time.monotonic()
        assert run(room, source, wall_s=0.3)["ended"] == "wall"
        assert time.monotonic() - began < 20
    result = run(room, "while True: pass", wall_s=30.0)  # 1 s of CPU by `wall_s` of the options
    assert (result["ended"], result["code"]) == ("exit", 128 + signal.SIGKILL)


def test_memory_of_one_and_of_all_together(room):
    assert run(room, "try: bytearray(400 << 20)\nexcept MemoryError: print('no')")["output"] == "no\n"
    many = "import os, time\nfor _ in range(6):\n  if not os.fork(): break\nx = b'1' * (60 << 20)\ntime.sleep(60)"
    assert run(room, many)["ended"] == "memory"
    few = many.replace("range(6)", "range(2)").replace("sleep(60)", "sleep(0.3)")
    assert run(room, few)["ended"] == "exit", "the negative control"


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.memfd_create('x')",
        "import ctypes; l = ctypes.CDLL(None); exit(l.shmget(0, 1 << 20, 0o1600) < 0)",
        "import ctypes; l = ctypes.CDLL(None); exit(l.unshare(0x10000000) < 0)",
        "import ctypes; l = ctypes.CDLL(None); exit(l.ptrace(16, 1, 0, 0) < 0)",
        "import ctypes; l = ctypes.CDLL(None); exit(l.clone(ctypes.CFUNCTYPE(None)(), 0, 0x10000011, 0) < 0)",
        "import ctypes; l = ctypes.CDLL(None); exit(l.mount(b'/', b'/tmp', None, 4096, None) < 0)",
        "import os; os.chroot('/tmp')",
        "import os; os.setuid(0)",
        "import os; os.kill(1, 9); import time; time.sleep(0.2); raise OSError",
    ],
)
def test_ways_around_the_limits_are_closed(room, source):
    assert run(room, source)["code"] == 1
    assert run(room, "print(1)")["output"] == "1\n"


def test_files(room, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    for folder in (tmp_path, *tmp_path.parents):
        with contextlib.suppress(OSError):
            folder.chmod(folder.stat().st_mode | 0o755)
    look = f"print(open({str(secret)!r}).read())"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout == "42\n", "the negative control"
    assert run(room, look) == {"ended": "exit", "code": 1, "output": ""}
    places = (
        "import os\nfor p in ('/etc/passwd', '/proc/self/environ', '/home', '/var', '/sys', '/run'): print(os.path.exists(p))"
    )
    assert run(room, places)["output"] == "False\n" * 6
    write = "import os\nfor p in ('/', '/usr', '/usr/lib', '/etc', '/dev', os.path.dirname(os.__file__)):\n"
    assert run(room, write + "  try: open(p + '/x', 'w')\n  except OSError: print('no')")["output"] == "no\n" * 6
    assert run(room, "f = open('f', 'wb')\nwhile True: f.write(bytes(4096))")["code"] != 0
    pieces = "import os\nn = 0\ntry:\n  for n in range(99): open(str(n), 'wb').write(bytes(1 << 20))\nexcept OSError: print(n)"
    assert 1 <= int(run(room, pieces)["output"]) <= OPTIONS["file_mb"]
    assert int(run(room, pieces.replace("bytes(1 << 20)", "b''"))["output"]) <= OPTIONS["files"]
    assert run(room, "import os; print(os.listdir())")["output"] == "['program.py']\n", "nothing of earlier programs"


def test_huge_output(room):
    result = run(room, "while True: print('x' * 1000)")
    assert (
        result["ended"] == "output" and result["output"].startswith("x") and len(result["output"]) == OPTIONS["output_kb"] * 1024
    )


def test_network(room):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        call = f"import socket; socket.create_connection({address}, 2); print('in')"
        thread = threading.Thread(target=lambda: contextlib.suppress(OSError) and server.accept(), daemon=True)
        thread.start()
        assert subprocess.run([sys.executable, "-c", call], capture_output=True, text=True).stdout == "in\n", "negative control"
        assert run(room, call)["code"] == 1
    name = f"\0jrl-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        assert run(room, f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})")["code"] == 1


def test_secrets_and_signals(monkeypatch):
    monkeypatch.setenv("API_KEY", "sesame")
    made = sandbox.Sandbox(OPTIONS)
    try:
        assert "sesame" not in run(made, "import os; print(dict(os.environ), os.listdir('/'))")["output"]
        inherited = "import os\nfor fd in range(3, 256):\n  try: os.fstat(fd); print(fd)\n  except OSError: pass"
        assert run(made, inherited)["output"] == ""
        aim = f"import os\nfor pid in ({os.getpid()}, {os.getppid()}, {made._process.pid}, -1):\n"
        aim += "  try: os.kill(pid, 9)\n  except OSError: print('no')"
        assert run(made, aim)["output"] == "no\n" * 4 and made._process.poll() is None
    finally:
        made.close()


def test_no_process_stays_behind(room):
    leave = (
        "import os, signal, sys, time, ctypes\n"
        "if os.fork(): print('left', flush=True); os._exit(0)\n"
        "os.setsid(); ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
        "if os.fork(): os._exit(0)\n"
        "for n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError): pass\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    assert run(room, NAMED + leave) == {"ended": "exit", "code": 0, "output": "left\n"}
    assert time.monotonic() - began < 20 and named() == []


def test_nothing_outlives_a_killed_trainer():
    """Not even what has cleared its own death signal and left its session."""
    source = (
        NAMED
        + "import os, time\nif os.fork(): time.sleep(60)\nos.setsid(); ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(60)"
    )
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(sandbox.__file__)!r})\n"
        f"import sandbox; sandbox.Sandbox({OPTIONS!r}).run({source!r}, '', 50)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as trainer:
        until = time.monotonic() + 20
        while len(named()) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(named()) == 2
        trainer.send_signal(signal.SIGKILL)
    until = time.monotonic() + 5
    while named() and time.monotonic() < until:
        time.sleep(0.05)
    assert named() == []


# Where there are no namespaces ------------------------------------------------------------------------------------------------


def unprivileged(code, namespaces=False):
    """What a program says, run by an unprivileged user if this is root, where namespaces can be made or not."""
    start = (
        f"import os, sys; sys.path.insert(0, {os.path.dirname(jail.__file__)!r}); import jail, sandbox; OPTIONS = {OPTIONS!r}\n"
    )
    if os.geteuid() == 0:
        start += "os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
    if not namespaces:
        start += "jail._call('prctl', 38, 1, 0, 0, 0); jail.filter_system_calls()\n"
    ask = lambda python, code: subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/tmp")  # noqa: E731
    for python in filter(None, (os.path.realpath(sys.executable), shutil.which("python3", path="/usr/bin:/usr/local/bin"))):
        if ask(python, f"{start}os.execv({python!r}, [{python!r}, '-c', ''])").returncode == 0:
            return ask(python, start + code)
    pytest.skip("no Python that an unprivileged user can run")


def test_an_unprivileged_user_has_the_whole_of_it(room):
    write = "for p in ('/', '/dev', '/etc', '/usr'):\n  try: open(p + '/x', 'w')\n  except OSError: print('no')"
    result = unprivileged(
        f"print([*sandbox.check(OPTIONS), sandbox.Sandbox(OPTIONS).run({write!r}, '', 5.0)['output']])", namespaces=True
    )
    weakness, kept, written = ast.literal_eval(result.stdout)
    assert weakness == "" and len(kept) == 8 and all(kept.values())
    assert written == "no\n" * 4


def test_it_is_refused_there_unless_told_otherwise():
    result = unprivileged("sandbox.Sandbox(OPTIONS)")
    assert result.stderr.strip().endswith("OSError: unshare: Operation not permitted")
    result = unprivileged("print(sandbox.check(OPTIONS | {'allow_weak': True}))")
    weakness, kept = ast.literal_eval(result.stdout)
    assert weakness == "unshare: Operation not permitted"
    assert not kept["no files of others"] and kept["memory limited"] and kept["files limited"] and kept["processes limited"]


def test_a_weak_sandbox_still_stops_bombs_and_what_is_left_behind():
    leave = NAMED + "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(60)"
    result = unprivileged(
        f"s = sandbox.Sandbox(OPTIONS | {{'allow_weak': True}})\n"
        f"print([s.run(x, '', 0.5)['ended'] for x in ({NAMED + BOMB!r}, {leave!r}, 'while True: pass', 'print(1)')])"
    )
    bomb, *others = ast.literal_eval(result.stdout)
    assert bomb in ("wall", "processes") and others == ["exit", "wall", "exit"]
    assert named() == []


def test_the_manager_refuses_what_does_not_hold(monkeypatch):
    def broken(options):
        return "unshare: Operation not permitted", {"no network": False, "memory limited": True}

    def impossible(options):
        raise OSError("unshare: Operation not permitted")

    monkeypatch.setattr(manager.sandbox, "check", impossible)
    with pytest.raises(
        UserError, match=r"python_tests: no sandbox that holds .*Operation not permitted.*sandbox.allow_weak=True"
    ):
        RewardManager([("p", "python_tests", 1.0)], 10.0)
    monkeypatch.setattr(manager.sandbox, "check", broken)
    with pytest.raises(UserError, match=r"does not keep what it promises \(no network\).*sandbox.allow_weak=True"):
        RewardManager([("p", "python_tests", 1.0)], 10.0)
    section = default_config().reward
    section.sandbox.wall_s = 3.0
    with pytest.raises(UserError, match=r"sandbox.wall_s=3.0: .*reward.timeout_s=10.0.* give a timeout_s of 14 or more"):
        RewardManager([("p", "python_tests", 1.0)], 10.0, section)


# The reward -------------------------------------------------------------------------------------------------------------------

GOOD = "So:\n```python\ndef f(x): return 0\n```\nno, rather\n```python\ndef f(x):\n    return x + 1\n```\nthat is it."
ASSERTS = ["assert f(1) == 2", "assert f(2) == 3", "import math\nassert f(math.inf) == math.inf"]
PAIRS = [["2\n", "4\n"], {"stdin": "-3", "stdout": "-6"}]


def loop(before):
    return f"```python\n{before}\nwhile True: pass\n```"


CASES = [
    (GOOD, ASSERTS, 1),
    (GOOD, json.dumps(ASSERTS), 1),
    ("def f(x): return 2", ASSERTS, 1 / 3),
    ("def f(x): return x + 1\nprint(1)\nf(0) ** f(-1)", ASSERTS, 1),
    ("def f(x: return", ASSERTS, 0),
    (loop("def f(x): return x + 1"), ASSERTS, 0),
    ("def f(x):\n  while x == 2: pass\n  return x + 1", ASSERTS, 1 / 3),
    ("def f(x): return x + 1\n0 / 0", ASSERTS, 0),
    ("import sys\ndef f(x): sys.exit(0)", ASSERTS, 0),
    ("import os\nprint('passed', 0, 1, 2); os._exit(0)", ASSERTS, 0),
    ("import os\nfor n in range(3): os.write(1, b'0 %d\\n' % n)", ASSERTS, 0),
    ("```py\nprint(2 * int(input()))\n```", PAIRS, 1),
    ("print(4)", PAIRS, 1 / 2),
    ("print(2 * int(input()), '  \\n\\n')", PAIRS, 1),
    ("print(2 * int(input())); raise SystemExit(1)", PAIRS, 0),
    (loop("print(2 * int(input()), flush=True)"), PAIRS, 0),
    ("print(input())", [], math.nan),
    ("print(input())", None, math.nan),
]


def test_shares_of_tests_passed():
    functions, texts, tests, expected = ("python_tests",), *zip(*CASES, strict=True)
    section = default_config().reward
    section.functions, section.timeout_s, section.sandbox.wall_s = functions[0], 40.0, 0.5
    rewards = RewardManager.from_config(section)
    rewards.check_columns({"tests"})
    result = rewards.score(["p"] * len(CASES), texts, {"tests": tests})
    assert result.parts["python_tests"].tolist() == pytest.approx([0 if math.isnan(e) else e for e in expected])
    assert result.valid.tolist() == [not math.isnan(e) for e in expected]
    assert result.failures == {"python_tests/nan": 2}
    section.sandbox.all_or_nothing = True
    rewards = RewardManager.from_config(section)
    some = [texts[i] for i in (0, 2, 12)], {"tests": [tests[i] for i in (0, 2, 12)]}
    assert rewards.score(["p"] * 3, *some).total.tolist() == [1, 0, 0]
    assert rewards.score(["p"], ["x"], {"tests": [[1]]}).failures == {"python_tests/error": 1}
