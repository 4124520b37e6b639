"""The whole of RL post-training, top to bottom.

    prompts -> rollout -> rewards -> advantages -> update -> publish -> (again)

`experience` makes training batches with the published policy; `train` learns from them and publishes the new weights to
the rollout engine. This is the only file that knows all the others; what they are is put together in `jrl.build`, and what
a run writes and saves is in `jrl.run`.
"""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrl import config as config_lib
from jrl.ahead import Ahead, Group, InTurn, draws, rollout_of, staleness
from jrl.algorithms.advantages import token_rewards
from jrl.algorithms.aggregation import weights
from jrl.algorithms.kl import adapted_coef, kl
from jrl.algorithms.pieces import PYTHON, call, settings
from jrl.algorithms.samples import overlong_penalty, resample, resampling_weights
from jrl.arguments import collect, estimate, kept, minibatches, of_samples
from jrl.build import Parts, build, copy_params
from jrl.data import Prompt
from jrl.errors import UserError
from jrl.losses import finish
from jrl.plan.auto import resolve
from jrl.rl_run import RLRun
from jrl.rollout.engine import Engine
from jrl.rollout.scheduler import Request
from jrl.run import Interrupted, check_outputs
from jrl.types import Batch, Completion, Rollout, concatenate, make_rollout, take

log = logging.getLogger("jrl")


class Trainer:
    """Trains a policy as a config says; `Trainer(config).train()` is what `python -m jrl.main` runs.

    Args:
      config: from `jrl.config.load` or a config file's `get_config`.
      reward: a function `fn(prompts, completions, **columns) -> float[N]` in place of `config.reward.functions`.
      advantage, policy_loss, filter: functions in place of those keys of `config.algorithm`, see `jrl.algorithms.pieces`.
      critic_head: a class in place of that of `config.critic.head`, see `jrl.models.decoder.Critic`.
      train_data, eval_data: a `datasets.Dataset` or a list of rows in place of `config.data.train` and `.eval`.
      speaker: the agent's number among several, see `jrl.agents`.

    Raises:
      UserError: a config that cannot run, before any device work.
    """

    def __init__(
        self, config, *, reward: Callable | None = None, advantage: Callable | None = None, policy_loss: Callable | None = None,
        filter: Callable | None = None, critic_head: Callable | None = None, train_data: Any = None, eval_data: Any = None,
        speaker: int | None = None,
    ):  # fmt: skip
        config = config_lib.with_python_data(config, train_data is not None, eval_data is not None)
        config_lib.validate(config)
        if config.stage != "rl":
            raise UserError(f"config.stage={config.stage!r}: Trainer runs rl; use jrl.SupervisedTrainer, or the command line")
        if config.agents.turns and speaker is None:
            raise UserError(f"config.agents.turns={config.agents.turns!r}: Trainer trains one policy; use jrl.agents.Agents")
        pieces = config_lib.choose_pieces(config, advantage=advantage, policy_loss=policy_loss, filter=filter)
        if critic_head:
            config.critic.head = PYTHON
        self.config = config = resolve(config_lib.with_preset(config, pieces))
        check_outputs(config)  # a mistake there should not wait for the model
        self.parts: Parts = build(config, pieces, reward, train_data, eval_data, speaker or 0, critic_head)
        self.run = RLRun(config, self.parts)
        self.run.generation = self.generation = self.make_generation()

    @classmethod
    def from_pretrained(cls, path: str, config: Any = "configs/gsm8k_grpo.py", **options: Any) -> "Trainer":
        """A trainer of the model at `path` (directory, hub id or GGUF file) by a config or the name of a config file."""
        config = config_lib.load(config, {}) if isinstance(config, str) else config.copy_and_resolve_references()
        config.model.path = path
        return cls(config, **options)

    # The loop --------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any]:
        """Takes the steps that are left, and returns the summary that the command line prints."""
        config, run = self.config, self.run
        with run:  # SIGTERM and Ctrl-C raise Interrupted at the next safe point
            states = run.restore()  # {"policy": TrainState, "critic": TrainState}, as saved or fresh
            try:
                self.generation.start(config.steps - run.step)
                self.publish(states)
                if config.eval.at_start and not run.before:
                    run.before = self.evaluate()
                batches = self.experience(states)
                for step in run.steps(states, self.evaluate):
                    batch = next(batches)
                    metrics = self.update(step, states, batch)
                    self.publish(states)
                    self.generation.step_done()
                    run.finish_step(step, batch, metrics)
                return run.finish(states, self.evaluate)
            except Interrupted as why:
                self.generation.interrupted()
                return run.leave(states, why)
            finally:
                self.generation.stop()

    def experience(self, states: dict) -> Iterator[Batch]:
        """Training batches of `prompts_per_step` groups, made by whichever weights are published at that moment."""
        wanted, a, pieces = self.config.rollout.prompts_per_step, self.config.algorithm, self.parts.pieces
        while True:
            self.parts.engine.reset_stats()
            parts: list[Batch] = []
            drawn = groups = 0
            for _ in range(1 + a.max_refills * a.dynamic_sampling):
                batch = self.sample(wanted - groups, first_group=drawn)
                self.run.record(batch)
                drawn += wanted - groups
                arguments = settings(a) | of_samples(batch, self.parts.rewards.weights)
                rows = kept(pieces.filter, arguments) if a.dynamic_sampling else np.arange(len(batch))
                parts += [take(batch, rows)] if len(rows) else []
                groups = sum(len(np.unique(b.rollout.group_ids)) for b in parts)
                if groups == wanted:
                    break
            if groups < wanted and a.dynamic_sampling and a.max_refills:
                log.warning("dynamic sampling: %d of %d groups after %d draws", groups, wanted, 1 + a.max_refills)
            # If no group was informative, the last draw is used as it is: advantages of 0, no step for nothing.
            yield self.resampled(states, concatenate(parts or [batch]))

    # prompts -> rollout -> rewards -> advantages -----------------------------------------------------------------------

    def sample(self, groups: int, first_group: int) -> Batch:
        """Scored responses to the next prompts, and the reward of the greedy one where the advantage asks for it.

        Args:
          first_group: groups that the batch has had before; beyond the first draw, each stands in for one that was dropped.
        """
        first = self.run.samples
        with self.run.timers("gen"):
            if isinstance(self.generation, Ahead):
                prompts, rollout, ids = self.taken(self.generation, groups, first_group)
            else:
                prompts = self.parts.stream.next(groups)
                rollout = self.generate(prompts, self.config.rollout.group_size, first_group=first_group)
                ids = first + np.arange(len(rollout))
        with self.run.timers("reward"):
            batch = self.score(prompts, rollout)
        batch = dataclasses.replace(batch, ids=ids)
        if not self.parts.pieces.greedy:
            return batch
        with self.run.timers("gen_max"):
            greedy = self.score(prompts, self.generate(prompts, 1, temperature=0.0))
        baseline, known = greedy.rewards[rollout.prompt_index], greedy.valid[rollout.prompt_index]
        return dataclasses.replace(batch, greedy_rewards=baseline, valid=batch.valid & known)

    def generate(
        self, prompts: list[Prompt], samples: int, temperature: float | None = None, first_group: int = 0, judged: bool = True,
        first_id: int | None = None,
    ) -> Rollout:  # fmt: skip
        """`samples` responses to each prompt, at the training temperature unless told otherwise.

        Args:
          judged: they will be scored as they are, so their rewards may be made while others are generated.
          first_id: the number of the first sample; by default the run's next, which are used up.
        """
        run = self.run
        if first_id is None:
            first_id = run.samples
            run.samples += len(prompts) * samples
        requests = [self.request(x, samples, first_id + i * samples, temperature) for i, x in enumerate(prompts)]
        shares = self.parts.shares
        mine, scored = shares.generated(len(requests)), shares.scored(len(requests))

        def finished(completions: list[Completion]) -> None:
            for x in completions if judged else ():  # what can be scored by itself need not wait for the last one
                if mine[x.request] in scored:
                    self.parts.rewards.submit(prompts[mine[x.request]], self.text(x.tokens), len(x.tokens))

        made: list[Completion] = []
        try:
            check = run.check if shares.alone else lambda: None  # others in lockstep would go on without this process
            made = self.generation.generate(requests[mine.start : mine.stop], finished, check)
        except Interrupted:  # the others have to hear of it, below
            self.generation.interrupted()
        told = [dataclasses.replace(x, request=mine[x.request]) for x in made] if shares.reports else []
        completions = list(itertools.chain(*run.exchange(told, "the others' responses")))
        return make_rollout([r.tokens for r in requests], completions, first_group + np.arange(len(prompts), dtype=np.int32))

    def make_generation(self) -> InTurn | Ahead:
        """What generates, in turn with the learner or beside it, see `jrl.ahead`."""
        c, parts, run = self.config.rollout, self.parts, self.run
        if isinstance(parts.engine, Engine) and not self.config.max_staleness:
            return InTurn(parts.engine)
        mine = parts.shares.generated(c.prompts_per_step)

        def request(group: Group, sample: int, count: int) -> Request:
            return self.request(group.prompt, count, group.first_id + sample)

        def finished(prompt: Prompt, x: Completion) -> None:
            parts.rewards.submit(prompt, self.text(x.tokens), len(x.tokens))

        most, copies = self.config.max_staleness, not (self.config.pools.rollout or c.workers)
        drawn = draws(parts.stream, lambda: run.samples, c.group_size, c.prompts_per_step, mine)
        return Ahead(parts.engine, drawn, request, finished, c.group_size, len(mine), most, copies)

    def taken(self, ahead: Ahead, count: int, first_group: int) -> tuple[list[Prompt], Rollout, np.ndarray]:
        """The next groups of those that were generated ahead: prompts, responses and their numbers."""
        mine, again = len(self.parts.shares.generated(count)), count if first_group else 0
        made: list[Group] = []
        with contextlib.suppress(Interrupted):  # the others have to hear of it, below
            made = ahead.take(mine, self.run.check, again)
        groups = list(itertools.chain(*self.run.exchange(made, "the others' responses")))
        self.parts.stream.next(count)
        self.run.samples += count * self.config.rollout.group_size
        return [group.prompt for group in groups], *rollout_of(groups, first_group)

    def request(self, prompt: Prompt, samples: int, first_id: int, temperature: float | None = None) -> Request:
        """To the engine, at the training temperature unless told otherwise."""
        c = self.config.rollout
        temperature = c.temperature if temperature is None else temperature
        return Request(np.asarray(prompt.tokens, np.int32), samples, c.max_new_tokens, temperature, first_id, c.ignore_eos)

    def score(self, prompts: list[Prompt], rollout: Rollout) -> Batch:
        """The rewards of a rollout; a sequence whose reward failed is marked, not lost."""
        mine = np.empty(len(rollout), object)
        mine[:] = [prompts[i] for i in rollout.prompt_index]
        texts = self.texts(rollout)
        at_once = self.config.rollout.prompts_per_step * self.config.rollout.group_size  # as many as the deadline is meant for
        columns = mine, texts, rollout.response_lens, np.isin(rollout.prompt_index, self.parts.shares.scored(len(prompts)))
        results = [
            self.parts.rewards.score_prompts(*(list(x[i : i + at_once]) for x in columns))
            for i in range(0, len(rollout), at_once)
        ]
        join = lambda values: np.concatenate(list(values))  # noqa: E731
        parts = {name: join(r.parts[name] for r in results) for name in results[0].parts}
        return Batch(rollout, mine, texts, join(r.total for r in results), join(r.valid for r in results), parts)

    def texts(self, rollout: Rollout) -> np.ndarray:
        """object[N], the responses."""
        return np.array([self.text(tokens) for tokens in rollout.responses()], object)

    def text(self, tokens: np.ndarray) -> str:
        return self.parts.tokenizer.decode(tokens, skip_special_tokens=True)

    def resampled(self, states: dict, batch: Batch) -> Batch:
        """The batch with its advantages; or as many responses drawn by reward from it and from former ones (PF-PPO)."""
        a, replay = self.config.algorithm, self.run.replay
        if a.resample == "none" and not a.replay_steps:
            return self.advantages(states, batch)
        everything = self.advantages(states, replay.join(batch))
        replay.push(batch)
        groups = everything.rollout.group_ids
        chances = resampling_weights(everything.rewards, groups, everything.valid, a.resample, a.resample_power)
        rng = np.random.default_rng((self.config.seed, int(batch.ids[0])))
        return take(everything, resample(chances, len(batch), rng)) if chances.any() else take(everything, np.arange(len(batch)))

    def advantages(self, states: dict, batch: Batch) -> Batch:
        """Rewards, less the penalties, to advantages: relative to the group, to a critic's values, or whatever is chosen."""
        a, p, timers, rollout, mask = self.config.algorithm, self.parts, self.run.timers, batch.rollout, batch.scored_mask
        old: Any = rollout.logprobs if a.proximal == "rollout" else None
        ref: Any = None
        values: Any = None
        penalty: Any = None
        if old is None and p.old_logprobs:
            with timers("old_log_prob"):
                old = p.policy.run("logprobs", states["policy"].params, rollout)[0]
        if p.reference is not None:
            with timers("ref"):
                ref = p.reference.run("logprobs", states.get("reference", p.reference_params), rollout)[0]
        if p.critic is not None:
            with timers("values"):
                values = p.critic.run("values", states["critic"].params, rollout)[0]
        with timers("adv"):
            arguments = settings(a) | of_samples(batch, p.rewards.weights)
            arguments |= {"mask": mask, "rollout_logprobs": rollout.logprobs, "greedy_rewards": batch.greedy_rewards}
            rewards = batch.rewards
            if a.overlong_penalty:
                limit = self.config.rollout.max_new_tokens
                shaping = overlong_penalty(arguments["lens"], limit, a.overlong_buffer, a.overlong_penalty)
                rewards = rewards + shaping
                arguments["reward_parts"] = batch.reward_parts | {"overlong": shaping}
                arguments["reward_weights"] = p.rewards.weights | {"overlong": 1.0}
            if a.kl_in == "reward":
                penalty = self.run.kl_coef * kl(old, ref, a.kl_estimator)
            tokens = token_rewards(rewards, mask, penalty)  # [N, T]
            penalized = tokens.sum(axis=1)
            arguments |= {"rewards": penalized, "token_rewards": tokens} | ({} if values is None else {"values": values})
            advantages, returns = estimate(p.pieces.advantage, arguments)
        return dataclasses.replace(
            batch, advantages=advantages, old_logprobs=old, ref_logprobs=ref, values=values, returns=returns,
            penalized=np.asarray(penalized), unlearned=batch.truncated if a.overlong_filter else None,
        )  # fmt: skip

    # update -> publish -------------------------------------------------------------------------------------------------

    def update(self, step: int, states: dict, batch: Batch) -> dict[str, float]:
        """Epochs over minibatches of the batch, critic first; replaces the states, which are donated."""
        a, p = self.config.algorithm, self.parts
        known = [*self.run.published, *self.run.replay.versions]
        if not np.isin(batch.rollout.versions[batch.rollout.loss_mask], known).all():
            raise RuntimeError(f"step {step}: the batch is of other weights than the published versions {[*self.run.published]}")
        rng = np.random.default_rng((self.config.seed, step))
        self.generation.release()  # it may be borrowing the very arrays that the updates donate
        metrics: dict[str, list[float]] = {}
        if isinstance(self.generation, Ahead):
            collect(metrics, "rollout", staleness(batch.rollout, self.run.published) | {"ready_groups": self.generation.ready})
        for _ in range(a.epochs):
            for rows in minibatches(batch.rollout.group_ids, a.minibatches, rng):
                taught = self.taught(batch, rows)
                columns = self.columns(batch, rows, taught, rng)
                collect(metrics, "rollout", {"rows_taught": len(taught)})
                if p.critic is not None:
                    with self.run.timers("update_critic"):
                        states["critic"], new = p.critic.update(states["critic"], batch.rollout, columns["critic"], rows)
                    collect(metrics, "critic", new)
                if step >= p.policy_delay_steps and len(taught):
                    with self.run.timers("update_actor"):
                        states["policy"], new = p.policy.update(states["policy"], batch.rollout, columns["policy"], taught)
                    collect(metrics, "actor", finish(new))
        self.steer_kl(step, states, batch, metrics)
        return {name: float(np.mean(values)) for name, values in metrics.items()}

    def taught(self, batch: Batch, rows: np.ndarray) -> np.ndarray:
        """Which of `rows` the policy can learn from: a row of advantage 0 has no gradient, and there is no pass for it."""
        a = self.config.algorithm
        if a.kl_in == "loss" or a.entropy_coef or not self.parts.pieces.linear:
            return rows
        learns = np.any((batch.advantages != 0) & batch.loss_mask, axis=1)
        return rows[(learns | (batch.rewards > 0) if a.positive_lm_coef else learns)[rows]]

    def columns(
        self, batch: Batch, rows: np.ndarray, taught: np.ndarray, rng: np.random.Generator
    ) -> dict[str, dict[str, np.ndarray]]:
        """What the losses read, by model.

        The loss is divided by what the whole minibatch `rows` counts; metrics of the policy are means over the rows `taught`.
        """
        a, rollout, prepare = self.config.algorithm, batch.rollout, self.parts.pieces.prepare
        mask, shown = np.zeros_like(batch.loss_mask), np.zeros_like(batch.loss_mask)
        mask[rows], shown[taught] = batch.loss_mask[rows], batch.loss_mask[taught]
        share = mask / max(mask.sum(), 1)
        weight = np.asarray(weights(mask, a.aggregation, max_length=self.config.rollout.max_new_tokens))
        policy = {
            "share": shown / max(shown.sum(), 1),
            "sequence_share": np.asarray(weights(shown, "seq-mean-token-mean")),
            "weight": weight,
            "advantages": batch.advantages,
            "rollout_logprobs": rollout.logprobs,
            "old_logprobs": batch.old_logprobs,
            "ref_logprobs": batch.ref_logprobs,
        }
        if prepare is not None:
            key = jax.random.key(int(rng.integers(2**31)))
            policy["selected"] = np.asarray(call(prepare, settings(a) | policy | {"mask": mask, "key": key}), np.float32)
        if a.kl_in == "loss" and a.kl_controller == "adaptive":
            policy["kl_weight"] = weight * np.float32(self.run.kl_coef)
        if a.positive_lm_coef:
            positive = mask & (batch.rewards > 0)[:, None]
            policy["lm_weight"] = positive / max(positive.sum(), 1)
        critic = {"share": share, "weight": share, "old_values": batch.values, "returns": batch.returns}
        present = lambda columns: {k: v for k, v in columns.items() if v is not None}  # noqa: E731
        return {"policy": present(policy), "critic": present(critic)}

    def steer_kl(self, step: int, states: dict, batch: Batch, metrics: dict[str, list[float]]) -> None:
        """After the updates of a step: the adaptive weight of the KL, and the reference, which may follow the policy."""
        a, every = self.config.algorithm, self.config.reference.refresh_steps
        if a.kl_controller == "adaptive":
            collect(metrics, "actor", {"kl_coef": self.run.kl_coef})
            measured = np.asarray(kl(batch.old_logprobs, batch.ref_logprobs, a.kl_estimator))[batch.loss_mask]
            if measured.size:
                samples = len(batch)
                self.run.kl_coef = adapted_coef(self.run.kl_coef, float(measured.mean()), a.kl_target, samples, a.kl_horizon)
        if every and (step + 1) % every == 0:
            states["reference"] = copy_params(states["policy"].params, self.parts.reference.param_shardings)

    def publish(self, states: dict) -> None:
        """The policy's arrays in the rollout's layout and precision; where both agree these are the same arrays."""
        with self.run.timers("update_weights"):
            params, version = self.parts.rollout_weights(states["policy"].params), int(states["policy"].step)
            self.run.published.append(version)
            self.generation.publish(params, version)

    # evaluation ----------------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy: the mean of `eval.samples` at the training temperature, and greedy; nothing without such data."""
        p, samples, first = self.parts, self.config.eval.samples, self.parts.first_eval_sample
        if not p.eval_prompts:
            return {}

        def scored(samples: int, temperature: float | None, first_id: int) -> Batch:
            return self.score(p.eval_prompts, self.generate(p.eval_prompts, samples, temperature, first_id=first_id))

        with self.run.timers("testing"):  # with the same random numbers every time, and none of the training's
            sampled = scored(samples, None, first) if samples else None
            greedy = scored(1, 0.0, first + len(p.eval_prompts) * samples)
        return self.run.log_eval(sampled, greedy)
