"""A `transformers` tokenizer as JetStream wants one.

The ids of a text are those that the native server feeds for it: with a BOS where the tokenizer puts one, and none where it
does not. Ids that a client sends are fed as they are. JetStream would put a BOS before both, but this tokenizer names none.

The text of a response is joined from the texts of its tokens. It is the text that the native server gives, but for what a
tokenizer does across tokens: one with SentencePiece's vocabulary drops the space at the start of a text, here it stays.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jrl.rollout.jetstream.compat import token_utils, tokenizer_api
from jrl.serve.text import Pieces, prompt_ids


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Implements `jetstream.engine.tokenizer_api.Tokenizer`.

    Args:
      tokenizer: of `transformers`.
      eos_ids: every id that ends a response.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int]):
        self._tokenizer, self._eos_ids = tokenizer, frozenset(eos_ids)
        self._special = frozenset(tokenizer.all_special_ids)
        self._pieces = Pieces(tokenizer)
        self._text = functools.lru_cache(maxsize=1 << 16)(self._text_of)

    def encode(
        self,
        s: str,
        *,
        is_bos: bool = True,
        prefill_lengths: list[int] | None = None,
        max_prefill_length: int | None = None,
        jax_padding: bool = True,
    ) -> tuple[jax.Array | np.ndarray, int]:
        """The ids of a text, padded to one of the lengths that JetStream chooses from, and how many there are.

        Of more than `max_prefill_length` ids the last ones stay; the count is that of all.

        Args:
          is_bos: False for the continuation of a session, which gets no special tokens.
        """
        ids = prompt_ids(self._tokenizer, s) if is_bos else self._tokenizer(s, add_special_tokens=False)["input_ids"]
        return token_utils.pad_tokens(
            ids, self.bos_id, self.pad_id, prefill_lengths=prefill_lengths, max_prefill_length=max_prefill_length,
            jax_padding=jax_padding,
        )  # fmt: skip

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """The text of tokens, special ones left out, each as if it stood alone; bytes that are no text are surrogates."""
        del kwargs
        return "".join(self._text(int(token)) for token in token_ids)

    def _text_of(self, token: int) -> str:
        if token in self._special:
            return ""
        piece = self._pieces.name(token)
        return piece.text if piece.bytes is None else bytes(piece.bytes).decode("utf-8", "surrogateescape")

    @property
    def pad_id(self) -> int:
        """What fills up prompts; it is never read."""
        return 0

    @property
    def eos_id(self) -> int:
        return min(self._eos_ids)

    @property
    def bos_id(self) -> None:
        """None, also where the model has one: `encode` has put it there already."""
        return None

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Every id that ends a response; the pad token does not, unless it is one of them."""
        return self._eos_ids
