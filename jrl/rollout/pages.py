"""The page allocator of one rollout replica: reference counts over a fixed pool of KV pages.

Page 0 is the null page: unused table entries point at it and idle slots write to it, so it is never handed out.
"""

from collections import deque


class PageAllocator:
    """Hands out page ids 1 .. num_pages - 1; a page shared by k holders comes back when the k-th lets go."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"a pool needs the null page and at least one more, got num_pages = {num_pages}")
        self._free = deque(range(1, num_pages))
        self._references = [0] * num_pages
        self.num_pages = num_pages

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return sum(1 for count in self._references if count)

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each; the caller has checked `free`."""
        if count > len(self._free):
            raise RuntimeError(f"asked for {count} pages with {len(self._free)} free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            if not self._references[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """One holder less for each page; pages without a holder become free."""
        for page in pages:
            if not self._references[page]:
                raise RuntimeError(f"page {page} was released more often than it was held")
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def check(self) -> None:
        """Free and used pages are all pages but the null page, and nothing is both."""
        assert self.free + self.used == self.num_pages - 1, (self.free, self.used, self.num_pages)
        assert not self._references[0] and not any(self._references[page] for page in self._free)
