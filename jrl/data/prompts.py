"""From examples to token ids, through the tokenizer's chat template."""

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from jrl.data.sources import Example, Message
from jrl.errors import UserError

log = logging.getLogger(__name__)

_PROBE = "\N{OBJECT REPLACEMENT CHARACTER}system\N{OBJECT REPLACEMENT CHARACTER}"  # no template writes this by itself


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What the engine is asked to continue, and what the rewards need to know about it."""

    tokens: tuple[int, ...]  # special tokens included, up to where the assistant begins
    text: str  # as rendered, before tokenization
    messages: tuple[Message, ...]
    answer: str | None
    columns: dict[str, Any]  # of the row; see `Example`
    uid: str  # the same for the same messages, in every run


def encode(
    examples: Sequence[Example],
    tokenizer: Any,
    system_prompt: str,
    max_prompt_tokens: int,
    on_long: str,
    use_chat_template: bool,
) -> list[Prompt]:
    """Renders and tokenizes examples.

    Args:
      tokenizer: of `transformers`.
      system_prompt: text of the system message. "" stands for none: a template that would fill in a text of its own
        gets an empty system message instead.
      max_prompt_tokens: tokens, chat template included.
      on_long: what to do with a longer prompt: "error", or "drop" (their number is logged).
      use_chat_template: False: the texts of the messages as they are, with a BOS if the tokenizer adds one.

    Raises:
      UserError: no chat template, a template that refuses the messages, a system message beside `system_prompt`, a
        prompt longer than allowed, or none left.
    """
    if not examples:
        return []
    system = system_messages(tokenizer, system_prompt, use_chat_template)
    chats = [_messages(i, example, system) for i, example in enumerate(examples)]
    texts = [_render(i, chat, tokenizer) if use_chat_template else join_contents(chat) for i, chat in enumerate(chats)]
    # A template writes its own BOS, so the tokenizer must not add another one.
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if not use_chat_template:
        ids = _with_bos(ids, tokenizer)
    prompts = []
    for i, (example, chat, text, tokens) in enumerate(zip(examples, chats, texts, ids, strict=True)):
        if len(tokens) <= max_prompt_tokens:
            prompts.append(Prompt(tuple(tokens), text, tuple(chat), example.answer, example.columns, _uid(chat)))
        elif on_long == "error":
            raise UserError(
                f"data.max_prompt_tokens={max_prompt_tokens}: {_name(i, example)} has {len(tokens)} tokens; "
                "allow more, or set data.on_long=drop"
            )
    if not prompts:
        raise UserError(f"data.max_prompt_tokens={max_prompt_tokens}: all {len(examples)} prompts are longer; allow more")
    if len(prompts) < len(examples):
        dropped = len(examples) - len(prompts)
        log.warning("dropped %d of %d prompts, longer than %d tokens", dropped, len(examples), max_prompt_tokens)
    return prompts


def _name(index: int, example: Example) -> str:
    return f"prompt {index + 1} ({example.key[:60]!r})"


def _uid(chat: list[Message]) -> str:
    return hashlib.blake2b(repr([(m["role"], m["content"]) for m in chat]).encode(), digest_size=8).hexdigest()


def system_messages(tokenizer: Any, system_prompt: str, use_chat_template: bool) -> list[Message]:
    """The system message to put before a chat, if any.

    Raises:
      UserError: there is no chat template to use.
    """
    if use_chat_template and not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "data.use_chat_template=True: the tokenizer has no chat template; set it to False, or use an instruct model"
        )
    if system_prompt or (use_chat_template and _has_default_system_text(tokenizer)):
        return [{"role": "system", "content": system_prompt}]
    return []


def _has_default_system_text(tokenizer: Any) -> bool:
    """Whether a chat without a system message is rendered with one: the same frame as around a given text."""
    user: list[Message] = [{"role": "user", "content": "x"}]
    try:
        before, found, after = _template(tokenizer, [{"role": "system", "content": _PROBE}, *user]).partition(_PROBE)
    except Exception:  # templates without a system role raise what they like; those have no default either
        return False
    bare = _template(tokenizer, user)
    return bool(found) and bare.startswith(before) and bare.endswith(after) and len(bare) >= len(before) + len(after)


def _messages(index: int, example: Example, system: list[Message]) -> list[Message]:
    if isinstance(example.question, str):
        return [*system, {"role": "user", "content": example.question}]
    if example.question[0]["role"] != "system":
        return [*system, *example.question]
    if system and system[0]["content"]:
        raise UserError(f"data.system_prompt: {_name(index, example)} has a system message of its own; leave the key empty")
    return example.question


def _template(tokenizer: Any, chat: list[Message]) -> str:
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def _render(index: int, chat: list[Message], tokenizer: Any) -> str:
    try:
        return _template(tokenizer, chat)
    except Exception as error:  # jinja's errors and those that templates raise by themselves
        roles = ", ".join(m["role"] for m in chat)
        raise UserError(f"prompt {index + 1}: the chat template refuses the roles {roles} ({error})") from None


def join_contents(chat: Sequence[Message]) -> str:
    """The text of messages where no chat template is used."""
    return "\n\n".join(m["content"] for m in chat)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text without a template, after a BOS if the tokenizer adds one."""
    return _with_bos(tokenizer([text], add_special_tokens=False)["input_ids"], tokenizer)[0]


def _with_bos(ids: list[list[int]], tokenizer: Any) -> list[list[int]]:
    """The ids with the BOS that the tokenizer itself would add, once; an EOS that it would add is left out."""
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("x")["input_ids"][:1] != [bos]:
        return ids
    return [row if row[:1] == [bos] else [bos, *row] for row in ids]
