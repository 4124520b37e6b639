"""The whole of RL post-training, top to bottom.

    prompts -> rollout -> rewards -> advantages -> update -> publish -> (again)

`experience` makes training batches with the published policy; `train` learns from them and publishes the new weights to
the rollout engine. This is the only file that knows all the others; what they are is put together in `jrl.build`, and what
a run writes and saves is in `jrl.run`.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrl import config as config_lib
from jrl.algorithms.advantages import gae, grpo, token_rewards, whiten
from jrl.algorithms.aggregation import weights
from jrl.algorithms.kl import kl
from jrl.build import Parts, build
from jrl.data import Prompt
from jrl.plan.auto import resolve
from jrl.rollout.scheduler import Request
from jrl.run import Interrupted, Run, run_directory
from jrl.types import Batch, Rollout, concatenate, make_rollout, take

log = logging.getLogger("jrl")


class Trainer:
    """Trains a policy as a config says; `Trainer(config).train()` is what `python -m jrl.main` runs.

    Args:
      config: from `jrl.config.load` or a config file's `get_config`.
      reward: a function `fn(prompts, completions, **columns) -> float[N]` in place of `config.reward.functions`.
      train_data, eval_data: a `datasets.Dataset` or a list of rows in place of `config.data.train` and `.eval`.

    Raises:
      UserError: a config that cannot run, before any device work.
    """

    def __init__(self, config, *, reward: Callable | None = None, train_data: Any = None, eval_data: Any = None):
        config = config_lib.with_python_data(config, train_data is not None, eval_data is not None)
        config_lib.validate(config)
        self.config = config = resolve(config)
        run_directory(config.run_dir)  # a mistake there should not wait for the model
        self.parts: Parts = build(config, reward, train_data, eval_data)
        self.run = Run(config, self.parts)

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
                self.publish(states)
                if config.eval.at_start and not run.before:
                    run.before = self.evaluate()
                batches = self.experience(states)
                for step in range(run.step, config.steps):
                    began = time.perf_counter()
                    batch = next(batches)
                    metrics = self.update(step, states, batch)
                    self.publish(states)
                    run.finish_step(step, batch, metrics, time.perf_counter() - began)
                    if config.eval.every_steps and (step + 1) % config.eval.every_steps == 0 and step + 1 < config.steps:
                        self.evaluate()
                    run.save_if_due(states)
                    run.check()
                return run.finish(states, self.evaluate)
            except Interrupted as why:
                self.parts.engine.abort()
                return run.leave(states, why)

    def experience(self, states: dict) -> Iterator[Batch]:
        """Training batches of `prompts_per_step` groups, made by whichever weights are published at that moment."""
        wanted, dynamic = self.config.rollout.prompts_per_step, self.config.algorithm.dynamic_sampling
        while True:
            self.parts.engine.reset_stats()
            kept: list[Batch] = []
            drawn = groups = 0
            for _ in range(1 + self.config.algorithm.max_refills * dynamic):
                prompts = self.parts.stream.next(wanted - groups)
                with self.run.timers("gen"):
                    rollout = self.generate(prompts, self.config.rollout.group_size, first_group=drawn)
                with self.run.timers("reward"):
                    batch = self.score(prompts, rollout)
                self.run.record(batch)
                drawn += len(prompts)
                rows = informative(batch) if dynamic else np.arange(len(batch))
                kept += [take(batch, rows)] if len(rows) else []
                groups = sum(len(np.unique(b.rollout.group_ids)) for b in kept)
                if groups == wanted:
                    break
            # If no group was informative, the last draw is used as it is: advantages of 0, no step for nothing.
            yield self.advantages(states, concatenate(kept or [batch]))

    # prompts -> rollout -> rewards -> advantages -----------------------------------------------------------------------

    def generate(self, prompts: list[Prompt], samples: int, temperature: float | None = None, first_group: int = 0) -> Rollout:
        """`samples` responses to each prompt, at the training temperature unless told otherwise."""
        c, run = self.config.rollout, self.run
        temperature, ignore_eos = c.temperature if temperature is None else temperature, c.ignore_eos
        requests = [
            Request(np.asarray(x.tokens, np.int32), samples, c.max_new_tokens, temperature, run.samples + i * samples, ignore_eos)
            for i, x in enumerate(prompts)
        ]
        run.samples += len(prompts) * samples
        completions = self.parts.engine.generate(requests, on_step=lambda _: run.check())
        return make_rollout([r.tokens for r in requests], completions, first_group + np.arange(len(prompts), dtype=np.int32))

    def score(self, prompts: list[Prompt], rollout: Rollout) -> Batch:
        """The rewards of a rollout; a sequence whose reward failed is marked, not lost."""
        decode = self.parts.tokenizer.decode
        mine = np.empty(len(rollout), object)
        mine[:] = [prompts[i] for i in rollout.prompt_index]
        texts = np.array([decode(tokens, skip_special_tokens=True) for tokens in rollout.responses()], object)
        at_once = self.config.rollout.prompts_per_step * self.config.rollout.group_size  # as many as the deadline is meant for
        results = [
            self.parts.rewards.score_prompts(list(mine[i : i + at_once]), list(texts[i : i + at_once]))
            for i in range(0, len(rollout), at_once)
        ]
        join = lambda values: np.concatenate(list(values))  # noqa: E731
        parts = {name: join(r.parts[name] for r in results) for name in results[0].parts}
        return Batch(rollout, mine, texts, join(r.total for r in results), join(r.valid for r in results), parts)

    def advantages(self, states: dict, batch: Batch) -> Batch:
        """Rewards to advantages: relative to the group (GRPO), or estimated over the critic's values (PPO)."""
        a, p, timers, rollout, mask = self.config.algorithm, self.parts, self.run.timers, batch.rollout, batch.loss_mask
        old: Any = None
        ref: Any = None
        values: Any = None
        returns: Any = None
        penalty: Any = None
        if p.updates_per_step > 1 or a.kl_in == "reward":
            with timers("old_log_prob"):
                old = p.policy.run("logprobs", states["policy"].params, rollout)[0]
        if p.reference is not None:
            with timers("ref"):
                ref = p.reference.run("logprobs", p.reference_params, rollout)[0]
        if p.critic is not None:
            with timers("values"):
                values = p.critic.run("values", states["critic"].params, rollout)[0]
        with timers("adv"):
            if a.kl_in == "reward":
                penalty = a.kl_coef * kl(old, ref, a.kl_estimator)
            rewards = token_rewards(batch.rewards, mask, penalty)  # [N, T]
            if values is not None:
                raw, returns = gae(rewards, values, mask, a.gamma, a.lam)
                advantages = whiten(raw, mask)
            else:
                each = grpo(rewards.sum(axis=1), rollout.group_ids, batch.valid, a.normalize_std)  # [N]
                advantages = jnp.where(mask, each[:, None], 0.0)
        return dataclasses.replace(
            batch, advantages=np.asarray(advantages, np.float32), old_logprobs=old, ref_logprobs=ref, values=values,
            returns=None if returns is None else np.asarray(returns), penalized=np.asarray(rewards.sum(axis=1)),
        )  # fmt: skip

    # update -> publish -------------------------------------------------------------------------------------------------

    def update(self, step: int, states: dict, batch: Batch) -> dict[str, float]:
        """Epochs over minibatches of the batch, critic first; replaces the states, which are donated."""
        a, p = self.config.algorithm, self.parts
        if not (batch.rollout.versions[batch.rollout.loss_mask] == p.engine.version).all():
            raise RuntimeError(f"step {step}: the batch is of other weights than the published version {p.engine.version}")
        rng = np.random.default_rng((self.config.seed, step))
        p.engine.load(None, -1)  # it may be borrowing the very arrays that the updates donate
        metrics: dict[str, list[float]] = {}
        for _ in range(a.epochs):
            for rows in minibatches(batch.rollout.group_ids, a.minibatches, rng):
                taught = rows if a.kl_in == "loss" or a.entropy_coef else rows[np.any(batch.advantages[rows] != 0, axis=1)]
                columns = self.columns(batch, rows, taught)
                collect(metrics, "rollout", {"rows_taught": len(taught)})
                if p.critic is not None:
                    with self.run.timers("update_critic"):
                        states["critic"], new = p.critic.update(states["critic"], batch.rollout, columns["critic"], rows)
                    collect(metrics, "critic", new)
                if step >= p.policy_delay_steps and len(taught):  # a row of advantage 0 has no gradient: no pass for it
                    with self.run.timers("update_actor"):
                        states["policy"], new = p.policy.update(states["policy"], batch.rollout, columns["policy"], taught)
                    collect(metrics, "actor", new)
        return {name: float(np.mean(values)) for name, values in metrics.items()}

    def columns(self, batch: Batch, rows: np.ndarray, taught: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
        """What the losses read, by model.

        The loss is divided by what the whole minibatch `rows` counts; metrics of the policy are means over the rows `taught`.
        """
        a, rollout = self.config.algorithm, batch.rollout
        mask, shown = np.zeros_like(batch.loss_mask), np.zeros_like(batch.loss_mask)
        mask[rows], shown[taught] = batch.loss_mask[rows], batch.loss_mask[taught]
        share = mask / max(mask.sum(), 1)
        policy = {
            "share": shown / max(shown.sum(), 1),
            "weight": np.asarray(weights(mask, a.aggregation, max_length=self.config.rollout.max_new_tokens)),
            "advantages": batch.advantages,
            "rollout_logprobs": rollout.logprobs,
            "old_logprobs": batch.old_logprobs,
            "ref_logprobs": batch.ref_logprobs,
        }
        critic = {"share": share, "weight": share, "old_values": batch.values, "returns": batch.returns}
        present = lambda columns: {k: v for k, v in columns.items() if v is not None}  # noqa: E731
        return {"policy": present(policy), "critic": present(critic)}

    def publish(self, states: dict) -> None:
        """The policy's arrays in the rollout's layout and precision; where both agree these are the same arrays."""
        with self.run.timers("update_weights"):
            params = self.parts.rollout_weights(states["policy"].params)
            self.parts.engine.load(params, int(states["policy"].step))

    # evaluation ----------------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy: the mean of `eval.samples` at the training temperature, and greedy; nothing without such data."""
        p, samples, drawn = self.parts, self.config.eval.samples, self.run.samples
        if not p.eval_prompts:
            return {}
        self.run.samples = p.first_eval_sample  # the same random numbers every time, and none of the training's
        with self.run.timers("testing"):
            sampled = self.score(p.eval_prompts, self.generate(p.eval_prompts, samples)) if samples else None
            greedy = self.score(p.eval_prompts, self.generate(p.eval_prompts, 1, temperature=0.0))
        self.run.samples = drawn
        return self.run.log_eval(sampled, greedy)


def informative(batch: Batch) -> np.ndarray:
    """Rows of groups whose rewards differ; the others have advantage 0 and teach nothing (DAPO, arXiv:2503.14476)."""
    groups = batch.rollout.group_ids
    mixed = [g for g in np.unique(groups) if len(np.unique(batch.rewards[(groups == g) & batch.valid])) > 1]
    return np.flatnonzero(np.isin(groups, mixed))


def minibatches(group_ids: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Row numbers of `count` minibatches of whole groups, in random order; one minibatch keeps the order."""
    groups = np.unique(group_ids)
    if count > 1:
        groups = rng.permutation(groups)
    return [np.flatnonzero(np.isin(group_ids, part)) for part in np.array_split(groups, min(count, len(groups)))]


def collect(metrics: dict[str, list[float]], prefix: str, new: dict[str, float]) -> None:
    """Appends an update's metrics under `prefix/name`, names that already have a room of their own as they are."""
    for name, value in new.items():
        metrics.setdefault(name if "/" in name else f"{prefix}/{name}", []).append(value)
