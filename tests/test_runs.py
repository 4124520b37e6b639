"""Whole runs of the tiny model: what they promise, what they write, and that they learn."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import Trainer, UserError
from jrl.algorithms.kl import kl
from jrl.config import load
from jrl.config_keys import KEYS
from jrl.run import run_directory
from jrl.sharding.digest import digest
from tests.runs import RUN, TINY, a_run, assert_same_runs, command, digests, lines, sampled, start, trained

SHORT = {"steps": 2, "eval__every_steps": 0, "checkpoint__every_steps": 0}


def length_reward(prompts, completions, **columns):
    return [len(c) / 10 for c in completions]


# What a run leaves behind ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run by the command line, as a user starts it: its directory, its last line and what it said."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    rewards = folder.parent / "rewards.py"
    rewards.write_text("def length(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    settings = {"log.tensorboard": True, "export.hf": True, "log.print_samples_every": 2, "steps": 3}
    settings["reward.functions"] = f"{rewards}:length*0.1"
    process = start(command(folder, **settings))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder, out, err


def test_a_run_writes_all_that_it_promises(finished):
    folder, out, err = finished
    summary = json.loads(out.splitlines()[-1])
    assert list(summary) == [
        "task", "accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "steps", "seconds", "samples_per_s",
        "export",
    ]  # fmt: skip
    assert json.loads((folder / "result.json").read_text()) == summary and summary["steps"] == 3
    assert json.loads((folder / "config.json").read_text()).keys() == KEYS.keys()
    assert list(folder.glob("events.out.tfevents.*")) or list(folder.rglob("events.out.tfevents.*"))
    assert "<html" in (folder / "report.html").read_text()
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()) == [1, 2, 3]
    assert "64 distinct training problems, 8 held out, 0 in both" in err
    assert re.search(r"step 3/3 reward [\d.]+ accuracy [\d.]+ KL .* entropy .* length .* tokens/s .*", err)


def test_metrics_have_the_names_of_the_field(finished):
    for step in (m for m in lines(finished[0] / "metrics.jsonl") if m["kind"] == "train"):
        assert {
            "actor/entropy", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm", "actor/lr",
            "critic/score/mean", "critic/rewards/mean", "critic/advantages/mean", "response_length/mean",
            "response_length/clip_ratio", "prompt_length/mean", "timing_s/gen", "timing_s/update_actor", "timing_s/step",
            "perf/throughput", "perf/max_memory_allocated_gb", "rollout_corr/kl",
        } <= step.keys()  # fmt: skip
        assert "perf/mfu" not in step, "nobody knows the peak of a CPU"
        assert all(np.isfinite(v) for v in step.values() if isinstance(v, float))


def test_every_sample_is_written_as_it_was_sampled(finished):
    folder = finished[0]
    rows = lines(folder / "samples.jsonl")
    assert len(rows) == 3 * 4 * 4
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    for row in rows:
        assert len(row["tokens"]) == len(row["logprobs"]) <= 16 and row["stop_reason"] in ("eos", "length")
        assert tokenizer.decode(row["tokens"], skip_special_tokens=True) == row["completion"]
        assert row["version"] == 2 * row["step"]  # two updates a step, published after both
        assert row["reward"] == pytest.approx(0.1 * len(row["completion"]), rel=1e-6)


def test_the_export_is_the_trained_model(finished):
    """`transformers` opens it, and gives the samples of a new run from it the logprobs that the engine gives them."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = finished[0]
    model = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    config = load(TINY, {"run_dir": str(folder.parent / "again")})
    trainer = Trainer.from_pretrained(str(folder / "hf"), config=config)
    assert config.model.path != str(folder / "hf")  # the caller's config is left as it was
    assert model.generation_config.eos_token_id == trainer.parts.tokenizer.eos_token_id
    states = {"policy": trainer.parts.policy.init_state(trainer.parts.initial_params)}
    trainer.publish(states)
    rollout = trainer.generate(trainer.parts.stream.next(4), 2)
    for i, (p, n) in enumerate(zip(rollout.prompt_lens, rollout.lens, strict=True)):
        tokens = torch.from_numpy(rollout.tokens[i : i + 1, :n]).long()
        with torch.no_grad():
            logp = torch.log_softmax(model(tokens).logits[0], -1).numpy()
        theirs = logp[np.arange(p - 1, n - 1), rollout.tokens[i, p:n]]
        np.testing.assert_allclose(rollout.logprobs[i, p:n], theirs, atol=1e-4)
    fresh = a_run(folder.parent / "fresh", **SHORT)
    assert digest(states["policy"].params) != digest(fresh.parts.initial_params)  # it has learned since


# Sameness ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arg", [pytest.param("", marks=pytest.mark.slow), ":ppo"], ids=["grpo", "ppo"])
def test_a_resumed_run_is_the_unbroken_one(tmp_path, arg):
    a_run(tmp_path / "whole", arg).train()
    a_run(tmp_path / "parts", arg, steps=2).train()
    assert a_run(tmp_path / "parts", arg, resume=True).train()["steps"] == 4
    assert_same_runs(tmp_path / "parts", tmp_path / "whole", 4)
    a_run(tmp_path / "other", arg, seed=1).train()
    assert sampled(tmp_path / "other") != sampled(tmp_path / "whole")
    assert digests(tmp_path / "other", 4) != digests(tmp_path / "whole", 4)


@pytest.mark.slow
def test_evaluation_leaves_the_training_alone(tmp_path):
    often = a_run(tmp_path / "often", **(SHORT | {"eval__every_steps": 1, "steps": 3}))
    never = a_run(tmp_path / "never", **(SHORT | {"eval__at_start": False, "steps": 3}))
    often.train(), never.train()
    assert_same_runs(tmp_path / "often", tmp_path / "never", 3)


def test_what_is_published_is_what_was_learned(tmp_path):
    trainer = a_run(tmp_path / "run", steps=2)
    states = trainer.run.restore()
    trainer.publish(states)
    learned = lambda: digest(jax.tree.map(jnp.asarray, states["policy"].params))  # noqa: E731
    assert digest(trainer.parts.engine.params) == learned()
    stale = jax.tree.map(jnp.copy, trainer.parts.engine.params)
    batch = next(trainer.experience(states))
    batch = dataclasses.replace(batch, advantages=np.where(batch.loss_mask, 1.0, 0.0).astype(np.float32))
    trainer.update(0, states, batch)
    trainer.publish(states)
    assert digest(trainer.parts.engine.params) == learned() != digest(stale)
    with pytest.raises(RuntimeError, match="other weights"):
        trainer.update(1, states, batch)


# Algorithms, end to end ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_critic_learns_alone_at_first(tmp_path):
    settings = {"steps": 3, "critic__policy_delay_steps": 2, "eval__at_start": False}
    a_run(tmp_path / "run", ":ppo", {"reward": length_reward}, **settings).train()
    early, late = trained(tmp_path / "run")[:2], trained(tmp_path / "run")[2]
    assert all("actor/pg_loss" not in m and m["critic/vf_loss"] > 0 for m in early) and "actor/pg_loss" in late
    states = [digests(tmp_path / "run", step) for step in (1, 2, 3)]
    policy, critic = (
        [{k: v for k, v in s.items() if k.startswith(f"{who}.params")} for s in states] for who in ("policy", "critic")
    )
    assert policy[0] == policy[1] != policy[2] and critic[0] != critic[1] != critic[2] and len(policy[0]) > 5
    assert np.isfinite(late["critic/vf_explained_var"]) and late["critic/lr"] == pytest.approx(1e-4)


@pytest.mark.slow
def test_kl_to_the_reference_holds_the_policy_back(tmp_path):
    settings = {"algorithm__kl_in": "loss", "algorithm__kl_estimator": "k3", "learner__learning_rate": 3e-3, "steps": 3}
    runs = []
    for coef in (1e-6, 10.0):
        a_run(tmp_path / str(coef), "", {"reward": length_reward}, algorithm__kl_coef=coef, **(SHORT | settings)).train()
        runs.append(trained(tmp_path / str(coef)))
    weak, strong = (run[-1]["actor/kl_ref"] for run in runs)
    assert weak > 0.01 and strong < 0.7 * weak and runs[1][-1]["actor/kl_loss"] > 0


def test_kl_in_the_reward_is_taken_from_it_token_by_token(tmp_path):
    trainer = a_run(tmp_path / "run", "", {"reward": length_reward}, algorithm__kl_in="reward", algorithm__kl_coef=0.5)
    states = trainer.run.restore()
    trainer.publish(states)
    batch = next(trainer.experience(states))
    np.testing.assert_allclose(batch.ref_logprobs, batch.old_logprobs, atol=1e-5)  # nothing has been learned yet
    moved = jax.tree.map(lambda x: x * 1.3, trainer.parts.reference_params)
    trainer.parts.reference_params = moved
    after = trainer.advantages(states, batch)
    penalty = np.where(batch.loss_mask, np.asarray(kl(after.old_logprobs, after.ref_logprobs, "k3")), 0.0).sum(axis=1)
    scores = batch.rewards - 0.5 * penalty
    for group in np.unique(batch.rollout.group_ids):
        rows = batch.rollout.group_ids == group
        expected = (scores[rows] - scores[rows].mean()) / (scores[rows].std(ddof=1) + 1e-6)
        got = after.advantages[rows, :].max(axis=1) + after.advantages[rows, :].min(axis=1)
        np.testing.assert_allclose(got, expected, atol=2e-3)
    assert penalty.max() > 0.01


def test_dynamic_sampling_refills_until_the_batch_is_full(tmp_path):
    def half(prompts, completions, answer, **columns):
        """Groups of every second answer are all alike."""
        return [len(c) * (int(a) % 2) for a, c in zip(answer, completions, strict=True)]

    settings = SHORT | {"algorithm__dynamic_sampling": True, "algorithm__max_refills": 8, "steps": 3, "eval__at_start": False}
    a_run(tmp_path / "run", "", {"reward": half}, **settings).train()
    metrics, rows = trained(tmp_path / "run"), lines(tmp_path / "run" / "samples.jsonl")
    assert min(m["rollout/groups_kept"] for m in metrics) < 1
    for step, told in enumerate(metrics):
        mine = [r for r in rows if r["step"] == step]
        groups = {r["group"] for r in mine}
        taught = [r for r in mine if r["advantage"] is not None]
        assert len(taught) == 16 and any(r["advantage"] for r in taught)
        assert all(len({r["reward"] for r in taught if r["group"] == g}) > 1 for g in {r["group"] for r in taught})
        assert len(mine) == 4 * len(groups) > 16  # every draw is written, under numbers of its own
        assert told["rollout/groups_kept"] == pytest.approx(4 / len(groups))
    assert len({r["uid"] for r in rows}) == len(rows) // 4  # no prompt was asked twice


def test_without_an_informative_group_nothing_is_learned(tmp_path):
    settings = SHORT | {"algorithm__dynamic_sampling": True, "algorithm__max_refills": 2, "steps": 1, "eval__at_start": False}
    trainer = a_run(tmp_path / "run", "", {"reward": lambda prompts, completions, **_: [1.0] * len(completions)}, **settings)
    before = digest(trainer.parts.initial_params)
    trainer.train()
    assert len(lines(tmp_path / "run" / "samples.jsonl")) == 3 * 16
    assert digest(a_run(tmp_path / "run", resume=True, **SHORT).run.restore()["policy"].params) == before


# Learning ------------------------------------------------------------------------------------------------------------------


def lower_case(prompts, completions, **columns):
    """The share of lower-case letters: a random model writes few."""
    return [sum("a" <= x <= "z" for x in c) / max(len(c), 1) for c in completions]


@pytest.mark.parametrize("arg", ["", pytest.param(":ppo", marks=pytest.mark.slow)], ids=["grpo", "ppo"])
def test_it_learns(tmp_path, arg):
    settings = {
        "steps": 25, "checkpoint__every_steps": 0, "eval__every_steps": 0, "learner__learning_rate": 3e-3,
        "critic__learning_rate": 3e-3, "rollout__group_size": 8, "algorithm__kl_in": "none",
        "algorithm__kl_coef": 0.0,
    }  # fmt: skip
    result = a_run(tmp_path / "run", arg, {"reward": lower_case}, **settings).train()
    assert result["accuracy_after"] > result["accuracy_before"] + 0.3
    settings |= {"learner__learning_rate": 0.0, "steps": 5}
    still = a_run(tmp_path / "still", arg, {"reward": lower_case}, **settings).train()
    assert abs(still["accuracy_after"] - still["accuracy_before"]) < 0.05


# The Python face --------------------------------------------------------------------------------------------------------------


def test_a_dataset_and_a_function_in_place_of_config_keys(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"question": [f"What is {i}?" for i in range(12)], "answer": [str(i) for i in range(12)], "size": list(range(12))}
    seen = []

    def reward(prompts, completions, answer, size, **columns):
        assert [int(a) for a in answer] == list(size) and all(f"What is {a}?" in p for p, a in zip(prompts, answer, strict=True))
        seen.extend(size)
        return [0.0] * len(completions)

    train, held_out = datasets.Dataset.from_dict(rows), [{"question": "What is -1?", "answer": "-1", "size": -1}]
    config = load(TINY, RUN | {"run_dir": str(tmp_path / "run"), "steps": 2, "eval.every_steps": 0})
    config.data.train, config.data.train_size, config.data.eval_size = "", 0, 0
    Trainer(config, reward=reward, train_data=train, eval_data=held_out).train()
    assert set(seen) <= set(range(-1, 12)) and len(set(seen)) == 9 and seen.count(-1) == 2 * 2


def test_a_run_without_held_out_data_learns_all_the_same(tmp_path):
    settings = SHORT | {"data__eval": "", "data__eval_size": 0, "steps": 1}
    result = a_run(tmp_path / "run", **settings).train()
    assert result["steps"] == 1 and result["accuracy_after"] is None and digests(tmp_path / "run", 1)


def test_a_failing_last_evaluation_does_not_cost_the_weights(tmp_path, monkeypatch):
    trainer = a_run(tmp_path / "run", **(SHORT | {"steps": 1, "eval__at_start": False}))

    def fail():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer, "evaluate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert digests(tmp_path / "run", 1)


def test_a_score_belongs_to_the_checkpoint_that_was_evaluated(tmp_path, monkeypatch):
    trainer = a_run(tmp_path / "run", **{"steps": 4, "eval__every_steps": 2, "checkpoint__every_steps": 1})
    saved, save = {}, trainer.run.checkpoints.save
    monkeypatch.setattr(trainer.run.checkpoints, "save", lambda step, *a: saved.update({step: a[-1]}) or save(step, *a))
    trainer.train()
    assert [saved[step] is None for step in (1, 2, 3, 4)] == [True, False, True, False]


def test_resuming_a_finished_run_copies_nothing(tmp_path):
    a_run(tmp_path / "run", **SHORT).train()
    before = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    seconds = json.loads((tmp_path / "run" / "result.json").read_text())["seconds"]
    assert a_run(tmp_path / "run", resume=True, **SHORT).train()["seconds"] > seconds  # of the whole run
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == before


# Bad rewards, bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raises", "is nan", "hangs"])
def test_a_bad_reward_costs_its_samples_and_not_the_run(tmp_path, caplog, kind):
    source = {
        "raises": "raise RuntimeError('out of patience')",
        "is nan": "return [float('nan')] + [float(len(c)) for c in completions[1:]]",
        "hangs": "import time; time.sleep(60)",
    }[kind]
    (tmp_path / "rewards.py").write_text(f"def mine(prompts, completions, **columns):\n    {source}\n")
    settings = SHORT | {"reward__functions": f"{tmp_path}/rewards.py:mine", "reward__timeout_s": 1.0, "eval__at_start": False}
    result = a_run(tmp_path / "run", "", **settings).train()
    assert result["steps"] == 2
    failed = 1 if kind == "is nan" else 16
    assert [m["reward/failed"] for m in trained(tmp_path / "run")] == [failed] * 2
    rows = lines(tmp_path / "run" / "samples.jsonl")
    assert sum(not r["valid"] for r in rows) == 2 * failed
    assert all(r["advantage"] == 0 for r in rows if not r["valid"])
    assert caplog.records
    told = [m for m in lines(tmp_path / "run" / "metrics.jsonl") if m["kind"] == "eval"][-1]
    scores = [v for name, v in told.items() if name.startswith("val-core/")]
    assert told["reward/failed"] > 0 and bool(scores) == (kind == "is nan")  # a sample without a reward is not a wrong one
    if scores:
        held_out = result["accuracy_after"]
        assert held_out == min(scores) or held_out == max(scores)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"data__train": "nowhere.jsonl"}, ["nowhere.jsonl", "no such"]),
        ({"data__train": "BROKEN"}, ["broken.jsonl", "line 3"]),
        ({"data__max_prompt_tokens": 20}, ["data.max_prompt_tokens=20", "tokens"]),
        ({"learner__mesh__fsdp": 3}, ["learner.mesh", "8"]),
        ({"rollout__mesh__tensor": 3, "rollout__mesh__replica": 1}, ["rollout.mesh", "8"]),
        ({"model__path": "/nowhere/model"}, ["/nowhere/model"]),
        ({"reward__functions": "no_such_rule"}, ["no_such_rule"]),
        ({"data__train_size": 0, "data__eval_size": 0, "data__train": "FEW"}, ["rollout.prompts_per_step=4"]),
        ({"rollout__num_pages": 2}, ["rollout.num_pages=2"]),
    ],
)
def test_bad_input_is_one_line_and_leaves_an_earlier_run_alone(tmp_path, changes, parts):
    (tmp_path / "broken.jsonl").write_text('{"question": "1", "answer": "1"}\n' * 2 + "{not json\n")
    (tmp_path / "few.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    earlier = tmp_path / "run" / "samples.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("precious")
    files = {"BROKEN": str(tmp_path / "broken.jsonl"), "FEW": str(tmp_path / "few.jsonl")}
    changes = {k: files.get(v, v) if isinstance(v, str) else v for k, v in changes.items()}
    if "data__train" in changes:
        changes |= {"data__options": {}, "data__eval_size": 0, "eval__every_steps": 0}
    with pytest.raises(UserError) as error:
        a_run(tmp_path / "run", "", **changes)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert earlier.read_text() == "precious"


@pytest.mark.parametrize("kind", ["a file", "below a file", "something else", "home"])
def test_the_directory_of_a_run_is_looked_at_first(tmp_path, monkeypatch, kind):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("precious")
    monkeypatch.setenv("HOME", str(tmp_path))
    if kind == "home":
        assert run_directory("~/runs/x") == tmp_path / "runs" / "x"
        return
    path = tmp_path / {"a file": "file", "below a file": "file/run", "something else": "data"}[kind]
    with pytest.raises(UserError, match=f"config.run_dir={path}"):
        a_run(path)
    assert (tmp_path / "file").read_text() == (tmp_path / "data" / "train.jsonl").read_text() == "precious"


def test_resuming_with_other_data_is_refused(tmp_path):
    a_run(tmp_path / "run", **SHORT).train()
    with pytest.raises(UserError, match="other training data"):
        a_run(tmp_path / "run", resume=True, seed=1, **(SHORT | {"steps": 3})).train()
