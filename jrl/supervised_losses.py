"""The losses of the stages that learn from data as they stand; `jrl.losses` has RL's.

Columns of a microbatch, f32[d, N, t] each, are by token as there: `weight` is the share of a token, an answer or a pair in the
loss, `mask` tells which tokens carry loss. What belongs to a whole answer stands at one of its tokens and is 0 at the others, so
that its sum over the row is the number itself. Pairs lie side by side; `better` is 1 for the chosen answer.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.algorithms import preference
from jrl.algorithms.presets import PREFERENCE_LOSSES
from jrl.learner import Forward, Loss
from jrl.packing import Packed

Metrics = dict[str, jax.Array]


def _of_answers(packed: Packed) -> dict[str, jax.Array]:
    """Sums of the columns over each row, [d, N]."""
    return {name: jnp.sum(x, axis=-1) for name, x in packed.columns.items()}


def _pairs(better: jax.Array) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """From [d, N] to those of the chosen and of the rejected, [P] each."""
    is_first = better[:, 0::2] > better[:, 1::2]

    def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        first, second = x[:, 0::2], x[:, 1::2]
        return jnp.where(is_first, first, second).reshape(-1), jnp.where(is_first, second, first).reshape(-1)

    return split


def _mean(weight: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The mean under weights; where they are 0, anything may stand."""
    return lambda x: jnp.sum(weight * jnp.where(weight > 0, x, 0.0))


def sft_loss() -> Loss:
    """The mean of -logprob over the tokens that carry loss."""

    def loss(forward: Forward, params, packed: Packed) -> tuple[jax.Array, Metrics]:
        mean = _mean(packed.columns["weight"])
        logprobs, entropy, likeliest = forward.predictions(params, packed)
        total = mean(-logprobs)
        return total, {"loss": total, "accuracy": mean(likeliest), "entropy": mean(entropy)}

    return loss


def preference_loss(section) -> Loss:
    """A loss of `jrl.algorithms.preference` on pairs; `section` is config.dpo."""
    kind, fn = PREFERENCE_LOSSES[section.loss], getattr(preference, section.loss)
    options = {name: section[name] for name in kind.keys}

    def loss(forward: Forward, params, packed: Packed) -> tuple[jax.Array, Metrics]:
        c = _of_answers(packed)
        sums = jnp.sum(packed.columns["mask"] * forward.logprobs(params, packed)[0], axis=-1)
        tokens, pairs = jnp.maximum(c["mask"], 1.0), _pairs(c["better"])
        scale = tokens if kind.mean else 1.0
        arrays = [*pairs(sums / scale), *(pairs(c["ref_logprobs"] / scale) if kind.reference else ())]
        losses, chosen, rejected = fn(*arrays, **options)
        mean = _mean(pairs(c["weight"])[0])
        total = mean(losses)
        of_tokens = pairs(sums / tokens)
        return total, {
            "loss": total, **_compared(mean, chosen, rejected),
            "chosen_logprob": mean(of_tokens[0]), "rejected_logprob": mean(of_tokens[1]),
        }  # fmt: skip

    return loss


def _compared(mean: Callable, chosen: jax.Array, rejected: jax.Array) -> Metrics:
    """Accuracy, rewards and how far apart they are; equal rewards are half right."""
    right = (chosen > rejected) + 0.5 * (chosen == rejected)
    rewards = {"chosen_reward": mean(chosen), "rejected_reward": mean(rejected)}
    return {"accuracy": mean(right), "reward_margin": mean(chosen - rejected), **rewards}


def kto_loss(section) -> Loss:
    """KTO on single answers; `section` is config.dpo. The column `kl` is the z of `preference.kto`."""
    options = {name: section[name] for name in PREFERENCE_LOSSES["kto"].keys}

    def loss(forward: Forward, params, packed: Packed) -> tuple[jax.Array, Metrics]:
        c = {name: x.reshape(-1) for name, x in _of_answers(packed).items()}
        sums = jnp.sum(packed.columns["mask"] * forward.logprobs(params, packed)[0], axis=-1).reshape(-1)
        losses, rewards = preference.kto(sums, c["ref_logprobs"], c["label"], c["kl"], **options)
        mean = _mean(c["weight"])
        total = mean(losses)
        right = jnp.where(c["label"] > 0.5, rewards > 0, rewards < 0)
        return total, {"loss": total, "accuracy": mean(right), "kl": mean(c["kl"]), "reward": mean(rewards)}

    return loss


def reward_loss(section) -> Loss:
    """Bradley-Terry on the scores of pairs; `section` is config.reward_model."""

    def loss(forward: Forward, params, packed: Packed) -> tuple[jax.Array, Metrics]:
        c = _of_answers(packed)
        pairs = _pairs(c["better"])
        chosen, rejected = pairs(jnp.sum(packed.columns["mask"] * forward.values(params, packed), axis=-1))
        losses = preference.bradley_terry(chosen, rejected, pairs(c["margin"])[0], section.centre_coef)
        mean = _mean(pairs(c["weight"])[0])
        total = mean(losses)
        return total, {"loss": total, **_compared(mean, chosen, rejected)}

    return loss


def step_loss() -> Loss:
    """Cross-entropy of the scores of steps with their labels; weights are by step."""

    def loss(forward: Forward, params, packed: Packed) -> tuple[jax.Array, Metrics]:
        c = packed.columns
        scores, mean = forward.values(params, packed), _mean(c["weight"])
        total = mean(preference.step_cross_entropy(scores, c["label"]))
        right = (scores > 0) == (c["label"] > 0.5)
        return total, {"loss": total, "accuracy": mean(right), "score": mean(scores)}

    return loss
