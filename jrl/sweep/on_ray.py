"""The runs of a sweep as tasks of Ray, on the cluster at RAY_ADDRESS or on one that is started here.

A task does no more than start the run's process and wait for it, so a run is the same with Ray and without. The sweep's directory
and the files that the config names must be there under the same paths on every machine of the cluster.
"""

import logging
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import ray

from jrl.errors import UserError
from jrl.launch.cluster import alone
from jrl.sweep.execute import POLL_S


class RayPool:
    """See `jrl.sweep.execute.Pool`: all jobs are handed to Ray at once, which runs as many as its resources allow.

    Args:
      num_cpus, num_gpus: of each run.

    Raises:
      UserError: a cluster that is started here can never run one.
    """

    def __init__(self, num_cpus: float, num_gpus: float):
        address = os.environ.get("RAY_ADDRESS")
        # A cluster that is asked for by name keeps its own settings.
        local: dict[str, Any] = {} if address else {"include_dashboard": False}
        if not ray.is_initialized():
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.WARNING, **local)
        wanted = {"CPU": num_cpus, "GPU": num_gpus}
        for name, number in wanted.items():
            most = max(node["Resources"].get(name, 0) for node in ray.nodes())
            if not address and number > most:  # another cluster may grow
                raise UserError(f"--num_{name.lower()}s={number:g}: this machine has {most:g}; give at most that")
        self._task = ray.remote(_wait_for).options(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=0)

    def room(self, running: int) -> bool:
        return True

    def start(self, command: Sequence[str], output: pathlib.Path) -> tuple[Any, pathlib.Path]:
        output = output.absolute()
        return self._task.remote(list(command), str(output), os.getcwd()), output

    def started(self, job: tuple[Any, pathlib.Path]) -> bool:
        return job[1].exists()

    def ended(self, job: tuple[Any, pathlib.Path]) -> int | None:
        reference, output = job
        if not ray.wait([reference], timeout=0)[0]:
            return None
        try:
            return ray.get(reference)
        except Exception as error:  # the task was cancelled, or its worker or machine is gone: it costs this run only
            with output.open("a", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {error}\n")
            return 1

    def stop(self, job: tuple[Any, pathlib.Path], number: int) -> None:
        ray.cancel(job[0])  # a KeyboardInterrupt in the task


def _wait_for(command: list[str], output: str, directory: str) -> int:
    """Runs a process to its end, in a worker of Ray; its exit status."""
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=alone(), start_new_session=True
        )
    while process.poll() is None:
        try:
            time.sleep(POLL_S)  # waiting for the process itself, the worker would not hear of `RayPool.stop`
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
    return process.returncode
