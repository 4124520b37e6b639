"""Models of real shapes on 8 virtual devices against one: the same samples, and from the same samples the same update."""

import dataclasses

import jax
import numpy as np
import pytest

from jrl.config import load
from jrl.models.decoder import init_params
from jrl.models.hf import save_hf
from jrl.models.load import RANDOM, byte_tokenizer
from jrl.trainer import Trainer
from tests.runs import QUIET, ROOT, TINY

pytestmark = pytest.mark.slow


def length_reward(prompts, completions, **_):
    return [float(len(c)) for c in completions]


def a_trainer(config: str, folder, **changes):
    """A trainer with its states made and its weights published, before the first step."""
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    trainer = Trainer(load(config, QUIET | {"run_dir": str(folder)} | keys), reward=length_reward)
    states = trainer.run.restore()
    trainer.publish(states)
    return trainer, states


def assert_same_on_one_device(config, tmp_path, monkeypatch, meshes, common):
    many, many_states = a_trainer(config, tmp_path / "many", **common, **meshes)
    spread = next(many.experience(many_states))
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: devices[:1])
    one, one_states = a_trainer(config, tmp_path / "one", **common)
    batch = next(one.experience(one_states))
    monkeypatch.undo()

    a, b = spread.rollout, batch.rollout
    width = min(a.tokens.shape[1], b.tokens.shape[1])
    same = (a.tokens[:, :width] == b.tokens[:, :width]).all(axis=1) & (a.lens == b.lens)
    # A sample may part ways where its uniform meets a step of the distribution that rounding has moved.
    assert same.mean() >= 0.9
    np.testing.assert_allclose(a.logprobs[same, :width], b.logprobs[same, :width], atol=1e-4)

    metrics = [t.update(0, s, batch) for t, s in ((many, many_states), (one, one_states))]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "rollout_corr/logprob_abs_diff"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=2e-4, abs=1e-5), name
    assert metrics[1]["actor/grad_norm"] > 1e-3 and metrics[1]["rollout_corr/logprob_abs_diff"] < 1e-4
    other = dataclasses.replace(batch, advantages=-0.9 * batch.advantages)
    one.parts.engine.load(None, -1)
    one.publish(one_states)
    versions = np.full_like(batch.rollout.versions, one.parts.engine.version)
    changed = one.update(0, one_states, dataclasses.replace(other, rollout=dataclasses.replace(batch.rollout, versions=versions)))
    assert abs(changed["actor/grad_norm"] / metrics[1]["actor/grad_norm"] - 1) > 1e-3


@pytest.mark.parametrize(
    "meshes",
    [
        {"learner__mesh__fsdp": 4, "learner__mesh__tensor": 2, "rollout__mesh__replica": 4, "rollout__mesh__tensor": 2},
        {"learner__mesh__fsdp": 2, "learner__mesh__tensor": 4, "rollout__mesh__replica": 2, "rollout__mesh__tensor": 4},
    ],
    ids=["4x2", "2x4"],
)
def test_grouped_heads_over_fsdp_and_tensor(tmp_path, monkeypatch, meshes):
    """4 layers of hidden size 1024 with 16 query and 4 KV heads."""
    arch = dataclasses.replace(
        RANDOM["tiny"], hidden_size=1024, intermediate_size=2816, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=64
    )
    save_hf(tmp_path / "model", arch, init_params(arch, 1), byte_tokenizer(), (byte_tokenizer().eos_token_id,))
    common = {"model__path": str(tmp_path / "model"), "rollout__group_size": 8}
    assert_same_on_one_device(TINY, tmp_path, monkeypatch, meshes, common)


def test_smollm2_over_fsdp(tmp_path, monkeypatch):
    common = {"rollout__prompts_per_step": 8, "rollout__group_size": 2, "data__train_size": 50, "data__eval_size": 4}
    meshes = {"learner__mesh__fsdp": 8, "rollout__mesh__replica": 8, "rollout__slots": 2}
    assert_same_on_one_device(f"{ROOT}/configs/demo.py", tmp_path, monkeypatch, meshes, common)
