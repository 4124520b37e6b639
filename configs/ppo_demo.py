"""The demo's task by PPO: a Flax critic, started from the policy's own backbone, instead of the group's mean.

The critic learns alone for a few steps before the policy starts to move. About twice the work of the GRPO demo per step.
"""

import pathlib
import runpy


def get_config():
    c = runpy.run_path(str(pathlib.Path(__file__).with_name("demo.py")))["get_config"]()
    c.steps = 30
    c.run_dir = "runs/ppo_demo"
    c.algorithm.name = "ppo"
    c.algorithm.lam = 0.95
    c.algorithm.minibatches = 2
    c.critic.learning_rate = 1e-4
    c.critic.beta2 = 0.95
    c.critic.weight_decay = 0.0
    c.critic.policy_delay_steps = 3
    c.checkpoint.every_steps = 15
    return c
