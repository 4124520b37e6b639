"""Training on data as they stand: supervised fine-tuning, preferences and reward models, one loop for all.

    rows -> sequences -> columns -> update -> (again)

What differs between these stages is in `jrl.stages`; what a run writes and saves is in `jrl.run`.
"""

import copy
import dataclasses
import logging
import pathlib
from typing import Any

import jax
import numpy as np

from jrl import config as config_lib
from jrl import platform
from jrl.algorithms.preference import mismatch_kl
from jrl.build import check_memories, make_layout
from jrl.data import PromptStream
from jrl.data.chats import Item, Renderer, assemble, fitting
from jrl.data.records import Columns, load_records
from jrl.data.sources import is_gym
from jrl.errors import UserError
from jrl.learner import Forward, Learner, make_optimizer
from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.hf import save_hf
from jrl.models.load import OpenModel, open_model
from jrl.plan.auto import refuse_what_cannot_fit
from jrl.plan.supervised import make_stage_plan
from jrl.run import Interrupted, Run, check_outputs
from jrl.sharding.layout import Layout
from jrl.sharding.reshard import reshard
from jrl.stages import Arrays, Known, Stage, stage_of
from jrl.types import Sequences, take
from jrl.utilization import max_memory_gb

log = logging.getLogger("jrl")

CONSOLE = (
    ("loss", 8, ("train/loss",), ".4f"),
    ("accuracy", 8, ("train/accuracy",), ".3f"),
    ("grad norm", 9, ("train/grad_norm",), ".2e"),
    ("tokens/s", 8, ("perf/throughput",), ",.0f"),
)


@dataclasses.dataclass
class Parts:
    """The components of a run."""

    arch: Arch
    tokenizer: Any
    eos_ids: tuple[int, ...]
    train_items: list[Item]
    eval_items: list[Item]
    width: int  # tokens of the longest sequence
    stream: PromptStream[Item]
    learner: Learner
    initial_params: Any  # on the learner's mesh; dropped once the state is made


class SupervisedTrainer:
    """Trains a model as the stage of a config says; `SupervisedTrainer(config).train()` is what `python -m jrl.main` runs.

    Args:
      config: from `jrl.config.load` or a config file's `get_config`, with `config.stage` other than "rl".
      train_data, eval_data: a `datasets.Dataset` or a list of rows in place of `config.data.train` and `.eval`.

    Raises:
      UserError: a config or a row that cannot be used, before any device work.
    """

    def __init__(self, config, *, train_data: Any = None, eval_data: Any = None):
        config = config_lib.with_python_data(config, train_data is not None, eval_data is not None)
        config_lib.validate(config)
        if config.stage == "rl":
            raise UserError("config.stage='rl': SupervisedTrainer runs the other stages; use jrl.Trainer, or the command line")
        self.config, self.stage = config, stage_of(config)
        check_outputs(config)  # a mistake there should not wait for the model
        self.parts = build(config, self.stage, train_data, eval_data)
        self.run = SupervisedRun(config, self.stage, self.parts)
        self.ref_logprobs: dict[str, np.ndarray] = {}  # uid -> f32 of each of the item's sequences

    def train(self) -> dict[str, Any]:
        """Takes the steps that are left, and returns the summary that the command line prints."""
        config, run, p = self.config, self.run, self.parts
        with run:  # SIGTERM and Ctrl-C raise Interrupted at the next safe point
            if self.stage.reference:
                self.ref_logprobs = self.reference(p.train_items) | self.reference(p.eval_items)
            states = run.restore()  # {"policy": TrainState}, as saved or fresh
            evaluate = lambda: self.evaluate(states)  # noqa: E731
            try:
                if config.eval.at_start and not run.before:
                    run.before = evaluate()
                for step in run.steps(states, evaluate):
                    sequences, columns, rows = self.batch(p.stream.next(), states["policy"].params)
                    with run.timers("update"):
                        states["policy"], metrics = p.learner.update(states["policy"], sequences, columns, rows)
                    run.finish_step(step, sequences, metrics)
                return run.finish(states, evaluate)
            except Interrupted as why:
                return run.leave(states, why)

    def batch(self, items: list[Item], params: Any) -> tuple[Sequences, Arrays, np.ndarray]:
        """The sequences of a step, what the loss reads beside them, and which of them carry loss."""
        stage, sequences = self.stage, assemble(items, self.parts.width)
        rows = stage.rows(sequences)
        if not stage.reference:
            return sequences, stage.columns(sequences, items, Known()), rows
        reference, kl = np.concatenate([self.ref_logprobs[item.uid] for item in items]), 0.0
        others = np.setdiff1d(np.arange(len(sequences)), rows)
        if len(others):  # answers to prompts that are not theirs
            with self.run.timers("kl"):
                kl = float(mismatch_kl(self.logprobs(params, take(sequences, others)), reference[others]))
        return sequences, stage.columns(sequences, items, Known(reference, kl)), rows

    def reference(self, items: list[Item]) -> dict[str, np.ndarray]:
        """uid -> log-probabilities of an item's sequences under the weights that training starts from.

        Made in the order of the data, so that a resumed run has the very numbers of the unbroken one.
        """
        found, size = {}, self.config.data.examples_per_step
        for i in range(0, len(items), size):
            part = items[i : i + size]
            sums = self.logprobs(self.parts.initial_params, assemble(part, self.parts.width))
            found |= zip((item.uid for item in part), sums.reshape(len(part), -1), strict=True)
        return found

    def logprobs(self, params: Any, sequences: Sequences) -> np.ndarray:
        """f32[N], summed over the tokens that carry loss."""
        return np.sum(self.parts.learner.run("logprobs", params, sequences)[0], axis=1, where=sequences.loss_mask)

    def evaluate(self, states: dict[str, Any]) -> dict[str, float]:
        """The loss's metrics of the held-out rows; nothing without such."""
        p = self.parts
        if not p.eval_items:
            return {}
        with self.run.timers("testing"):
            params = states["policy"].params
            result = p.learner.measure(params, *self.batch(p.eval_items, params))
        return self.run.log_eval(result)


class SupervisedRun(Run):
    """See `Run`."""

    def __init__(self, config, stage: Stage, parts: Parts):
        self.stage, self.parts = stage, parts
        super().__init__(config, {"policy": parts.learner}, parts.stream, CONSOLE)

    def fresh_states(self) -> dict[str, Any]:
        return {"policy": self.parts.learner.init_state(self.parts.initial_params)}

    def restore(self, step: int | None = None) -> dict[str, Any]:
        states = super().restore(step)
        self.parts.initial_params = None
        return states

    def finish_step(self, step: int, sequences: Sequences, update: dict[str, float]) -> None:
        """Writes the step's metrics, and counts it as done."""
        metrics = {f"train/{name}": value for name, value in update.items()}
        metrics |= self.step_times(int(sequences.lens.sum()))
        metrics["perf/max_memory_allocated_gb"] = max_memory_gb(jax.local_devices())
        metrics["perf/compiled_programs"] = len(self.parts.learner.compiled)
        self.write_step(step, metrics)
        self.commit()

    def log_eval(self, result: dict[str, float]) -> dict[str, float]:
        """Writes and returns the metrics of the held-out rows."""
        c = self.config
        return self.write_eval(result, {f"val-core/{c.data.eval or c.data.train}/{c.stage}/{k}": v for k, v in result.items()})

    def score(self, evaluation: dict[str, float]) -> float | None:
        name, sign = self.stage.best
        return sign * evaluation[name] if name in evaluation else None

    def export(self, directory: pathlib.Path, states: dict[str, Any]) -> None:
        p, c, tokenizer = self.parts, self.config, self.parts.tokenizer
        if not self.stage.has_head and not c.data.use_chat_template:  # what scores is to read conversations as it does here
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = None
        save_hf(directory, p.arch, states["policy"].params, tokenizer, p.eos_ids, of_steps=c.reward_model.of == "steps")

    def summary(self, after: dict[str, float]) -> dict[str, Any]:
        names = ("loss", "accuracy")
        return {
            "task": self.config.data.train,
            "stage": self.config.stage,
            **{f"{name}_{when}": m.get(name) for name in names for when, m in (("before", self.before), ("after", after))},
            "steps": self.step,
            "seconds": round(self.elapsed, 1),
        }


# Putting a run together ------------------------------------------------------------------------------------------------


def build(config, stage: Stage, train_data: Any = None, eval_data: Any = None) -> Parts:
    """Everything the trainer needs; errors in the data or the mesh come before any weight is loaded."""
    layout = make_layout(config, "learner")
    check_memories(config, {"learner": layout})
    found = open_model(config.model.path)
    plan = make_stage_plan(config, found.arch, len(jax.devices()))  # for its errors, before any row is read
    refuse_what_cannot_fit(plan, found.arch, jax.devices())
    train, held_out = load_items(config, stage, found, train_data, eval_data)
    width = max(len(s.tokens) for item in train + held_out for s in item.sequences)
    stream = PromptStream(train, config.data.examples_per_step, config.seed, "data.examples_per_step")
    if found.scores and stage.has_head:
        raise UserError(f"config.model.path={config.model.path}: is a reward model, which writes no text; give a language model")
    params = found.load(layout, config.seed).params
    platform.configure()  # only now: what loading leaves behind goes back to the system
    learner = make_learner(config, stage, found.arch, layout)
    if not stage.has_head and not found.scores:
        params = reshard(decoder.critic_from_policy(found.arch, params, bias=False), learner.param_shardings)
    return Parts(found.arch, found.tokenizer, found.eos_ids, train, held_out, width, stream, learner, params)


def load_items(config, stage: Stage, model: OpenModel, train_data: Any, eval_data: Any) -> tuple[list[Item], list[Item]]:
    """Training and held-out rows as tokens; says how many, on stderr."""
    d = config.data
    train = d.train if train_data is None else train_data
    prompt, answer = ("question", "answer") if is_gym(train) else (d.prompt_key, d.answer_key)
    records = load_records(
        train, d.eval if eval_data is None else eval_data, stage.read(Columns(prompt, answer, d.prompt_suffix)),
        train_size=d.train_size, eval_size=d.eval_size, seed=config.seed, options=d.options.to_dict(),
    )  # fmt: skip
    renderer = Renderer.make(model.tokenizer, model.eos_ids, d.system_prompt, d.use_chat_template)
    splits = []
    for rows in map(stage.couple, records):
        items = [stage.encode(record, renderer) for record in rows]
        splits.append(fitting(items, rows, d.max_tokens, d.on_long))
    train_rows, eval_rows = map(len, splits)
    dropped = sum(map(len, records)) - train_rows - eval_rows
    log.info("data: %d training rows, %d held out, %d dropped as too long", train_rows, eval_rows, dropped)
    return splits[0], splits[1]


def make_learner(config, stage: Stage, arch: Arch, layout: Layout) -> Learner:
    c = config.learner
    dtype = platform.compute_dtype(config.model.compute_dtype, layout.mesh.devices.flat[0].platform)
    forward = Forward(arch, layout, dtype, c.remat, 1.0, c.logit_chunk)
    return Learner(
        "policy", forward, layout, stage.model, c.microbatch_tokens, stage.loss, *make_optimizer(c, config.steps),
        packing=stage.packing, optimizer_memory=c.optimizer_memory,
    )  # fmt: skip
