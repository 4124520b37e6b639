"""Rollout workers on Ray: `rollout.workers` actors, each with an engine on the devices that Ray gives it.

Weights come as the parts that the learner's processes hold, see `jrl.launch.delivery`. Of several such processes each has as
many of the workers as any other, which sample its share of the prompts.
"""

import os
from typing import Any

import jax
import ray

from jrl import platform
from jrl.config import default_config, flatten, override
from jrl.launch.delivery import connect
from jrl.launch.group import WorkerError, WorkerGroup
from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.rollout.workers import Piece, Turn, Worker, WorkerLost, Workers
from jrl.sharding.layout import Layout
from jrl.sharding.shards import from_shards

TURN_S = 900.0  # of one step of a worker's engine, compiling included; a worker that takes longer is taken for lost


class EngineActor:
    """What runs on a worker's host.

    Args:
      settings: the run's config, flat.
      longest: tokens of the longest prompt.
      slots: of each of the engine's replicas; 0 for as many as a worker's share of the samples asks for.
    """

    def __init__(self, settings: dict[str, Any], arch: Arch, eos_ids: tuple[int, ...], longest: int, slots: int):
        from jrl.build import engine_of

        config = default_config()
        for name, value in settings.items():
            override(config, name, value)
        layout = Layout.rollout({"replica": -1, "tensor": config.rollout.mesh.tensor}, jax.local_devices())
        platform.configure()
        dtype = platform.compute_dtype(config.model.compute_dtype)
        like = decoder.abstract_params(arch)
        shardings = layout.tree(decoder.param_axes(arch), like)
        engine = engine_of(config, arch, eos_ids, layout, dtype, longest, slots // layout.batch_shards or 1, config.seed, None)
        self._worker = Worker(engine, lambda parts: from_shards(ray.get(parts), like, shardings))

    def turn(self, weights: list[Any] | None, version: int, new: list[Piece]) -> Turn:
        return self._worker.turn(weights, version, new)

    def pid(self) -> int:
        return os.getpid()


class OnRay:
    """`jrl.rollout.workers.Remote` of one actor."""

    def __init__(self, number: int, resources: dict[str, float], args: tuple, timeout_s: float):
        self._number = number
        try:
            self._group = WorkerGroup(EngineActor, 1, resources, args, strategy="PACK", timeout_s=timeout_s)
        except WorkerError as error:
            raise WorkerLost(f"rollout worker {number}: {error}") from None

    def turn(self, weights: tuple[Any, int] | None, new: list[Piece]) -> Turn:
        parts, version = weights or (None, -1)
        try:
            return self._group.call_one(0, "turn", parts, version, new, timeout_s=TURN_S)
        except WorkerError as error:
            raise WorkerLost(f"rollout worker {self._number}: {error}") from error

    def close(self) -> None:
        self._group.shutdown()


def ray_workers(config, arch: Arch, eos_ids: tuple[int, ...], longest: int) -> Workers:
    """This process's workers, on the cluster at RAY_ADDRESS or one on this machine."""
    c = config.rollout
    connect(c.workers)
    share = -(-c.prompts_per_step * c.group_size // c.workers)
    args = (flatten(config), arch, eos_ids, longest, c.slots or min(share, 64))
    resources = {"CPU": c.worker_cpus} | ({"GPU": c.worker_gpus} if c.worker_gpus else {})
    timeout_s = config.hosts.connect_s
    mine = c.workers // jax.process_count()
    first = mine * jax.process_index()
    return Workers(lambda number: OnRay(first + number, resources, args, timeout_s), mine, c.worker_restarts)
