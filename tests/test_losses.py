"""The loss of every kind through the real learner: its gradient does not depend on how the minibatch was split."""

import functools

import jax
import numpy as np
import pytest

from jrl.algorithms.aggregation import weights
from jrl.algorithms.pieces import call, settings
from jrl.algorithms.presets import POLICY_LOSSES, preset
from jrl.config import choose_pieces, default_config, with_preset
from jrl.losses import finish, policy_loss
from jrl.types import Completion, make_rollout
from tests.learners import assert_same_update, make_learner, make_params

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 260, n).astype(np.int32) for n in (5, 9)]


@functools.cache
def data():
    """Ten responses of 3 to 25 tokens to two prompts, and columns as a stale rollout of another policy would give them."""
    completions = []
    for prompt in range(2):
        for sample in range(5):
            n = 3 + 5 * sample - 2 * prompt * (sample > 0)
            tokens, logprobs = RNG.integers(3, 260, n).astype(np.int32), np.zeros(n, np.float32)
            completions.append(Completion(prompt, sample, tokens, logprobs, logprobs, np.zeros(n, np.int32), "eos"))
    rollout = make_rollout(PROMPTS, completions)
    old = make_learner(remat="none").run("logprobs", make_params(), rollout)[0]
    mask = rollout.loss_mask
    shifted = lambda by: np.where(mask, old + RNG.normal(0, by, old.shape), 0).astype(np.float32)  # noqa: E731
    rewards = RNG.normal(size=10).astype(np.float32)
    return rollout, {
        "old_logprobs": shifted(0.2), "rollout_logprobs": shifted(0.3), "ref_logprobs": shifted(0.5),
        "advantages": np.where(mask, rewards[:, None] + RNG.normal(0, 0.1, mask.shape), 0).astype(np.float32),
    }  # fmt: skip


def preset_of(loss, **changes):
    config = default_config()
    config.algorithm.update({"policy_loss": loss, "aggregation": "seq-mean-token-mean"} | changes if loss != "grpo" else changes)
    return config


def learner_of(config, microbatch_tokens=4096):
    loss = policy_loss(with_preset(config).algorithm, choose_pieces(config).policy_loss)
    return make_learner(remat="none", microbatch_tokens=microbatch_tokens, loss=loss)


def columns(config):
    rollout, given = data()
    algorithm, mask = with_preset(config).algorithm, rollout.loss_mask
    out = given | {"weight": np.asarray(weights(mask, algorithm.aggregation, max_length=32)), "share": mask / mask.sum()}
    out["sequence_share"] = np.asarray(weights(mask, "seq-mean-token-mean"))
    if algorithm.kl_in == "none":
        out.pop("ref_logprobs")
    if algorithm.positive_lm_coef:
        positive = mask & (np.arange(10) % 3 == 0)[:, None]
        out["lm_weight"] = positive / positive.sum()
    if algorithm.kl_controller == "adaptive":
        out["kl_weight"] = out["weight"] * np.float32(0.2)
    if prepare := choose_pieces(config).prepare:
        arrays = settings(algorithm) | out | {"mask": mask, "key": jax.random.key(0)}
        out["selected"] = np.asarray(call(prepare, arrays), np.float32)
    return rollout, {name: np.asarray(x, np.float32) for name, x in out.items()}


def update(config, microbatch_tokens):
    rollout, given = columns(config)
    learner = learner_of(config, microbatch_tokens)
    state, metrics = learner.update(learner.init_state(make_params()), rollout, given, np.arange(len(rollout)))
    return (state, finish(metrics)), learner


COV = {"cov_fraction": 0.2, "cov_low": -9.0, "cov_high": 9.0}
KL = {"kl_in": "loss", "kl_coef": 0.3, "kl_estimator": "k3+", "entropy_coef": 0.01}
CASES = {
    "gspo": ("gspo", KL | {"clip_low": 0.2}), "gmpo": ("gmpo", {}), "cispo": ("cispo", {"positive_lm_coef": 0.1}),
    "sapo": ("sapo", KL | {"kl_controller": "adaptive"}), "reinforce": ("reinforce", {"aggregation": "seq-mean-token-sum"}),
    "clip_cov": ("clip_cov", COV), "kl_cov": ("kl_cov", {"cov_fraction": 0.2}),
    "sequence correction": (
        "ppo",
        {"rollout_is_cap": 1.5, "rollout_is": "sequence", "rollout_rs": "geometric", "aggregation": "seq-mean-token-sum-norm"},
    ),
    "geometric correction": ("ppo", {"rollout_is_cap": 1.1, "rollout_is": "geometric", "aggregation": "token-mean"}),
}  # fmt: skip
BY_DEFAULT = ("sequence correction",)


@pytest.mark.parametrize("name", [x if x in BY_DEFAULT else pytest.param(x, marks=pytest.mark.slow) for x in CASES])
def test_the_gradient_does_not_depend_on_the_microbatches(name):
    loss, changes = CASES[name]
    config = preset_of(loss, **changes)
    (whole, one), (parts, many) = update(config, 4096), update(config, 80)
    assert (one.compiled and many.compiled) and whole[1]["grad_norm"] > 1e-4
    assert_same_update(whole, parts, rtol=1e-5)
    for metric, value in whole[1].items():
        assert parts[1][metric] == pytest.approx(value, rel=2e-4, abs=1e-6), metric
    if name == "gspo":  # the negative control: a split whose parts are averaged, as if each had its own denominators
        rollout, given = columns(config)
        learner = learner_of(config)
        halves = [learner.update(learner.init_state(make_params()), rollout, own(given, rows), rows)[1] for rows in SPLIT]
        assert np.mean([m["pg_loss"] for m in halves]) != pytest.approx(whole[1]["pg_loss"], rel=1e-3)


SPLIT = np.split(np.random.default_rng(1).permutation(10), [3])


def own(given, rows):
    """Weights by the denominators of some rows alone."""
    mask = np.zeros_like(data()[0].loss_mask)
    mask[rows] = data()[0].loss_mask[rows]
    return given | {"weight": np.asarray(weights(mask, "token-mean"))}


def test_every_loss_is_tried_here_or_among_the_invariants():
    assert {loss for loss, _ in CASES.values()} == set(POLICY_LOSSES) and preset("grpo")["policy_loss"] == "ppo"
