"""Qwen2.5-0.5B-Instruct learns GSM8K by GRPO, 15 passes over the training set.

Wants `data/gsm8k/train.jsonl` and `test.jsonl` with the fields `question` and `answer`, the number after "####".
"""

from jrl.config import default_config


def get_config():
    c = default_config()
    c.steps = 435  # 15 passes of 29 steps
    c.run_dir = "runs/gsm8k_grpo"
    c.model.path = "Qwen/Qwen2.5-0.5B-Instruct"

    c.data.train, c.data.eval = "data/gsm8k/train.jsonl", "data/gsm8k/test.jsonl"
    c.data.prompt_suffix = ' Reason step by step, then write the final number after "####".'
    c.data.max_prompt_tokens = 512
    c.data.on_long = "drop"

    c.rollout.prompts_per_step, c.rollout.group_size = 256, 5
    c.rollout.max_new_tokens = 512

    c.algorithm.kl_in, c.algorithm.kl_coef, c.algorithm.kl_estimator = "loss", 0.001, "k3"
    c.algorithm.dual_clip = 3.0
    c.algorithm.minibatches = 4

    c.learner.learning_rate = 1e-6
    c.learner.microbatch_tokens = 16384

    c.reward.functions = "gsm8k_strict"
    c.eval.every_steps = 29
    c.checkpoint.every_steps = 29
    c.checkpoint.best = True
    c.log.samples = False
    return c
