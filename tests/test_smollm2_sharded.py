"""The real model on 8 virtual devices: fsdp for training, replicas for rollout, against one device."""

import jax
import numpy as np
import pytest

from jrl.config import load
from jrl.trainer import Trainer


def one_step(tmp_path, devices: int) -> tuple[dict, np.ndarray]:
    """Metrics of a GRPO step of the demo, and its sampled tokens."""
    sizes = {"learner.mesh.fsdp": devices, "learner.mesh.data": 1, "rollout.mesh.replica": devices}
    small = {"rollout.prompts_per_step": 8, "rollout.group_size": 2, "rollout.slots": 16 // devices, "data.train_size": 50}
    other = {"data.eval_size": 4, "run_dir": str(tmp_path / str(devices)), "log.tensorboard": False}
    trainer = Trainer(load("configs/demo.py", {**sizes, **small, **other}), reward=length_reward)
    states = trainer.run.restore()
    trainer.publish(states)
    batch = next(trainer.experience(states))
    return trainer.update(0, states, batch), batch.rollout.tokens


def length_reward(prompts, completions, **_):
    return [len(c) for c in completions]


@pytest.mark.slow
def test_fsdp_and_replicas_give_the_losses_and_samples_of_one_device(tmp_path, monkeypatch):
    many, many_tokens = one_step(tmp_path, 8)
    every = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: every[:1])
    one, one_tokens = one_step(tmp_path, 1)
    np.testing.assert_array_equal(many_tokens, one_tokens)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert one["actor/grad_norm"] > 0
