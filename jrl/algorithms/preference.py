"""Losses of preference learning: from what a policy and its reference say of whole answers to one loss a pair or answer.

Let log p(y|x) be an answer's log-probability and log p_ref that of the reference, which carries no gradient. P pairs have a
chosen answer y_w and a rejected one y_l to the same prompt; N single answers have a label. Arrays are f32[P] or f32[N]; which are
sums over an answer's tokens and which are means is said for each, and in `jrl.algorithms.presets.PREFERENCE_LOSSES`.

Each function returns the loss, f32[P] or f32[N], and the implicit rewards of the answers, those of chosen and rejected ones for a
pair: what the loss compares, without a gradient. Denominators are the caller's.
"""

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_shapes

Pairs = tuple[jax.Array, jax.Array, jax.Array]  # loss, chosen rewards, rejected rewards

LEAST_LOG_ODDS = -1e-6  # log-probabilities above are taken for it: their odds would be infinite


def _log_ratios(chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array) -> tuple[jax.Array, jax.Array]:
    check_shapes("P", chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return jnp.asarray(chosen) - _constant(ref_chosen), jnp.asarray(rejected) - _constant(ref_rejected)


def _constant(x: Array) -> jax.Array:
    return jax.lax.stop_gradient(jnp.asarray(x))


def _with_rewards(loss: jax.Array, chosen: Array, rejected: Array) -> Pairs:
    return loss, _constant(chosen), _constant(rejected)


def dpo(
    chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, beta: float, label_smoothing: float = 0.0
) -> Pairs:
    """Direct preference optimization (arXiv:2305.18290, eq. 7), and cDPO with labels that may be wrong.

        h = log p(y_w|x) / p_ref(y_w|x) - log p(y_l|x) / p_ref(y_l|x)
        L = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)

    The log-probabilities are sums. The rewards are beta log p / p_ref.

    Args:
      label_smoothing: e, the chance that a pair is the wrong way round (cDPO: Mitchell, "A note on DPO with noisy preferences &
        relationship to IPO", 2023). With e > 0 the loss is least at sigmoid(beta h) = 1 - e, not at infinite h.
    """
    better, worse = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    h = beta * (better - worse)
    loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(h) - label_smoothing * jax.nn.log_sigmoid(-h)
    return _with_rewards(loss, beta * better, beta * worse)


def ipo(chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array, beta: float) -> Pairs:
    """Identity preference optimization (arXiv:2310.12036, eq. 17; its tau is beta).

        L = (h - 1 / (2 beta))^2, h as in `dpo`

    The log-probabilities are means over the answer's tokens. The paper's answers have no length; with sums the same gap would
    be asked of long answers and short ones. The rewards are beta log p / p_ref of these means.
    """
    better, worse = _log_ratios(chosen, rejected, ref_chosen, ref_rejected)
    loss = jnp.square(better - worse - 1 / (2 * beta))
    return _with_rewards(loss, beta * better, beta * worse)


def kto(
    logprobs: Array, ref_logprobs: Array, label: Array, kl: Array, beta: float, desirable: float = 1.0, undesirable: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Kahneman-Tversky optimization (arXiv:2402.01306, eq. 8), for answers that are good or bad by themselves.

        r = log p(y|x) / p_ref(y|x)
        L = desirable (1 - sigmoid(beta (r - z)))      of an answer that is wanted
            undesirable (1 - sigmoid(beta (z - r)))    of one that is not

    The log-probabilities are sums. The rewards are beta r.

    Args:
      label: 1 where the answer is wanted, 0 where it is not.
      kl: z, f32[N] or a number: how far the policy is from the reference, in nats, max(0, mean of r over mismatched pairs of
        prompt and answer); no gradient flows through it.
      desirable, undesirable: lambda_D and lambda_U. For classes of n_D and n_U rows the paper wants
        (desirable n_D) / (undesirable n_U) between 1 and 4/3.
    """
    check_shapes("N", logprobs=logprobs, ref_logprobs=ref_logprobs, label=label)
    ratio = jnp.asarray(logprobs) - _constant(ref_logprobs)
    above = beta * (ratio - _constant(kl))
    wanted = jnp.asarray(label) > 0.5
    loss = jnp.where(wanted, desirable * jax.nn.sigmoid(-above), undesirable * jax.nn.sigmoid(above))
    return loss, _constant(beta * ratio)


def mismatch_kl(logprobs: Array, ref_logprobs: Array) -> jax.Array:
    """The z of `kto`: max(0, mean log ratio), from log-probabilities f32[M] (sums) of answers to prompts that are not theirs."""
    check_shapes("M", logprobs=logprobs, ref_logprobs=ref_logprobs)
    return jnp.maximum(jnp.mean(jnp.asarray(logprobs) - jnp.asarray(ref_logprobs)), 0.0)


def orpo(chosen: Array, rejected: Array, beta: float) -> Pairs:
    """Odds ratio preference optimization (arXiv:2403.07691, eqs. 3 to 7; its lambda is beta), without a reference.

        odds = p / (1 - p), log p the mean of the answer's token log-probabilities
        L = -log p(y_w|x) - beta log sigmoid(log odds(y_w|x) / odds(y_l|x))

    The rewards are beta log p.
    """
    check_shapes("P", chosen=chosen, rejected=rejected)

    def log_odds(logprob: Array) -> jax.Array:
        logprob = jnp.minimum(logprob, LEAST_LOG_ODDS)
        return logprob - jnp.log(-jnp.expm1(logprob))

    loss = -jnp.asarray(chosen) - beta * jax.nn.log_sigmoid(log_odds(chosen) - log_odds(rejected))
    return _with_rewards(loss, beta * jnp.asarray(chosen), beta * jnp.asarray(rejected))


def simpo(chosen: Array, rejected: Array, beta: float, gamma: float) -> Pairs:
    """Simple preference optimization (arXiv:2405.14734, eq. 6), without a reference.

        L = -log sigmoid(beta (log p(y_w|x) - log p(y_l|x)) - gamma)

    The log-probabilities are means over the answer's tokens. The rewards are beta log p.

    Args:
      beta: larger than in `dpo`, 2 to 2.5 in the paper, as means are smaller than sums.
      gamma: the margin by which the chosen reward should be ahead; 0.5 to 1.6 in the paper.
    """
    check_shapes("P", chosen=chosen, rejected=rejected)
    loss = -jax.nn.log_sigmoid(beta * (jnp.asarray(chosen) - jnp.asarray(rejected)) - gamma)
    return _with_rewards(loss, beta * jnp.asarray(chosen), beta * jnp.asarray(rejected))


def bradley_terry(chosen: Array, rejected: Array, margin: Array, centre: float = 0.0) -> jax.Array:
    """The loss f32[P] of a reward model on pairs (arXiv:2203.02155, eq. 1; the margin: arXiv:2307.09288, eq. 2).

        L = -log sigmoid(r_w - r_l - margin) + centre (r_w + r_l)^2

    Args:
      chosen, rejected: r_w and r_l, f32[P], the scores of the answers.
      margin: by how much the chosen one should be ahead; 0 where nothing is known.
      centre: weight of what keeps scores around 0, which pairs alone leave open (arXiv:2312.09244).
    """
    check_shapes("P", chosen=chosen, rejected=rejected, margin=margin)
    better, worse = jnp.asarray(chosen), jnp.asarray(rejected)
    return -jax.nn.log_sigmoid(better - worse - jnp.asarray(margin)) + centre * jnp.square(better + worse)


def step_cross_entropy(scores: Array, labels: Array) -> jax.Array:
    """The loss of a process reward model on one step each: the cross-entropy of sigmoid(score) with the label, any shape.

        L = -label log sigmoid(score) - (1 - label) log sigmoid(-score)

    Labels are 0 (wrong) or 1 (right), or between them a share of continuations that came out right (arXiv:2312.08935, eq. 5).
    The minimum is the label itself as a probability, for soft labels too; a squared error of the sigmoid has the same minimum
    but hardly a gradient where the model is sure and wrong, and one of the score itself punishes scores beyond the label.
    """
    score, label = jnp.asarray(scores), jnp.asarray(labels)
    return -label * jax.nn.log_sigmoid(score) - (1 - label) * jax.nn.log_sigmoid(-score)
