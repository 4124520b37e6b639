"""What waits in the hosts' memory: the same numbers as on the devices, the same checkpoints, and less held."""

import math
import types

import jax
import numpy as np
import pytest

from jrl import build
from jrl.checkpoint import Checkpointer
from jrl.config import default_config, override
from jrl.errors import UserError
from jrl.sharding.digest import digest
from jrl.sharding.layout import Layout
from jrl.sharding.memory_kinds import DEVICE, HOST
from tests.learners import make_learner, make_params, random_batch
from tests.runs import a_run, assert_same_runs, trained

ROLLOUT, COLUMNS = random_batch((3, 20), samples=3, longest=20)


def two_updates(layout, memory):
    learner = make_learner(layout, optimizer_memory=memory)
    state = learner.init_state(make_params(layout))
    for _ in range(2):
        state, metrics = learner.update(state, ROLLOUT, COLUMNS, np.arange(len(ROLLOUT)))
    assert metrics["grad_norm"] > 1  # so that gradients are clipped
    return learner, state


def memories(tree) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.fixture(scope="module")
def layout():
    return Layout.train({"fsdp": 2, "tensor": 2}, jax.devices()[:4])


@pytest.fixture(scope="module")
def updated(layout):
    return {memory: two_updates(layout, memory) for memory in (DEVICE, HOST)}


def test_updates_are_those_of_a_state_on_the_devices(updated):
    (_, near), (_, far) = updated[DEVICE], updated[HOST]
    for x, y in zip(jax.tree.leaves(near), jax.tree.leaves(far), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    assert memories(far.opt_state) == {HOST} and memories(far.params) == {DEVICE} == memories(near.opt_state)


def test_a_skipped_update_leaves_the_moments_where_they_are(layout, updated):
    learner = updated[HOST][0]
    state = learner.init_state(make_params(layout))
    broken = COLUMNS | {"advantages": COLUMNS["advantages"] * np.nan}
    state, metrics = learner.update(state, ROLLOUT, broken, np.arange(len(ROLLOUT)))
    assert metrics["skipped"] == 1 and memories(state.opt_state) == {HOST}


def test_checkpoints_go_from_one_memory_to_the_other(updated, tmp_path):
    learner, state = updated[HOST]
    sums = digest(state)
    assert sums == digest(jax.device_put(state, updated[DEVICE][0].state_shardings))
    checkpoints = Checkpointer(tmp_path, keep=2)
    checkpoints.save(1, state, {})
    for memory, (other, _) in updated.items():
        _, restored, _ = checkpoints.restore(other.abstract_state())
        assert digest(restored) == sums and memories(restored.opt_state) == {memory}
    checkpoints.close()


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 2, "context": 2}, pytest.param({"fsdp": 1}, marks=pytest.mark.slow)], ids=["four", "one"]
)
def test_a_reference_in_host_memory_says_the_same(sizes):
    layout = Layout.train(sizes, jax.devices()[: math.prod(sizes.values())])
    params, results = make_params(layout), {}
    for memory in (DEVICE, HOST):
        reference = make_learner(layout, param_memory=memory)
        copy = build.copy_params(params, reference.param_shardings)
        assert memories(copy) == {memory}
        results[memory] = reference.run("logprobs", copy, ROLLOUT)[0]
    np.testing.assert_array_equal(results[DEVICE], results[HOST])
    assert results[HOST].any()


@pytest.mark.slow
def test_a_run_is_the_same_run_broken_or_not(tmp_path):
    asked = dict(
        learner__optimizer_memory=HOST, critic__optimizer_memory=HOST, reference__memory=HOST, reference__refresh_steps=1,
        algorithm__name="ppo", algorithm__kl_in="loss", algorithm__kl_coef=0.1, eval__every_steps=0, eval__at_start=False,
    )  # fmt: skip
    a_run(tmp_path / "whole", **asked, steps=2).train()
    a_run(tmp_path / "broken", **asked, steps=1).train()
    resumed = a_run(tmp_path / "broken", **asked, steps=2, resume=True)
    resumed.train()
    assert_same_runs(tmp_path / "whole", tmp_path / "broken", 2)
    assert trained(tmp_path / "whole")[-1]["actor/kl_loss"] != 0


class NoHostMemory:
    """A device of a backend without it."""

    def addressable_memories(self):
        return [types.SimpleNamespace(kind=DEVICE)]

    def __str__(self):
        return "CHIP_0"


@pytest.mark.parametrize(
    ("key", "value"),
    [("learner.optimizer_memory", HOST), ("critic.optimizer_memory", HOST), ("reference.memory", HOST),
     ("learner.remat", "offload")],
)  # fmt: skip
def test_a_backend_without_such_memory_is_refused_by_name(monkeypatch, key, value):
    config = default_config()
    override(config, key, value)
    build.make_layouts(config)  # this one has it
    chips = types.SimpleNamespace(mesh=types.SimpleNamespace(devices=np.array([NoHostMemory()])))
    monkeypatch.setattr(build, "make_layout", lambda *_: chips)
    remedy = "full" if value == "offload" else DEVICE
    with pytest.raises(UserError, match=f"^config.{key}={value}: CHIP_0 has no pinned_host memory, only device; give {remedy}$"):
        build.make_layouts(config)
    override(config, key, remedy)
    build.make_layouts(config)
