"""The losses the learner is handed: algorithms (arrays in, arrays out) applied to what a model says of one microbatch.

Columns of a microbatch, f32[d, N, t] each: `weight`, the share of a token in the loss, and `share`, its share in token
means (both sum to at most 1 over the minibatch, 0 where there is no loss); `advantages`, `rollout_logprobs`. Where there is
use for them: `sequence_share`, the share in means over sequences; `old_logprobs`, `ref_logprobs`, `old_values`, `returns`;
`selected`, which tokens of the whole minibatch a loss has chosen; `kl_weight`, a weight times a KL coefficient that changes;
`lm_weight`, the share in the mean over tokens of positive examples. Responses are whole, so sums over a row are sums over a
response.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrl.algorithms.kl import kl
from jrl.algorithms.pieces import call, needs_old_logprobs, needs_selection, settings
from jrl.algorithms.policy_loss import ppo_clip
from jrl.algorithms.rollout_correction import mismatch, rejection_mask, truncated_importance_weights
from jrl.algorithms.value_loss import clipped_value_loss
from jrl.errors import UserError
from jrl.learner import Forward, Loss
from jrl.packing import Packed

REPORTED = {"clipped": "pg_clipfrac"}  # what a policy loss calls it -> the metric


def policy_columns(algorithm) -> tuple[str, ...]:
    """The columns of the policy's microbatches; `algorithm` is config.algorithm with every choice made."""
    a = algorithm
    there = {
        "share": True, "sequence_share": True, "weight": True, "advantages": True, "rollout_logprobs": True,
        "old_logprobs": needs_old_logprobs(a) or a.proximal == "rollout", "ref_logprobs": a.kl_in != "none",
        "selected": needs_selection(a), "kl_weight": a.kl_in == "loss" and a.kl_controller == "adaptive",
        "lm_weight": a.positive_lm_coef > 0,
    }  # fmt: skip
    return tuple(name for name, wanted in there.items() if wanted)


def _rows(packed: Packed) -> dict[str, jax.Array]:
    """The columns as [d N, t]."""
    return {name: x.reshape(-1, x.shape[-1]) for name, x in packed.columns.items()}


def _mean(share: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The mean under shares; where a share is 0, anything may stand, NaN included."""
    seen = share > 0
    return lambda x: jnp.sum(share * jnp.where(seen, x, 0.0))


def policy_loss(algorithm, fn: Callable = ppo_clip) -> Loss:
    """Policy gradient, entropy bonus, KL penalty and the language-model loss on positive examples.

    The policy gradient may be weighted for the rollout's mismatch, and tokens of too large a mismatch left out of it.
    Without the column `old_logprobs` the update is the only one on its samples, and the old logprobs are the current
    ones: the ratio is exactly 1 and no second pass is paid for.

    Args:
      algorithm: config.algorithm with every choice made.
      fn: of `jrl.algorithms.policy_loss`, or a user's.
    """
    chosen = settings(algorithm)

    def loss(forward: Forward, params, packed: Packed):
        c = _rows(packed)
        logprobs, entropy = (x.reshape(-1, x.shape[-1]) for x in forward.logprobs(params, packed))
        old = c["old_logprobs"] if "old_logprobs" in c else jax.lax.stop_gradient(logprobs)
        mask, mean = c["weight"] > 0, _mean(c["share"])
        arrays = c | {"logprobs": logprobs, "old_logprobs": old, "entropy": entropy, "mask": mask}
        tokens, about = _token_losses(fn, chosen | arrays)
        learner = jax.lax.stop_gradient(logprobs) if algorithm.proximal == "rollout" else old
        correction, metrics = _rollout_correction(algorithm, learner, c["rollout_logprobs"], mask, mean)
        total = jnp.sum(c["weight"] * (tokens if correction is None else tokens * correction))
        metrics |= {"pg_loss": total, "entropy": mean(entropy), "ppo_kl": mean(old - logprobs)}
        metrics |= {REPORTED.get(name, name): mean(x) for name, x in about.items() if name != "ratio"}
        metrics["ratio_deviation"] = mean(jnp.abs(about["ratio"] - 1)) if "ratio" in about else jnp.float32(0)
        metrics |= _mismatch_metrics(learner, c, mask, mean)
        if algorithm.entropy_coef:
            total -= algorithm.entropy_coef * jnp.sum(c["weight"] * entropy)
        if "ref_logprobs" in c:
            penalty = kl(logprobs, c["ref_logprobs"], algorithm.kl_estimator)
            metrics["kl_ref"] = mean(kl(logprobs, c["ref_logprobs"], "k3"))
            if algorithm.kl_in == "loss":
                metrics["kl_loss"] = jnp.sum(c["weight"] * penalty)
                adaptive = "kl_weight" in c
                total += jnp.sum(c["kl_weight"] * penalty) if adaptive else algorithm.kl_coef * metrics["kl_loss"]
        if "lm_weight" in c:
            metrics["positive_lm_loss"] = -jnp.sum(c["lm_weight"] * logprobs)
            total += algorithm.positive_lm_coef * metrics["positive_lm_loss"]
        return total, metrics

    return loss


def _token_losses(fn: Callable, arrays: dict) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What the policy loss makes of each token, and what it reports."""
    result = call(fn, arrays)
    tokens, about = result if isinstance(result, tuple) else (result, {})
    if jnp.shape(tokens) != arrays["logprobs"].shape:
        name, shape = getattr(fn, "__name__", "the policy loss"), jnp.shape(tokens)
        raise UserError(f"{name} returns shape {shape}; return one loss for each token, [N, T]")
    return tokens, about


def _rollout_correction(algorithm, old, rollout, mask, mean) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """The factor of each token's loss, None for 1, and what there is to report of it."""
    factor, metrics = None, {}
    if algorithm.rollout_is_cap:
        factor, truncated = truncated_importance_weights(old, rollout, algorithm.rollout_is_cap, algorithm.rollout_is, mask)
        metrics["rollout_corr/rollout_is_mean"] = mean(factor)
        metrics["rollout_corr/rollout_is_ratio_fraction_high"] = mean(truncated)
        metrics["rollout_corr/rollout_is_eff_sample_size"] = mean(jnp.square(factor))  # of the squares; see `finish`
    if algorithm.rollout_rs != "none":
        bounds = algorithm.rollout_rs_low, algorithm.rollout_rs_high
        keep = rejection_mask(old, rollout, algorithm.rollout_rs, *bounds, mask).astype(jnp.float32)
        factor = keep if factor is None else factor * keep
        metrics["rollout_corr/rollout_rs_masked_fraction"] = mean(1 - keep)
    return factor, metrics


def _mismatch_metrics(old, c: dict[str, jax.Array], mask, mean) -> dict[str, jax.Array]:
    by_token, by_sequence = mismatch(old, c["rollout_logprobs"], mask)
    metrics = {f"rollout_corr/{name}": mean(x) for name, x in by_token.items()}
    if "sequence_share" in c:
        sequences = _mean(c["sequence_share"])
        metrics |= {f"rollout_corr/{name}": sequences(x) for name, x in by_sequence.items()}
    return metrics


def finish(metrics: dict[str, float]) -> dict[str, float]:
    """An update's metrics, after the sums over its microbatches, with those that are no sums.

    The effective sample size, as a share of the tokens, is (mean w)^2 / mean w^2.
    """
    name = "rollout_corr/rollout_is_eff_sample_size"
    if name not in metrics:
        return metrics
    first, second = metrics["rollout_corr/rollout_is_mean"], metrics[name]
    return metrics | {name: first**2 / second if second > 0 else 0.0}


def value_loss(critic) -> Loss:
    """Clipped squared error of the critic's values; `critic` is config.critic."""

    def loss(forward: Forward, params, packed: Packed):
        c = _rows(packed)
        values = forward.values(params, packed).reshape(-1, packed.tokens.shape[-1])
        tokens, clipped = clipped_value_loss(values, c["old_values"], c["returns"], critic.value_clip)
        total = jnp.sum(c["weight"] * tokens)
        return total, {"vf_loss": total, "vf_clipfrac": jnp.sum(c["share"] * clipped)}

    return loss
