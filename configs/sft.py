"""Supervised fine-tuning, as it is of the random tiny model on conversations about sums, in under a minute on a CPU.

The data are made by `configs/dpo.py`. For a model of your own give `model.path`, `data.train` (JSONL with `messages`, or with a
prompt and an answer), `data.max_tokens` and a learning rate, of which a tiny model wants a large one.
"""

import pathlib
import runpy

from jrl.config import default_config


def get_config():
    c = default_config()
    c.stage = "sft"
    c.steps = 40
    c.run_dir = "runs/sft"
    c.model.path = "random:tiny"
    c.data.train = runpy.run_path(str(pathlib.Path(__file__).with_name("dpo.py")))["sums"]("chats")
    c.data.eval_size = 32
    c.data.examples_per_step = 16
    c.data.max_tokens = 256  # the random model's tokenizer makes one token of each byte

    c.learner.learning_rate = 3e-3
    c.learner.schedule = "cosine"
    c.learner.warmup_steps = 4
    c.learner.microbatch_tokens = 2048
    c.eval.every_steps = 10
    return c
