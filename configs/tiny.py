"""A few steps with random weights: every part of a run, in under a minute on a CPU. Nothing is learned.

`configs/tiny.py:ppo` runs PPO with a critic instead of GRPO.
"""

from jrl.config import default_config, parse_arg


def get_config(arg=None):
    arg = parse_arg(arg, ppo=False)
    c = default_config()
    c.steps = 3
    c.run_dir = "runs/tiny"
    c.model.path = "random:tiny"

    c.data.train = "reasoning_gym:chain_sum"
    c.data.options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    c.data.train_size, c.data.eval_size = 64, 8
    c.data.max_prompt_tokens = 192  # the random model's tokenizer makes one token of each byte

    c.rollout.prompts_per_step, c.rollout.group_size = 4, 4
    c.rollout.max_new_tokens = 16

    c.learner.learning_rate = 1e-4
    c.learner.microbatch_tokens = 2048
    c.reward.functions = "last_number"
    c.checkpoint.every_steps = 2
    c.log.print_samples_every = 1
    if arg.ppo:
        c.algorithm.name = "ppo"
        c.algorithm.kl_in, c.algorithm.kl_coef, c.algorithm.kl_estimator = "reward", 0.001, "k1"
        c.algorithm.minibatches = 2
        c.critic.learning_rate = 1e-4
    return c
