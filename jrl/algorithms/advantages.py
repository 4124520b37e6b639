"""Advantages: how much better than expected each token or response was.

N sequences, T tokens, [N, T] indexed by token; `mask` says which tokens the policy chose. What lies outside the mask
never enters a result, not even as NaN. All results are float32 and no gradient is meant to flow through them.

The functions that `jrl.algorithms.presets.ADVANTAGES` names give the advantage of each response, [N], or of each token,
[N, T]; those that read the critic's values give the returns that it learns besides. Their arguments are filled in by name
(`jrl.algorithms.pieces`): rewards [N] with all penalties in them, token_rewards [N, T] the same spread over the tokens,
group_ids, valid (whose reward is known), mask, and settings of `config.algorithm`.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jrl.algorithms._checks import Array, check_shapes


def token_rewards(rewards: Array, mask: Array, penalty: Array | None = None) -> jax.Array:
    """r_t = R [t is the last token of the response] - penalty_t.

    With penalty = beta KL_t this is the reward of InstructGPT (arXiv:2203.02155, eq. 2), spread over the tokens.

    Args:
      rewards: [N], the reward R of each whole response.
      mask: bool[N, T].
      penalty: [N, T] or None, subtracted on every token of the mask; the coefficient is already in it.

    Returns:
      f32[N, T], 0 outside the mask; a row without tokens carries no reward.
    """
    rewards, mask = jnp.asarray(rewards, jnp.float32), jnp.asarray(mask, bool)
    check_shapes("N T", mask=mask)
    check_shapes("N", mask_rows=jnp.any(mask, axis=1), rewards=rewards)
    steps = jnp.arange(mask.shape[1])  # [T]
    last = jnp.max(jnp.where(mask, steps, -1), axis=1)  # [N], -1 in a row without tokens
    out = jnp.where(steps == last[:, None], rewards[:, None], 0.0)  # [N, T]
    if penalty is None:
        return out
    check_shapes("N T", mask=mask, penalty=penalty)
    return jnp.where(mask, out - penalty, 0.0)


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The groups of N responses, each response in one; only the valid ones count."""

    group: jax.Array  # i32[N], in [0, N)
    valid: jax.Array  # bool[N]

    def total(self, x) -> jax.Array:
        """[N] -> [N], the sum over the valid responses of each one's group."""
        n = self.valid.shape[0]
        return jax.ops.segment_sum(jnp.where(self.valid, x, 0.0), self.group, n)[self.group]

    def count(self) -> jax.Array:
        return self.total(jnp.ones(self.valid.shape[0]))

    def highest(self, x) -> jax.Array:
        return jax.ops.segment_max(jnp.where(self.valid, x, -jnp.inf), self.group, self.valid.shape[0])[self.group]

    def lowest(self, x) -> jax.Array:
        return -self.highest(-x)

    def centred(self, x) -> jax.Array:
        """x - mean."""
        return x - self.total(x) / jnp.maximum(self.count(), 1)

    def std(self, x) -> jax.Array:
        """Unbiased."""
        return jnp.sqrt(self.total(jnp.square(self.centred(x))) / jnp.maximum(self.count() - 1, 1))

    def teaches(self, x) -> jax.Array:
        """bool[N]: valid, and not all of the group's x are equal.

        The mean of equal numbers is not exactly that number (three times 0.1), so equality is asked of x itself.
        """
        return self.valid & (self.highest(x) > self.lowest(x))


def _groups(rewards: Array, group_ids: Array, valid: Array) -> tuple[jax.Array, _Groups]:
    """Rewards as f32[N], and the groups that they are compared in."""
    rewards, valid = jnp.asarray(rewards, jnp.float32), jnp.asarray(valid, bool)
    check_shapes("N", rewards=rewards, group_ids=group_ids, valid=valid)
    n = rewards.shape[0]
    # Segments must lie in [0, N), and ids need not: responses that were filtered out leave holes.
    group = jnp.unique(jnp.asarray(group_ids), size=n, return_inverse=True)[1].reshape(n)
    return rewards, _Groups(group, valid)


def grpo(rewards: Array, group_ids: Array, valid: Array, normalize_std: bool = True) -> jax.Array:
    """Advantage over the other responses to the same prompt.

        A_i = (R_i - mean) / (std + 1e-6)    GRPO (arXiv:2402.03300, section 4.1.2)
        A_i = R_i - mean                     with normalize_std=False: Dr. GRPO (arXiv:2503.20783)

    mean and std (unbiased, n - 1) are those of the valid responses of the group.

    Args:
      rewards: [N], the reward of each whole response.
      group_ids: int[N], any integers in any order; groups may differ in size.
      valid: bool[N]; the others enter no statistic, whatever their reward, NaN included.

    Returns:
      f32[N]; exactly 0 for responses that are not valid, are alone in their group, or whose group has equal rewards.
    """
    rewards, groups = _groups(rewards, group_ids, valid)
    centred = groups.centred(rewards)
    out = centred / (groups.std(rewards) + 1e-6) if normalize_std else centred
    return jnp.where(groups.teaches(rewards), out, 0.0)


def rloo(rewards: Array, group_ids: Array, valid: Array) -> jax.Array:
    """A_i = R_i - mean of the others = n / (n - 1) (R_i - mean): REINFORCE leave-one-out (arXiv:2402.14740).

    Arguments and zeros as in `grpo`.
    """
    rewards, groups = _groups(rewards, group_ids, valid)
    count = groups.count()
    return jnp.where(groups.teaches(rewards), groups.centred(rewards) * count / jnp.maximum(count - 1, 1), 0.0)


def opo(rewards: Array, group_ids: Array, valid: Array, lens: Array) -> jax.Array:
    """A_i = R_i - sum(l R) / sum(l), the baseline of least variance if a gradient's square grows with the length
    (OPO, arXiv:2505.23585).

    Args:
      lens: [N], tokens l of each response; the rest as in `grpo`.
    """
    rewards, groups = _groups(rewards, group_ids, valid)
    lens = jnp.asarray(lens, jnp.float32)
    check_shapes("N", rewards=rewards, lens=lens)
    baseline = groups.total(lens * rewards) / jnp.maximum(groups.total(lens), 1)
    return jnp.where(groups.teaches(rewards), rewards - baseline, 0.0)


def gpg(rewards: Array, group_ids: Array, valid: Array) -> jax.Array:
    """A_i = B / B_teaching (R_i - mean): group policy gradient (arXiv:2504.02546, with F_norm = 1).

    B are the valid responses of the batch and B_teaching those whose group has different rewards: groups that teach
    nothing then do not weaken the others in a mean over the batch. Arguments and zeros as in `grpo`.
    """
    rewards, groups = _groups(rewards, group_ids, valid)
    teaches = groups.teaches(rewards)
    scale = jnp.sum(groups.valid) / jnp.maximum(jnp.sum(teaches), 1)
    return jnp.where(teaches, scale * groups.centred(rewards), 0.0)


def grpo_passk(rewards: Array, group_ids: Array, valid: Array, normalize_std: bool = True) -> jax.Array:
    """The gradient of the best of a group, k being the group's size (arXiv:2503.19595).

        A_i = (R_max - R_second) [/ (std + 1e-6)]    for the best response
        A_i = 0                                      for all others

    If two are best, R_second = R_max and nobody learns. Arguments as in `grpo`.
    """
    rewards, groups = _groups(rewards, group_ids, valid)
    best = groups.valid & (rewards == groups.highest(rewards))
    second = groups.highest(jnp.where(best, -jnp.inf, rewards))
    alone = groups.teaches(rewards) & best & (groups.total(best.astype(jnp.float32)) == 1)
    gap = jnp.where(alone, rewards - second, 0.0)
    return gap / (groups.std(rewards) + 1e-6) if normalize_std else gap


def gdpo(
    reward_parts: Mapping[str, Array],
    reward_weights: Mapping[str, float],
    group_ids: Array,
    valid: Array,
    mask: Array,
    normalize_std: bool = True,
) -> jax.Array:
    """Several rewards, each compared within the group by itself, so that none drowns another (GDPO, arXiv:2601.05242).

        A_i = whiten(sum_k w_k grpo(R_k)_i)    over the tokens of the batch

    Args:
      reward_parts: name -> [N], each reward before its weight.
      reward_weights: name -> w_k.
      mask: bool[N, T].

    Returns:
      f32[N, T].
    """
    mask = jnp.asarray(mask, bool)
    each = [reward_weights[name] * grpo(part, group_ids, valid, normalize_std) for name, part in reward_parts.items()]
    return whiten(jnp.broadcast_to(jnp.sum(jnp.stack(each), axis=0)[:, None], mask.shape), mask)


def reinforce_plus_plus(token_rewards: Array, mask: Array, gamma: float) -> jax.Array:
    """A_t = whiten(G_t), G_t = r_t + gamma G_next: REINFORCE++ (arXiv:2501.03262), whitened over the whole batch.

    Args:
      token_rewards: [N, T]; mask: bool[N, T]; gamma: discount per token of the mask.

    Returns:
      f32[N, T].
    """
    return whiten(reward_to_go(token_rewards, mask, gamma), mask)


def reinforce_plus_plus_baseline(rewards: Array, group_ids: Array, valid: Array, mask: Array) -> jax.Array:
    """A = whiten(R - mean of the group), over the tokens of the whole batch (arXiv:2501.03262, REINFORCE++-baseline).

    Args:
      rewards, group_ids, valid: as in `grpo`; mask: bool[N, T].

    Returns:
      f32[N, T].
    """
    mask = jnp.asarray(mask, bool)
    return whiten(jnp.broadcast_to(grpo(rewards, group_ids, valid, False)[:, None], mask.shape), mask)


def remax(token_rewards: Array, greedy_rewards: Array, mask: Array) -> jax.Array:
    """A_t = G_t - R(greedy response to the same prompt): ReMax (arXiv:2310.10505); no discount.

    Args:
      token_rewards: [N, T]; mask: bool[N, T].
      greedy_rewards: [N].

    Returns:
      f32[N, T].
    """
    mask, baseline = jnp.asarray(mask, bool), jnp.asarray(greedy_rewards, jnp.float32)
    check_shapes("N", mask_rows=jnp.any(mask, axis=1), greedy_rewards=baseline)
    return jnp.where(mask, reward_to_go(token_rewards, mask, 1.0) - baseline[:, None], 0.0)


def reward_to_go(token_rewards: Array, mask: Array, gamma: float) -> jax.Array:
    """G_t = r_t + gamma G_next, f32[N, T], "next" as in `gae`."""
    return gae(token_rewards, jnp.zeros(jnp.shape(mask)), mask, gamma, 1.0)[0]


def gae(rewards: Array, values: Array, mask: Array, gamma: float, lam: float | Array) -> tuple[jax.Array, jax.Array]:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16) over the tokens of the mask alone.

        delta_t  = r_t + gamma V_next - V_t
        A_t      = delta_t + gamma lambda A_next
        return_t = A_t + V_t

    "next" is the next token of the mask: the bootstrap jumps over tool tokens. After the last one V and A are 0, also
    where a response was cut off at its length limit.

    Args:
      rewards, values: [N, T]; V_t is computed from the tokens before t.
      mask: bool[N, T].
      gamma, lam: discount and lambda per token; lam may be [N].

    Returns:
      Advantages f32[N, T], not whitened, and returns f32[N, T]; 0 outside the mask.
    """
    rewards, values = jnp.asarray(rewards, jnp.float32), jnp.asarray(values, jnp.float32)
    mask = jnp.asarray(mask, bool)
    check_shapes("N T", rewards=rewards, values=values, mask=mask)

    def back(carry, x):
        v_next, a_next = carry  # [N]
        r_t, v_t, mask_t = x
        a_t = r_t + gamma * v_next - v_t + gamma * lam * a_next
        carry = jnp.where(mask_t, v_t, v_next), jnp.where(mask_t, a_t, a_next)
        return carry, jnp.where(mask_t, a_t, 0.0)

    zero = jnp.zeros(mask.shape[0])
    advantages = jax.lax.scan(back, (zero, zero), (rewards.T, values.T, mask.T), reverse=True)[1].T  # [N, T]
    return advantages, jnp.where(mask, advantages + values, 0.0)


def whitened_gae(token_rewards: Array, values: Array, mask: Array, gamma: float, lam: float) -> tuple[jax.Array, jax.Array]:
    """`gae` with the advantages whitened over the batch, as PPO takes them."""
    advantages, returns = gae(token_rewards, values, mask, gamma, lam)
    return whiten(advantages, mask), returns


def decoupled_gae(
    token_rewards: Array,
    values: Array,
    mask: Array,
    gamma: float,
    lam: float,
    critic_lam: float,
    length_alpha: float,
) -> tuple[jax.Array, jax.Array]:
    """GAE with one lambda for the policy and another for the critic's returns (VC-PPO, arXiv:2503.01491; VAPO, arXiv:2504.05118).

    With length_alpha > 0 the policy's is adapted to the l tokens of each response (VAPO):

        lambda = 1 - 1 / (length_alpha l)    kept within 0 and 1

    Args:
      token_rewards, values: [N, T]; mask: bool[N, T]; gamma: discount per token.
      lam: the policy's, where length_alpha is 0.
      critic_lam: the critic's; 1 gives it the plain reward-to-go to learn.

    Returns:
      Advantages f32[N, T], whitened over the batch, and returns f32[N, T].
    """
    mask = jnp.asarray(mask, bool)
    if length_alpha:
        lens = jnp.maximum(jnp.sum(mask, axis=1), 1).astype(jnp.float32)  # [N]
        policy_lam: float | jax.Array = jnp.clip(1 - 1 / (length_alpha * lens), 0.0, 1.0)
    else:
        policy_lam = lam
    advantages = gae(token_rewards, values, mask, gamma, policy_lam)[0]
    return whiten(advantages, mask), gae(token_rewards, values, mask, gamma, critic_lam)[1]


def moments(x: Array, mask: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean and unbiased variance of x over the mask (any one shape), and whether x varies there at all.

    The mean of equal numbers carries a rounding error, so their variance need not be exactly 0; `varies` is exact.
    """
    count = jnp.sum(mask)
    mean = jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(count, 1)
    variance = jnp.sum(jnp.where(mask, jnp.square(x - mean), 0.0)) / jnp.maximum(count - 1, 1)
    low, high = jnp.min(jnp.where(mask, x, jnp.inf)), jnp.max(jnp.where(mask, x, -jnp.inf))
    return mean, variance, high > low


def whiten(x: Array, mask: Array) -> jax.Array:
    """(x - mean) / sqrt(var + 1e-8) over the mask of the whole batch, var unbiased.

    Args:
      x: [N, T]; mask: bool[N, T].

    Returns:
      f32[N, T]; 0 outside the mask, and everywhere where x does not vary over it.
    """
    x, mask = jnp.asarray(x, jnp.float32), jnp.asarray(mask, bool)
    check_shapes("N T", x=x, mask=mask)
    mean, variance, varies = moments(x, mask)
    return jnp.where(mask & varies, (x - mean) / jnp.sqrt(variance + 1e-8), 0.0)
