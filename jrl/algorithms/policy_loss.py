"""Policy losses, token by token; `jrl.algorithms.aggregation` makes one number of them.

All arrays are [N, T], indexed by token. In every loss

    r = exp(logprobs - old_logprobs), the exponent clamped to +-20

is the ratio of the policy being updated to the one before the updates on these samples. Gradients flow to `logprobs` alone.
Each function returns the loss f32[N, T] and what there is to report, f32[N, T] each: "ratio", and "clipped", 1 where a bound
holds. Losses over whole sequences need every token of a row in the array, and give each token a part of its row's loss, so
that aggregating with seq-mean-token-mean gives the mean over the sequences.

The functions that `jrl.algorithms.presets.POLICY_LOSSES` names take their arguments by name (`jrl.algorithms.pieces`).
"""

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_shapes
from jrl.algorithms.kl import LOG_RATIO_LIMIT

Loss = tuple[jax.Array, dict[str, jax.Array]]


def _constant(x: Array) -> jax.Array:
    return jax.lax.stop_gradient(jnp.asarray(x, jnp.float32))


def _log_ratio(logprobs: Array, old_logprobs: Array, advantages: Array) -> tuple[jax.Array, jax.Array]:
    """Log ratio and advantages as f32[N, T], gradients flowing to `logprobs` alone."""
    check_shapes("N T", logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    return jnp.asarray(logprobs, jnp.float32) - _constant(old_logprobs), _constant(advantages)


def _exp(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _row_mean(x: jax.Array, mask: Array) -> jax.Array:
    """[N, T] -> [N, 1], over the tokens of the mask; 0 in a row without any."""
    mask = jnp.asarray(mask, bool)
    check_shapes("N T", x=x, mask=mask)
    tokens = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
    return jnp.sum(jnp.where(mask, x, 0.0), axis=1, keepdims=True) / tokens


def _report(ratio: jax.Array, clipped: jax.Array) -> dict[str, jax.Array]:
    return {"ratio": jax.lax.stop_gradient(ratio), "clipped": clipped.astype(jnp.float32)}


def ppo_clip(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Loss:
    """Clipped surrogate objective (arXiv:1707.06347, eq. 7), as a loss to minimize.

        L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        L = min(L, -c A) where A < 0, with dual_clip c > 1 (arXiv:1912.09729)

    So dL/dlogprobs is -r A, but 0 for A > 0 and r > 1 + clip_high, for A < 0 and r < 1 - clip_low, with dual clip for
    A < 0 and r > c, and wherever the clamp holds. Exactly at the border of a clip it is still -r A. Unequal bounds are
    the clip-higher of DAPO (arXiv:2503.14476). "clipped" is 1 where the clipped term of the max holds.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages)
    return _clipped_surrogate(_exp(log_ratio), advantages, clip_low, clip_high, dual_clip)


def _clipped_surrogate(ratio, advantages, clip_low: float, clip_high: float, dual_clip: float | None = None) -> Loss:
    plain = -ratio * advantages
    bounded = -jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    clipped = bounded > plain
    loss = jnp.where(clipped, bounded, plain)  # not maximum(), whose gradient at equality is half of each side's
    if dual_clip is not None:
        bound = -dual_clip * advantages
        loss = jnp.where((advantages < 0) & (loss > bound), bound, loss)
    return loss, _report(ratio, clipped)


def gspo(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip_low: float, clip_high: float) -> Loss:
    """PPO's clip of the ratio of whole sequences (GSPO-token, arXiv:2507.18071).

        s = exp(mean over the row's tokens of logprobs - old_logprobs)
        L = max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A)

    In value s is the same for all tokens of a row; in the gradient each token's own logprob stands in for it, so that with
    one advantage a row and seq-mean-token-mean the gradient is that of the sequence's s. Bounds are of the order of 1e-4.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages)
    sequence = jax.lax.stop_gradient(_row_mean(log_ratio, mask))
    ratio = _exp(sequence + log_ratio - jax.lax.stop_gradient(log_ratio))
    return _clipped_surrogate(ratio, advantages, clip_low, clip_high)


def gmpo(logprobs: Array, old_logprobs: Array, advantages: Array, mask: Array, clip_low: float, clip_high: float) -> Loss:
    """Geometric mean of the clipped token ratios (GMPO, arXiv:2507.20673).

        d = logprobs - old_logprobs;  d' = min(d, clip_high) if A > 0, max(d, -clip_low) if A < 0
        L = -A exp(mean over the row's tokens of d')

    The bounds are of the log ratio (the paper's e^-0.4 and e^0.4 are 0.4 and 0.4). A is one number a row: of advantages
    that differ along a row the mean is taken.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages)
    advantages = jnp.broadcast_to(_row_mean(advantages, mask), log_ratio.shape)
    clipped = ((advantages > 0) & (log_ratio > clip_high)) | ((advantages < 0) & (log_ratio < -clip_low))
    bounded = jnp.where(clipped, jnp.clip(log_ratio, -clip_low, clip_high), log_ratio)
    ratio = jnp.broadcast_to(_exp(_row_mean(bounded, mask)), log_ratio.shape)
    return -ratio * advantages, _report(ratio, clipped)


def cispo(logprobs: Array, old_logprobs: Array, advantages: Array, clip_low: float, clip_high: float) -> Loss:
    """REINFORCE weighted by the clipped ratio, through which no gradient flows (CISPO, arXiv:2506.13585).

        L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs

    No token loses its gradient. The paper has no lower bound: clip_low = 1.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages)
    ratio = jax.lax.stop_gradient(_exp(log_ratio))
    weight = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -weight * advantages * jnp.asarray(logprobs, jnp.float32), _report(ratio, weight != ratio)


def sapo(logprobs: Array, old_logprobs: Array, advantages: Array, tau_positive: float, tau_negative: float) -> Loss:
    """A soft gate in place of the clip (SAPO, arXiv:2511.20347).

        L = -A 4/tau sigmoid(tau (r - 1)),  tau = tau_positive if A > 0 else tau_negative

    On policy the gradient is that of PPO; away from r = 1 it fades, the faster the larger tau. Nothing is "clipped".
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages)
    ratio, tau = _exp(log_ratio), jnp.where(advantages > 0, tau_positive, tau_negative)
    loss = -advantages * jax.nn.sigmoid(tau * (ratio - 1)) * 4 / tau
    return loss, _report(ratio, jnp.zeros_like(ratio))


def reinforce(logprobs: Array, advantages: Array) -> Loss:
    """L = -A logprobs: REINFORCE (Williams 1992), and the loss of GPG (arXiv:2504.02546).

    There is no ratio: it is on policy only in the first update on its samples.
    """
    check_shapes("N T", logprobs=logprobs, advantages=advantages)
    return -_constant(advantages) * jnp.asarray(logprobs, jnp.float32), {}


# Entropy mechanism -------------------------------------------------------------------------------------------------------


def covariance(old_logprobs: Array, advantages: Array, mask: Array) -> jax.Array:
    """(A - mean A)(logprob - mean logprob), means over the mask of the whole minibatch (arXiv:2505.22617).

    What lowers the entropy most are tokens where it is large. The paper takes the logprobs of the policy being updated;
    these are those before the updates, the same in the first one, so that the choice of tokens is one for the minibatch.

    Returns:
      f32[N, T]; -inf outside the mask.
    """
    old_logprobs, advantages, mask = _constant(old_logprobs), _constant(advantages), jnp.asarray(mask, bool)
    check_shapes("N T", old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    count = jnp.maximum(jnp.sum(mask), 1)
    centred = [x - jnp.sum(jnp.where(mask, x, 0.0)) / count for x in (advantages, old_logprobs)]
    return jnp.where(mask, centred[0] * centred[1], -jnp.inf)


def _first(score: jax.Array, count: jax.Array) -> jax.Array:
    """bool[N, T]: the `count` entries of highest score, none of score -inf; of equals, the first."""
    order = jnp.argsort(-score.reshape(-1), stable=True)
    rank = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(order.size))
    return (rank < count).reshape(score.shape) & (score > -jnp.inf)


def clip_cov_selection(
    old_logprobs: Array, advantages: Array, mask: Array, cov_fraction: float, cov_low: float, cov_high: float, key: jax.Array
) -> jax.Array:
    """bool[N, T]: `cov_fraction` of the mask's tokens, at least one, at random among those of covariance within the bounds."""
    cov = covariance(old_logprobs, advantages, mask)
    eligible = (cov > cov_low) & (cov < cov_high)
    count = jnp.maximum(jnp.sum(jnp.asarray(mask, bool)) * cov_fraction, 1).astype(jnp.int32)
    return _first(jnp.where(eligible, jax.random.uniform(key, cov.shape), -jnp.inf), count)


def kl_cov_selection(old_logprobs: Array, advantages: Array, mask: Array, cov_fraction: float) -> jax.Array:
    """bool[N, T]: the `cov_fraction` of the mask's tokens, at least one, whose covariance is the highest."""
    count = jnp.maximum(jnp.sum(jnp.asarray(mask, bool)) * cov_fraction, 1).astype(jnp.int32)
    return _first(covariance(old_logprobs, advantages, mask), count)


def clip_cov(logprobs: Array, old_logprobs: Array, advantages: Array, selected: Array, clip_low: float, clip_high: float) -> Loss:
    """`ppo_clip`, and no loss at all for the selected tokens (Clip-Cov, arXiv:2505.22617).

    Args:
      selected: from `clip_cov_selection`.
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages)
    loss, about = _clipped_surrogate(_exp(log_ratio), advantages, clip_low, clip_high)
    selected = jnp.asarray(selected, bool)
    check_shapes("N T", loss=loss, selected=selected)
    return jnp.where(selected, 0.0, loss), about | {"clipped": jnp.where(selected, 1.0, about["clipped"])}


def kl_cov(logprobs: Array, old_logprobs: Array, advantages: Array, selected: Array, cov_kl_coef: float) -> Loss:
    """L = -r A, and for the selected tokens + cov_kl_coef |log r| (KL-Cov, arXiv:2505.22617). No ratio is clipped.

    Args:
      selected: from `kl_cov_selection`; reported as "clipped".
    """
    log_ratio, advantages = _log_ratio(logprobs, old_logprobs, advantages)
    ratio, selected = _exp(log_ratio), jnp.asarray(selected, bool)
    check_shapes("N T", ratio=ratio, selected=selected)
    penalty = jnp.where(selected, cov_kl_coef * jnp.abs(log_ratio), 0.0)
    return -ratio * advantages + penalty, _report(ratio, selected)
