"""Training and held-out problems with no question in common, and their examples drawn without repeats."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrl.data.sources import Example, is_gym, load_examples
from jrl.errors import UserError


def load_splits(
    train: Any,
    held_out: Any = "",
    *,
    train_size: int = 0,
    eval_size: int = 0,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    prompt_key: str = "question",
    answer_key: str = "answer",
    prompt_suffix: str = "",
    repeats: bool = False,
) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples; a question that occurs in both goes to the held-out ones alone.

    Args:
      train: a source of `load_examples`.
      held_out: likewise; None or "" to hold out `eval_size` problems of `train` (none at 0).
      train_size, eval_size: problems, drawn at random if there are more; 0 stands for all.
      seed: of the draw.
      options, prompt_key, answer_key, prompt_suffix: see `load_examples`.
      repeats: of one reasoning-gym source, train on problems as often as the tasks make them. Sizes count different ones, and
        the held-out ones are the first that were drawn, each once.

    Raises:
      UserError: as `load_examples`, and when there are fewer distinct questions than wanted.
    """

    def load(source: Any, size: int) -> list[Example]:
        return load_examples(
            source, prompt_key=prompt_key, answer_key=answer_key, prompt_suffix=prompt_suffix,
            options=options if is_gym(source) else None, size=size, seed=seed,
        )  # fmt: skip

    if options and not any(map(is_gym, (train, held_out))):
        raise UserError(f"data.options={dict(options)}: only reasoning-gym sources take options; remove them")
    if is_gym(train) and not train_size:
        raise UserError(f"data.train_size=0: {train} makes as many problems as it is told; give a number")
    if repeats:
        if not is_gym(train) or held_out:
            raise UserError("data.repeats=True: is for a reasoning-gym data.train without a data.eval; set it to False")
        keys = {"prompt_key": prompt_key, "answer_key": answer_key, "prompt_suffix": prompt_suffix}
        size = train_size + eval_size
        return split_draws(load_examples(train, **keys, options=options, size=size, seed=seed, repeats=True), eval_size)
    if held_out is None or (isinstance(held_out, str) and not held_out):
        return split_by_question(load(train, train_size + eval_size), train_size, eval_size, seed)
    evals = _sample(distinct(load(held_out, eval_size)), eval_size, seed, "data.eval_size")
    taken = {example.key for example in evals}
    examples = [e for e in distinct(load(train, train_size + len(evals))) if e.key not in taken]
    return _sample(examples, train_size, seed, "data.train_size"), evals


def split_by_question(
    examples: Sequence[Example], train_size: int, eval_size: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """Random training and held-out examples from one source, each question used once.

    Args:
      train_size: examples; 0: all that are not held out.
      eval_size: held-out examples.

    Raises:
      UserError: fewer distinct questions than wanted.
    """
    rows = distinct(examples)
    if len(rows) < max(train_size, 1) + eval_size:
        raise UserError(
            f"data.train_size={train_size}, data.eval_size={eval_size}: there are {len(rows)} distinct questions "
            f"({len(examples)} rows); ask for fewer"
        )
    shuffled = _shuffle(rows, seed)
    end = eval_size + train_size if train_size else len(rows)
    return shuffled[eval_size:end], shuffled[:eval_size]


def split_draws(examples: Sequence[Example], eval_size: int) -> tuple[list[Example], list[Example]]:
    """Draws in their order: the first `eval_size` different questions are held out, all draws of other ones are for training."""
    held_out = distinct(examples)[:eval_size]
    taken = {example.key for example in held_out}
    return [example for example in examples if example.key not in taken], held_out


def distinct(examples: Sequence[Example]) -> list[Example]:
    """The first example of each question, in the order of these."""
    first: dict[str, Example] = {}
    for example in examples:
        first.setdefault(example.key, example)
    return list(first.values())


def overlap(train: Sequence[Example], held_out: Sequence[Example]) -> int:
    """How many questions occur in both."""
    return len({e.key for e in train} & {e.key for e in held_out})


def _sample(examples: list[Example], size: int, seed: int, key: str) -> list[Example]:
    if len(examples) < max(size, 1):
        raise UserError(f"{key}={size}: there are {len(examples)} distinct questions outside the other set; ask for fewer")
    return _shuffle(examples, seed)[:size] if size else examples


def _shuffle(examples: list[Example], seed: int) -> list[Example]:
    return [examples[i] for i in np.random.default_rng(seed).permutation(len(examples))]
