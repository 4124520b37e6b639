"""Corrections for samples that another distribution than the learner's old policy gave: a quantized or stale rollout's.

Three policies meet in one loss (the decoupled objective, arXiv:2110.00641, and AReaL, arXiv:2505.24298): the behaviour policy
that sampled (`rollout_logprobs`), the proximal one around which the ratio is clipped (`old_logprobs`, recomputed by the learner
before its updates) and the current one:

    L = -w min(r A, clip(r) A),  r = current / proximal,  w = proximal / behaviour

w is computed here, at one of three levels, from d = old_logprobs - rollout_logprobs of a row's tokens:

    token      rho_t = exp(d_t)         leaves the tokens before this one as the rollout's
    sequence   rho = exp(sum of d)      unbiased, of large variance in long rows
    geometric  rho = exp(mean of d)     a measure of the row, not a probability ratio

All exponents are clamped to +-20. No gradient flows through anything here.
"""

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_name, check_shapes
from jrl.algorithms.kl import LOG_RATIO_LIMIT

LEVELS = ("token", "sequence", "geometric")


def log_ratios(old_logprobs: Array, rollout_logprobs: Array, level: str, mask: Array | None = None) -> jax.Array:
    """log rho f32[N, T], at the levels of a row the same number in all of its tokens, clamped to +-20.

    Args:
      old_logprobs, rollout_logprobs: [N, T], of the sampled tokens under both policies.
      level: see above.
      mask: bool[N, T], which tokens of a row count; needed but for "token".

    Raises:
      UserError: an unknown level.
    """
    check_name("rollout correction level", level, LEVELS)
    check_shapes("N T", old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    d = jnp.asarray(old_logprobs, jnp.float32) - jnp.asarray(rollout_logprobs, jnp.float32)
    if level != "token":
        mask = jnp.asarray(mask, bool)
        check_shapes("N T", d=d, mask=mask)
        row = jnp.sum(jnp.where(mask, d, 0.0), axis=1, keepdims=True)
        row = row / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1) if level == "geometric" else row
        d = jnp.broadcast_to(row, d.shape)
    return jnp.clip(jax.lax.stop_gradient(d), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def truncated_importance_weights(
    old_logprobs: Array, rollout_logprobs: Array, cap: float, level: str = "token", mask: Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Truncated importance sampling (Ionides 2008, J. Comput. Graph. Stat. 17(2)): w = min(rho, cap).

    Multiplied with a token's policy loss it makes the mean over the rollout's samples one over the old policy's; the cap
    bounds the variance, at the price of a bias where it holds.

    Args:
      old_logprobs, rollout_logprobs, level, mask: as in `log_ratios`.
      cap: at least 1, or the weights of a faithful rollout would be truncated too.

    Returns:
      w f32[N, T] and bool[N, T], where the cap holds.
    """
    ratio = jnp.exp(log_ratios(old_logprobs, rollout_logprobs, level, mask))
    return jnp.minimum(ratio, cap), ratio > cap


def rejection_mask(
    old_logprobs: Array, rollout_logprobs: Array, level: str, low: float, high: float, mask: Array | None = None
) -> jax.Array:
    """Masked importance sampling: bool[N, T], True where low <= rho <= high; the other tokens are to carry no loss.

    By token it is IcePop (arXiv:2510.18855), by sequence or geometric mean whole rows fall out. The denominators of the loss
    stay those of all tokens, so a rejected token counts as one of loss 0.
    """
    ratio = log_ratios(old_logprobs, rollout_logprobs, level, mask)
    return (ratio >= jnp.log(low)) & (ratio <= jnp.log(high))


def effective_sample_size(weights: Array, share: Array) -> jax.Array:
    """(mean w)^2 / mean w^2 under the shares [N, T], which sum to 1: 1 for equal weights, 1/n if one of n has it all."""
    weights, share = jnp.asarray(weights, jnp.float32), jnp.asarray(share, jnp.float32)
    check_shapes("N T", weights=weights, share=share)
    second = jnp.sum(share * jnp.square(weights))
    return jnp.square(jnp.sum(share * weights)) / jnp.where(second > 0, second, 1.0)


def mismatch(old_logprobs: Array, rollout_logprobs: Array, mask: Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """How far the rollout's policy was from the old one, under the names of verl's `rollout_corr/*`.

    Args:
      old_logprobs, rollout_logprobs: [N, T]; mask: bool[N, T].

    Returns:
      By token, f32[N, T], to be averaged over tokens: kl = -d, k3_kl, logprob_abs_diff = |d|, chi2_token = rho^2 - 1.
      By sequence, f32[N, T] constant along a row, to be averaged over sequences: chi2_seq, training_ppl, rollout_ppl,
      log_ppl_abs_diff; perplexities are exp(-mean logprob) of a row.
    """
    token = log_ratios(old_logprobs, rollout_logprobs, "token")
    whole = log_ratios(old_logprobs, rollout_logprobs, "sequence", mask)
    mean = log_ratios(old_logprobs, rollout_logprobs, "geometric", mask)
    zero = jnp.zeros_like(token)
    perplexity = lambda x: jnp.exp(-log_ratios(x, zero, "geometric", mask))  # noqa: E731
    by_token = {
        "kl": -token,
        "k3_kl": jnp.expm1(token) - token,
        "logprob_abs_diff": jnp.abs(token),
        "chi2_token": jnp.expm1(2 * token),
    }
    by_sequence = {
        "chi2_seq": jnp.expm1(2 * whole),
        "training_ppl": perplexity(old_logprobs),
        "rollout_ppl": perplexity(rollout_logprobs),
        "log_ppl_abs_diff": jnp.abs(mean),
    }
    return by_token, by_sequence
