"""Training on a Ray cluster: python -m jrl.launch.ray --config=configs/NAME.py [--config.KEY=VALUE ...] [--hosts=N] [--help]

One worker on each host runs `python -m jrl.main` with the very same config, as a process of its own. When one fails, or its
host dies, all are started again from the last checkpoint. The cluster is that of RAY_ADDRESS, or of the job that this is run in
(`ray job submit`), or one on this machine.

The output of all processes goes to stderr, each line behind the number and host of its process, and to RUN_DIR/logs/; the last
line on stdout is that of process 0, the run's summary. Ctrl-C and SIGTERM let the run save and leave. A mistake is one line and
exit status 2, a run that failed once too often exit status 1.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from jrl import config as config_lib
from jrl import main as jrl_main
from jrl.errors import UserError, entry_point
from jrl.flags import check_values, read_flags
from jrl.launch import debug
from jrl.launch.cluster import BY_HAND, CLUSTER
from jrl.launch.failures import Failure, blame

POLL_EVERY_S = 0.5
POLL_TIMEOUT_S = 60.0  # a host that does not answer for so long is taken for dead
SETTLE_S = 20.0  # for what failed first to show, where something else was only the first to be seen
FINISH_S = 300.0  # for the others to end after process 0
KILL_S = 15.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line says beside the config."""

    hosts: int = 1
    cpus_per_host: int = 1
    gpus_per_host: int = 0
    tpus_per_host: int = 0
    restarts: int = 3
    env: str = ""
    debug: bool = False
    timeout_s: float = 300.0
    save_s: float = 600.0


ABOUT = {
    "hosts": "processes of the run, each on a host of its own where the cluster has several",
    "cpus_per_host": "CPUs that Ray sets aside on each",
    "gpus_per_host": "GPUs on each",
    "tpus_per_host": "TPU chips on each",
    "restarts": "times that a run that failed is taken up again",
    "env": "NAME,NAME: variables of this shell that all processes get, such as XLA_FLAGS",
    "debug": "breakpoint() in a process waits for `ray debug`, in a terminal on the same host",
    "timeout_s": "seconds until the hosts have to be there",
    "save_s": "seconds that a run has to save and leave after a signal",
}
LEAST = {"hosts": 1, "cpus_per_host": 1, "gpus_per_host": 0, "tpus_per_host": 0, "restarts": 0, "timeout_s": 1, "save_s": 0}
ABOUT_ALL = "Runs jrl.main on the hosts of a Ray cluster, with its flags (python -m jrl.main --help) and these:"


class GaveUp(RuntimeError):
    """The run failed more often than it may."""


def split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """(arguments of the launcher, arguments of jrl.main)."""
    fields = {field.name for field in dataclasses.fields(Settings)}
    mine: list[str] = []
    rest, others = list(args), []
    while rest:
        arg = rest.pop(0)
        name, equals, _ = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in fields | {"help"}:
            others.append(arg)
            continue
        mine.append(arg)
        if name != "help" and not equals and rest:
            mine.append(rest.pop(0))
    return mine, others


def parse(args: Sequence[str]) -> tuple[Settings, list[str], Any]:
    """(settings, arguments of jrl.main, config).

    Raises:
      UserError: any mistake that can be seen without the hosts.
    """
    mine, others = split(args)
    settings = read_flags(Settings, "python -m jrl.launch.ray", ABOUT_ALL, ABOUT, mine)
    check_values(settings, LEAST)
    if settings.gpus_per_host and settings.tpus_per_host:
        raise UserError("--gpus_per_host and --tpus_per_host: a host has one or the other")
    if missing := [name for name in settings.env.split(",") if name and name not in os.environ]:
        raise UserError(f"--env={settings.env}: {missing[0]} is not set here; set it, or leave it out")
    command = jrl_main.parse(others)
    if command.config is None:
        raise UserError("--config is missing: python -m jrl.launch.ray --config=configs/demo.py --hosts=2; --help says more")
    if command.dry_run:
        raise UserError("--dry_run: starts nothing, so it needs no cluster; python -m jrl.main does it")
    return settings, others, config_lib.load(command.config, command.overrides)


class Launch:
    """A run, through all its restarts.

    Args:
      args: of the program.
      run_dir: of the run.
      module: what Python runs on each host.
    """

    def __init__(self, settings: Settings, args: Sequence[str], run_dir: str, module: str = "jrl.main"):
        self._settings, self._args, self._run_dir, self._module = settings, list(args), run_dir, module
        self._began = False  # the run has the directory; a restart before that must not resume what an earlier run left there
        self._signals, self._following = 0, False

    def run(self) -> dict[str, Any]:
        """The run's summary.

        Raises:
          UserError: the hosts are not to be had, or a process told of a mistake.
          GaveUp: the run failed once too often.
        """
        old = {number: signal.signal(number, self._note_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for attempt in range(self._settings.restarts + 1):
                outcome = self._attempt(attempt)
                if not isinstance(outcome, Failure):
                    return outcome
                self._account(outcome, attempt)
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        raise AssertionError("the last attempt neither ended nor failed")

    def _note_signal(self, number: int, _frame: Any) -> None:
        if not self._following:
            raise GaveUp(f"{signal.Signals(number).name}: left, before all processes had been started")
        self._signals += 1
        told = "the run will save and leave; again to leave at once" if self._signals == 1 else "leaving at once"
        say(f"{signal.Signals(number).name}: {told}")

    def _account(self, failure: Failure, attempt: int) -> None:
        """Says what failed and what is done about it; raises if that is nothing."""
        if failure.mistake:
            raise UserError(failure.mistake)
        if self._signals:
            raise GaveUp(failure.told("it was told to leave, so it is not started again"))
        if attempt == self._settings.restarts:
            raise GaveUp(failure.told(f"that was the last of {attempt + 1} attempts; --config.resume=True continues the run"))
        where = "from the last checkpoint" if self._began else "from the beginning"
        say(failure.told(f"restart {attempt + 1} of {self._settings.restarts}, {where}"))

    def _attempt(self, attempt: int) -> dict[str, Any] | Failure:
        """Runs all processes once: the summary, or who failed."""
        from jrl.launch.group import WorkerError, WorkerGroup
        from jrl.launch.worker import TrainingProcess

        s = self._settings
        amounts = {"CPU": s.cpus_per_host, "GPU": s.gpus_per_host, "TPU": s.tpus_per_host}
        resources = {name: amount for name, amount in amounts.items() if amount}
        try:
            with WorkerGroup(TrainingProcess, s.hosts, resources, strategy=_strategy(), timeout_s=s.timeout_s) as group:
                try:
                    self._start(group, attempt)
                    self._following = True
                    return self._follow(group)
                finally:
                    self._following = False
                    group.outcomes("kill", timeout_s=KILL_S)
        except WorkerError as error:
            return Failure(str(error), mistake=str(error) if isinstance(error.__cause__, UserError) else "")

    def _start(self, group: Any, attempt: int) -> None:
        """Starts the process of each worker, told of its number and of where the first one will listen."""
        s = self._settings
        numbers = _process_numbers(group.call("tpu_worker_id")) if s.tpus_per_host else list(range(s.hosts))
        self._first = numbers.index(0)
        self._names = [f"process {number} on {host}" for number, host in zip(numbers, group.hosts, strict=True)]
        coordinator = f"{group.hosts[self._first]}:{group.call_one(self._first, 'free_port')}"
        passed = {name: os.environ[name] for name in s.env.split(",") if name} | _cluster()
        passed |= debug.ENVIRONMENT if s.debug else {}
        wrapped = ["jrl.launch.debug"] if s.debug else []
        args = ["-m", *wrapped, self._module, *self._args, *(["--config.resume=True"] if attempt and self._began else [])]
        for rank, number in enumerate(numbers):
            joined = _joined(coordinator, s.hosts, number)
            title = f"=== {self._names[rank]}, attempt {attempt + 1}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
            group.call_one(rank, "start", args, os.getcwd(), self._run_dir, number, passed | joined, title)
        say(f"{self._run_dir}: {s.hosts} processes on {', '.join(dict.fromkeys(group.hosts))}")

    def _follow(self, group: Any) -> dict[str, Any] | Failure:
        """Passes on what the processes write, until all have ended or one has failed."""
        since: dict[str, float] = {}  # when something was first so, by time.monotonic()
        while True:
            outcomes = group.outcomes("poll", timeout_s=POLL_TIMEOUT_S)
            self._show(outcomes)
            if (end := self._end(outcomes, since)) is not None:
                return end
            if self._signals and "told" not in since:
                since["told"] = time.monotonic()
                group.outcomes("send_signal", signal.SIGTERM, timeout_s=POLL_TIMEOUT_S)
            time.sleep(POLL_EVERY_S)

    def _end(self, outcomes: Sequence[Any], since: dict[str, float]) -> dict[str, Any] | Failure | None:
        """How the attempt ends; None while it goes on."""
        failure = blame(self._names, outcomes, "told" in since)
        if failure is None:
            since.pop("failed", None)
            ended = [outcome.status is not None for outcome in outcomes]
            if all(ended):
                return outcomes[self._first].summary or Failure(f"{self._names[self._first]} ended without a summary")
            if any(ended) and _longer(since, "ended", FINISH_S):
                return Failure(f"some processes went on for {FINISH_S:g} s after another had ended well")
        elif failure.certain or _longer(since, "failed", SETTLE_S):
            return failure
        if self._signals > 1:
            return Failure("the run was left at once")
        if "told" in since and _longer(since, "told", self._settings.save_s):
            return Failure(f"the run did not save within {self._settings.save_s:g} s")
        return None

    def _show(self, outcomes: Sequence[Any]) -> None:
        for name, outcome in zip(self._names, outcomes, strict=True):
            if not isinstance(outcome, Exception):
                sys.stderr.writelines(f"[{name}] {line}\n" for line in outcome.lines)
                self._began |= outcome.began
        sys.stderr.flush()


def _cluster() -> dict[str, str]:
    """What a process finds this cluster by, for rollout workers and the debugger."""
    import ray

    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def _joined(coordinator: str, hosts: int, number: int) -> dict[str, str]:
    """What a process joins the others by, or is alone by, whatever else the environment of Ray's workers may say."""
    if hosts == 1:
        return {CLUSTER: "off"}
    return dict(zip(BY_HAND, (coordinator, str(hosts), str(number)), strict=True))


def _longer(since: dict[str, float], what: str, seconds: float) -> bool:
    """Whether something has been so for longer than that; the first call for it begins its time."""
    now = time.monotonic()
    return now - since.setdefault(what, now) > seconds


def _strategy() -> str:
    """Each process on a host of its own, but on a cluster of one host, such as this machine, wherever there is room."""
    import ray

    return "STRICT_SPREAD" if sum(node["Alive"] for node in ray.nodes()) > 1 else "PACK"


def _process_numbers(tpu_worker_ids: Sequence[int | None]) -> list[int]:
    """The process of each worker: libtpu numbers the hosts of a slice itself, and the processes have to agree with it."""
    known = [number for number in tpu_worker_ids if number is not None]
    if sorted(known) != list(range(len(tpu_worker_ids))):
        return list(range(len(tpu_worker_ids)))
    return known


def say(text: str) -> None:
    print(f"jrl.launch.ray: {text}", file=sys.stderr, flush=True)


def run(args: Sequence[str]) -> dict[str, Any]:
    """Trains on a cluster, and returns the run's summary."""
    settings, others, config = parse(args)
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("ray is not installed; pip install 'jrl[ray]'") from None
    # The processes' output comes through the workers' reports, each line once and behind its host.
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        at = os.environ.get("RAY_ADDRESS", "")
        raise UserError(f"RAY_ADDRESS={at}: {error}; give the address of a cluster that runs, or none for one here") from None
    try:
        return Launch(settings, others, config.run_dir).run()
    finally:
        ray.shutdown()


@entry_point
def main(args: Sequence[str]) -> int:
    """The exit status: 0, or 1 after a run that failed."""
    try:
        print(json.dumps(run(args)), flush=True)
    except GaveUp as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
