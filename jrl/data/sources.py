"""Problems from JSONL, parquet, Hugging Face `datasets`, Python lists and reasoning-gym, all as `Example`s.

A row needs a question (text, or a list of chat messages) and a reference answer, under the names that the caller gives.
Rows in verl's form (`prompt`, a list of messages, and `reward_model["ground_truth"]`) are understood without any names.
All columns of a row are kept, for the reward functions.
"""

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from jrl.data import gym
from jrl.errors import UserError

Message = dict[str, str]  # {"role": ..., "content": ...}
RESERVED = ("prompts", "completions")  # the positional arguments of a reward function
FORMS = "FILE.jsonl, FILE.parquet, hf:ID[:SPLIT], hf:ID:SUBSET:SPLIT or reasoning_gym:NAME[+NAME]"


@dataclasses.dataclass(frozen=True)
class Example:
    """One problem before it meets a tokenizer."""

    question: str | list[Message]  # what the model is asked
    answer: str | None  # reference, as text; GSM8K's is the whole solution with its "#### n"
    columns: dict[str, Any]  # the row, with its answer (of whatever type) as `answer` too

    @property
    def key(self) -> str:
        """The question's text, by which problems are told apart; differences in white space do not count."""
        parts = [self.question] if isinstance(self.question, str) else [m["content"] for m in self.question]
        return " ".join(" ".join(parts).split())


def load_examples(
    source: Any,
    *,
    prompt_key: str = "question",
    answer_key: str = "answer",
    prompt_suffix: str = "",
    options: Mapping[str, Any] | None = None,
    size: int = 0,
    seed: int = 0,
    repeats: bool = False,
) -> list[Example]:
    """Reads a source.

    Args:
      source: a name in one of the `FORMS`, a `datasets.Dataset`, or any other iterable of dicts.
      prompt_key, answer_key: names of the columns.
      prompt_suffix: text appended to the question, or to the last message.
      options: keyword options of reasoning-gym's datasets; for a mix, `{NAME: {...}}` is for NAME alone.
      size: distinct problems to draw from reasoning-gym; every other source is read whole.
      seed: of reasoning-gym's draw.
      repeats: keep its repeated problems, see `gym.draw`.

    Raises:
      UserError: no such file, a broken line (with its number), a missing column (with the row and the columns there
        are), an unknown task or option, too few distinct problems, a package that is not installed.
    """
    if is_gym(source):
        prompt_key, answer_key = "question", "answer"
    rows = load_rows(source, options=options, size=size, seed=seed, repeats=repeats)
    return [_example(where, row, prompt_key, answer_key, prompt_suffix) for where, row in rows]


def load_rows(
    source: Any, *, options: Mapping[str, Any] | None = None, size: int = 0, seed: int = 0, repeats: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a source, each with a word on where it stands; arguments and errors are those of `load_examples`."""
    if is_gym(source):
        names = source.removeprefix(gym.PREFIX).split("+")
        rows = list(_numbered(source, gym.draw(names, options or {}, size, seed, repeats)))
    elif options:
        raise UserError(f"data.options={dict(options)}: {source!r} takes none; they are for {gym.PREFIX}NAME only")
    else:
        rows = list(_rows(source))
    if not rows:
        raise UserError(f"{source if isinstance(source, str) else type(source).__name__}: holds no rows")
    return rows


def is_gym(source: Any) -> bool:
    return isinstance(source, str) and source.startswith(gym.PREFIX)


# Rows, each with a word on where it stands ---------------------------------------------------------------------------

Rows = Iterator[tuple[str, dict[str, Any]]]


def _rows(source: Any) -> Rows:
    if isinstance(source, str | pathlib.Path):
        name = str(source)
        if name.startswith("hf:"):
            yield from _numbered(name, _hub_rows(name))
        elif name.endswith((".jsonl", ".parquet")):
            path = pathlib.Path(name).expanduser()
            if not path.is_file():
                raise UserError(f"{name}: no such file (looked for {path.absolute()})")
            yield from _jsonl_rows(path) if name.endswith(".jsonl") else _numbered(name, _parquet_rows(path))
        else:
            raise UserError(f"data source {name!r}: is none of {FORMS}")
    elif isinstance(source, Mapping):  # a DatasetDict, or a dict of columns
        raise UserError(f"data: got a {type(source).__name__} with {', '.join(map(str, source))}; give rows, or one split")
    else:
        yield from _numbered("data", source)


def _numbered(name: str, rows: Iterable[dict[str, Any]]) -> Rows:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UserError(f"{name} row {number}: is a {type(row).__name__}; every row must be a dict")
        yield f"{name} row {number}", dict(row)


def _jsonl_rows(path: pathlib.Path) -> Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # bad JSON or bad UTF-8
                raise UserError(f"{path} line {number}: is not JSON ({error}); mend or remove it") from None
            if not isinstance(row, dict):
                raise UserError(f"{path} line {number}: is a JSON {type(row).__name__}; every line must be an object")
            yield f"{path} line {number}", row


def _parquet_rows(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    pyarrow, parquet = _extra("pyarrow", path), _extra("pyarrow.parquet", path)
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as parquet ({' '.join(str(error).split())[:200]})") from None


def _hub_rows(source: str) -> Iterable[dict[str, Any]]:
    datasets = _extra("datasets", source)
    parts = source.removeprefix("hf:").split(":")
    if not all(parts) or len(parts) > 3:
        raise UserError(f"data source {source!r}: write hf:ID, hf:ID:SPLIT or hf:ID:SUBSET:SPLIT")
    name, *subset, split = parts if len(parts) > 1 else (*parts, "train")
    try:
        return datasets.load_dataset(name, *subset, split=split)
    except Exception as error:  # the library raises a dozen types, from no network to an unknown split
        text = " ".join(str(error).split())[:300]
        raise UserError(f"data source {source!r}: `datasets` cannot load it ({type(error).__name__}: {text})") from error


def _extra(package: str, source: Any) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"{source}: needs the package {package.split('.')[0]}; pip install 'jrl[data]'") from None


# From a row to an example --------------------------------------------------------------------------------------------


def _example(where: str, row: dict[str, Any], prompt_key: str, answer_key: str, suffix: str) -> Example:
    verl = isinstance(row.get("reward_model"), Mapping)
    if verl and prompt_key not in row:
        prompt_key = "prompt"
    for config_key, key in (("data.prompt_key", prompt_key), ("data.answer_key", answer_key)):
        if key not in row and not (key == answer_key and verl and "ground_truth" in row["reward_model"]):
            raise UserError(f"{where}: has no column {key!r} ({config_key}); it has {', '.join(sorted(map(str, row)))}")
    if clash := [name for name in RESERVED if name in row and name != prompt_key]:
        raise UserError(f"{where}: column {clash[0]!r} has the name of an argument of the reward functions; rename it")
    columns = {k: v for k, v in row.items() if k not in RESERVED}
    columns["answer"] = row[answer_key] if answer_key in row else row["reward_model"]["ground_truth"]
    question = _question(where, prompt_key, row[prompt_key], suffix)
    return Example(question, _text(columns["answer"]), columns)


def _question(where: str, key: str, value: Any, suffix: str) -> str | list[Message]:
    if isinstance(value, str) and value.strip():
        return value + suffix
    messages = read_messages(where, key, value)
    if not any(m["content"].strip() for m in messages):
        raise UserError(f"{where}: {key} is empty; remove the row")
    messages[-1]["content"] += suffix
    return messages


def read_messages(where: str, key: str, value: Any) -> list[Message]:
    """A list of chat messages, as a column holds it."""
    is_chat = isinstance(value, list | tuple) and value and all(isinstance(m, Mapping) for m in value)
    if not is_chat or not all(isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value):
        raise UserError(f"{where}: {key}={str(value)[:80]!r} is neither text nor a list of messages (role, content) of text")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _text(answer: Any) -> str | None:
    """A reference answer as text; what is no scalar becomes JSON."""
    if answer is None or isinstance(answer, str):
        return answer
    return str(answer) if isinstance(answer, int | float) else json.dumps(answer, default=str)
