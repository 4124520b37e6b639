"""Conversations as token ids, and which of them the assistant wrote.

A chat template is a program: what it writes for the first messages need not be the beginning of what it writes for all of
them. The spans of the assistant are found by rendering up to where each begins and up to where it ends, and every such prefix
has to be, token by token, the beginning of the whole; a row of which that is not true is an error, never a wrong mask. Templates
that mark the assistant's text themselves, with `{% generation %}`, are asked instead.
"""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.data.prompts import encode_text, join_contents, system_messages
from jrl.data.records import Chat, Record
from jrl.data.sources import Message
from jrl.errors import UserError
from jrl.shapes import LENGTH_STEP, bucket
from jrl.types import Sequences

STEP_END = "\n"  # after each step of an answer
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One conversation of n tokens; what follows the last token with loss is left out."""

    tokens: np.ndarray  # i32[n]
    mask: np.ndarray  # bool[n], which carry loss
    prompt_len: int  # tokens before the first of these


@dataclasses.dataclass(frozen=True)
class Item:
    """What the stream draws: the sequences of one row, which belong together."""

    uid: str  # the same for the same tokens, in every run
    sequences: tuple[Encoded, ...]
    facts: dict[str, Any]  # see `Record`


@dataclasses.dataclass(frozen=True)
class Renderer:
    """Turns messages into tokens, in one way for a whole run.

    Attributes:
      system: messages before every conversation that has no system message of its own.
      eos_ids: every id that ends a turn.
    """

    tokenizer: Any
    use_chat_template: bool
    system: tuple[Message, ...]
    eos_ids: tuple[int, ...]

    @classmethod
    def make(cls, tokenizer: Any, eos_ids: tuple[int, ...], system_prompt: str, use_chat_template: bool) -> "Renderer":
        """
        Args:
          system_prompt: as in `jrl.data.prompts.encode`.
        """
        return cls(tokenizer, use_chat_template, tuple(system_messages(tokenizer, system_prompt, use_chat_template)), eos_ids)

    def encode(self, where: str, chat: Chat, all_turns: bool) -> Encoded:
        """A conversation whose assistant turns carry loss: all of them, or the last one, with which it then ends.

        Raises:
          UserError: a template that refuses the messages or rewrites earlier ones; no turn to learn.
        """
        chat = self._with_system(chat)
        if not self.use_chat_template:
            return self._encode_text(where, chat)
        if all_turns and _GENERATION.search(self.tokenizer.chat_template):
            return self._encode_marked(where, chat)
        turns = [i for i, m in enumerate(chat) if m["role"] == "assistant"]
        end = turns[-1] + 1
        text = self.render(where, chat[:end])
        whole = self.tokens(text)
        mask = np.zeros(len(whole), bool)
        for i in turns if all_turns else turns[-1:]:
            begin = self._prefix(where, text, whole, self.render(where, chat[:i], answer=True), i, "begins")
            stop = self._prefix(where, text, whole, self.render(where, chat[: i + 1]), i, "ends")
            mask[begin : self._last_eos(whole, begin, stop)] = True
        return _encoded(where, whole, mask)

    def _with_system(self, chat: Chat) -> Chat:
        return chat if chat[0]["role"] == "system" else (*self.system, *chat)

    def whole(self, where: str, chat: Chat) -> np.ndarray:
        """All of a conversation, without the white space after the EOS that ends it."""
        chat = self._with_system(chat)
        if not self.use_chat_template:
            return self._encode_text(where, chat).tokens
        tokens = self.tokens(self.render(where, chat))
        end = self._last_eos(tokens, 0, len(tokens))
        return tokens if self.tokenizer.decode(tokens[end:]).strip() else tokens[:end]

    def prompt_tokens(self, where: str, chat: Chat) -> np.ndarray:
        """Up to where the assistant begins."""
        chat = self._with_system(chat)
        if self.use_chat_template:
            return self.tokens(self.render(where, chat, answer=True))
        return np.asarray(encode_text(self.tokenizer, join_contents(chat)), np.int32)

    def render(self, where: str, chat: Sequence[Message], answer: bool = False) -> str:
        """The text of messages, with `answer` up to where the assistant's next one begins."""
        try:
            return self.tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=answer)
        except Exception as error:  # jinja's errors and those that templates raise by themselves
            roles = ", ".join(m["role"] for m in chat)
            raise UserError(f"{where}: the chat template refuses the roles {roles} ({error})") from None

    def tokens(self, text: str) -> np.ndarray:
        """A template writes its own BOS, so the tokenizer must not add another one."""
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def _prefix(self, where: str, text: str, whole: np.ndarray, start: str, turn: int, event: str) -> int:
        """How many of the tokens of the whole are those of a text that should be its beginning."""
        part = self.tokens(start)
        if np.array_equal(whole[: len(part)], part):
            return len(part)
        place = f"{where}: message {turn + 1}, of the assistant: "
        if text.startswith(start):
            raise UserError(
                f"{place}where it {event} a token goes across the border, so that it is nobody's; remove white space from the"
                " beginning and the end of the message"
            )
        raise UserError(
            f"{place}up to where it {event} the chat template renders another text than in the whole conversation, so that its"
            " tokens cannot be told; give sft.turns=last, or another template"
        )

    def _last_eos(self, whole: np.ndarray, begin: int, stop: int) -> int:
        """Where the loss ends: after the last EOS, as what follows it is written by the template; without one, with the turn."""
        ends = np.flatnonzero(np.isin(whole[begin:stop], self.eos_ids))
        return begin + int(ends[-1]) + 1 if len(ends) else stop

    def _encode_marked(self, where: str, chat: Chat) -> Encoded:
        self.render(where, chat)  # for its errors
        out = self.tokenizer.apply_chat_template(
            list(chat), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )  # fmt: skip
        return _encoded(where, np.asarray(out["input_ids"], np.int32), np.asarray(out["assistant_masks"], bool))

    def _encode_text(self, where: str, chat: Chat) -> Encoded:
        """Without a template: the prompt as RL would encode it, the answer, and an EOS."""
        if any(m["role"] == "assistant" for m in chat[:-1]) or chat[-1]["role"] != "assistant":
            raise UserError(f"{where}: a conversation of several turns needs data.use_chat_template=True")
        prompt = self.prompt_tokens(where, chat[:-1])
        answer = [*self.tokens(chat[-1]["content"]), self.tokenizer.eos_token_id]
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        return _encoded(where, np.asarray([*prompt, *answer], np.int32), mask)


def _encoded(where: str, tokens: np.ndarray, mask: np.ndarray) -> Encoded:
    marked = np.flatnonzero(mask)
    if not len(marked) or not marked[0]:
        raise UserError(f"{where}: no token of the assistant, or none before it, in what the chat template renders")
    end = marked[-1] + 1
    return Encoded(tokens[:end], mask[:end], int(marked[0]))


def encode_conversations(record: Record, renderer: Renderer, all_turns: bool) -> Item:
    """The conversations of a row; of several, all have the tokens of the prompt in common."""
    sequences = tuple(renderer.encode(record.where, chat, all_turns) for chat in record.chats)
    prompts = {s.tokens[: s.prompt_len].tobytes() for s in sequences}
    if len(prompts) > 1:
        raise UserError(f"{record.where}: chosen and rejected differ before the answer begins, as they are rendered")
    return _item(sequences, record.facts)


def encode_scored(record: Record, renderer: Renderer) -> Item:
    """The conversations of a row, each with one more token, where the score of what is before it stands.

    A value belongs to the token whose state is scored before it is chosen, so the score after the last token is the value of the
    next; which token that is makes no difference. It is the only one with loss. Conversations end with the EOS of their last
    turn. Where an answer begins does not matter to its score: the prompt is what all of them have in common.
    """
    whole = [renderer.whole(record.where, chat) for chat in record.chats]
    start = renderer.prompt_tokens(record.where, record.prompt)
    shared = min(_in_common(start, tokens) for tokens in whole)
    sequences = (Encoded(tokens, np.zeros(len(tokens), bool), shared) for tokens in whole)
    return _item(tuple(scored(s, [len(s.tokens)]) for s in sequences), record.facts)


def _in_common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens are the same from the beginning on."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def steps_of(text: str) -> tuple[str, ...]:
    """The steps of an answer: its lines, without those that are blank."""
    return tuple(line for line in text.split(STEP_END) if line.strip())


def encode_steps(record: Record, renderer: Renderer) -> Item:
    """An answer in steps, tokenized one by one, so that the last token of each is known; scores stand after these.

    Raises:
      UserError: a step of several lines, which nobody would find again in a response.
    """
    for step in record.facts["steps"]:
        if steps_of(step) != (step,):
            raise UserError(
                f"{record.where}: the step {step[:60]!r} has a line break; a line is a step where responses are scored, so give"
                " a step for each line, or one line for the step"
            )
    pieces = [renderer.prompt_tokens(record.where, record.prompt)]
    pieces += [renderer.tokens(step + STEP_END) for step in record.facts["steps"]]
    ends = np.cumsum([len(piece) for piece in pieces])
    tokens = np.concatenate(pieces)
    answer = Encoded(tokens, np.arange(len(tokens)) >= ends[0], int(ends[0]))
    sequence = scored(answer, ends[1:])
    return _item((sequence,), {name: value for name, value in record.facts.items() if name != "steps"})


def scored(sequence: Encoded, places: Sequence[int] | np.ndarray) -> Encoded:
    """The sequence with one more token, and scores at these places alone, each right after what it is the score of."""
    mask = np.zeros(len(sequence.tokens) + 1, bool)
    mask[places] = True
    return Encoded(np.append(sequence.tokens, np.int32(0)), mask, sequence.prompt_len)


def _item(sequences: tuple[Encoded, ...], facts: dict[str, Any]) -> Item:
    return Item(_uid(sequences, facts), sequences, facts)


def _uid(sequences: tuple[Encoded, ...], facts: dict[str, Any]) -> str:
    digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=8)
    for s in sequences:
        digest.update(s.tokens.tobytes() + s.mask.tobytes())
    return digest.hexdigest()


def fitting(items: list[Item], records: list[Record], max_tokens: int, on_long: str) -> list[Item]:
    """Those whose sequences have at most `max_tokens` tokens.

    Raises:
      UserError: a longer one where `on_long` is "error", or none is left.
    """
    kept = []
    for item, record in zip(items, records, strict=True):
        longest = max(len(s.tokens) for s in item.sequences)
        if longest <= max_tokens:
            kept.append(item)
        elif on_long == "error":
            raise UserError(
                f"data.max_tokens={max_tokens}: {record.where} has {longest} tokens; allow more, or set data.on_long=drop"
            )
    if items and not kept:
        raise UserError(f"data.max_tokens={max_tokens}: all {len(items)} rows are longer; allow more")
    return kept


def assemble(items: Sequence[Item], width: int) -> Sequences:
    """The sequences of items, one group for each item.

    Args:
      width: tokens of the longest sequence of any batch, so that all are equally wide.
    """
    rows = [(i, s) for i, item in enumerate(items) for s in item.sequences]
    shape = (len(rows), bucket(width, LENGTH_STEP))
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for n, (_, s) in enumerate(rows):
        tokens[n, : len(s.tokens)], mask[n, : len(s.tokens)] = s.tokens, s.mask
    return Sequences(
        tokens=tokens, prompt_lens=np.array([s.prompt_len for _, s in rows], np.int32),
        lens=np.array([len(s.tokens) for _, s in rows], np.int32), loss_mask=mask,
        group_ids=np.array([i for i, _ in rows], np.int32),
    )  # fmt: skip
