"""Optimizer state and reference in the hosts' memory: the same numbers, less on the devices."""

import jax
import numpy as np

from jrl.sharding.layout import Layout
from tests.learners import make_learner, make_params, random_batch

BATCH = random_batch((3, 20), samples=3, longest=20)


def test_updates_are_those_of_a_state_on_the_devices():
    layout, (rollout, columns), states = Layout.train({"fsdp": 4, "tensor": 2}), BATCH, {}
    for memory in ("device", "host"):
        learner = make_learner(layout, optimizer_memory=memory)
        state = learner.init_state(make_params(layout))
        for _ in range(2):
            state, metrics = learner.update(state, rollout, columns, np.arange(len(rollout)))
        assert metrics["grad_norm"] > 1  # so that gradients are clipped
        states[memory] = state
    for x, y in zip(jax.tree.leaves(states["device"]), jax.tree.leaves(states["host"]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(states["host"].opt_state) if x.ndim}
    assert kinds == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(states["host"].params)} == {"device"}
