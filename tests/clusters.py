"""Runs of several processes on this machine: helpers of their tests."""

import contextlib
import dataclasses
import pathlib
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from tests.runs import command, environment, start


@dataclasses.dataclass
class Member:
    """One process of a run; what it writes goes to files, so that no pipe fills."""

    process: subprocess.Popen
    out: pathlib.Path
    err: pathlib.Path

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)


def cluster_environment(index: int, count: int, port: int, devices: int) -> dict[str, str]:
    return environment(
        JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
        JAX_NUM_PROCESSES=str(count),
        JAX_PROCESS_ID=str(index),
        XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def members(
    folder: pathlib.Path, count: int, devices: int, arg: str = "", of: dict[int, dict[str, Any]] | None = None, **changes: Any
) -> Iterator[list[Member]]:
    """The same run in `count` processes of `devices` virtual devices each; none is left behind.

    Args:
      of: further changes, of single processes.
    """
    port, started = free_port(), []
    logs = folder.with_name(folder.name + "_logs")
    logs.mkdir(exist_ok=True)
    try:
        for i in range(count):
            out, err = (logs / f"{time.monotonic_ns()}_{i}.{kind}" for kind in ("out", "err"))
            args = command(folder, arg, **(changes | (of or {}).get(i, {})))
            with out.open("w") as stdout, err.open("w") as stderr:
                env = cluster_environment(i, count, port, devices)
                started.append(Member(start(args, env=env, stdout=stdout, stderr=stderr), out, err))
        yield started
    finally:
        for member in started:
            member.process.kill()
            member.process.wait()


def run_together(folder: pathlib.Path, count: int, devices: int, arg: str = "", **changes: Any) -> list[Member]:
    """A run to its end."""
    with members(folder, count, devices, arg, **changes) as started:
        for member in started:
            status = member.wait(600)
            assert status == 0, "".join(f"--- process {i}\n{m.err.read_text()}" for i, m in enumerate(started))
    return started


def run_alone(folder: pathlib.Path, devices: int, arg: str = "", **changes: Any) -> None:
    """The same in one process."""
    env = environment(XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}")
    process = start(command(folder, arg, **changes), env=env)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
