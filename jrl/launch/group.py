"""A group of workers on Ray: one class on several hosts, its methods called on all of them.

    with WorkerGroup(Counter, 2, {"CPU": 4, "GPU": 8}, args=(10,)) as group:
        group.call("add", 5)         # [15, 15], in the order of ranks
        group.call_one(1, "add", 1)  # 16
        group.hosts                  # ["10.0.0.4", "10.0.0.7"]

The class is an ordinary one. Every wait has a deadline, and an error says which worker it is of, and where that runs. Ray must be
initialized.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from jrl.errors import UserError


class WorkerError(RuntimeError):
    """A call that failed on one worker.

    Attributes:
      rank, host: the worker.
      died: the worker itself, or its host, is gone; otherwise the method raised, or no answer came.
    """

    def __init__(self, rank: int, host: str, text: str, died: bool = False):
        super().__init__(f"worker {rank} on {host}: {text}")
        self.rank, self.host, self.died = rank, host, died


class WorkerGroup:
    """Workers that are placed together, or not at all.

    Args:
      cls: what runs on each; made as `cls(*args)`.
      count: how many; ranks are 0 to count - 1.
      resources: what each is given, by Ray's names: {"CPU": 4, "GPU": 8, "TPU": 4}.
      args: positional arguments of the class.
      strategy: Ray's placement strategy; STRICT_SPREAD puts each on a host of its own.
      timeout_s: for the resources to be had, and again for the workers to be made.

    Attributes:
      hosts: the address of each worker's host.

    Raises:
      UserError: the cluster did not have the resources in time.
      WorkerError: a worker could not be made.
    """

    def __init__(
        self, cls: type, count: int, resources: Mapping[str, float], args: Sequence[Any] = (), strategy: str = "STRICT_SPREAD",
        timeout_s: float = 300.0,
    ):  # fmt: skip
        rest = dict(resources)
        self._placement = placement_group([rest.copy() for _ in range(count)], strategy=strategy)
        self._actors: list[Any] = []
        self.hosts = ["a host yet to be found"] * count
        try:
            if not self._placement.wait(timeout_s):
                raise UserError(_not_to_be_had(count, resources, strategy, timeout_s))
            options = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0), "resources": rest, "max_restarts": 0}
            for rank in range(count):
                where = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank)
                self._actors.append(ray.remote(cls).options(scheduling_strategy=where, **options).remote(*args))
            self.hosts = self.call("__ray_call__", _address, timeout_s=timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()

    def call(self, method: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """What a method returns on each worker, by rank. All are called at once, and all answers are waited for.

        Raises:
          WorkerError: of the lowest rank that failed or is late.
        """
        outcomes = self.outcomes(method, *args, timeout_s=timeout_s, **kwargs)
        for outcome in outcomes:
            if isinstance(outcome, WorkerError):
                raise outcome
        return outcomes

    def call_one(self, rank: int, method: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any:
        """What a method returns on one worker.

        Raises:
          WorkerError: it failed or is late.
        """
        ref = getattr(self._actors[rank], method).remote(*args, **kwargs)
        outcome = self._outcome(rank, ref, method, time.monotonic() + timeout_s, timeout_s)
        if isinstance(outcome, WorkerError):
            raise outcome
        return outcome

    def outcomes(self, method: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        """As `call`, but with a WorkerError in the place of what a worker did not return."""
        deadline = time.monotonic() + timeout_s
        refs = [getattr(actor, method).remote(*args, **kwargs) for actor in self._actors]
        return [self._outcome(rank, ref, method, deadline, timeout_s) for rank, ref in enumerate(refs)]

    def _outcome(self, rank: int, ref: Any, method: str, deadline: float, timeout_s: float) -> Any:
        error: WorkerError
        try:
            return ray.get(ref, timeout=max(deadline - time.monotonic(), 0.0))
        except GetTimeoutError:
            return WorkerError(rank, self.hosts[rank], f"no answer to {method} within {timeout_s:g} s")
        except RayTaskError as failed:
            error = WorkerError(rank, self.hosts[rank], f"{type(failed.cause).__name__}: {failed.cause}")
            error.__cause__ = failed  # with the traceback of the worker
        except ActorUnavailableError:  # Ray does not know yet whether it is dead
            error = WorkerError(rank, self.hosts[rank], f"cannot be reached for {method}")
        except RayError as failed:
            error = WorkerError(rank, self.hosts[rank], _gone(failed), died=True)
        return error

    def shutdown(self) -> None:
        """Ends the workers and gives the resources back. Again is as good as once."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        remove_placement_group(self._placement)


def _address(_worker: Any) -> str:
    return ray.util.get_node_ip_address()


def _gone(error: RayError) -> str:
    """Why there is no such worker, without what Ray tells of its own inside."""
    lines = [line.strip() for line in str(error).splitlines()]
    if getattr(error, "actor_init_failed", False):
        return f"could not be made: {lines[-1]}"
    # Facts such as "pid: 7" are indented; the last line of the others says why, and then at length what it may come from.
    why = [line for line in str(error).splitlines() if line[:1].strip()][-1]
    return f"gone: {why.partition(' Worker exit type:')[0][:300]}"


def _not_to_be_had(count: int, resources: Mapping[str, float], strategy: str, timeout_s: float) -> str:
    shape = lambda amounts: ", ".join(f"{amounts.get(name, 0):g} {name}" for name in resources)  # noqa: E731
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    each = ", each on a host of its own" if strategy == "STRICT_SPREAD" else ""
    there = "; ".join(shape(node) for node in nodes)
    return (
        f"waited {timeout_s:g} s for {count} x ({shape(resources)}){each}; the cluster has {len(nodes)} hosts, with {there}: "
        "ask for less, or add hosts, or wait until others are done"
    )
