"""Weights from the learner's processes to rollout workers, through Ray's object store.

Each process puts in what its own devices hold (`jrl.sharding.shards`); references to all parts go to the workers, which take
them from the hosts that have them. Of several processes an actor hands everyone's references to everyone.
"""

import asyncio
import os
import uuid
from typing import Any

import jax
import ray

from jrl.activity import WAITING, doing
from jrl.errors import UserError
from jrl.sharding.hosts import gather
from jrl.sharding.shards import own_shards

NAMESPACE = "jrl"


def connect(workers: int) -> None:
    """Joins the cluster at RAY_ADDRESS; a process that learns alone starts one on this machine where that is not set.

    Raises:
      UserError: several processes without RAY_ADDRESS.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if jax.process_count() > 1 and not address:
        raise UserError(
            f"config.rollout.workers={workers}: the learner has {jax.process_count()} processes, which must share a Ray cluster:"
            " start one (ray start --head) and give all of them RAY_ADDRESS=HOST:6379"
        )
    if not ray.is_initialized():
        ray.init(address=address or "local", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")


class Delivery:
    """Hands the policy's weights to workers; all of the learner's processes make one together, and call it together.

    Args:
      dtype: in which weights travel.
    """

    def __init__(self, dtype: Any):
        self._cast = jax.jit(lambda params: jax.tree.map(lambda x: x.astype(dtype), params))
        self._exchange: Any = None
        self._number = 0
        if jax.process_count() > 1:
            name = gather(uuid.uuid4().hex, "the others, to join the cluster")[0]
            options = dict(name=name, namespace=NAMESPACE, get_if_exists=True, num_cpus=0)
            self._exchange = ray.remote(_Exchange).options(**options).remote(jax.process_count())

    def __call__(self, params: Any) -> list[Any]:
        """References to the parts of all processes, each a list of shards by leaf."""
        mine = ray.put(own_shards(self._cast(params)))
        if self._exchange is None:
            return [mine]
        self._number += 1
        with doing(WAITING + "the others' weights"):  # where the run's health looks after the time
            return ray.get(self._exchange.swap.remote(self._number, jax.process_index(), [mine]))


class _Exchange:
    """What each process brings to a round, handed to all when it is complete."""

    def __init__(self, processes: int):
        self._processes = processes
        self._brought: dict[int, dict[int, Any]] = {}  # by round and process
        self._changed = asyncio.Condition()

    async def swap(self, number: int, process: int, reference: list[Any]) -> list[Any]:
        """The references of round `number`, by process; one is in a list, as Ray would fetch what a bare one stands for."""
        async with self._changed:
            brought = self._brought.setdefault(number, {})
            brought[process] = reference[0]
            self._brought.pop(number - 1, None)  # complete, so those who still wait for it have it at hand
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(brought) == self._processes)
        return [brought[i] for i in range(self._processes)]
