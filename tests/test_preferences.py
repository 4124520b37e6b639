"""Preference learning and reward models: losses of batches against dense NumPy, one sequence at a time, and whole runs."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jrl import UserError
from jrl.agents import Agents
from jrl.algorithms import preference
from jrl.algorithms.presets import PREFERENCE_LOSSES
from jrl.config import load, with_preset
from jrl.data.chats import Renderer, assemble
from jrl.data.records import Columns
from jrl.learner import Forward, Learner
from jrl.models import decoder
from jrl.models.load import RANDOM, byte_tokenizer, open_model
from jrl.plan import make_plan
from jrl.rewards.model import Chats, ModelReward
from jrl.sharding.layout import Layout
from jrl.sharding.show import picture
from jrl.stages import Known, stage_of
from tests import dense
from tests.learners import assert_same_update, make_learner, make_params, one_device
from tests.runs import QUIET, ROOT, TINY, a_run, digests, lines, trained
from tests.stage_runs import a_stage_run, labelled, pairs, steps, stop_after

ARCH = dataclasses.replace(RANDOM["tiny"], family="qwen2", qkv_bias=True)
KIND = {"pairs": (pairs, "pair"), "labelled": (labelled, "labelled"), "steps": (steps, "stepwise")}


def config(stage, **changes):
    return load(f"{ROOT}/configs/{stage}.py", {name.replace("__", "."): value for name, value in changes.items()})


def items_of(stage, kind, folder, count=6):
    make, method = KIND[kind]
    make(folder / "rows.jsonl", count)
    columns, tokenizer = Columns("prompt", "answer", ""), byte_tokenizer()
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    records = stage.couple([getattr(columns, method)(f"row {i}", row) for i, row in enumerate(rows)])
    renderer = Renderer.make(tokenizer, (tokenizer.eos_token_id,), "", True)
    return [stage.encode(record, renderer) for record in records]


def prepared(stage, kind, folder):
    """Items, their sequences, what is known of them, and columns."""
    items = items_of(stage, kind, folder)
    sequences = assemble(items, 64)
    known = Known(-np.random.default_rng(0).exponential(90, len(sequences)).astype(np.float32), 3.0)
    return items, sequences, known, stage.columns(sequences, items, known)


def model_of(stage, layout=None):
    """Weights far from zero, a random head among them."""
    params = make_params(arch=ARCH)
    if not stage.has_head:
        params = decoder.critic_from_policy(ARCH, params, bias=False)
        params["value"]["kernel"] = jax.random.normal(jax.random.key(7), (ARCH.hidden_size, 1)) / 4
    axes = decoder.param_axes(ARCH, stage.model)
    return params if layout is None else jax.device_put(params, layout.tree(axes, params))


def learner_of(stage, layout=None, budget=4096):
    it = make_learner(layout, ARCH, temperature=1.0)
    return Learner("policy", it.forward, it.layout, stage.model, budget, stage.loss, it.optimizer, it.schedule, stage.packing)


def answer_logprobs(params, sequences):
    """Sum over the tokens with loss and their number, of each sequence by itself."""
    sums = []
    for tokens, n, mask in zip(sequences.tokens, sequences.lens, sequences.loss_mask, strict=True):
        logp = dense.next_token_logprobs(ARCH, params, tokens[:n])[np.arange(n - 1), tokens[1:n]]
        sums.append((logp[mask[1:n]].sum(), mask.sum()))
    return np.array(sums).T


OPTIONS = {"dpo": {"beta": 0.02, "label_smoothing": 0.1}, "ipo": {"beta": 0.3}, "orpo": {"beta": 0.3}, "simpo": {"beta": 2.0}}
OPTIONS["kto"] = {"beta": 0.02, "desirable": 1.2, "undesirable": 0.7}


@pytest.mark.parametrize("name", ["dpo", "kto", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ipo", "orpo", "simpo"))])
def test_the_loss_of_a_batch_is_that_of_its_answers_one_by_one(name, tmp_path):
    c = config("dpo", dpo__loss=name, **{f"dpo__{key}": value for key, value in OPTIONS[name].items()})
    stage, kind = stage_of(c), PREFERENCE_LOSSES[name]
    items, sequences, known, columns = prepared(stage, "pairs" if kind.paired else "labelled", tmp_path)
    params = model_of(stage)
    found = learner_of(stage, budget=150).measure(params, sequences, columns, stage.rows(sequences))  # several microbatches
    sums, counts = answer_logprobs(dense.float64(params), sequences)
    scale = counts if kind.mean else 1
    of = lambda x: ((x / scale)[0::2].astype(np.float32), (x / scale)[1::2].astype(np.float32))  # noqa: E731
    options = {key: c.dpo[key] for key in kind.keys}
    if kind.paired:
        arrays = [*of(sums), *(of(known.ref_logprobs) if kind.reference else ())]
        losses, chosen, rejected = getattr(preference, name)(*arrays, **options)
        accuracy = np.mean(np.asarray(chosen) > np.asarray(rejected))
        assert found["reward_margin"] == pytest.approx(float(np.mean(chosen - rejected)), rel=1e-4)
        swapped = [arrays[i ^ 1] for i in range(len(arrays))]  # the negative control: the wrong way round
        assert np.mean(getattr(preference, name)(*swapped, **options)[0]) != pytest.approx(float(np.mean(losses)), rel=1e-3)
    else:
        labels = np.array([item.facts["label"] for item in items], np.float32)
        losses, rewards = preference.kto(of(sums)[0], of(known.ref_logprobs)[0], labels, known.kl, **options)
        accuracy = np.mean((np.asarray(rewards) > 0) == (labels > 0))
    assert found["loss"] == pytest.approx(float(np.mean(losses)), rel=1e-4)
    assert found["accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_scores_are_read_at_the_last_token_of_each_answer_and_of_each_step(tmp_path):
    for of, kind in (("answers", "pairs"), ("steps", "steps")):
        c = config("reward_model", reward_model__of=of, reward_model__centre_coef=0.0 if of == "steps" else 0.1)
        stage = stage_of(c)
        items, sequences, _, columns = prepared(stage, kind, tmp_path)
        params = model_of(stage)
        found = learner_of(stage, budget=200).measure(params, sequences, columns, stage.rows(sequences))
        exact = dense.float64(params)
        scores, tokenizer = [], byte_tokenizer()
        for tokens, n, mask in zip(sequences.tokens, sequences.lens, sequences.loss_mask, strict=True):
            values = dense.hidden(ARCH, exact["backbone"], tokens[: n - 1]) @ exact["value"]["kernel"]
            last = np.flatnonzero(mask) - 1  # the tokens that are scored, each before the place of its score
            scores.append(values[last, 0])
            ends = [tokenizer.decode(tokens[i : i + 1]) for i in last]
            assert ends == ["<|im_end|>"] if of == "answers" else set(ends) == {"\n"} and len(ends) == tokenizer.decode(
                tokens[: n - 1]).rpartition("assistant\n")[2].count("\n")  # fmt: skip
        if of == "answers":
            margins = np.array([item.facts["margin"] for item in items])
            a, b = (np.concatenate(scores)[i::2] for i in (0, 1))
            expected = np.mean(np.log1p(np.exp(-(a - b - margins))) + 0.1 * (a + b) ** 2)
            assert found["accuracy"] == pytest.approx(np.mean(a > b))
        else:
            s, labels = np.concatenate(scores), np.concatenate([item.facts["labels"] for item in items])
            expected = np.mean(np.log1p(np.exp(-np.where(labels > 0.5, s, -s))))
            assert found["accuracy"] == pytest.approx(np.mean((s > 0) == (labels > 0.5)))
        assert found["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", "reward_model", "steps"])
def test_the_gradient_depends_neither_on_the_microbatches_nor_on_the_mesh(name, tmp_path):
    if name in ("dpo", "kto"):
        stage = stage_of(config("dpo", dpo__loss=name))
    else:
        stage = stage_of(config("reward_model", reward_model__of="steps" if name == "steps" else "answers",
                                reward_model__centre_coef=0.0))  # fmt: skip
    kind = {"dpo": "pairs", "kto": "labelled", "reward_model": "pairs", "steps": "steps"}[name]

    def update(layout, budget):
        _, sequences, _, columns = prepared(stage, kind, tmp_path)
        it = learner_of(stage, layout, budget)
        state, metrics = it.update(it.init_state(model_of(stage, layout)), sequences, columns, stage.rows(sequences))
        return state, metrics | {"pg_loss": metrics["loss"], "entropy": metrics["accuracy"]}

    whole = update(one_device(), 4096)
    assert whole[1]["grad_norm"] > 1e-3
    assert_same_update(whole, update(Layout.train({"fsdp": 2, "context": 2}, jax.devices()[:4]), 70))


# Runs ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {kind: make(folder / f"{kind}.jsonl") for kind, (make, _) in KIND.items()}


def run(stage, folder, source, **changes):
    options = {"data__train": source, "data__eval_size": 6, "eval__every_steps": 0, "learner__learning_rate": 1e-3}
    return a_stage_run(stage, folder, **(options | changes))


def test_a_run_of_dpo_starts_at_its_reference_falls_and_resumes_to_the_bit(tmp_path, data):
    none = {"data__eval_size": 0}  # held out
    run("dpo", tmp_path / "whole", data["pairs"], **none).train()
    losses = [m["train/loss"] for m in trained(tmp_path / "whole")]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5) and losses[-1] < losses[0] - 0.05
    first = run("dpo", tmp_path / "parts", data["pairs"], **none)
    stop_after(first, 2)
    assert first.train()["interrupted"] == "SIGTERM"
    assert run("dpo", tmp_path / "parts", data["pairs"], resume=True, **none).train()["steps"] == 4
    assert trained(tmp_path / "parts") == trained(tmp_path / "whole")
    assert digests(tmp_path / "parts", 4) == digests(tmp_path / "whole", 4) != digests(tmp_path / "whole", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ipo", "kto", "orpo", "simpo"])
def test_other_losses_fall_and_the_model_tells_answers_apart(name, tmp_path, data):
    changes = {"dpo__loss": name, "steps": 8, "checkpoint__every_steps": 0}
    summary = run("dpo", tmp_path / "run", data["labelled" if name == "kto" else "pairs"], **changes).train()
    assert summary["loss_after"] < summary["loss_before"] - 0.01 and summary["accuracy_after"] > 0.8


@pytest.mark.slow
def test_a_process_reward_model_learns_which_steps_are_right(tmp_path, data):
    changes = {"reward_model__of": "steps", "reward_model__centre_coef": 0.0, "steps": 40, "checkpoint__every_steps": 0}
    summary = run("reward_model", tmp_path / "run", data["steps"], learner__learning_rate=3e-3, **changes).train()
    assert summary["loss_before"] == pytest.approx(np.log(2), abs=1e-5) and summary["loss_after"] < 0.4


def test_a_process_reward_model_scores_a_response_by_its_least_likely_step(tmp_path, data):
    changes = {"reward_model__of": "steps", "reward_model__centre_coef": 0.0, "checkpoint__every_steps": 0}
    trainer = run("reward_model", tmp_path / "run", data["steps"], **changes)
    params = decoder.critic_from_policy(trainer.parts.arch, make_params(arch=trainer.parts.arch), bias=False)
    params["value"]["kernel"] = jax.random.normal(jax.random.key(7), params["value"]["kernel"].shape) / 4
    trainer.run.export(tmp_path / "hf", {"policy": SimpleNamespace(params=params)})
    assert open_model(str(tmp_path / "hf")).scores == "steps"
    forward = lambda arch, layout: Forward(arch, layout, np.float32, "full", 1.0, 1024)  # noqa: E731
    it = ModelReward(str(tmp_path / "hf"), one_device(), forward, 4096, Chats())
    it.load()
    completions = ["one\n\n  two \n x", "b\na", " \n", "x", "b\na\n"]
    scores, failures = it.run(["q?"] * 5, completions, {}, 1.0)
    exact, tokenizer, expected = dense.float64(params), byte_tokenizer(), []
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    for steps_said in (["one", "  two ", " x"], ["b", "a"], [], ["x"], ["b", "a"]):
        prompt = "<|im_start|>user\nq?<|im_end|>\n<|im_start|>assistant\n"
        tokens = np.array(tokenizer(prompt + "".join(f"{s}\n" for s in steps_said), add_special_tokens=False)["input_ids"])
        values = dense.hidden(trainer.parts.arch, exact["backbone"], tokens) @ exact["value"]["kernel"]
        ends = np.flatnonzero(tokens == newline)[3:]  # those before are of the template
        assert len(ends) == len(steps_said)
        expected.append(1 / (1 + np.exp(-values[ends, 0])))
    np.testing.assert_allclose(scores, [min(s, default=0) for s in expected], atol=1e-4)
    assert not failures and any(s[-1] > min(s) + 0.01 for s in expected if len(s))  # the least is not simply the last


def test_what_scores_reads_conversations_as_it_was_trained_to(tmp_path, data):
    for use in (True, False):
        trainer = run("reward_model", tmp_path / "run", data["pairs"], data__use_chat_template=use)
        trainer.run.export(tmp_path / f"hf {use}", {"policy": SimpleNamespace(params=trainer.parts.initial_params)})
        found = open_model(str(tmp_path / f"hf {use}"))
        assert found.scores == "answers" and bool(found.tokenizer.chat_template) is use


@pytest.fixture(scope="module")
def rewarded(tmp_path_factory, data):
    """A finished run of a reward model."""
    folder = tmp_path_factory.mktemp("reward_model") / "run"
    changes = {"steps": 16, "learner__learning_rate": 3e-3, "export__hf": True, "checkpoint__every_steps": 0}
    trainer = run("reward_model", folder, data["pairs"], **changes)
    return folder, trainer, trainer.train()


def test_a_reward_model_starts_at_no_opinion_and_learns(rewarded):
    folder, _, summary = rewarded
    assert summary["loss_before"] > np.log(2) - 1e-4 and summary["accuracy_before"] == 0.5  # scores of 0; margins cost more
    assert summary["loss_after"] < summary["loss_before"] - 0.2 and summary["accuracy_after"] == 1.0
    assert trained(folder)[-1]["train/reward_margin"] > 0.2


def test_the_export_is_a_classifier_of_transformers_with_the_same_scores_and_is_read_again(rewarded, data):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder, trainer, summary = rewarded
    model = AutoModelForSequenceClassification.from_pretrained(folder / "hf").eval()
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    scores = []
    rows = [[s.tokens[:-1] for s in item.sequences] for item in trainer.parts.eval_items]  # without the place of the score
    for pair in rows:
        texts = [tokenizer.decode(tokens) for tokens in pair]
        inputs = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            scores.append(model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].numpy())
    again = run("reward_model", folder.parent / "again", data["pairs"], model__path=str(folder / "hf"))
    p = again.parts
    sequences = assemble(p.eval_items, p.width)
    mine = np.sum(p.learner.run("values", p.initial_params, sequences)[0], axis=1, where=sequences.loss_mask)
    np.testing.assert_allclose(mine, np.concatenate(scores), atol=1e-4)
    assert np.std(mine) > 0.05  # the negative control of scores that are all alike
    assert summary["accuracy_after"] == np.mean(mine[0::2] > mine[1::2])


def test_a_reward_model_is_no_policy(rewarded, tmp_path, data):
    folder = rewarded[0]
    assert open_model(str(folder / "hf")).scores
    with pytest.raises(UserError, match="is a reward model, which writes no text"):
        run("dpo", tmp_path / "run", data["pairs"], model__path=str(folder / "hf"))
    (tmp_path / "hf").mkdir()
    told = json.loads((folder / "hf" / "config.json").read_text()) | {"id2label": {"0": "A", "1": "B"}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(told))
    for file in (folder / "hf").glob("tok*"):
        (tmp_path / "hf" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="a classifier of 2 labels has no single score"):
        open_model(str(tmp_path / "hf"))


# In RL -----------------------------------------------------------------------------------------------------------------


def test_rl_scores_with_the_reward_model_what_its_own_template_renders(rewarded, tmp_path):
    """On a mesh of its own, beside a rule; the policy's template is another one."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = rewarded[0]
    own = tmp_path / "model"
    shutil.copytree(folder / "hf", own)
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}a:{% endif %}"
    tokenizer.save_pretrained(own)
    mesh = {f"reward__mesh__{axis}": size for axis, size in {"data": 2, "fsdp": 4, "context": 1, "tensor": 1}.items()}
    changes = {"reward__functions": "reward_model*2, last_number", "reward__model__path": str(own)}
    trainer = a_run(tmp_path / "run", **changes, **mesh)
    prompts = trainer.parts.stream.next(3)
    completions = ["12", "", "\n the answer is 7", "7!"]
    asked = [prompts[0], prompts[1], prompts[0], prompts[2]]
    result = trainer.parts.rewards.score_prompts(asked, completions, [1] * 4)
    model = AutoModelForSequenceClassification.from_pretrained(own).eval()
    for prompt, completion, score in zip(asked, completions, result.parts["reward_model"], strict=True):
        text = tokenizer.apply_chat_template([*prompt.messages, {"role": "assistant", "content": completion}], tokenize=False)
        assert text.startswith("u:") and text.endswith(f"<|im_end|>a:{completion}<|im_end|>")
        with torch.no_grad():
            (theirs,) = model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits[0]
        assert score == pytest.approx(theirs.item(), abs=1e-4)
    assert np.std(result.parts["reward_model"]) > 1e-3 and result.valid.all()
    np.testing.assert_allclose(result.total, 2 * result.parts["reward_model"] + result.parts["last_number"], rtol=1e-6)
    long = trainer.parts.rewards.score_prompts(prompts[:2], ["x" * 3000, "7"], [3000, 1])
    assert long.valid.tolist() == [False, True] and long.failures == {"reward_model/error": 1}


@pytest.mark.slow
def test_an_agent_is_scored_on_the_conversation_that_it_saw(rewarded, tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    own = str(rewarded[0] / "hf")
    options = {"reward": {"functions": "reward_model", "model": {"path": own}}}
    changes = QUIET | {"run_dir": str(tmp_path), "agents.options": {"solver": options}, "steps": 1, "data.eval_size": 0}
    agents = Agents(load(f"{ROOT}/configs/agents.py", changes | {"checkpoint.every_steps": 0}))
    seen, original = [], agents.scored
    agents.scored = lambda name, said, talks: seen.append((name, said)) or original(name, said, talks)
    agents.train()
    (prompts, _) = next(said for name, said in seen if name == "solver")[-1]
    rows = lines(tmp_path / "solver" / "samples.jsonl")[len(prompts) :]  # of the second thing that it said
    tokenizer, model = AutoTokenizer.from_pretrained(own), AutoModelForSequenceClassification.from_pretrained(own).eval()
    for prompt, row in zip(prompts, rows, strict=True):
        chat = [*prompt.messages, {"role": "assistant", "content": row["completion"]}]
        assert [m["role"] for m in chat] == ["user", "assistant", "user", "assistant"]
        text = tokenizer.apply_chat_template(chat, tokenize=False).removesuffix("\n")
        with torch.no_grad():
            (score,) = model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits[0]
        assert row["reward"] == pytest.approx(score.item(), abs=1e-4)
    assert len({row["reward"] for row in rows}) > 4


def test_mistakes_with_reward_models_are_told_before_any_work(rewarded, tmp_path):
    folder = rewarded[0]
    with pytest.raises(UserError, match="config.reward.model.path='': reward.functions names reward_model; give"):
        a_run(tmp_path / "run", reward__functions="reward_model")
    with pytest.raises(UserError, match="config.reward.model.path=.*reward_model alone reads it"):
        a_run(tmp_path / "run", reward__model__path=str(folder / "hf"))
    with pytest.raises(UserError, match="config.reward.model.path=random:tiny: is a language model"):
        a_run(tmp_path / "run", reward__model__path="random:tiny", reward__functions="reward_model")
    with pytest.raises(UserError, match="config.reward.model.path=.*a Python function is the reward"):
        changes = {"reward__model__path": str(folder / "hf"), "reward__functions": "reward_model"}
        a_run(tmp_path / "run", options={"reward": lambda prompts, completions, **_: 0}, **changes)
    with pytest.raises(UserError, match="is a reward model, which writes no text"):
        a_run(tmp_path / "run", model__path=str(folder / "hf"))
    tiny = load(TINY, {"reward.model.path": str(folder / "hf"), "reward.functions": "reward_model"})
    held = make_plan(tiny, RANDOM["tiny"], 1).held_bytes
    expected = sum(x.size for x in jax.tree.leaves(decoder.abstract_params(RANDOM["tiny"], decoder.RewardModel))) * 4
    assert held["reward model: parameters, float32"] == expected
    shown = picture(with_preset(tiny), 1, 1)
    assert "mesh of reward" in shown and "value/kernel" in shown
