"""Python programs of a policy, run against tests in `jrl/rewards/jail.py`.

`jrl.rewards.worker` loads this file by its path and calls `python_tests(**options)` once for the function that it then gives
samples to; `check` is called before, by the trainer. It needs nothing of jrl.
"""

import json
import math
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MB = 1 << 20
START_S = 30.0  # for the jail to start
LATE_S = 0.5  # what all that is around the programs of a sample may take
_BLOCK = re.compile(r"^```(?:python|py)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE | re.IGNORECASE)

# Runs a solution and asserts in one process. Which of them passed goes where stdout went, under a name that the solution cannot
# have written by chance; what the solution prints is dropped.
_ASSERTS = """
import json, os, sys
solution, tests, token = json.load(sys.stdin)
report = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
names = {"__name__": "solution"}
exec(compile(solution, "solution.py", "exec"), names)
for number, test in enumerate(tests):
    try:
        exec(compile(test, "test.py", "exec"), names)
    except BaseException:
        continue
    os.write(report, f"{token} {number}\\n".encode())
os._exit(0)
"""

# Tries what no program may do, and prints what of it failed as it should: {promise: whether it is kept}.
_PROBE = """
import json, os, socket, sys
secret, outsider, processes, memory, file_bytes = json.load(sys.stdin)

def fails(attempt):
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False

def fork():
    gate, hold = os.pipe()
    made = 0
    try:
        while made <= processes:
            if not os.fork():
                os.close(hold)
                os.read(gate, 1)
                os._exit(0)
            made += 1
    finally:
        os.close(hold)

def fill():
    with open("big", "wb") as file:
        for _ in range(file_bytes // 4096 + 1):
            file.write(bytes(4096))

kept = {
    "no network": [name for _, name in socket.if_nameindex()] in ([], ["lo"]),
    "no files of others": fails(lambda: open(secret)) and not os.path.exists(f"/proc/{outsider}"),
    "no signals to others": fails(lambda: os.kill(outsider, 0)),
    "no rights": os.getuid() != 0 and fails(lambda: os.setuid(0)),
    "no environment": not set(os.environ) - {"LC_CTYPE"},
    "processes limited": fails(fork),
    "memory limited": fails(lambda: bytearray(2 * memory)),
    "files limited": fails(fill),
}
print(json.dumps(kept))
"""


class Sandbox:
    """A process of jail.py, which runs one program at a time.

    Args:
      options: the keys of the config's section `reward.sandbox`.

    Raises:
      OSError: it cannot be started, or is not allowed to be weak; the text says why.
    """

    def __init__(self, options: Mapping[str, Any]):
        limits = {
            "memory_bytes": options["memory_mb"] * MB, "file_bytes": options["file_mb"] * MB, "files": options["files"],
            "processes": options["processes"], "output_bytes": options["output_kb"] * 1024,
            "cpu_s": math.ceil(options["wall_s"]), "weak": options["allow_weak"],
        }  # fmt: skip
        self.limits = limits
        jail = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jail.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", jail, json.dumps(limits)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env={},
        )  # fmt: skip
        self._left = b""
        try:
            said = self._answer(START_S)
        except BaseException:
            self.close()
            raise
        self.weakness: str = said.get("weak", "")  # why there are no namespaces; empty where there are
        if "refused" in said:
            self.close()
            raise OSError(said["refused"])

    def run(self, source: str, stdin: str, wall_s: float) -> dict[str, Any]:
        """Runs a program; returns {"ended", "code", "output"} as jail.py says."""
        request = {"source": source, "stdin": stdin, "wall_s": wall_s}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        return self._answer(wall_s + START_S)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._left:
            if not select.select([self._process.stdout], [], [], max(until - time.monotonic(), 0))[0]:
                raise OSError("the sandbox does not answer")
            piece = self._process.stdout.read(1 << 16)
            if not piece:
                raise OSError("the sandbox has ended")
            self._left += piece
        line, _, self._left = self._left.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def check(options: Mapping[str, Any]) -> tuple[str, dict[str, bool]]:
    """Starts a sandbox and tries to break out of it: (why it is weak or "", {promise: whether it was seen to hold}).

    Raises:
      OSError: there is none, or nothing runs in it.
    """
    sandbox = Sandbox(options)
    try:
        with tempfile.NamedTemporaryFile("w") as secret:
            os.chmod(secret.name, 0o644)
            limits = sandbox.limits
            asked = [secret.name, os.getpid(), limits["processes"], limits["memory_bytes"], limits["file_bytes"]]
            result = sandbox.run(_PROBE, json.dumps(asked), START_S)
    finally:
        sandbox.close()
    try:
        return sandbox.weakness, json.loads(result["output"])
    except ValueError:
        raise OSError(f"{sys.executable} does not run in it: {result}") from None


# The reward ----------------------------------------------------------------------------------------------------------------


def program_of(completion: str) -> str:
    """The last block fenced as Python, or else the whole of it."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def parse_tests(tests: Any) -> list[str] | list[tuple[str, str]]:
    """The column `tests`: Python statements that assert, or pairs of stdin and the stdout that is right.

    It is a list of texts; a list of [stdin, stdout] or {"stdin": .., "stdout": ..}; or such a list as JSON.

    Raises:
      ValueError: anything else.
    """
    tests = json.loads(tests) if isinstance(tests, str) else tests
    if isinstance(tests, Sequence) and all(isinstance(test, str) for test in tests):
        return list(tests)
    pairs = [(t["stdin"], t["stdout"]) if isinstance(t, Mapping) else tuple(t) for t in tests]
    if not all(len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in pairs):
        raise ValueError("tests must be a list of texts or of pairs (stdin, stdout)")
    return pairs


def python_tests(**options: Any) -> Callable[..., float]:
    """The function of a sample that runs its program against its tests; `options` is `reward.sandbox`.

    The reward is the share of tests passed, or with `all_or_nothing` 1.0 where all did, else 0.0; NaN where there are no tests.
    All of a sample's tests together have `wall_s`; those not reached have failed. Asserts run in the program's own process, which
    a program that is made for it can deceive; the stdout that is right never enters the sandbox.
    """
    sandbox = [Sandbox(options)]

    def score(completion: str, *, tests: Any, **_: Any) -> float:
        parsed = parse_tests(tests) if tests is not None else []
        if not parsed:
            return math.nan
        try:
            passed = _passed(sandbox[0], program_of(completion), parsed, options["wall_s"])
        except OSError:
            sandbox[0].close()
            sandbox[0] = Sandbox(options)
            raise
        return float(passed == len(parsed)) if options["all_or_nothing"] else passed / len(parsed)

    return score


def _passed(sandbox: Sandbox, program: str, tests: list[str] | list[tuple[str, str]], wall_s: float) -> int:
    if isinstance(tests[0], str):
        token = os.urandom(16).hex()
        output = sandbox.run(_ASSERTS, json.dumps([program, tests, token]), wall_s)["output"]
        return len({line for line in output.splitlines() if line.startswith(f"{token} ")})
    passed, until = 0, time.monotonic() + wall_s
    for stdin, stdout in tests:
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        result = sandbox.run(program, stdin, left_s)
        passed += result["ended"] == "exit" and result["code"] == 0 and _lines(result["output"]) == _lines(stdout)
    return passed


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines and of the whole."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
