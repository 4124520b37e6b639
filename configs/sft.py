"""The random tiny model learns to answer sums by supervised fine-tuning, in under a minute on a CPU.

Set `model.path` and `data.train` to a model and conversations of your own: JSONL with `messages`, or with a prompt and an answer.
"""

from jrl.config import default_config


def get_config():
    c = default_config()
    c.stage = "sft"
    c.steps = 40
    c.run_dir = "runs/sft"
    c.model.path = "random:tiny"

    c.data.train = "reasoning_gym:chain_sum"
    c.data.options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    c.data.train_size, c.data.eval_size = 64, 16
    c.data.examples_per_step = 16
    c.data.max_tokens = 256  # the random model's tokenizer makes one token of each byte

    c.learner.learning_rate = 3e-3
    c.learner.schedule = "cosine"
    c.learner.warmup_steps = 4
    c.learner.microbatch_tokens = 2048
    c.eval.every_steps = 10
    return c
