"""Which pages hold the keys and values of which tokens: the prefix index of one replica.

A full page is named by a hash of its tokens, of everything before them and of the weights' version, so a sequence that
begins like an earlier one finds the pages it can share, and never one that other weights filled.
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from jrl.rollout.pages import PageAllocator


class PrefixIndex:
    """Names of the full pages of a pool, used and cached ones alike; owns the pool's allocator, as `pages`."""

    def __init__(self, num_pages: int, page_size: int):
        self.pages = PageAllocator(num_pages, self._forget)
        self.page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def _names(self, tokens: np.ndarray, version: int) -> Iterator[bytes]:
        """The names of the full pages of a sequence, i32[n], in order."""
        name = str(version).encode()
        full = np.ascontiguousarray(tokens[: len(tokens) // self.page_size * self.page_size], np.int32)
        for page in full.reshape(-1, self.page_size):
            name = hashlib.blake2b(name + page.tobytes(), digest_size=16).digest()
            yield name

    def take(self, tokens: np.ndarray, version: int) -> list[int]:
        """The pages of the longest known beginning of `tokens`, each with one more holder: the caller."""
        found = []
        for name in self._names(tokens, version):
            if name not in self._page_of:
                break
            found.append(self._page_of[name])
        self.pages.share(found)
        return found

    def add(self, tokens: np.ndarray, pages: Sequence[int], version: int) -> None:
        """Makes the full pages of `tokens` known; where a page of the same contents is known already, that one stays."""
        for name, page in zip(self._names(tokens, version), pages, strict=False):
            if name not in self._page_of and page not in self._name_of:
                self._page_of[name], self._name_of[page] = page, name
                self.pages.name(page)

    def _forget(self, page: int) -> None:
        del self._page_of[self._name_of.pop(page)]

    def clear(self) -> None:
        """Forgets everything: no page filled so far will be found again."""
        self._page_of.clear()
        self._name_of.clear()
        self.pages.clear()

    def check(self) -> None:
        self.pages.check()
        assert len(self._page_of) == len(self._name_of)
