"""What a run of RL keeps besides: its samples, the replayed ones among them, the engine's numbers, and a changing KL weight."""

import itertools
import pathlib
from collections import deque
from typing import Any

import jax
import numpy as np

from jrl import utilization
from jrl.ahead import Ahead, InTurn, from_json, to_json
from jrl.algorithms.value_loss import explained_variance
from jrl.build import Parts
from jrl.metrics import response_metrics, stats
from jrl.models.hf import save_hf
from jrl.replay import Replay, from_text, to_text
from jrl.rollout.engine import EngineStats, sum_stats
from jrl.run import Run, log
from jrl.samples import SampleWriter
from jrl.sharding.hosts import gather, is_chief
from jrl.types import Batch


class RLRun(Run):
    """See `Run`.

    Attributes:
      samples: sequences sampled so far, which numbers the random draws.
      kl_coef: the weight of the KL to the reference, which a controller may change.
      replay: the responses of former steps.
      published: versions of the weights that a token may have been chosen by, oldest first.
      generation: what generates, in turn with the learner or ahead of it.
    """

    def __init__(self, config, parts: Parts):
        self.parts, self.samples = parts, 0
        self.kl_coef = config.algorithm.kl_coef
        self.replay = Replay(config.algorithm.replay_steps)
        self.published: deque[int] = deque(maxlen=config.max_staleness + 1)
        self.generation: InTurn | Ahead  # the trainer's
        self.sample_log: SampleWriter | None = None
        self._sampled: list[Batch] = []
        super().__init__(config, {"policy": parts.policy} | ({"critic": parts.critic} if parts.critic else {}), parts.stream)

    # Start and resume ------------------------------------------------------------------------------------------------------

    def fresh_states(self) -> dict[str, Any]:
        p = self.parts
        states = {"policy": p.policy.init_state(p.initial_params)}
        if p.critic and p.initial_critic:
            states["critic"] = p.critic.init_state(p.initial_critic(p.initial_params))
        return states

    def abstract_states(self) -> dict[str, Any]:
        reference = {"reference": self.parts.reference.abstract_params()} if self.config.reference.refresh_steps else {}
        return super().abstract_states() | reference

    def restore(self, step: int | None = None) -> dict[str, Any]:
        states, p = super().restore(step), self.parts
        if self.config.reference.refresh_steps:  # it changes, and so is a part of the state
            states.setdefault("reference", p.reference_params)
            p.reference_params = None
        p.initial_params = None
        self.sample_log = SampleWriter(self.directory, self.step) if self.config.log.samples and is_chief() else None
        return states

    def note(self) -> dict[str, Any]:
        def now() -> dict[str, Any]:
            facts = {"samples": self.samples, "kl_coef": self.kl_coef, "replay": self.replay.batches}
            return Run.note(self) | facts | {"published": [*self.published]}

        return self.generation.snapshot(now)

    def written(self, note: dict[str, Any]) -> dict[str, Any]:
        done = dict(itertools.chain.from_iterable(x.items() for x in gather(note["ahead"], "the checkpoint's contents")))
        return note | {"replay": to_text(note["replay"]), "ahead": to_json(done)}

    def resumed(self, note: dict[str, Any]) -> None:
        super().resumed(note)
        self.samples, self.kl_coef = note["samples"], note["kl_coef"]
        self.replay = Replay(self.replay.steps, from_text(note["replay"], self.parts.train_prompts))
        if isinstance(self.generation, Ahead):  # otherwise it is generated again
            self.generation.resume(from_json(note["ahead"]))
        self.published.extend(note["published"][:-1])  # the last one is published again

    # During ----------------------------------------------------------------------------------------------------------------

    def record(self, batch: Batch) -> None:
        """Every sampled sequence, whether it is trained on or not."""
        self._sampled.append(batch)

    def finish_step(self, step: int, batch: Batch, updates: dict[str, float]) -> None:
        """Writes the step's metrics and samples, and counts it as done."""
        p = self.parts
        tokens = sum(int(b.rollout.lens.sum()) for b in self._sampled)
        metrics = {
            **batch_metrics(batch, self._sampled, self.config), **self._engine_metrics(), **updates, **self.step_times(tokens)
        }  # fmt: skip
        metrics |= self._utilization(batch, metrics)
        metrics["perf/compiled_programs"] = sum(len(x.compiled) for x in (p.policy, p.critic, p.reference, p.engine) if x)
        self.write_step(step, metrics)
        if self.sample_log:
            for sampled in self._sampled:
                self.sample_log.write(step, sampled, advantages_of(batch, sampled))
        every = self.config.log.print_samples_every
        if self.metrics and every and (step + 1) % every == 0:
            first = self._sampled[0]
            shown = zip(first.prompts, first.texts, first.rewards, strict=True)
            self.metrics.print_samples([(p.text, text, float(reward)) for p, text, reward in itertools.islice(shown, 3)])
        self._sampled = []
        self.commit()

    def _engine_metrics(self) -> dict[str, float]:
        """Of the engines of all processes, of several that generate in lockstep one."""
        stats = self.parts.engine.stats if self.parts.shares.reports else EngineStats()
        return sum_stats(gather(stats, "the engines' counts")).metrics()

    def _utilization(self, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        """The step's and its policy update's share of peak arithmetic, where the peak is known, and memory."""
        c, p, devices, rollout = self.config.algorithm, self.parts, jax.devices(), batch.rollout
        taught = metrics.get("rollout/rows_taught", 0.0) * c.minibatches / len(batch) * ("timing_s/update_actor" in metrics)
        updates = utilization.update_flops(p.arch, rollout, c.epochs, taught)
        passes = p.old_logprobs + (p.reference is not None)
        sampled = [b.rollout for b in self._sampled]
        others = utilization.other_flops(p.arch, sampled, rollout, c.epochs, passes, p.critic is not None)
        shares = {
            "perf/mfu": utilization.mfu(updates + others, metrics["timing_s/step"], devices),
            "perf/mfu/actor": utilization.mfu(updates, metrics.get("timing_s/update_actor", 0.0), devices),
        }
        known = {name: share for name, share in shares.items() if share is not None}
        return known | {"perf/max_memory_allocated_gb": utilization.max_memory_gb(jax.local_devices())}

    def log_eval(self, sampled: Batch | None, greedy: Batch) -> dict[str, float]:
        """Writes and returns held-out accuracy: the first reward function's mean."""
        name = next(iter(greedy.reward_parts))
        source = self.config.data.eval or self.config.data.train
        result, shown, failed = {}, {}, 0
        for key, label, batch in (("greedy", "greedy@1", greedy), ("accuracy", f"mean@{self.config.eval.samples}", sampled)):
            if batch is None:
                continue
            failed += int((~batch.valid).sum())
            if batch.valid.any():  # a sample whose reward failed is neither right nor wrong
                result[key] = shown[f"val-core/{source}/{name}/{label}"] = float(batch.reward_parts[name][batch.valid].mean())
        if failed:
            log.warning("evaluation: the reward of %d samples failed; they are left out", failed)
            shown["reward/failed"] = failed
        return self.write_eval(result, shown)

    # Leaving ---------------------------------------------------------------------------------------------------------------

    def score(self, evaluation: dict[str, float]) -> float | None:
        return evaluation["accuracy"] if "accuracy" in evaluation else evaluation.get("greedy")

    def export(self, directory: pathlib.Path, states: dict[str, Any]) -> None:
        p = self.parts
        save_hf(directory, p.arch, states["policy"].params, p.tokenizer, p.eos_ids)

    def summary(self, after: dict[str, float]) -> dict[str, Any]:
        return {
            "task": self.config.data.train,
            "accuracy_before": self.before.get("accuracy"),
            "accuracy_after": after.get("accuracy"),
            "greedy_before": self.before.get("greedy"),
            "greedy_after": after.get("greedy"),
            "steps": self.step,
            "seconds": round(self.elapsed, 1),
            "samples_per_s": round(self.samples / self.seconds, 3) if self.seconds else None,
        }

    def close(self) -> None:
        super().close()
        if self.sample_log:
            self.sample_log.close()


def advantages_of(batch: Batch, sampled: Batch) -> np.ndarray:
    """f32[N, T] for the sequences that were sampled, NaN for those that did not get into the training batch."""
    n, width = sampled.rollout.tokens.shape
    out = np.full((n, width), np.nan, np.float32)
    taken, rows = np.unique(batch.ids, return_index=True)
    _, mine, theirs = np.intersect1d(sampled.ids, taken, return_indices=True)
    out[mine] = batch.advantages[rows[theirs], :width]
    return out


def batch_metrics(batch: Batch, sampled: list[Batch], config) -> dict[str, float]:
    """What a step's samples say, under the names that users of such systems know."""
    rewards = np.concatenate([b.rewards for b in sampled])
    valid = np.concatenate([b.valid for b in sampled])
    name = next(iter(batch.reward_parts))
    groups = lambda b: len(np.unique(b.rollout.group_ids))  # noqa: E731
    metrics = {
        **stats("critic/score", rewards[valid]),
        **stats("critic/rewards", batch.penalized[batch.valid]),
        **stats("critic/advantages", batch.advantages[batch.loss_mask]),
        **response_metrics(np.concatenate([b.rollout.response_lens for b in sampled]), config.rollout.max_new_tokens),
        **stats("prompt_length", np.concatenate([b.rollout.prompt_lens for b in sampled])),
        "train/accuracy": float(np.concatenate([b.reward_parts[name] for b in sampled])[valid].mean()) if valid.any() else 0.0,
        "reward/failed": float((~valid).sum()),
        "rollout/groups_kept": groups(batch) / sum(map(groups, sampled)),
    }
    if batch.values is not None:
        mask = batch.loss_mask
        metrics |= stats("critic/values", batch.values[mask]) | stats("critic/returns", batch.returns[mask])
        metrics["critic/vf_explained_var"] = float(explained_variance(batch.values, batch.returns, mask))
    return metrics
