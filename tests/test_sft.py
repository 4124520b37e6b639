"""Supervised fine-tuning: the loss is that of whole conversations, one at a time, and a run of it keeps a run's promises."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jrl import SupervisedTrainer, Trainer, UserError, supervised
from jrl.config import load
from jrl.main import plan_text
from jrl.models import decoder
from jrl.models.load import RANDOM
from jrl.packing import pack_rows
from jrl.plan.supervised import make_stage_plan
from jrl.sharding.layout import Layout
from jrl.stages import Known, stage_of
from jrl.supervised_losses import sft_loss
from tests import dense
from tests.learners import assert_same_update, make_learner, make_params, one_device, random_batch
from tests.runs import ROOT, digests, lines, trained
from tests.stage_runs import a_stage_run, conversations, stop_after

CONFIG = load(f"{ROOT}/configs/sft.py", {})
ARCH = dataclasses.replace(RANDOM["tiny"], family="qwen2", qkv_bias=True)


def sequences():
    """Whole conversations of random tokens with the loss on some of them, and the column that the loss reads."""
    rollout, _ = random_batch((9, 17, 30, 5), 3, 40)
    rng = np.random.default_rng(0)
    rollout = dataclasses.replace(rollout, loss_mask=rollout.loss_mask & (rng.random(rollout.tokens.shape) < 0.7))
    return rollout, stage_of(CONFIG).columns(rollout, [], Known())


def learner(layout=None, budget=256, **options):
    return make_learner(
        layout, ARCH, temperature=1.0, loss=sft_loss(), microbatch_tokens=budget, **({"packing": pack_rows} | options)
    )


def expected(params, rollout):
    """Mean of -logprob and share of likeliest tokens, one conversation at a time in float64."""
    losses, hits = [], []
    for tokens, n, mask in zip(rollout.tokens, rollout.lens, rollout.loss_mask, strict=True):
        logp = dense.next_token_logprobs(ARCH, params, tokens[:n])[:-1]  # [n - 1, V], of the tokens from the second on
        picked = logp[np.arange(n - 1), tokens[1:n]]
        losses += list(-picked[mask[1:n]])
        hits += list((logp.argmax(-1) == tokens[1:n])[mask[1:n]])
    return np.mean(losses), np.mean(hits)


def test_packed_conversations_have_the_loss_of_each_alone():
    (rollout, columns), params = sequences(), make_params(arch=ARCH)
    # Likely tokens, so that the accuracy is not 0: half of them are what the model would say.
    greedy = [dense.next_token_logprobs(ARCH, dense.float64(params), t[:n])[:-1].argmax(-1)
              for t, n in zip(rollout.tokens, rollout.lens, strict=True)]  # fmt: skip
    for row, best in enumerate(greedy):
        rollout.tokens[row, rollout.lens[row] - 1] = best[-1]  # no other position depends on the last token
    loss, accuracy = expected(dense.float64(params), rollout)
    it = learner()
    found = it.measure(params, rollout, columns, np.arange(len(rollout)))
    assert found["loss"] == pytest.approx(loss, rel=1e-5) and found["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert 0 < accuracy < 1 and len(it.compiled) >= 1

    def blind(*args):  # the negative control: rows whose sequences see each other
        for packed in pack_rows(*args):
            yield dataclasses.replace(packed, offsets=np.where(packed.offsets < 0, -1, np.arange(packed.offsets.shape[-1])))

    assert learner(packing=blind).measure(params, rollout, columns, np.arange(len(rollout)))["loss"] != pytest.approx(
        loss, rel=1e-3
    )


def sft_update(layout, budget):
    rollout, columns = sequences()
    it = learner(layout, budget)
    state, metrics = it.update(it.init_state(make_params(layout, ARCH)), rollout, columns, np.arange(len(rollout)))
    return state, metrics | {"pg_loss": metrics["loss"]}


@pytest.mark.slow
def test_the_gradient_depends_neither_on_the_microbatches_nor_on_the_mesh():
    whole = sft_update(one_device(), 4096)
    assert whole[1]["grad_norm"] > 1e-3
    assert_same_update(whole, sft_update(Layout.train({"fsdp": 2, "context": 2}, jax.devices()[:4]), 80))


# Runs ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return conversations(tmp_path_factory.mktemp("data") / "chats.jsonl")


def run(folder, chats, **changes):
    data = {"data__train": chats, "data__options": {}, "data__train_size": 0, "data__eval_size": 6}
    return a_stage_run("sft", folder, **(data | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, chats):
    folder = tmp_path_factory.mktemp("sft") / "run"
    changes = {"steps": 12, "export__hf": True, "eval__every_steps": 4, "learner__schedule": "constant"}
    return folder, run(folder, chats, **changes).train()


def test_a_run_learns_and_leaves_what_it_promises(finished):
    folder, summary = finished
    assert summary == json.loads((folder / "result.json").read_text())
    assert summary["stage"] == "sft" and summary["steps"] == 12
    assert summary["loss_after"] < summary["loss_before"] - 1 and summary["accuracy_after"] > summary["accuracy_before"]
    losses = [m["train/loss"] for m in trained(folder)]
    assert losses[-1] < losses[0] - 1 and "<html" in (folder / "report.html").read_text()
    held_out = [m for m in lines(folder / "metrics.jsonl") if m["kind"] == "eval"]
    assert [m["step"] for m in held_out] == [0, 4, 8, 12]
    assert [p.name for p in (folder / "checkpoints").iterdir() if p.name == "12"] == ["12"]


@pytest.mark.slow
def test_the_negative_control_of_learning_a_loss_of_the_other_sign_rises(tmp_path, chats, monkeypatch):
    loss = sft_loss()

    def upside_down(forward, params, packed):
        total, metrics = loss(forward, params, packed)
        return -total, metrics

    monkeypatch.setattr(supervised, "stage_of", lambda config: dataclasses.replace(stage_of(config), loss=upside_down))
    summary = run(tmp_path / "run", chats, steps=6, checkpoint__every_steps=0, learner__schedule="constant").train()
    assert summary["loss_after"] > summary["loss_before"]


def test_the_export_is_the_trained_model_and_the_loss_is_that_of_transformers(finished, chats):
    import torch
    from transformers import AutoModelForCausalLM

    folder, summary = finished
    model = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    it = run(folder.parent / "again", chats, model__path=str(folder / "hf"))
    losses = []
    for item in it.parts.eval_items:
        (s,) = item.sequences
        labels = np.where(s.mask, s.tokens, -100)
        with torch.no_grad():
            logits = model(torch.from_numpy(s.tokens[None]).long()).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(labels[1:]).long(), ignore_index=-100, reduction="none"
        )[s.mask[1:]].tolist()  # fmt: skip
    assert summary["loss_after"] == pytest.approx(np.mean(losses), abs=1e-4)


@pytest.mark.slow  # as one of dpo, by default
def test_a_resumed_run_is_the_unbroken_one(tmp_path, chats):
    run(tmp_path / "whole", chats).train()
    first = run(tmp_path / "parts", chats)
    stop_after(first, 2)
    assert first.train()["interrupted"] == "SIGTERM"
    assert run(tmp_path / "parts", chats, resume=True).train()["steps"] == 4
    assert trained(tmp_path / "parts") == trained(tmp_path / "whole")
    assert digests(tmp_path / "parts", 4) == digests(tmp_path / "whole", 4)
    assert digests(tmp_path / "parts", 2) != digests(tmp_path / "parts", 4)


def test_mistakes_come_before_any_weight_is_read(tmp_path, chats, monkeypatch):
    monkeypatch.setattr(decoder, "init_params", lambda *_: pytest.fail("weights were made"))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "q"}]}\n')
    with pytest.raises(UserError, match="bad.jsonl line 1: messages has no message of the role assistant"):
        run(tmp_path / "a", str(bad), data__eval_size=0, eval__every_steps=0)
    with pytest.raises(UserError, match="data.examples_per_step=99: there are 18 training examples"):
        run(tmp_path / "a", chats, data__examples_per_step=99)
    with pytest.raises(UserError, match="config.data.max_tokens=4096: exceeds the 2048 positions"):
        run(tmp_path / "a", chats, data__max_tokens=4096)
    with pytest.raises(UserError, match="config.stage='sft': Trainer runs rl"):
        Trainer(load(f"{ROOT}/configs/sft.py", {}))
    with pytest.raises(UserError, match="config.stage='rl'"):
        SupervisedTrainer(load(f"{ROOT}/configs/tiny.py", {}))


def test_the_plan_tells_the_stage_and_knows_every_program_that_a_run_meets(tmp_path, chats):
    it = run(tmp_path / "run", chats, checkpoint__every_steps=0, eval__at_start=False)
    it.train()
    plan = make_stage_plan(it.config, it.parts.arch, 8)
    met = {tuple(key[1:]) for key in it.parts.learner.compiled.seen if key[0] == "update"}
    assert met and met <= set(plan.programs["policy.update (prompts, prompt tokens, rows, tokens of a row)"])
    assert "stage      sft: 4 updates, each on 4 rows" in plan.text() and "rollout" not in plan.text()
    assert plan_text(it.config) == plan.text()
