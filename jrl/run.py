"""What a run keeps: its directory, its metrics and samples, its checkpoints, and how it is interrupted.

`runs/NAME/` holds config.json, metrics.jsonl, TensorBoard events, samples.jsonl, checkpoints/, result.json, report.html and
hf/, the trained model as `transformers` reads it.
"""

import itertools
import json
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jrl import config as config_lib
from jrl import utilization
from jrl.algorithms.value_loss import explained_variance
from jrl.build import Parts
from jrl.checkpoint import Checkpointer
from jrl.errors import UserError
from jrl.learner import Learner
from jrl.metrics import MetricsWriter, Timers, response_metrics, stats
from jrl.models.hf import save_hf
from jrl.replay import Replay, from_text, to_text
from jrl.report import write_report
from jrl.samples import SampleWriter
from jrl.types import Batch

log = logging.getLogger("jrl")

MADE_BY_RUNS = ("config.json", "metrics.jsonl", "samples.jsonl", "checkpoints", "result.json")


class Interrupted(Exception):
    """SIGTERM or Ctrl-C came; the message says which."""


class Run:
    """The state of a run beside the models', and everything that leaves the process.

    Attributes:
      step: steps completed.
      samples: sequences sampled so far, which numbers the random draws.
      kl_coef: the weight of the KL to the reference, which a controller may change.
      replay: the responses of former steps.
      before: the metrics of the evaluation at the start.
      last_eval: those of the latest one, and the step that it was made at.
    """

    def __init__(self, config, parts: Parts):
        self.config, self.parts = config, parts
        self.directory = run_directory(config.run_dir)
        self.step, self.samples, self.seconds, self.earlier = 0, 0, 0.0, 0.0
        self.kl_coef = config.algorithm.kl_coef
        self.replay = Replay(config.algorithm.replay_steps)
        self.before: dict[str, float] = {}
        self.last_eval: tuple[int, dict[str, float]] = (-1, {})
        self.timers = Timers()
        self._sampled: list[Batch] = []
        self._committed: dict[str, Any] = {}
        self._signal: str | None = None
        self._old_handlers: dict[int, Any] = {}
        if not config.resume:
            _set_aside(self.directory)
        self.checkpoints = Checkpointer(self.directory / "checkpoints", config.checkpoint.keep, config.checkpoint.best)
        self._began = time.perf_counter()

    # Signals -------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Run":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old_handlers[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()
        self.checkpoints.close()

    def _note_signal(self, number: int, _frame: Any) -> None:
        self._signal = signal.Signals(number).name
        # A second one is not waited for.
        signal.signal(number, self._old_handlers[number])
        log.warning("%s: saving and leaving; again to leave at once", self._signal)

    def check(self) -> None:
        """Raises Interrupted if a signal has come. Called where nothing is half done."""
        if self._signal:
            raise Interrupted(self._signal)

    # Start and resume ------------------------------------------------------------------------------------------------------

    def restore(self) -> dict[str, Any]:
        """The training states: of the latest readable checkpoint when resuming, otherwise fresh ones."""
        p = self.parts
        learners: dict[str, Learner] = {"policy": p.policy} | ({"critic": p.critic} if p.critic else {})
        found = None
        if self.config.resume:
            abstract = {name: learner.abstract_state() for name, learner in learners.items()}
            if self.config.reference.refresh_steps:
                abstract["reference"] = p.reference.abstract_params()
            found = self.checkpoints.restore(abstract)
            if found is None:
                log.warning("nothing to resume in %s: starting from the beginning", self.checkpoints.directory)
        if found is None:
            states = {"policy": p.policy.init_state(p.initial_params)}
            if p.critic and p.initial_critic:
                states["critic"] = p.critic.init_state(p.initial_critic(p.initial_params))
        else:
            self.step, states, extra = found
            self.samples, self.seconds, self.before = extra["samples"], extra["seconds"], extra["before"]
            self.earlier, self.kl_coef = extra["elapsed"], extra["kl_coef"]
            self.replay = Replay(self.replay.steps, from_text(extra["replay"], p.train_prompts))
            p.stream.restore(extra["stream"])
            log.info("resumed at step %d", self.step)
        if self.config.reference.refresh_steps:  # it changes, and so is a part of the state
            states.setdefault("reference", p.reference_params)
            p.reference_params = None
        p.initial_params = None
        self._open_logs()
        self._commit()
        return states

    def _open_logs(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        resolved = json.dumps(config_lib.flatten(self.config), indent=1)
        (self.directory / "config.json").write_text(resolved + "\n")
        c = self.config
        self.metrics = MetricsWriter(self.directory, c.log.tensorboard, c.steps, self.step)
        self.sample_log = SampleWriter(self.directory, self.step) if c.log.samples else None

    def _commit(self) -> None:
        """Takes note of where the finished steps have led; a checkpoint of an interrupted step goes back to here."""
        self._committed = {
            "samples": self.samples, "seconds": self.seconds, "elapsed": self.elapsed, "before": self.before,
            "stream": self.parts.stream.state(), "kl_coef": self.kl_coef,
            "replay": self.replay.batches,
        }  # fmt: skip

    @property
    def elapsed(self) -> float:
        """Seconds of the whole run, those of the processes that it is resumed from included."""
        return self.earlier + time.perf_counter() - self._began

    # During ----------------------------------------------------------------------------------------------------------------

    def record(self, batch: Batch) -> None:
        """Every sampled sequence, whether it is trained on or not."""
        self._sampled.append(batch)

    def finish_step(self, step: int, batch: Batch, updates: dict[str, float], seconds: float) -> None:
        """Writes the step's metrics and samples, and counts it as done."""
        self.seconds += seconds
        tokens = sum(int(b.rollout.lens.sum()) for b in self._sampled)
        metrics = {
            **batch_metrics(batch, self._sampled, self.config), **self.parts.engine.stats.metrics(), **updates,
            **self.timers.collect(),
        }  # fmt: skip
        metrics["timing_s/step"] = seconds
        metrics["perf/throughput"] = tokens / seconds
        metrics |= self._utilization(batch, metrics)
        metrics["perf/compiled_programs"] = sum(
            len(x.compiled) for x in (self.parts.policy, self.parts.critic, self.parts.reference, self.parts.engine) if x
        )
        self.metrics.log(step, metrics)
        if self.sample_log:
            for sampled in self._sampled:
                self.sample_log.write(step, sampled, advantages_of(batch, sampled))
        every = self.config.log.print_samples_every
        if every and (step + 1) % every == 0:
            first = self._sampled[0]
            shown = zip(first.prompts, first.texts, first.rewards, strict=True)
            self.metrics.print_samples([(p.text, text, float(reward)) for p, text, reward in itertools.islice(shown, 3)])
        self._sampled = []
        self.step = step + 1
        self._commit()

    def _utilization(self, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        """The step's and its policy update's share of peak arithmetic, where the peak is known, and memory."""
        c, p, devices, rollout = self.config.algorithm, self.parts, jax.local_devices(), batch.rollout
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
        return known | {"perf/max_memory_allocated_gb": utilization.max_memory_gb(devices)}

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
        self.last_eval = self.step, result
        self.metrics.log_eval(self.step, shown)
        return result

    # Saving and leaving ------------------------------------------------------------------------------------------------------

    def save_if_due(self, states: dict[str, Any]) -> None:
        every = self.config.checkpoint.every_steps
        if every and self.step % every == 0 and self.step < self.config.steps:
            self.save(states)

    def save(self, states: dict[str, Any]) -> None:
        """A checkpoint of the last finished step; the writing goes on in the background."""
        with self.timers("save_checkpoint"):
            step, scores = self.last_eval
            metric = scores.get("accuracy", scores.get("greedy")) if step == self.step else None
            extra = self._committed | {"replay": to_text(self._committed["replay"])}
            self.checkpoints.save(self.step, states, extra, metric)

    def leave(self, states: dict[str, Any], why: Interrupted) -> dict[str, Any]:
        """Saves an interrupted run."""
        self.save(states)
        self.checkpoints.wait()
        self._close()
        log.warning("%s: saved step %d in %s; continue with --config.resume=True", why, self.step, self.directory)
        return {"interrupted": str(why), "steps": self.step, "run_dir": str(self.directory)}

    def finish(self, states: dict[str, Any], evaluate: Callable[[], dict[str, float]]) -> dict[str, Any]:
        """The last evaluation, checkpoint, export and report; returns the summary."""
        try:
            after = evaluate()
        except Exception:  # whatever went wrong, it shall not cost the weights
            self.save(states)
            self.checkpoints.wait()
            raise
        self._commit()
        self.save(states)
        self.checkpoints.wait()
        export = None
        if self.config.export.hf:
            export = str(self.directory / "hf")
            save_hf(export, self.parts.arch, states["policy"].params, self.parts.tokenizer, self.parts.engine.shape.eos_ids)
        result = {
            "task": self.config.data.train,
            "accuracy_before": self.before.get("accuracy"),
            "accuracy_after": after.get("accuracy"),
            "greedy_before": self.before.get("greedy"),
            "greedy_after": after.get("greedy"),
            "steps": self.step,
            "seconds": round(self.elapsed, 1),
            "samples_per_s": round(self.samples / self.seconds, 3) if self.seconds else None,
            "export": export,
        }
        (self.directory / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        self._close()
        write_report(self.directory)
        return result

    def _close(self) -> None:
        self.metrics.close()
        if self.sample_log:
            self.sample_log.close()


def run_directory(path: str) -> pathlib.Path:
    """The directory that a run may use; nothing is written.

    Raises:
      UserError: it is no directory, cannot be made, or holds files of something else than a run.
    """
    directory = pathlib.Path(path).expanduser()
    there = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"config.run_dir={path}: {there} is not a directory that can be written to; choose another")
    if there == directory and any(directory.iterdir()) and not any((directory / name).exists() for name in MADE_BY_RUNS):
        raise UserError(f"config.run_dir={path}: holds files that are no run's; give a new or an empty directory")
    return directory


def _set_aside(directory: pathlib.Path) -> None:
    """Renames an earlier run's directory to NAME.1, NAME.2, ...: a new run starts empty, and nothing is lost."""
    if not directory.exists() or not any(directory.iterdir()):
        return
    directory = directory.absolute()
    number = next(i for i in itertools.count(1) if not directory.with_name(f"{directory.name}.{i}").exists())
    directory.rename(directory.with_name(f"{directory.name}.{number}"))
    log.info("%s held a run; it is now %s.%d (to continue one: --config.resume=True)", directory, directory, number)


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
