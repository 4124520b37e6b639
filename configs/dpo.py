"""Learning from pairs, as it is with the random tiny model in under a minute on a CPU: `configs/dpo.py`, or `:loss=kto`.

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
    """Small sums in a file: right and wrong results as "pairs", one of them as "labelled" answers, right ones as "chats"."""
    file = pathlib.Path(f"runs/data/sums_{kind}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row(kind, a, b)) + "\n" for a in range(16) for b in range(16)))
    return str(file)


def row(kind, a, b):
    prompt, right, wrong, label = f"{a} + {b} = ?", f"{a + b}.", f"{a + b + 1 + (a + b) % 3}?", (a + b) % 2 == 0
    if kind == "pairs":
        return {"prompt": prompt, "chosen": right, "rejected": wrong}
    if kind == "labelled":
        return {"prompt": prompt, "completion": right if label else wrong, "label": label}
    more = [("user", "And one more?"), ("assistant", f"{a + b + 1}.")] if label else []
    return {"messages": [{"role": r, "content": text} for r, text in [("user", prompt), ("assistant", right), *more]]}
