"""Text to token ids, and back: all at once or as they come, a character when its last byte is there."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what bytes decode to that are no character, or none yet
MOST_UNFINISHED = 32  # tokens that may wait for a character to be completed; decoding them again and again is not free


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, with the BOS that the tokenizer puts before it and without an EOS that it may add."""
    ids = tokenizer(text)["input_ids"]
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    added_eos = len(ids) > len(plain) and ids[-1] == tokenizer.eos_token_id != (plain or [None])[-1]
    return ids[:-1] if added_eos else ids


def make_decode(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Token ids to text as clients see it: without special tokens, and with nothing tidied away."""
    return functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclasses.dataclass(frozen=True)
class Piece:
    """One token, named for a client."""

    text: str  # bytes that are no text by themselves are spelled bytes:\\xe2\\x82
    bytes: list[int] | None  # None where the tokenizer does not say


class Pieces:
    """Names single tokens, whatever stands around them."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.name = functools.lru_cache(maxsize=1 << 16)(self._name)

    def _name(self, token: int) -> Piece:
        spelled = self._tokenizer.convert_ids_to_tokens(token)
        if spelled is None:  # vocabularies are padded: the model has more ids than the tokenizer
            return Piece("", [])
        if "\N{LOWER ONE EIGHTH BLOCK}" in spelled:  # SentencePiece's space, which decode drops at the start of a text
            text = spelled.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
        else:
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if UNFINISHED not in text:
            return Piece(text, list(text.encode()))
        raw = raw_bytes(spelled)
        return Piece(text, None) if raw is None else Piece("bytes:" + "".join(f"\\x{b:02x}" for b in raw), list(raw))


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies spell bytes with: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def raw_bytes(spelled: str) -> bytes | None:
    """The bytes of a token as the vocabulary spells it: byte-level, or <0xE2>; None if it is neither."""
    if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
        return bytes([int(spelled[3:5], 16)])
    letters = _byte_letters()
    return bytes(letters[c] for c in spelled) if all(c in letters for c in spelled) else None


class TextStream:
    """The text of one response, given out in parts that never end within a character or within what may become a stop string.

    The parts together are the text of the whole response up to its stop string. Each part is decoded in a window that
    begins where an earlier part ended, so that the cost is linear and spaces at the border stay.

    Args:
      decode: token ids to text.
      stop: strings that end the response and do not belong to it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()):
        self._decode, self._stop = decode, tuple(stop)
        self._tokens: list[int] = []  # of the window
        self._read = 0  # of these, decoded and in `_held` or given out
        self._held = ""
        self.decoded = 0  # characters so far, held ones included

    def feed(self, tokens: Sequence[int]) -> str:
        """The next part, perhaps empty."""
        self._take(tokens)
        return self._release(len(self._held) - self._maybe_stop())

    def finish(self, tokens: Sequence[int], stopped: bool) -> str:
        """The last part.

        Args:
          tokens: the last ones.
          stopped: the last of all tokens completes a stop string.
        """
        self._take(tokens[:-1])
        before = len(self._held)
        self._take(tokens[-1:], last=True)
        end = len(self._held)
        if stopped:
            # Only a stop string that the last token completes counts: min_tokens may have let an earlier one pass.
            begins = [self._held.find(stop, max(before - len(stop) + 1, 0)) for stop in self._stop]
            end = min((at for at in begins if at >= 0), default=end)
        return self._release(end)

    def _take(self, tokens: Sequence[int], last: bool = False) -> None:
        self._tokens += [int(token) for token in tokens]
        count, text = len(self._tokens), self._decode(self._tokens)
        if text.endswith(UNFINISHED) and not last:
            count = self._border(text)
            text = self._decode(self._tokens[:count])
        before = self._decode(self._tokens[: self._read])
        if last or len(text) > len(before):
            self._held += text[len(before) :]
            self.decoded += len(text) - len(before)
            self._tokens, self._read = self._tokens[self._read :], count - self._read

    def _border(self, text: str) -> int:
        """How many tokens of the window are settled although it ends in bytes that may still become a character.

        None, unless there are so many that this is no text at all: then up to where the parts on both sides decode to the
        whole. A character has at most four bytes, so what comes does not matter there.
        """
        count = len(self._tokens)
        if count - self._read > MOST_UNFINISHED:
            for cut in range(count - 4, count - 8, -1):
                if self._decode(self._tokens[:cut]) + self._decode(self._tokens[cut:]) == text:
                    return cut
        return 0

    def _release(self, count: int) -> str:
        part, self._held = self._held[:count], self._held[count:]
        return part

    def _maybe_stop(self) -> int:
        """Characters at the end that are the beginning of a stop string."""
        most = min(max(map(len, self._stop), default=1) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)
