"""What one may ask of sampling beyond a temperature, and the watch for stop strings: the host side, no array on any device."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jrl.errors import UserError

MAX_BEST = 20  # likeliest tokens reported per token, at the most
MAX_STOP_IDS = 16  # of one request; the width of a row of `sampler.Controls.stops`
MAX_LOGIT_BIAS = 100.0  # either way, as in OpenAI's API; exp(-100) is as good as never

# Number: (least, most, what the bounds mean to a reader). The penalties of presence and frequency have OpenAI's bounds.
RANGES = {
    "top_k": (0, math.inf, "a whole number of tokens, 0 for all of them"),
    "top_p": (math.ulp(0), 1, "above 0 and at most 1, which is all of the probability"),
    "min_p": (0, 1, "from 0, for any probability, to 1"),
    "min_tokens": (0, math.inf, "a whole number of tokens, 0 for none"),
    "repetition_penalty": (0.01, 100, "from 0.01 to 100, 1 for no penalty"),
    "presence_penalty": (-2, 2, "from -2 to 2, 0 for no penalty"),
    "frequency_penalty": (-2, 2, "from -2 to 2, 0 for no penalty"),
    "best": (0, MAX_BEST, f"a whole number of tokens from 0 to {MAX_BEST}"),
}
WHOLE = ("top_k", "min_tokens", "best")
INTEGER, REAL = (int, np.integer), (int, np.integer, float, np.floating)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What a request asks of sampling besides its temperature. Hashable; the defaults ask for nothing.

    Penalties and bias change the raw logits; then comes the temperature, then top-k, top-p of what top-k left, then min-p.
    """

    top_k: int = 0  # sample among the k likeliest tokens only; 0 is off (Fan et al. 2018, https://arxiv.org/abs/1805.04833)
    top_p: float = 1.0  # among the fewest that hold this probability (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751)
    min_p: float = 0.0  # least probability, relative to the likeliest token's (https://arxiv.org/abs/2407.01082)
    min_tokens: int = 0  # so many tokens come before the EOS, a stop id or the end of a stop string
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens in prompt or response (CTRL,
    # Keskar et al. 2019, https://arxiv.org/abs/1909.05858)
    presence_penalty: float = 0.0  # taken off the logits of tokens in the response
    frequency_penalty: float = 0.0  # taken off them once per occurrence
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # added to logits; kept as sorted pairs
    allowed_tokens: tuple[int, ...] | None = None  # sample among these only; None is all, and an EOS must be among them to be had
    stop: tuple[str, ...] = ()  # the response ends with the token that completes one of these
    stop_ids: tuple[int, ...] = ()  # the response ends with one of these, also where the EOS is ignored
    best: int = 0  # report the logprobs of so many likeliest tokens with each token
    prompt_logprobs: bool = False  # report the logprobs of the prompt's tokens

    def __post_init__(self):
        """Brings what callers write (lists, a single string, JSON's string keys) into one hashable form."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        allowed = None if self.allowed_tokens is None else tuple(self.allowed_tokens)
        try:
            bias = tuple(sorted((int(token), float(value)) for token, value in dict(self.logit_bias).items()))
        except (TypeError, ValueError):
            raise UserError(f"logit_bias={self.logit_bias!r}: give numbers by token id, such as {{50: -1.5}}") from None
        tidy = {"stop": stop, "allowed_tokens": allowed, "stop_ids": tuple(self.stop_ids), "logit_bias": bias}
        for name, value in tidy.items():
            object.__setattr__(self, name, value)

    @functools.cached_property
    def plain(self) -> bool:
        """The distribution sampled is the softmax at the temperature, so that nothing but `sampler.sample` is needed."""
        return self == Sampling(stop=self.stop, best=self.best, prompt_logprobs=self.prompt_logprobs)

    def validate(self, vocab_size: int) -> None:
        """Raises UserError for a number out of its range, a token id outside the vocabulary, or an empty list or string."""
        for name, (least, most, meaning) in RANGES.items():
            value = getattr(self, name)
            if not (isinstance(value, INTEGER if name in WHOLE else REAL) and least <= value <= most):
                raise UserError(f"{name}={value!r}: must be {meaning}")
        for name in ("allowed_tokens", "stop_ids", "logit_bias"):
            for token in dict(self.logit_bias) if name == "logit_bias" else getattr(self, name) or ():
                if not (isinstance(token, INTEGER) and 0 <= token < vocab_size):
                    raise UserError(f"{name}={token!r}: is no token; ids go from 0 to {vocab_size - 1}")
        for token, value in dict(self.logit_bias).items():
            if not abs(value) <= MAX_LOGIT_BIAS:
                raise UserError(f"logit_bias={{{token}: {value}}}: must be from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")
        if self.allowed_tokens == ():
            raise UserError("allowed_tokens=(): leaves nothing to sample; name at least one token, or give None for all")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise UserError(f"stop_ids={len(self.stop_ids)} of them: give at most {MAX_STOP_IDS}")
        for text in self.stop:
            _check_stop(text)


def _check_stop(text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise UserError(f"stop={text!r}: must be a text of at least one character; leave it out for no stop string")
    if "\ufffd" in text:
        raise UserError(f"stop={text!r}: U+FFFD stands for bytes that are no text yet; leave it out")


class StopStrings:
    """Watches the tokens of one response for the first that completes a stop string.

    A string is complete after n tokens if `decode(tokens[:n])` contains it and more than `min_tokens` tokens were needed
    for that. Each token is looked at in a window: the last tokens, of more text than the longest stop string has. What is
    found there counts only once the whole response, decoded, has it too, since text can decode differently at the start of
    a sequence than within it.

    Args:
      stops: strings, none of them empty.
      decode: token ids to text; bytes that do not make up a character yet are U+FFFD, as tokenizers have it.
      min_tokens: what is completed by so many tokens does not count.
    """

    MARGIN = 8  # characters of a window that may decode differently than within the response: a space at its start, and more

    def __init__(self, stops: Iterable[str], decode: Callable[[list[int]], str], min_tokens: int = 0):
        self.stops, self.decode, self.min_tokens = tuple(stops), decode, min_tokens
        self.tokens: list[int] = []
        self.start = 0  # of the window, in tokens
        self.needed = max(map(len, self.stops), default=0) + self.MARGIN  # characters in a window
        self.limit = 2 * self.needed  # tokens; a longer window is worth shortening

    @property
    def count(self) -> int:
        """Tokens looked at so far."""
        return len(self.tokens)

    def feed(self, tokens: Iterable[int]) -> int | None:
        """Takes the next tokens; returns how many of all there are up to the end of the first stop string, None without one.

        Tokens beyond that one are not taken.
        """
        for token in tokens:
            self.tokens.append(int(token))
            text, found = self._look(self.start)
            if found and (self.start == 0 or self._look(0)[1]):
                return self.count
            # An unfinished character at the end can keep what comes before it from being read.
            if self.count - self.start > self.limit and not text.endswith("\ufffd"):
                self._shorten()
        return None

    def _look(self, start: int) -> tuple[str, bool]:
        """The text of the tokens from `start` on, and whether a stop string ends in it beyond the first `min_tokens`."""
        text = self.decode(self.tokens[start:])
        passed = len(self.decode(self.tokens[start : self.min_tokens])) if start < self.min_tokens else 0
        return text, any(text.find(stop, max(passed - len(stop) + 1, 0)) >= 0 for stop in self.stops)

    def _shorten(self) -> None:
        """Moves the window's start to near its end, as far as there is text enough that begins with a whole character."""
        back = self.needed
        while back < self.count - self.start:
            # Of four bytes one begins a character.
            for start in range(self.count - back, max(self.count - back - 4, self.start), -1):
                text = self.decode(self.tokens[start:])
                if len(text) >= self.needed and not text.startswith("\ufffd"):
                    self.start, self.limit = start, 2 * (self.count - start)
                    return
            back *= 2
        self.limit = 2 * (self.count - self.start)
