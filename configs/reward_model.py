"""A reward model from pairs, on the random tiny model in under a minute on a CPU; `hf/` in its run_dir is a `reward.model.path`.

The data are those of `configs/dpo.py`; set `model.path` and `data.train` to a model and pairs of your own.
"""

import pathlib
import runpy

from jrl.config import default_config


def get_config():
    c = default_config()
    c.stage = "reward_model"
    c.steps = 40
    c.run_dir = "runs/reward_model"
    c.model.path = "random:tiny"
    c.data.train = runpy.run_path(str(pathlib.Path(__file__).with_name("dpo.py")))["sums"]("pairs")
    c.data.eval_size = 32
    c.data.examples_per_step = 16
    c.data.max_tokens = 128  # the random model's tokenizer makes one token of each byte

    c.reward_model.centre_coef = 0.01
    c.learner.learning_rate = 1e-3
    c.learner.microbatch_tokens = 4096
    c.eval.every_steps = 10
    return c
