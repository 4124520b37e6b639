"""The losses the learner is handed: algorithms (arrays in, arrays out) applied to what a model says of one microbatch.

Columns of a microbatch, f32[d, N, t] each: `weight`, the share of a token in the loss, and `share`, its share in token
means (both sum to at most 1 over the minibatch, 0 where there is no loss); `advantages`, `rollout_logprobs`, and where the
algorithm needs them `old_logprobs`, `ref_logprobs`, `old_values`, `returns`.
"""

import jax
import jax.numpy as jnp

from jrl.algorithms.kl import kl
from jrl.algorithms.policy_loss import ppo_clip
from jrl.algorithms.rollout_correction import truncated_importance_weights
from jrl.algorithms.value_loss import clipped_value_loss
from jrl.learner import Forward, Loss
from jrl.packing import Packed


def _rows(packed: Packed) -> dict[str, jax.Array]:
    """The columns as [d N, t]."""
    return {name: x.reshape(-1, x.shape[-1]) for name, x in packed.columns.items()}


def policy_loss(algorithm) -> Loss:
    """Clipped policy gradient, entropy bonus and KL penalty; `algorithm` is config.algorithm.

    With `rollout_is_cap` the policy gradient is weighted for the rollout's mismatch; what it reports besides are the mean
    weight and the share of truncated ones.

    Without the column `old_logprobs` the update is the only one on its samples, and the old logprobs are the current
    ones: the ratio is exactly 1 and no second pass is paid for.
    """

    def loss(forward: Forward, params, packed: Packed):
        c = _rows(packed)
        logprobs, entropy = (x.reshape(-1, x.shape[-1]) for x in forward.logprobs(params, packed))
        old = c["old_logprobs"] if "old_logprobs" in c else jax.lax.stop_gradient(logprobs)
        tokens, about = ppo_clip(
            logprobs, old, c["advantages"], algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip or None
        )
        share = c["share"]
        seen = share > 0
        mean = lambda x: jnp.sum(share * jnp.where(seen, x, 0.0))  # noqa: E731
        log_ratio, rollout = old - logprobs, c["rollout_logprobs"]
        metrics = {}
        if algorithm.rollout_is_cap:
            importance, truncated = truncated_importance_weights(old, rollout, algorithm.rollout_is_cap)
            tokens = tokens * importance
            metrics["rollout_corr/rollout_is_mean"] = mean(importance)
            metrics["rollout_corr/rollout_is_ratio_fraction_high"] = mean(truncated)
        total = jnp.sum(c["weight"] * tokens)
        metrics |= {
            "pg_loss": total,
            "entropy": mean(entropy),
            "pg_clipfrac": mean(about["clipped"]),
            "ppo_kl": mean(log_ratio),
            "ratio_deviation": mean(jnp.abs(about["ratio"] - 1)),
            "rollout_corr/logprob_abs_diff": mean(jnp.abs(old - rollout)),
            "rollout_corr/kl": mean(kl(rollout, old, "k3")),
        }
        if algorithm.entropy_coef:
            total -= algorithm.entropy_coef * jnp.sum(c["weight"] * entropy)
        if "ref_logprobs" in c:
            penalty = kl(logprobs, c["ref_logprobs"], algorithm.kl_estimator)
            metrics["kl_ref"] = mean(kl(logprobs, c["ref_logprobs"], "k3"))
            if algorithm.kl_in == "loss":
                metrics["kl_loss"] = jnp.sum(c["weight"] * penalty)
                total += algorithm.kl_coef * metrics["kl_loss"]
        return total, metrics

    return loss


def value_loss(critic) -> Loss:
    """Clipped squared error of the critic's values; `critic` is config.critic."""

    def loss(forward: Forward, params, packed: Packed):
        c = _rows(packed)
        values = forward.values(params, packed).reshape(-1, packed.tokens.shape[-1])
        tokens, clipped = clipped_value_loss(values, c["old_values"], c["returns"], critic.value_clip)
        total = jnp.sum(c["weight"] * tokens)
        return total, {"vf_loss": total, "vf_clipfrac": jnp.sum(c["share"] * clipped)}

    return loss
