"""Rows of supervised and preference data: which conversations a row holds, and what is known of them.

| stage | columns |
|---|---|
| sft | `messages`, or a prompt and an answer |
| pairs (reward_model, dpo) | `prompt`, `chosen`, `rejected`, and a `margin` if there is one |
| labels (dpo with `dpo.loss=kto`) | `prompt`, `completion`, `label` |
| steps (process rewards) | `prompt`, `steps`, `labels` |

Prompts and completions are text or lists of chat messages; `chosen` and `rejected` may be whole conversations, their prompt in
them. The prompt is looked for under `data.prompt_key`, then under `prompt`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jrl.data.sources import Message, is_gym, load_rows, read_messages
from jrl.errors import UserError

Chat = tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """One row before it meets a tokenizer."""

    where: str  # file and line, for errors
    prompt: Chat  # what comes before the first answer; the same in all conversations
    chats: tuple[Chat, ...]  # whole conversations: one, or the chosen and the rejected one
    facts: dict[str, Any]  # margin, label, steps: what the columns say besides

    @property
    def key(self) -> str:
        """The prompt's text, by which held-out rows are told from others; differences in white space do not count."""
        return " ".join(" ".join(m["content"] for m in self.prompt).split())


Read = Callable[[str, Mapping[str, Any]], Record]


# Reading a row -------------------------------------------------------------------------------------------------------


class Columns:
    """Reads rows by the names of their columns.

    Args:
      prompt_key, answer_key: the config's `data.prompt_key` and `data.answer_key`.
      prompt_suffix: text after each prompt that is no whole conversation.
    """

    def __init__(self, prompt_key: str, answer_key: str, prompt_suffix: str):
        self._prompt_keys, self._answer_key, self._suffix = (prompt_key, "prompt"), answer_key, prompt_suffix

    def conversation(self, where: str, row: Mapping[str, Any]) -> Record:
        """A row of sft."""
        if "messages" in row:
            chat = tuple(read_messages(where, "messages", row["messages"]))
            first = next((i for i, m in enumerate(chat) if m["role"] == "assistant"), None)
            if not first:
                found = "starts with" if first == 0 else "has no message of"
                raise UserError(f"{where}: messages {found} the role assistant; there is nothing to learn, remove the row")
            return Record(where, chat[:first], (chat,), {})
        prompt = self._prompt(where, row, "or messages ")
        return Record(where, prompt, ((*prompt, *_completion(where, self._answer_key, row)),), {})

    def pair(self, where: str, row: Mapping[str, Any]) -> Record:
        """A row with a better and a worse answer."""
        chosen, rejected = (_completion(where, name, row) for name in ("chosen", "rejected"))
        if chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
            shared = len(list(same))
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
            if not prompt or not chosen or not rejected:
                raise UserError(f"{where}: chosen and rejected must begin alike and then differ; mend or remove the row")
        else:
            prompt = self._prompt(where, row)
        if chosen == rejected:
            raise UserError(f"{where}: chosen and rejected are the same; remove the row")
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if len(answer) != 1 or answer[0]["role"] != "assistant":
                raise UserError(f"{where}: {name} must end with one message of the assistant after what both have in common")
        margin = _number(where, "margin", row["margin"]) if row.get("margin") is not None else 0.0
        return Record(where, prompt, ((*prompt, *chosen), (*prompt, *rejected)), {"margin": margin})

    def labelled(self, where: str, row: Mapping[str, Any]) -> Record:
        """A row with one answer that is good or bad."""
        prompt, answer = self._prompt(where, row), _completion(where, "completion", row)
        label = _column(where, "label", row)
        if label not in (0, 1):
            raise UserError(f"{where}: label={label!r}; must be true or false, whether the completion is wanted")
        return Record(where, prompt, ((*prompt, *answer),), {"label": float(label)})

    def stepwise(self, where: str, row: Mapping[str, Any]) -> Record:
        """A row whose answer is a list of steps, each with a label between 0 (wrong) and 1 (right)."""
        prompt, steps, labels = self._prompt(where, row), _column(where, "steps", row), _column(where, "labels", row)
        if not isinstance(steps, list | tuple) or not steps or not all(isinstance(s, str) and s.strip() for s in steps):
            raise UserError(f"{where}: steps={str(steps)[:80]} is no list of texts")
        if not isinstance(labels, list | tuple) or len(labels) != len(steps):
            raise UserError(f"{where}: labels={str(labels)[:80]} is no list of {len(steps)} numbers, one for each step")
        numbers = [_number(where, "labels", label) for label in labels]
        if not all(0 <= n <= 1 for n in numbers):
            raise UserError(f"{where}: labels={labels!r}: must be from 0 (wrong) to 1 (right)")
        return Record(where, prompt, (), {"steps": tuple(step.strip("\n") for step in steps), "labels": tuple(numbers)})

    def _prompt(self, where: str, row: Mapping[str, Any], other: str = "") -> Chat:
        key = next((key for key in self._prompt_keys if key in row), None)
        if key is None:
            wanted = " or ".join(map(repr, dict.fromkeys(self._prompt_keys)))
            raise UserError(f"{where}: has no column {wanted} {other}(data.prompt_key); it has {_names(row)}")
        value = row[key]
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else read_messages(where, key, value)
        if not any(m["content"].strip() for m in messages):
            raise UserError(f"{where}: {key} is empty; remove the row")
        return (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + self._suffix})


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row)))


def _column(where: str, key: str, row: Mapping[str, Any]) -> Any:
    if row.get(key) is None:
        raise UserError(f"{where}: has no column {key!r}; it has {_names(row)}")
    return row[key]


def _completion(where: str, key: str, row: Mapping[str, Any]) -> Chat:
    """Text as a message of the assistant, messages as they are."""
    value = _column(where, key, row)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    messages = [{"role": "assistant", "content": value}] if isinstance(value, str) else read_messages(where, key, value)
    if not messages[-1]["content"].strip():
        raise UserError(f"{where}: {key} is empty; remove the row")
    return tuple(messages)


def _number(where: str, key: str, value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {key}={value!r} is not a finite number")
    return float(value)


def mismatched(records: list[Record]) -> list[Record]:
    """Each record with a second conversation: its prompt with the answer of the record before it, in a circle."""
    return [
        dataclasses.replace(record, chats=(*record.chats, (*record.prompt, *other.chats[0][len(other.prompt) :])))
        for record, other in zip(records, [records[-1], *records[:-1]] if records else [], strict=True)
    ]


# Splits ----------------------------------------------------------------------------------------------------------------


def load_records(
    train: Any, held_out: Any, read: Read, *, train_size: int, eval_size: int, seed: int, options: Mapping[str, Any]
) -> tuple[list[Record], list[Record]]:
    """Training and held-out rows; a prompt that occurs in both goes to the held-out ones alone.

    A prompt may occur in several rows, with different answers. Of one source the first `eval_size` rows of a random order are
    held out, and all others of their prompts are left out.

    Args:
      train, held_out: sources of `jrl.data.load_examples`; "" or None to hold out rows of `train`.
      train_size, eval_size: rows, drawn at random if there are more; 0 stands for all (of a single source: none held out).

    Raises:
      UserError: what is wrong with a source or a row, or fewer rows than wanted.
    """

    def load(source: Any, size: int) -> list[Record]:
        rows = load_rows(source, options=options if is_gym(source) else None, size=size, seed=seed)
        return _shuffle([read(where, row) for where, row in rows], seed)

    if options and not any(map(is_gym, (train, held_out))):
        raise UserError(f"data.options={dict(options)}: only reasoning-gym sources take options; remove them")
    if held_out is None or (isinstance(held_out, str) and not held_out):
        rows = load(train, train_size + eval_size)
        evals = rows[:eval_size]
    else:
        evals = load(held_out, eval_size)[: eval_size or None]
        rows = load(train, train_size + len(evals) if is_gym(train) else 0)
    taken = {record.key for record in evals}
    rows = [record for record in rows if record.key not in taken]
    for key, wanted, got in (("data.train_size", max(train_size, 1), len(rows)), ("data.eval_size", eval_size, len(evals))):
        if got < wanted:
            raise UserError(f"{key}: {wanted} rows are wanted, but there are {got} with prompts of their own; ask for fewer")
    return rows[: train_size or None], evals


def _shuffle(records: list[Record], seed: int) -> list[Record]:
    return [records[i] for i in np.random.default_rng(seed).permutation(len(records))]
