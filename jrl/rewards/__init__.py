"""Rewards of finished samples: `fn(prompts, completions, **columns) -> float32[N]`, each function with a deadline."""

from jrl.rewards.manager import REWARDS, RewardFn, RewardManager, RewardResult

__all__ = ["REWARDS", "RewardFn", "RewardManager", "RewardResult"]
