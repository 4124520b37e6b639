"""Joins the processes of a run: `with member(config.hosts): ...`, the same on every host.

Which processes there are says the environment: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, set by hand
or by a launcher; or SLURM, in a step of several tasks; or the TPU workers of a slice on Kubernetes; JRL_CLUSTER=tpu stands for
those of a TPU VM. Where it says nothing, or JRL_CLUSTER=off, the process is alone, and nothing here has any effect.
"""

import contextlib
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from jrl.errors import UserError
from jrl.launch.health import STOPPED, Watch, own_state
from jrl.launch.recorder import Recorder

log = logging.getLogger("jrl")

CLUSTER = "JRL_CLUSTER"  # "tpu" on the workers of a TPU VM slice, which no variable of their own tells; "off" to be alone
BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
TPU_WORKERS = "TPU_WORKER_HOSTNAMES"  # comma separated, set on the workers of a TPU slice

# How errors of the runtime begin that another process may have caused; memory that runs out (RESOURCE_EXHAUSTED) is one's own.
OF_OTHERS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|FAILED_PRECONDITION): ")

_watch: Watch | None = None


def alone() -> dict[str, str]:
    """The environment for a process that this one starts, and that is to join nobody."""
    return {**os.environ, CLUSTER: "off"}


@contextlib.contextmanager
def member(section: Any) -> Iterator[None]:
    """Inside, the process is one of those that the environment names; a failure of any of them ends all.

    Args:
      section: config.hosts.

    Raises:
      UserError: an environment that contradicts itself, or processes that do not come.
    """
    global _watch
    found = _detect(os.environ)
    if found is None:
        yield
        return
    _watch = watch = _connect(found, section)
    try:
        yield
    except BaseException as error:
        _fail(watch, error)
    else:
        _part(watch)
    finally:
        _watch = None


def check_alike(settings: Mapping[str, Any]) -> None:
    """Makes sure that all processes have the same config and the same jrl, before they do anything that takes all of them.

    Raises:
      UserError: in every process, the key, the values and the processes that have them.
    """
    if _watch is None:
        return
    import jrl
    from jrl.sharding.hosts import gather

    everyone = gather({**settings, "jrl.__version__": jrl.__version__}, "their configs")
    for index, other in enumerate(everyone):
        for key in sorted(other.keys() | everyone[0].keys()):
            if (mine := everyone[0].get(key)) != (theirs := other.get(key)):
                raise UserError(
                    f"config.{key}={theirs!r} in process {index}, but {mine!r} in process 0; give all the same command"
                )


def is_first() -> bool:
    """Whether this is the process that speaks for all."""
    return _watch is None or _watch.index == 0


def states() -> list[dict[str, Any]]:
    """What every process is doing, as far as this one knows; of a process that is alone, itself."""
    return _watch.states() if _watch else [{"process": 0, **own_state(0)}]


def watch() -> Watch | None:
    """Of this process's cluster; None where it is alone."""
    return _watch


def _detect(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Arguments for `jax.distributed.initialize`; empty where JAX finds them itself, None for a process that is alone."""
    wanted = environment.get(CLUSTER, "")
    if wanted not in ("", "tpu", "off"):
        raise UserError(f"{CLUSTER}={wanted}: must be tpu or off, or not set")
    if wanted == "off":
        return None
    given = [name for name in BY_HAND if environment.get(name)]
    if given:
        if missing := [name for name in BY_HAND if name not in given]:
            raise UserError(f"{given[0]}={environment[given[0]]}: {', '.join(missing)} must be set too, or none of the three")
        count, index = (_whole(environment, name) for name in BY_HAND[1:])
        if not 0 <= index < count:
            raise UserError(f"JAX_PROCESS_ID={index}: must be from 0 to JAX_NUM_PROCESSES - 1 = {count - 1}")
        if ":" not in environment[BY_HAND[0]]:
            raise UserError(f"{BY_HAND[0]}={environment[BY_HAND[0]]}: must be HOST:PORT, of the host of process 0")
        address = environment[BY_HAND[0]]
        return {"coordinator_address": address, "num_processes": count, "process_id": index} if count > 1 else None
    if "SLURM_STEP_NUM_TASKS" in environment and _whole(environment, "SLURM_STEP_NUM_TASKS") > 1:
        return {"cluster_detection_method": "slurm"}
    if wanted == "tpu" or "," in environment.get(TPU_WORKERS, "") or environment.get("MEGASCALE_COORDINATOR_ADDRESS"):
        return {}
    return None


def _whole(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"{name}={environment[name]}: must be a whole number") from None


def _connect(found: dict[str, Any], section: Any) -> Watch:
    import jax
    from jax._src import distributed  # the key-value store has no public name

    where = found.get("coordinator_address", "the coordinator that the environment names")
    remedy = "see that every host runs the same command, with a number of its own, and reaches that address"
    recorder = Recorder()  # from here on: JAX ends a process that waits in vain
    who, why = (
        f"{socket.gethostname()} (pid {os.getpid()})",
        f"not all have come in hosts.connect_s={section.connect_s:g}; {remedy}",
    )
    recorder.tell({"who": who, "where": f"waiting for the other processes at {where}", "why": why})
    alone = {"cluster_detection_method": "deactivate"} if "process_id" in found else {}  # JAX need not look for more
    try:
        jax.distributed.initialize(
            **(found | alone),
            initialization_timeout=int(section.connect_s),
            heartbeat_timeout_seconds=int(3 * section.silence_s),  # later than ours, which says more
        )
    except Exception as error:
        recorder.fine()
        text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise UserError(f"{CLUSTER}: the processes cannot meet at {where} ({text}); {remedy}") from None
    state = distributed.global_state
    count, index, address = jax.process_count(), jax.process_index(), str(state.coordinator_address)
    watch = Watch(state.client, index, count, address, section.silence_s, section.wait_s, recorder)
    watch.start()
    if index:  # all do the same; one of them tells
        logging.getLogger("jrl").addFilter(lambda record: record.levelno >= logging.WARNING)
    log.info("%d processes, %d devices each", count, jax.local_device_count())
    return watch


def _part(watch: Watch) -> None:
    """The orderly end: nobody leaves before all have finished."""
    import jax

    from jrl.sharding.hosts import together

    together("the end")
    watch.leave()
    jax.distributed.shutdown()


def _fail(watch: Watch, error: BaseException) -> None:
    """Ends the process with the reason: its own, which it tells the others, or another process's."""
    told, status = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}", 1
    if isinstance(error, UserError):
        told = " ".join(str(error).split())
        print(f"error: {told}", file=sys.stderr)
        watch.accuse(f"{watch.name(watch.index)} failed {watch.where(watch.index)}: {told}")
        watch.die(2)
    if not isinstance(error, SystemExit | KeyboardInterrupt):
        traceback.print_exception(error)
    # A collective fails in those that are alive when one is gone, and does not say which.
    verdict = watch.await_verdict() if OF_OTHERS.match(str(error)) else watch.verdict()
    if verdict:
        print(f"error: {verdict}; {watch.name(watch.index)} stops", file=sys.stderr)
        watch.die(STOPPED)
    watch.accuse(f"{watch.name(watch.index)} failed {watch.where(watch.index)}: {told}")
    watch.die(status)
