"""Correction for samples that another distribution than the learner's old policy gave, such as a quantized rollout's."""

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_shapes
from jrl.algorithms.kl import LOG_RATIO_LIMIT


def truncated_importance_weights(old_logprobs: Array, rollout_logprobs: Array, cap: float) -> tuple[jax.Array, jax.Array]:
    """Truncated importance sampling (Ionides 2008, J. Comput. Graph. Stat. 17(2)), token by token.

        w = min(exp(old_logprobs - rollout_logprobs), cap), the exponent clamped to +-20

    Multiplied with a token's policy loss it makes the mean over the rollout's samples one over the old policy's; the cap
    bounds the variance, at the price of a bias where it holds. Sequences are not reweighted: the tokens before this one
    remain the rollout's.

    Args:
      old_logprobs: [N, T], of the sampled tokens under the policy before the updates, as the learner computes them.
      rollout_logprobs: [N, T], of the same tokens as the rollout computed them.
      cap: at least 1, or the weights of a faithful rollout would be truncated too.

    Returns:
      w f32[N, T], through which no gradient flows, and bool[N, T], where the cap holds.
    """
    check_shapes("N T", old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    log_ratio = jnp.asarray(old_logprobs, jnp.float32) - jnp.asarray(rollout_logprobs, jnp.float32)
    ratio = jnp.exp(jnp.clip(jax.lax.stop_gradient(log_ratio), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return jnp.minimum(ratio, cap), ratio > cap
