"""Every preset in a whole run of the tiny model, pieces of the user's own, and what the choices do to a run."""

import contextlib
import dataclasses
import json
import re
import textwrap
import time

import jax
import numpy as np
import pytest

from jrl import UserError
from jrl.algorithms.advantages import grpo, remax
from jrl.algorithms.kl import adapted_coef, kl
from jrl.algorithms.pieces import needs_old_logprobs
from jrl.algorithms.presets import PRESETS, preset
from jrl.config import choose_pieces, load
from jrl.losses import policy_columns
from jrl.plan import make_plan
from jrl.replay import Replay, from_text, to_text
from jrl.rewards import RewardManager
from jrl.rewards.per_sample import PerSample
from jrl.sharding.digest import digest
from tests.critic_heads import TwoLayers
from tests.runs import ROOT, TINY, a_run, assert_same_runs, lines, trained

SHORT = {"steps": 2, "eval__every_steps": 0, "eval__at_start": False, "checkpoint__every_steps": 0}
BY_DEFAULT = ("dapo",)


def lower_case(prompts, completions, **columns):
    """The share of lower-case letters: it differs from sample to sample."""
    return [sum("a" <= x <= "z" for x in c) / max(len(c), 1) for c in completions]


def begun(folder, name="grpo", /, options=None, **changes):
    """A trainer with its first weights published, and its states."""
    keys = {"algorithm__name": name, "algorithm__minibatches": 1}
    trainer = a_run(folder, "", {"reward": lower_case} | (options or {}), **(SHORT | keys | changes))
    states = trainer.run.restore()
    trainer.publish(states)
    return trainer, states


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One trainer of the default algorithm, for tests that make batches and leave its weights alone; and its states."""
    return begun(tmp_path_factory.mktemp("shared") / "run")


@contextlib.contextmanager
def choosing(trainer, pieces=None, **algorithm):
    """The trainer with other choices and pieces for a while."""
    section, before = trainer.config.algorithm, trainer.config.algorithm.to_dict()
    old_pieces = trainer.parts.pieces
    trainer.parts.pieces = dataclasses.replace(old_pieces, **(pieces or {}))
    section.update(algorithm)
    try:
        yield trainer
    finally:
        section.update(before)
        trainer.parts.pieces = old_pieces


@pytest.mark.parametrize("name", [x if x in BY_DEFAULT else pytest.param(x, marks=pytest.mark.slow) for x in PRESETS])
def test_every_preset_trains(tmp_path, name):
    # Of so few tokens 2e-4 are none, and covariances above 1 rare.
    more = {"algorithm__cov_fraction": 0.05} if name in ("clip_cov", "kl_cov") else {}
    more |= {"algorithm__cov_low": 1e-3} if name == "clip_cov" else {}
    minibatches = 1 if name in BY_DEFAULT else 2
    trainer, states = begun(tmp_path / "run", name, learner__learning_rate=1e-3, algorithm__minibatches=minibatches, **more)
    before = jax.tree.map(np.array, states["policy"].params)
    batches = trainer.experience(states)
    for step in range(2):
        batch = next(batches)
        metrics = trainer.update(step, states, batch)
        trainer.publish(states)
        assert all(np.isfinite(v) for v in metrics.values()), metrics
        assert metrics["actor/grad_norm"] > 0 and np.any(batch.advantages[batch.loss_mask])
    assert int(states["policy"].step) == 2 * minibatches and int(states["policy"].skipped) == 0
    assert (states.get("critic") is not None) == (name in ("ppo", "pf_ppo", "vapo"))
    moved = jax.tree.map(lambda a, b: bool(np.any(a != np.asarray(b))), before, states["policy"].params)
    assert all(jax.tree.leaves(moved))
    chosen = {key: trainer.config.algorithm[key] for key in preset(name) if f"algorithm__{key}" not in more}
    assert chosen.items() <= preset(name).items()


# Custom pieces -------------------------------------------------------------------------------------------------------------

MINE = """
import jax.numpy as jnp

def advantage(rewards, group_ids, lens):
    return rewards - rewards.mean() + 0.0 * lens

def policy_loss(logprobs, old_logprobs, advantages, clip_high):
    ratio = jnp.exp(logprobs - old_logprobs)
    return -jnp.minimum(ratio, 1 + clip_high) * advantages, {"mine": ratio}

def filter(rewards, group_ids, truncated):
    return rewards > 0
"""


def test_pieces_from_a_users_file_take_the_place_of_any_other(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    where = {f"algorithm__{kind}": f"{tmp_path}/mine.py:{kind}" for kind in ("advantage", "policy_loss", "filter")}
    settings = {"algorithm__dynamic_sampling": True, "algorithm__max_refills": 0, "steps": 1}
    trainer = a_run(tmp_path / "run", "", {"reward": lower_case}, **(SHORT | settings | where))
    trainer.train()
    rows, told = lines(tmp_path / "run" / "samples.jsonl"), trained(tmp_path / "run")[0]
    kept = [r for r in rows if r["reward"] > 0]
    assert 0 < len(kept) < len(rows) == 16  # parts of groups stay, and each is told apart
    mean = np.mean([r["reward"] for r in kept])
    for row in rows:
        expected = row["reward"] - mean if row["reward"] > 0 else None
        assert row["advantage"] == (None if expected is None else pytest.approx(expected, abs=1e-4))
    assert told["actor/mine"] == pytest.approx(1, abs=1e-3) and told["actor/grad_norm"] > 0 and "actor/pg_clipfrac" not in told


def test_python_functions_and_what_they_must_return(shared):
    trainer, states = shared
    calls = []

    def advantage(rewards, valid, *, gamma):
        calls.append(gamma)
        return rewards if len(calls) > 1 else rewards[:3]

    def draw(advantage, filter):
        with choosing(trainer, {"advantage": advantage, "filter": filter}, dynamic_sampling=True):
            return next(trainer.experience(states))

    with pytest.raises(UserError, match=r"filter <lambda> returns float64\[16\]; return bool\[16\]"):
        draw(advantage, lambda rewards: rewards.tolist())
    with pytest.raises(UserError, match=r"advantage advantage returns shape \[3\]; return \[N\] or \[N, T\]"):
        draw(advantage, lambda rewards: rewards >= 0)
    batch = draw(advantage, lambda rewards: rewards >= 0)
    np.testing.assert_allclose(batch.advantages.max(axis=1), batch.rewards)
    assert calls == [1.0, 1.0]
    with pytest.raises(UserError, match="return the advantages alone"):
        draw(lambda rewards: (rewards, rewards), lambda rewards: rewards >= 0)


def test_the_readmes_pieces_work(shared, tmp_path):
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"    # mine\.py.*?\n((?:    .*\n|\n)+)", readme)[1]
    (tmp_path / "mine.py").write_text(textwrap.dedent(code))
    paths = {f"algorithm.{kind}": f"{tmp_path}/mine.py:{name}" for kind, name in README_PIECES.items()}
    pieces = choose_pieces(load(TINY, paths))
    with choosing(shared[0], {"advantage": pieces.advantage}):
        batch = next(shared[0].experience(shared[1]))
    for group in range(4):
        rows = batch.rollout.group_ids == group
        each = batch.rewards[rows] - np.median(batch.rewards[rows])
        np.testing.assert_allclose(batch.advantages[rows], np.where(batch.loss_mask[rows], each[:, None], 0), atol=1e-6)
    gradient = jax.grad(lambda x: pieces.policy_loss(x, np.zeros((1, 2)), np.ones((1, 2)), 0.2).sum())(np.float32([[0.0, 3.0]]))
    np.testing.assert_allclose(gradient, [[-1.0, 0.0]], atol=1e-5)


README_PIECES = {"advantage": "median", "policy_loss": "soft_clip"}


def test_functions_given_to_the_trainer_are_used_and_recorded(tmp_path):
    def advantage(token_rewards, values, mask):
        return token_rewards * mask, values

    def policy_loss(logprobs, advantages):
        return -logprobs * advantages

    given = {"advantage": advantage, "policy_loss": policy_loss, "critic_head": TwoLayers}
    trainer, states = begun(tmp_path / "run", "grpo", given)
    assert trainer.parts.pieces.advantage is advantage and trainer.parts.critic is not None and not trainer.parts.pieces.linear
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["algorithm.advantage"] == "python with a critic" and recorded["algorithm.policy_loss"] == "python"
    assert recorded["algorithm.filter"] == "informative" and recorded["algorithm.clip_high"] == 0.2
    assert recorded["critic.head"] == "python"
    head = jax.tree.map(np.asarray, states["critic"].params["value"])
    assert head["first"]["kernel"].shape == (64, 3) and head["second"].shape == (3,)
    batch = next(trainer.experience(states))
    np.testing.assert_array_equal(batch.returns, batch.values)
    assert np.unique(batch.values[batch.loss_mask]).size > 1  # they start as the head initialises itself
    trainer.update(0, states, batch)
    assert np.any(head["second"] != np.asarray(states["critic"].params["value"]["second"]))
    assert make_plan(trainer.config, trainer.parts.arch, 8).meshes.keys() == {"learner", "rollout", "critic"}


# What the choices do ------------------------------------------------------------------------------------------------------


def test_remax_compares_with_the_greedy_response(shared):
    with choosing(shared[0], {"advantage": remax}) as trainer:
        compare_with_greedy(trainer, shared[1])


def compare_with_greedy(trainer, states):
    drawn = len(lines_written(trainer))
    batch = next(trainer.experience(states))
    prompts = [batch.prompts[np.flatnonzero(batch.rollout.group_ids == g)[0]] for g in range(4)]
    greedy = trainer.score(prompts, trainer.generate(prompts, 1, temperature=0.0))
    np.testing.assert_array_equal(batch.greedy_rewards, greedy.rewards[batch.rollout.group_ids])
    each = batch.rewards - batch.greedy_rewards
    np.testing.assert_allclose(batch.advantages, np.where(batch.loss_mask, each[:, None], 0), atol=1e-6)
    assert np.ptp(batch.rewards) > 0 and len(lines_written(trainer)) == drawn + 16  # the greedy ones are no samples of the run
    broken = dataclasses.replace(greedy, valid=np.array([True, False, True, True]))
    scored = trainer.score
    trainer.score = lambda p, r: broken if len(r) == 4 else scored(p, r)
    batch = next(trainer.experience(states))
    del trainer.score
    assert batch.valid.tolist() == [g != 1 for g in batch.rollout.group_ids]  # no baseline, no loss


def lines_written(trainer):
    return [row for batch in trainer.run._sampled for row in range(len(batch))]


def test_overlong_responses_lose_reward_or_their_loss(shared):
    trainer, states = shared
    with choosing(trainer, overlong_penalty=2.0, overlong_buffer=0.25, overlong_filter=True):
        batches = trainer.experience(states)  # until there is a response that ended early: about one in five does
        batch = next(b for b in batches if len(set(b.rollout.response_lens[~b.truncated].tolist()) | {16}) > 1)
    lens = batch.rollout.response_lens
    penalty = np.minimum(-(lens - 12) / 4 * 2.0, 0)
    np.testing.assert_allclose(batch.penalized, batch.rewards + penalty, rtol=1e-5)
    assert len(set(lens.tolist())) > 1 and batch.truncated.any() and not batch.truncated.all()
    # They count in the group's statistics, and their own tokens carry no loss.
    expected = np.asarray(grpo(batch.penalized, batch.rollout.group_ids, batch.valid))
    np.testing.assert_allclose(batch.advantages.sum(axis=1) / lens, expected, atol=1e-4)
    assert not batch.loss_mask[batch.truncated].any() and batch.loss_mask[~batch.truncated].any(axis=1).all()
    rows = np.arange(len(batch))
    taught = trainer.taught(batch, rows)
    columns = trainer.columns(batch, rows, taught, np.random.default_rng(0))["policy"]
    assert not set(taught) & set(np.flatnonzero(batch.truncated))
    assert columns["weight"].sum() == pytest.approx(1) and not columns["weight"][batch.truncated].any()


@pytest.mark.slow
def test_positive_examples_have_a_language_model_loss(tmp_path):
    trainer, states = begun(tmp_path / "run", "grpo", None, algorithm__positive_lm_coef=0.5)
    flat = positive_columns(trainer, states)
    positive = flat.loss_mask & (flat.rewards > 0)[:, None]
    batch, metrics = flat, trainer.update(0, states, flat)
    expected = -batch.rollout.logprobs[positive].mean()
    assert metrics["actor/positive_lm_loss"] == pytest.approx(expected, rel=1e-3) and metrics["actor/grad_norm"] > 0


def positive_columns(trainer, states):
    """A batch without advantages, of which the positive examples are taught all the same."""
    batch = next(trainer.experience(states))
    flat = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    rows = np.arange(len(batch))
    assert trainer.taught(flat, rows).tolist() == np.flatnonzero(batch.rewards > 0).tolist() != []
    columns = trainer.columns(flat, rows, trainer.taught(flat, rows), np.random.default_rng(0))["policy"]
    positive = batch.loss_mask & (batch.rewards > 0)[:, None]
    np.testing.assert_allclose(columns["lm_weight"], positive / positive.sum())
    return flat


CHOICES = [
    {}, {"positive_lm_coef": 0.1}, {"minibatches": 2}, {"proximal": "rollout"}, {"kl_in": "reward", "kl_coef": 0.1},
    {"kl_in": "loss", "kl_coef": 0.1, "kl_controller": "adaptive"}, {"policy_loss": "kl_cov"},
]  # fmt: skip


@pytest.mark.parametrize("choices", CHOICES, ids=lambda c: "-".join(c) or "none")
def test_a_microbatch_has_the_columns_that_the_planner_compiles_for(shared, choices):
    trainer, states = shared
    names = choose_pieces(load(TINY, {f"algorithm.{k}": v for k, v in choices.items()}))
    with choosing(trainer, {"prepare": names.prepare}, **choices):
        if choices.get("positive_lm_coef"):
            positive_columns(trainer, states)
        trainer.parts.old_logprobs, before = needs_old_logprobs(trainer.config.algorithm), trainer.parts.old_logprobs
        reference = trainer.parts.policy if "kl_in" in choices else None
        trainer.parts.reference, trainer.parts.reference_params = reference, states["policy"].params
        batch = next(trainer.experience(states))
        columns = trainer.columns(batch, np.arange(16), np.arange(16), np.random.default_rng(0))["policy"]
        assert set(columns) == set(policy_columns(trainer.config.algorithm))
        assert all(x.shape == batch.rollout.tokens.shape for x in columns.values())
        trainer.parts.old_logprobs, trainer.parts.reference = before, None


@pytest.mark.slow
def test_the_rollout_itself_may_be_the_policy_that_ratios_are_to(tmp_path):
    trainer, states = begun(tmp_path / "run", "grpo", None, algorithm__proximal="rollout", algorithm__minibatches=2)
    trainer.parts.policy.run = None  # no pass for old logprobs
    batch = next(trainer.experience(states))
    np.testing.assert_array_equal(batch.old_logprobs, batch.rollout.logprobs)
    stale = batch.rollout.logprobs - 0.3 * batch.loss_mask
    batch = dataclasses.replace(batch, old_logprobs=stale, rollout=dataclasses.replace(batch.rollout, logprobs=stale))
    metrics = trainer.update(0, states, batch)
    assert metrics["actor/ratio_deviation"] > 0.2
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.3, abs=0.05)  # of the learner, not of itself


# State that a run carries along ---------------------------------------------------------------------------------------------

STEERED = {
    "algorithm__kl_in": "reward", "algorithm__kl_coef": 0.1, "algorithm__kl_estimator": "k1", "algorithm__kl_target": 1e-3,
    "algorithm__kl_controller": "adaptive", "algorithm__kl_horizon": 100, "reference__refresh_steps": 2,
    "learner__learning_rate": 3e-3, "eval__every_steps": 0, "eval__at_start": False,
}  # fmt: skip


@pytest.mark.slow
def test_the_weight_of_the_kl_and_the_reference_change_as_they_should(tmp_path):
    trainer, states = begun(tmp_path / "run", "grpo", None, **STEERED)
    batches, first = trainer.experience(states), digest(states["policy"].params)
    coef = 0.1
    for step in range(3):
        batch = next(batches)
        assert trainer.run.kl_coef == pytest.approx(coef)
        metrics = trainer.update(step, states, batch)
        assert metrics["actor/kl_coef"] == pytest.approx(coef)
        measured = np.asarray(kl(batch.old_logprobs, batch.ref_logprobs, "k1"))[batch.loss_mask].mean()
        coef = adapted_coef(coef, measured, 1e-3, len(batch), 100)
        now = digest(states["policy"].params)
        if step == 0:
            assert digest(states["reference"]) == first != now and abs(measured) < 1e-5  # nothing has been learned yet
        if step == 1:
            assert digest(states["reference"]) == now and measured > 1e-3
            assert states["reference"] is not states["policy"].params
        if step == 2:
            assert abs(measured) < 1e-5 and digest(states["reference"]) != now
        trainer.publish(states)
    assert coef != 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["steered", "pf_ppo", "remax"])
def test_a_resumed_run_is_the_unbroken_one(tmp_path, kind):
    replay = {"algorithm__replay_steps": 2, "algorithm__rollout_is_cap": 2.0, "learner__learning_rate": 3e-3}
    named = {name: replay | {"algorithm__name": name} for name in ("pf_ppo", "remax")}
    settings = ({"steered": STEERED} | named)[kind] | {"eval__every_steps": 0, "eval__at_start": False}
    option = {"reward": lower_case}
    a_run(tmp_path / "whole", "", option, **settings).train()
    a_run(tmp_path / "parts", "", option, **(settings | {"steps": 3})).train()
    a_run(tmp_path / "parts", "", option, resume=True, **settings).train()
    assert_same_runs(tmp_path / "parts", tmp_path / "whole", 4)
    told = trained(tmp_path / "whole")
    assert len({m["actor/kl_coef"] for m in told}) == 4 if kind == "steered" else told[-1]["rollout_corr/logprob_abs_diff"] > 1e-3


@pytest.mark.slow
def test_former_responses_are_drawn_with_the_logprobs_they_were_sampled_with(tmp_path):
    replay = {"algorithm__replay_steps": 1, "algorithm__rollout_is_cap": 2.0, "learner__learning_rate": 3e-3}
    trainer, states = begun(tmp_path / "run", "pf_ppo", None, algorithm__resample="none", **replay)
    batches, seen = trainer.experience(states), {}
    for step in range(3):
        batch = next(batches)
        new = trainer.run.replay.batches[-1]
        seen |= {int(i): new.rollout.logprobs[n] for n, i in enumerate(new.ids)}
        assert len(batch) == 16 and len(trainer.run.replay.batches) == 1
        ages = set((batch.ids // 16).tolist())
        assert ages <= {step, step - 1} and len(ages) == 1 + (step > 0)
        for row, i in enumerate(batch.ids):
            begin, end = batch.rollout.prompt_lens[row], batch.rollout.lens[row]
            np.testing.assert_array_equal(batch.rollout.logprobs[row, begin:end], seen[int(i)][begin:end])
        former = batch.loss_mask & (batch.ids // 16 < step)[:, None]
        gap = np.abs(trainer.parts.policy.run("logprobs", states["policy"].params, batch.rollout)[0] - batch.rollout.logprobs)
        assert gap[batch.loss_mask & ~former].max() < 1e-4 and (step == 0 or gap[former].max() > 1e-3)
        trainer.update(step, states, batch)
        trainer.publish(states)
    trainer.run.replay.versions = []
    with pytest.raises(RuntimeError, match="other weights"):
        trainer.update(3, states, batch)


def test_a_replay_keeps_the_latest_steps_and_survives_being_written(shared):
    trainer, _ = shared
    first, second, third = (
        dataclasses.replace(trainer.sample(4, first_group=7), greedy_rewards=np.ones(16, np.float32)) for _ in range(3)
    )
    replay = Replay(2)
    for batch in (first, second, third):
        replay.push(batch)
    assert replay.batches == (second, third)
    joined = replay.join(first)
    assert joined.ids.tolist() == [*first.ids, *second.ids, *third.ids]
    assert (
        len(np.unique(joined.rollout.group_ids)) == 12
        and joined.rollout.group_ids[:16].tolist() == first.rollout.group_ids.tolist()
    )
    again = from_text(to_text(replay.batches), trainer.parts.train_prompts)
    for a, b in zip(again, replay.batches, strict=True):
        for name in ("tokens", "logprobs", "loss_mask", "versions", "stop_reasons", "group_ids", "lens"):
            x, y = getattr(a.rollout, name), getattr(b.rollout, name)
            assert x.dtype == y.dtype and (x == y).all()
        assert [p.uid for p in a.prompts] == [p.uid for p in b.prompts] and a.texts.tolist() == b.texts.tolist()
        assert (a.rewards == b.rewards).all() and a.reward_parts.keys() == b.reward_parts.keys() and (a.ids == b.ids).all()
        assert (a.greedy_rewards == 1).all() and a.advantages is None
    nothing = Replay(0)
    nothing.push(first)
    assert nothing.batches == ()


# Rewards -------------------------------------------------------------------------------------------------------------------


SCORERS = """
    import time

    def slow(completion, answer, completion_tokens):
        time.sleep(0.05)
        return completion.count("a") + len(answer) + completion_tokens / 64

    def of_all(prompts, completions):
        return [float(len(set(completions)))] * len(completions)
"""


def test_single_samples_are_scored_while_others_are_generated_and_no_order_matters(shared, tmp_path, monkeypatch):
    trainer, _ = shared
    engine, prompts, ready = trainer.parts.engine, trainer.parts.stream.next(8), []
    (tmp_path / "mine.py").write_text(textwrap.dedent(SCORERS))
    section = trainer.config.copy_and_resolve_references().reward
    section.functions = f"{tmp_path}/mine.py:slow, {tmp_path}/mine.py:of_all*0.5, last_number"
    rewards = RewardManager.from_config(section)
    (tickets,) = (runner._early for _, runner, _ in rewards._functions if isinstance(runner, PerSample))
    monkeypatch.setattr(trainer.parts, "rewards", rewards)
    monkeypatch.setattr(trainer.run, "samples", 0)
    monkeypatch.setattr(trainer.parts.stream, "next", lambda count: prompts)
    generate, score, step = engine.generate, trainer.score, engine.step

    def sampled():
        trainer.run.samples = 0  # the same random numbers
        return trainer.sample(8, first_group=0)

    def noting(*arguments):
        ready.append(sum(ticket.done.is_set() for found in tickets.values() for ticket in found))
        return score(*arguments)

    def backwards(requests, on_step):
        given = []
        completions = generate(requests, on_step=given.extend)
        for completion in reversed(given):
            on_step([completion])
        return completions[::-1]

    monkeypatch.setattr(trainer, "score", noting)
    late = sampled()  # the processes start now
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.8), step())[1])
    early = sampled()
    monkeypatch.setattr(engine, "step", step)
    monkeypatch.setattr(engine, "generate", backwards)
    again = sampled()
    monkeypatch.setattr(rewards, "submit", lambda *_: None)
    alone = sampled()
    assert ready[1] >= 16 and ready[3] == 0, "of 32 samples, 16 of which are generated at a time"
    for batch in (late, again, alone):
        np.testing.assert_array_equal(batch.rollout.tokens, early.rollout.tokens)
        np.testing.assert_array_equal(batch.rewards, early.rewards)
        for name in ("slow", "of_all", "last_number"):
            np.testing.assert_array_equal(batch.reward_parts[name], early.reward_parts[name])
    lens = early.rollout.response_lens
    expected = [
        t.count("a") + len(p.columns["answer"]) + n / 64 for t, p, n in zip(early.texts, early.prompts, lens, strict=True)
    ]
    np.testing.assert_allclose(early.reward_parts["slow"], expected)
    calls = early.texts.reshape(2, 16)  # as many at once as a step has
    np.testing.assert_array_equal(early.reward_parts["of_all"].reshape(2, 16), [[len(set(texts))] * 16 for texts in calls])
    assert len(set(expected)) > 1 and not tickets, "nothing is left over"
