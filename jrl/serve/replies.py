"""From the engine's completions to OpenAI's choices, whole or in parts as they come.

A choice that is not streamed is one part that holds everything, so both ways of answering share their text.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrl.rollout.scheduler import Request
from jrl.serve.text import Pieces, TextStream
from jrl.types import Completion

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclasses.dataclass(frozen=True)
class Style:
    """What a client wants to hear of each sample."""

    chat: bool
    scored: bool  # with logprobs
    best: int  # and so many of the likeliest tokens
    echo: bool = False  # the prompt first
    response: bool = True  # False: the prompt only
    token_ids: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """What is new of a choice."""

    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None  # None while it is under way
    tokens: int  # generated ones in this part
    extra: dict[str, Any]  # keys of the choice beyond OpenAI's


class Choice:
    """One sample on its way to the client.

    Args:
      request: of which it is a sample.
      decode: token ids to text.
    """

    def __init__(self, request: Request, decode: Callable[[Sequence[int]], str], pieces: Pieces, style: Style):
        self._request, self._decode, self._pieces, self._style = request, decode, pieces, style
        self._text = TextStream(decode, request.sampling.stop)
        self._echoed = not style.echo
        self._prompt_characters = 0

    def part(self, new: Completion) -> Part:
        """The next part, from the tokens that are new."""
        style, text, scores = self._style, "", _Scores(self._pieces, self._style)
        if not self._echoed:
            self._echoed = True
            text = self._echo(new, scores)
        finish = FINISH_REASONS[new.stop_reason] if new.stop_reason else None
        if not style.response:
            return Part(text, scores.as_dict(), "length" if finish else None, 0, {})
        text += self._respond(new, scores)
        extra = {"token_ids": new.tokens.tolist(), "token_versions": new.versions.tolist()} if style.token_ids else {}
        return Part(text, scores.as_dict(), finish, len(new.tokens), extra)

    def _echo(self, new: Completion, scores: "_Scores") -> str:
        stream, text = TextStream(self._decode), ""
        for i, token in enumerate(self._request.tokens.tolist()):
            if new.prompt_logprobs is not None:
                scores.add(token, float(new.prompt_logprobs[i]), stream.decoded, None)
            text += stream.feed([token])
        text += stream.finish([], stopped=False)
        self._prompt_characters = len(text)
        return text

    def _respond(self, new: Completion, scores: "_Scores") -> str:
        tokens, text = new.tokens.tolist(), ""
        if self._style.scored:  # token by token, for the place of each in the text
            for i, token in enumerate(tokens):
                best = None if new.best is None else (new.best[0][i], new.best[1][i])
                scores.add(token, float(new.logprobs[i]), self._prompt_characters + self._text.decoded, best)
                if not new.stop_reason or i < len(tokens) - 1:
                    text += self._text.feed([token])
            tokens = tokens[-1:] if new.stop_reason else []
        if new.stop_reason:
            return text + self._text.finish(tokens, new.stop_reason == "stop")
        return text + self._text.feed(tokens)


class _Scores:
    """Logprobs of consecutive tokens, in the form of completions or that of chats."""

    def __init__(self, pieces: Pieces, style: Style):
        self._pieces, self._style = pieces, style
        self._rows: list[tuple[int, float, int, tuple[np.ndarray, np.ndarray] | None]] = []

    def add(self, token: int, logprob: float, offset: int, best: tuple[np.ndarray, np.ndarray] | None) -> None:
        """The next token; `best` are the likeliest ones in its place and their logprobs, if they are known."""
        self._rows.append((token, logprob, offset, best))

    def as_dict(self) -> dict[str, Any] | None:
        if not self._style.scored:
            return None
        if self._style.chat:
            return {"content": [self._chat_row(*row) for row in self._rows], "refusal": None}
        name = lambda token: self._pieces.name(token).text  # noqa: E731
        return {
            "tokens": [name(token) for token, *_ in self._rows],
            "token_logprobs": [_number(logprob) for _, logprob, *_ in self._rows],
            "top_logprobs": [self._top(*row) for row in self._rows] if self._style.best else None,
            "text_offset": [offset for *_, offset, _ in self._rows],
        }

    def _top(self, token: int, logprob: float, offset: int, best) -> dict[str, float | None] | None:
        """The likeliest tokens and the one that was sampled, by name."""
        if best is None:
            return None
        rows = [*zip(*best, strict=True), (token, logprob)]
        return {self._pieces.name(int(t)).text: _number(float(p)) for t, p in rows}

    def _chat_row(self, token: int, logprob: float, offset: int, best) -> dict[str, Any]:
        rows = [] if best is None else [self._named(int(t), float(p)) for t, p in zip(*best, strict=True)]
        return self._named(token, logprob) | {"top_logprobs": rows}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._pieces.name(token)
        return {"token": piece.text, "logprob": _number(logprob), "bytes": piece.bytes}


def _number(logprob: float) -> float | None:
    """As JSON can say it; NaN, of a token that follows nothing, is null."""
    return None if math.isnan(logprob) else max(logprob, LEAST_LOGPROB)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def whole_choice(index: int, part: Part, chat: bool) -> dict[str, Any]:
    """A choice that is not streamed."""
    said = {"message": {"role": "assistant", "content": part.text, "refusal": None}} if chat else {"text": part.text}
    return {"index": index, **said, "logprobs": part.logprobs, "finish_reason": part.finish_reason, **part.extra}


def choice_chunk(index: int, part: Part, chat: bool, first: bool) -> dict[str, Any]:
    """A part of a streamed choice; the first part of a chat says who speaks."""
    said: dict[str, Any] = {"text": part.text}
    if chat:
        said = {"delta": ({"role": "assistant"} if first else {}) | {"content": part.text}}
    return {"index": index, **said, "logprobs": part.logprobs, "finish_reason": part.finish_reason, **part.extra}
