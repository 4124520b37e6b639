"""The algorithms by name: each a set of choices, every one of which is a config key of its own that may be set besides.

`algorithm.name` picks a row of `PRESETS`. A key of `BASE` that neither the config nor the command line sets takes the row's
value, or that of `BASE` where the row is silent. Nothing here needs jax: configs are checked before it is loaded.
"""

from typing import Any, NamedTuple

BASE: dict[str, Any] = {
    "advantage": "grpo", "normalize_std": True, "gamma": 1.0, "lam": 1.0, "critic_lam": 1.0, "length_alpha": 0.0,
    "policy_loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "aggregation": "token-mean",
    "tau_positive": 1.0, "tau_negative": 1.05, "cov_fraction": 0.0002, "cov_low": 1.0, "cov_high": 5.0, "cov_kl_coef": 1.0,
    "dynamic_sampling": False, "filter": "informative", "max_refills": 3,
    "overlong_penalty": 0.0, "overlong_buffer": 0.2, "overlong_filter": False, "positive_lm_coef": 0.0,
    "resample": "none", "resample_power": 2.0, "replay_steps": 0,
}  # fmt: skip

SEQUENCE_SUM = {"aggregation": "seq-mean-token-sum"}
SEQUENCE_MEAN = {"aggregation": "seq-mean-token-mean"}

PRESETS: dict[str, dict[str, Any]] = {
    # With a critic
    "ppo": {"advantage": "gae"},  # arXiv:1707.06347
    "pf_ppo": {"advantage": "gae", "resample": "power"},  # arXiv:2409.06957
    "vapo": {  # arXiv:2504.05118; value pretraining is critic.policy_delay_steps, about 50
        "advantage": "decoupled_gae", "critic_lam": 1.0, "length_alpha": 0.05, "clip_high": 0.28, "positive_lm_coef": 0.1,
    },
    # Relative to the group, or to another baseline without a critic
    "grpo": {},  # arXiv:2402.03300
    "dr_grpo": {"normalize_std": False, "aggregation": "seq-mean-token-sum-norm"},  # arXiv:2503.20783
    "dapo": {"clip_high": 0.28, "dynamic_sampling": True, "max_refills": 100, "overlong_penalty": 1.0},  # arXiv:2503.14476
    "grpo_passk": {"advantage": "grpo_passk"},  # arXiv:2503.19595
    "gdpo": {"advantage": "gdpo"},  # arXiv:2601.05242
    "rloo": {"advantage": "rloo", "policy_loss": "reinforce"} | SEQUENCE_SUM,  # arXiv:2402.14740
    "opo": {"advantage": "opo", "policy_loss": "reinforce"} | SEQUENCE_SUM,  # arXiv:2505.23585
    "remax": {"advantage": "remax", "policy_loss": "reinforce"} | SEQUENCE_SUM,  # arXiv:2310.10505
    "gpg": {"advantage": "gpg", "policy_loss": "reinforce"},  # arXiv:2504.02546
    "reinforce": {"advantage": "reward_to_go", "policy_loss": "reinforce"} | SEQUENCE_SUM,  # Williams 1992
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus"},  # arXiv:2501.03262
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline"},
    # Relative to the group, with another loss
    "gspo": {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4} | SEQUENCE_MEAN,  # arXiv:2507.18071
    "gmpo": {"policy_loss": "gmpo", "clip_low": 0.4, "clip_high": 0.4} | SEQUENCE_MEAN,  # arXiv:2507.20673
    "cispo": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},  # arXiv:2506.13585; the paper gives no clip_high
    "sapo": {"policy_loss": "sapo"} | SEQUENCE_MEAN,  # arXiv:2511.20347
    "clip_cov": {"policy_loss": "clip_cov"},  # arXiv:2505.22617
    "kl_cov": {"policy_loss": "kl_cov"},  # arXiv:2505.22617
}  # fmt: skip


class Preference(NamedTuple):
    """A loss of `jrl.algorithms.preference`, and what it is given."""

    reference: bool  # log-probabilities of the reference too
    mean: bool  # log-probabilities as means over the tokens of an answer; otherwise as sums
    paired: bool  # a chosen and a rejected answer; otherwise one with a label
    keys: tuple[str, ...]  # of the config's section dpo that it reads


PREFERENCE_LOSSES: dict[str, Preference] = {
    "dpo": Preference(True, False, True, ("beta", "label_smoothing")),
    "ipo": Preference(True, True, True, ("beta",)),
    "kto": Preference(True, False, False, ("beta", "desirable", "undesirable")),
    "orpo": Preference(False, True, True, ("beta",)),
    "simpo": Preference(False, True, True, ("beta", "gamma")),
}


class Piece(NamedTuple):
    """A function that a name stands for, and what is known of it before it is loaded."""

    path: str  # MODULE:FUNCTION
    about: str
    group: bool = False  # it compares the samples of a prompt, and needs at least 2
    critic: bool = False  # it reads the critic's values
    prepare: str = ""  # MODULE:FUNCTION that chooses tokens of the whole minibatch first, for the argument "selected"


_A, _L, _S = "jrl.algorithms.advantages:", "jrl.algorithms.policy_loss:", "jrl.algorithms.samples:"

ADVANTAGES = {
    "gae": Piece(f"{_A}whitened_gae", "over a critic, whitened", critic=True),
    "decoupled_gae": Piece(f"{_A}decoupled_gae", "lambdas for policy and critic, adapted to the length", critic=True),
    "grpo": Piece(f"{_A}grpo", "to the group's mean, over its std", group=True),
    "grpo_passk": Piece(f"{_A}grpo_passk", "of the group's best over its second", group=True),
    "gdpo": Piece(f"{_A}gdpo", "each reward to its own mean and std in the group, whitened", group=True),
    "rloo": Piece(f"{_A}rloo", "to the mean of the others in the group", group=True),
    "opo": Piece(f"{_A}opo", "to the group's mean weighted by length", group=True),
    "gpg": Piece(f"{_A}gpg", "to the group's mean, scaled for groups that teach nothing", group=True),
    "reward_to_go": Piece(f"{_A}reward_to_go", "no baseline"),
    "reinforce_plus_plus": Piece(f"{_A}reinforce_plus_plus", "reward to go, whitened"),
    "reinforce_plus_plus_baseline": Piece(f"{_A}reinforce_plus_plus_baseline", "to the group's mean, whitened", group=True),
    "remax": Piece(f"{_A}remax", "to the greedy response to the same prompt"),
}
POLICY_LOSSES = {
    "ppo": Piece(f"{_L}ppo_clip", "clipped ratio of tokens; dual clip"),
    "gspo": Piece(f"{_L}gspo", "clipped ratio of sequences"),
    "gmpo": Piece(f"{_L}gmpo", "geometric mean of clipped ratios"),
    "cispo": Piece(f"{_L}cispo", "REINFORCE weighted by the clipped ratio"),
    "sapo": Piece(f"{_L}sapo", "soft gate"),
    "reinforce": Piece(f"{_L}reinforce", "-A logprob"),
    "clip_cov": Piece(f"{_L}clip_cov", "ppo without tokens of high covariance", prepare=f"{_L}clip_cov_selection"),
    "kl_cov": Piece(f"{_L}kl_cov", "unclipped, a KL on tokens of high covariance", prepare=f"{_L}kl_cov_selection"),
}
FILTERS = {"informative": Piece(f"{_S}informative", "groups whose rewards differ", group=True)}

LINEAR = "linear"  # the critic's own head
TABLES = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES, "filter": FILTERS}


def preset(name: str) -> dict[str, Any]:
    """Every choice of an algorithm."""
    return BASE | PRESETS[name]
