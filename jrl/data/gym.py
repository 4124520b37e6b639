"""Distinct problems from reasoning-gym's procedural tasks (https://github.com/open-thought/reasoning-gym)."""

import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jrl.errors import UserError

PREFIX = "reasoning_gym:"


def draw(names: Sequence[str], options: Mapping[str, Any], size: int, seed: int, repeats: bool = False) -> list[dict[str, Any]]:
    """`size` problems with different questions, the tasks taking turns while they have new ones.

    Problem i of a task depends on (seed, i) only. Drawing ends when there are enough, or when so many draws in a row
    brought nothing new (ten times as many as there are problems, and at least 1,000) that there is hardly another one.

    Args:
      names: tasks, such as "chain_sum".
      options: the tasks' options; a dict under the name of a task holds options for that one alone.
      repeats: return every draw, so that small and frequent problems come as often as the tasks make them; `size` still
        counts the different ones.

    Returns:
      Rows with question, answer, metadata, data_source (`reasoning_gym:NAME`) and dataset_options: all that the task's
      own verifier needs.

    Raises:
      UserError: unknown task or option, or fewer than `size` distinct problems, with their number.
    """
    if size < 1:
        raise UserError(
            f"{PREFIX}{'+'.join(names)}: makes as many problems as it is told; give data.train_size and data.eval_size"
        )
    rows: dict[str, dict[str, Any]] = {}
    most = 100 * size + 1000
    drawn: list[dict[str, Any]] = []
    fruitless = 0
    turns = zip(*(_problems(name, _options_of(name, names, options), most, seed) for name in names), strict=True)
    for row in itertools.islice(itertools.chain.from_iterable(turns), most):
        fruitless += 1
        drawn.append(row)
        if rows.setdefault(" ".join(row["question"].split()), row) is row:
            fruitless = 0
        if len(rows) == size:
            return drawn if repeats else list(rows.values())
        if fruitless >= max(1000, 10 * len(rows)):
            break
    raise UserError(
        f"{PREFIX}{'+'.join(names)} with options {dict(options)}: has {len(rows)} distinct problems where "
        f"data.train_size + data.eval_size = {size} are wanted; ask for fewer, or widen data.options"
    )


def _problems(name: str, options: dict[str, Any], size: int, seed: int) -> Iterator[dict[str, Any]]:
    dataset = _create(name, options, size, seed)
    for i in range(size):
        entry = dataset[i]
        yield {
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "data_source": PREFIX + name,
            "dataset_options": options,
        }


def _options_of(name: str, names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    shared = {k: v for k, v in options.items() if k not in names}
    return {**shared, **options.get(name, {})}


def _create(name: str, options: dict[str, Any], size: int, seed: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise UserError(f"{PREFIX}{name}: needs the package reasoning-gym; pip install 'jrl[rewards]'") from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:8]
        raise UserError(f"{PREFIX}{name}: reasoning-gym has no task of that name; it has {', '.join(near)}")
    known = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("size", "seed")]
    for option in options:
        if option not in known:
            raise UserError(
                f"data.options.{option}={options[option]!r}: {name} has no such option; it has {', '.join(known)} "
                f"(an option for one task of a mix is data.options.{name}.NAME)"
            )
    try:
        return create_dataset(name, **options, size=size, seed=seed)
    except Exception as error:  # the tasks check their options by assertions
        raise UserError(f"data.options={options}: {name} refuses them ({type(error).__name__}: {error})") from None
