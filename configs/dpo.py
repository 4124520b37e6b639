"""The random tiny model learns from pairs, in under a minute on a CPU: `configs/dpo.py`, or `configs/dpo.py:loss=kto`.

The data are made below and written to `runs/data/`: sums, whose wrong results end with another mark, which is what a tiny model
learns of them. Set `model.path` and `data.train` to a model and pairs of your own: JSONL with `prompt`, `chosen` and `rejected`,
for KTO with `prompt`, `completion` and `label`.
"""

import json
import pathlib

from jrl.config import default_config, parse_arg


def get_config(arg=None):
    arg = parse_arg(arg, loss="dpo")
    c = default_config()
    c.stage = "dpo"
    c.steps = 40
    c.run_dir = f"runs/{arg.loss}"
    c.model.path = "random:tiny"
    c.data.train = sums("labelled" if arg.loss == "kto" else "pairs")
    c.data.eval_size = 32
    c.data.examples_per_step = 16
    c.data.max_tokens = 128  # the random model's tokenizer makes one token of each byte

    c.dpo.loss = arg.loss
    if arg.loss == "simpo":
        c.dpo.beta = 2.0
    c.learner.learning_rate = 1e-3
    c.learner.microbatch_tokens = 4096
    c.eval.every_steps = 10
    return c


def sums(kind):
    """Right and wrong results of small sums, as pairs or as answers with a label."""
    file = pathlib.Path(f"runs/data/sums_{kind}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for a in range(16):
        for b in range(16):
            prompt, right, wrong = f"{a} + {b} = ?", f"{a + b}.", f"{a + b + 1 + (a + b) % 3}?"
            pair = {"prompt": prompt, "chosen": right, "rejected": wrong}
            label = (a + b) % 2 == 0
            rows.append(pair if kind == "pairs" else {"prompt": prompt, "completion": right if label else wrong, "label": label})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)
