"""A model of 0.9 million parameters that writes words backwards: shown it among other things first, then by a reward.

`experiments/algorithms/run.py` makes the data and compares the algorithms; `config.py:sft` is the first stage.
"""

import pathlib

from jrl.config import default_config, parse_arg

DATA = pathlib.Path("runs/algorithms/data")


def get_config(arg=None):
    arg = parse_arg(arg, sft=False)
    c = default_config()
    c.model.path = "random:small" if arg.sft else "runs/algorithms/sft/hf"
    c.data.train, c.data.eval = str(DATA / "train.jsonl"), str(DATA / "eval.jsonl")
    c.data.use_chat_template = False
    c.checkpoint.keep = 1
    c.log.tensorboard = c.log.samples = False
    c.log.print_samples_every = 0
    return _sft(c) if arg.sft else _rl(c)


def _sft(c):
    c.stage = "sft"
    c.run_dir = "runs/algorithms/sft"
    c.data.answer_key = "reply"
    c.steps = 800
    c.data.examples_per_step, c.data.max_tokens = 128, 32
    c.learner.learning_rate, c.learner.schedule, c.learner.warmup_steps = 2e-3, "cosine", 50
    c.learner.microbatch_tokens = 4096
    c.eval.every_steps = 200
    return c


def _rl(c):
    c.steps = 60
    c.data.max_prompt_tokens = 16
    c.rollout.prompts_per_step, c.rollout.group_size = 16, 8
    c.rollout.max_new_tokens = 12
    c.learner.learning_rate, c.learner.warmup_steps = 1e-4, 5
    c.learner.beta2, c.learner.weight_decay = 0.95, 0.0
    c.critic.learning_rate = 3e-4
    c.learner.microbatch_tokens = 4096
    c.algorithm.minibatches = 2
    c.reward.functions = "exact_match"
    c.eval.every_steps, c.eval.samples = 10, 4
    c.export.hf = False
    return c
