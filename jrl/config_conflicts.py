"""Keys whose values are fine one by one and do not go together."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from jrl.algorithms.presets import ADVANTAGES, FILTERS, LINEAR, PREFERENCE_LOSSES
from jrl.config_keys import KEYS
from jrl.sharding.memory_kinds import DEVICE

STAGES = ("sft", "dpo", "reward_model")  # that have a section of their own
ROWS = ("data.examples_per_step", "data.max_tokens")  # of all stages but rl
# Keys that one of the functions in reward.functions reads alone, by how they begin.
OF_REWARDS = {
    "regex": ("reward.pattern",), "length_penalty": ("reward.length_",), "python_tests": ("reward.sandbox.",),
    "remote": ("reward.remote.",), "judge": ("reward.judge.",), "reward_model": ("reward.model.", "reward.mesh."),
}  # fmt: skip
ALONE = "algorithm.name=ppo, remax or reinforce_plus_plus"  # what can learn from one sample a prompt


def conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    """Keys whose values do not go together with others', and what to do."""
    if c.resume_step >= 0 and not c.resume:
        yield "resume_step", "is of a run that goes on; give resume=True, or -1"
    yield from _stage_conflicts(c)
    yield from _data_conflicts(c)
    yield from _evaluation_conflicts(c)
    if c.stage == "rl":
        yield from _rl_conflicts(c)
    yield from _mesh_conflicts(c, ("learner", "rollout", "critic", "reference", "reward") if c.stage == "rl" else ("learner",))


def _changed(c: ConfigDict, *beginnings: str) -> Iterator[tuple[str, Any]]:
    """Keys that begin so and are not at their default, with their values."""
    for name, key in KEYS.items():
        value = functools.reduce(getattr, name.split("."), c)
        if name.startswith(beginnings) and (value.to_dict() if isinstance(value, ConfigDict) else value) != key.default:
            yield name, value


def _stage_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    """Keys of a stage are for it alone, and of preference losses for those that read them."""
    for stage in STAGES:
        for name, _ in _changed(c, f"{stage}.") if c.stage != stage else ():
            yield name, f"has no effect with stage={c.stage}; leave it out, or give stage={stage}"
    readers = {name: [loss for loss, p in PREFERENCE_LOSSES.items() if name in p.keys] for name in c.dpo if name != "loss"}
    for name, losses in readers.items():
        if c.dpo.loss not in losses and c.dpo[name] != KEYS[f"dpo.{name}"].default:
            yield f"dpo.{name}", f"dpo.loss={c.dpo.loss} does not read it; leave it out, or give dpo.loss={' or '.join(losses)}"
    if c.reward_model.of == "steps" and c.reward_model.centre_coef:
        yield "reward_model.centre_coef", "scores of steps are probabilities of being right, and need no centre; give 0"
    if c.stage == "rl":
        for name, _ in _changed(c, *ROWS):
            meant = "rollout.prompts_per_step" if name == ROWS[0] else "data.max_prompt_tokens and rollout.max_new_tokens"
            yield name, f"has no effect with stage=rl; give {meant}"
        return
    for name, _ in _changed(c, "reference."):
        yield name, f"stage={c.stage} keeps no reference: dpo asks the initial weights once, on learner.mesh; leave it out"
    for name, _ in _changed(
        c, "agents.", "max_staleness", "pools.", "critic.optimizer_memory", *itertools.chain(*OF_REWARDS.values())
    ):
        yield name, f"has no effect with stage={c.stage}; leave it out, or give stage=rl"


def _data_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    d = c.data
    for kind in ("train", "eval"):
        if d[kind].startswith("reasoning_gym:") and not d[f"{kind}_size"]:
            yield f"data.{kind}_size", f"data.{kind}={d[kind]} makes as many problems as it is told; give a number"
    if c.stage != "rl" and d.repeats:
        yield "data.repeats", f"stage={c.stage} reads each row once; give False"
    if c.stage != "rl" and c.plan == "auto":
        yield "plan", f"stage={c.stage} has one mesh, which is not chosen by itself; give as_configured and learner.mesh"


def _rl_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    r, a, d = c.rollout, c.algorithm, c.data
    yield from _algorithm_conflicts(c)
    yield from _reward_conflicts(c)
    yield from _agent_conflicts(c)
    yield from _async_conflicts(c)
    if r.kv == "int8" and r.attention in ("tpu", "gpu", "cpu"):
        yield "rollout.kv", f"the {r.attention} kernel reads the compute_dtype; give rollout.attention=auto or xla, or kv=same"
    for name in ("weights", "kv"):
        if r[name] == "int8" and not a.rollout_is_cap and a.proximal == "learner":
            yield f"rollout.{name}", f"its samples are of a rounded policy; give algorithm.rollout_is_cap=2.0, or {name}=same"
    pages = -(-(d.max_prompt_tokens + r.max_new_tokens - 1) // r.page_size) + 1  # the last token is never fed; the null page
    if 0 < r.num_pages < pages:
        yield (
            "rollout.num_pages",
            f"the longest sequence (data.max_prompt_tokens + rollout.max_new_tokens) needs {pages}; give as many, or 0",
        )


def _async_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    advantage = ADVANTAGES.get(c.algorithm.advantage)
    used = {
        "critic": not advantage or advantage.critic, "reference": c.algorithm.kl_in != "none",
        "reward": bool(c.reward.model.path), "rollout": True,
    }  # fmt: skip
    for name, there in used.items():
        if c.pools[name] and not there:
            yield f"pools.{name}", "the run has no such model; give 0"
    if c.plan == "auto" and c.rollout.workers:
        yield "plan", "rollout.workers have devices that it knows nothing of; set learner.mesh, and leave plan out"
    if c.plan == "auto" and any(c.pools.values()):
        yield "plan", "chooses meshes over all devices; give as_configured, or no pools"
    r = c.rollout
    for name in (n for n in ("worker_cpus", "worker_gpus", "worker_restarts") if not r.workers):
        if r[name] != KEYS[f"rollout.{name}"].default:
            yield f"rollout.{name}", "there are no workers; give rollout.workers, or leave it out"
    if r.workers and not c.max_staleness:
        yield "rollout.workers", "they generate ahead of learning; give max_staleness=1 or more, or 0"
    if r.workers and c.pools.rollout:
        yield "pools.rollout", "generation has processes of its own with rollout.workers; give 0"
    if r.workers and r.weights == "int8":
        yield "rollout.weights", "workers are sent weights in compute_dtype; give same, or rollout.workers=0"
    if not c.max_staleness:
        return
    if c.agents.turns:
        yield "max_staleness", "agents generate in turn; give 0"
    if c.algorithm.resample != "none" or c.algorithm.replay_steps:
        yield "max_staleness", "resample and replay_steps choose what is trained on by themselves; give 0, or leave them out"


def _algorithm_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    r, a, advantage = c.rollout, c.algorithm, ADVANTAGES.get(c.algorithm.advantage)
    if advantage and advantage.group and r.group_size < 2:
        yield "rollout.group_size", f"advantage={a.advantage} compares the samples of a prompt; give at least 2, or {ALONE}"
    kept = FILTERS.get(a.filter)
    if a.dynamic_sampling and kept and kept.group and r.group_size < 2:
        yield "rollout.group_size", "dynamic sampling looks for groups of different rewards; give at least 2"
    if r.prompts_per_step % a.minibatches:
        yield (
            "algorithm.minibatches",
            f"must divide rollout.prompts_per_step={r.prompts_per_step}, as a minibatch holds whole groups",
        )
    if advantage and advantage.critic and c.critic.policy_delay_steps >= c.steps:
        yield "critic.policy_delay_steps", f"the policy would never learn in steps={c.steps}; give less"
    if c.critic.head != LINEAR and advantage and not advantage.critic:
        yield "critic.head", f"there is no critic with advantage={a.advantage}; give linear, or algorithm.name=ppo"
    if a.cov_low >= a.cov_high:
        yield "algorithm.cov_low", f"no covariance lies between it and cov_high={a.cov_high}; give less"
    yield from _kl_conflicts(c)
    yield from _rollout_correction_conflicts(c)


def _reward_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    named = [item.partition("*")[0].strip() for item in c.reward.functions.split(",")]
    for function, beginnings in OF_REWARDS.items():
        for name, _ in _changed(c, *beginnings) if function not in named else ():
            yield name, f"{function} alone reads it; leave it out, or name {function} in reward.functions={c.reward.functions}"
    for function, key, value, what in (
        ("reward_model", "reward.model.path", c.reward.model.path, "its directory"),
        ("judge", "reward.judge.url", c.reward.judge.url, "the address of its server"),
        ("judge", "reward.judge.model", c.reward.judge.model, "the model's name at reward.judge.url"),
    ):
        if function in named and not value:
            yield key, f"reward.functions names {function}; give {what}"
    if c.reward.length_free >= c.reward.length_full:
        yield "reward.length_full", f"must be more than reward.length_free={c.reward.length_free}"


def _agent_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    a, advantage = c.algorithm, ADVANTAGES.get(c.algorithm.advantage)
    if not c.agents.turns:
        if c.agents.options:
            yield "agents.options", "there are no agents; give agents.turns, or {}"
        return
    if advantage and not advantage.critic:
        yield "algorithm.advantage", "several agents learn by critics of their own; give algorithm.name=ppo or vapo"
    for name, off in (("dynamic_sampling", False), ("resample", "none"), ("replay_steps", 0)):
        if a[name] != off:
            yield f"algorithm.{name}", f"an episode has sequences of several agents, which stay together; give {off}"
    if c.checkpoint.best:
        yield "checkpoint.best", "several agents are not best at the same step; give False"
    if c.plan == "auto":
        yield "plan", "each agent would be given all devices; give as_configured"


def _kl_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    a = c.algorithm
    if a.kl_in != "none" and not a.kl_coef:
        yield "algorithm.kl_coef", f"algorithm.kl_in={a.kl_in} needs a positive weight; give one, or kl_in=none"
    if a.kl_in == "none" and a.kl_coef:
        yield "algorithm.kl_coef", "has no effect with algorithm.kl_in=none; give kl_in=loss or reward, or kl_coef=0"
    if a.kl_in == "loss" and a.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator",
            "its gradient in the loss has mean 0, so it is only noise; give k1+, k2 or k3, or kl_in=reward",
        )
    if a.kl_in == "reward" and a.kl_estimator.endswith("+"):
        yield "algorithm.kl_estimator", "no gradient flows through the reward; leave out the plus, or give kl_in=loss"
    if a.kl_in == "reward" and a.advantage == "gdpo":
        yield "algorithm.kl_in", "gdpo puts every reward on one scale, and a KL in it of any size too; give kl_in=loss"
    if a.kl_in == "none" and a.kl_controller != "fixed":
        yield "algorithm.kl_controller", "there is no KL to control; give kl_in=loss or reward, or kl_controller=fixed"
    if a.kl_in == "none" and c.reference.refresh_steps:
        yield "reference.refresh_steps", "there is no reference with algorithm.kl_in=none; give kl_in=loss or reward, or 0"
    if a.kl_in == "none" and c.reference.memory != DEVICE:
        yield "reference.memory", f"there is no reference with algorithm.kl_in=none; give kl_in=loss or reward, or {DEVICE}"


def _rollout_correction_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    a = c.algorithm
    if a.proximal == "rollout":
        for name, off in (("rollout_is_cap", 0), ("rollout_rs", "none")):
            if a[name] != off:
                yield f"algorithm.{name}", f"with proximal=rollout the ratio is to the rollout already; give {off}"
    if a.rollout_is != "token" and not a.rollout_is_cap:
        yield "algorithm.rollout_is", "has no effect with algorithm.rollout_is_cap=0; give a cap such as 2.0, or token"
    if a.replay_steps and not a.rollout_is_cap and a.proximal == "learner":
        yield (
            "algorithm.replay_steps",
            "its samples are of former policies; give algorithm.rollout_is_cap=2.0, or proximal=rollout, or 0",
        )


def _evaluation_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    evals, saves = c.eval.every_steps, c.checkpoint.every_steps
    if not c.data.eval and not c.data.eval_size:
        for name, asked, off in (("eval.every_steps", evals, 0), ("checkpoint.best", c.checkpoint.best, False)):
            if asked:
                yield name, f"nothing is held out to evaluate on; give data.eval or data.eval_size, or {name}={off}"
    if c.checkpoint.best and not saves:
        yield "checkpoint.best", "the last checkpoint is the only one; give checkpoint.every_steps, or checkpoint.best=False"
    # A checkpoint can be the best only if the very weights in it were evaluated.
    if c.checkpoint.best and (not evals or saves % evals):
        yield (
            "checkpoint.best",
            f"eval.every_steps={evals} does not evaluate what is saved every {saves} steps; give a divisor of {saves}",
        )


def _mesh_conflicts(c: ConfigDict, sections: Sequence[str]) -> Iterator[tuple[str, str]]:
    products: dict[str, int] = {}  # of those that share the learner's devices
    for section in sections:
        sizes = c[section].mesh.to_dict()
        free, zero = ([axis for axis, size in sizes.items() if size == n] for n in (-1, 0))
        if len(free) > 1:
            yield f"{section}.mesh.{free[1]}", f"mesh.{free[0]} is -1 too; give one of them a size"
        if zero and len(zero) < len(sizes):
            yield f"{section}.mesh.{zero[0]}", "0 stands for the learner's mesh and then in every axis; give 1 or more"
        if not free and not zero and not c.pools.get(section, 0):
            products[section] = math.prod(sizes.values())
    for section, product in products.items():
        first, expected = next(iter(products.items()))
        if product != expected:
            axis, _ = max(c[section].mesh.to_dict().items(), key=lambda item: item[1])
            yield (
                f"{section}.mesh.{axis}",
                f"{section}.mesh has {product} devices, {first}.mesh {expected}; both use the same devices, make them equal",
            )
