"""The page allocator of one rollout replica: reference counts over a fixed pool of KV pages.

A page is free, used (somebody holds it) or cached: nobody holds it, but its contents are known under a name and may be
wanted again, until its place is needed. Page 0 is the null page: unused table entries point at it and idle slots write to
it, so it is never handed out.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence


class PageAllocator:
    """Hands out page ids 1 .. num_pages - 1; a page shared by k holders comes back when the k-th lets go.

    Args:
      forget: called with the id of a cached page whose place is about to be given away.
    """

    def __init__(self, num_pages: int, forget: Callable[[int], None] = lambda page: None):
        if num_pages < 2:
            raise ValueError(f"a pool needs the null page and at least one more, got num_pages = {num_pages}")
        self._free = deque(range(1, num_pages))
        self._references = [0] * num_pages
        self._named: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._forget = forget
        self.num_pages = num_pages

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones at the price of forgetting them."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.num_pages - 1 - self.available

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each; the caller has checked `available`."""
        if count > self.available:
            raise RuntimeError(f"asked for {count} pages with {self.available} available")
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._named.remove(page)
        self._forget(page)
        return page

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each page; cached pages are used again."""
        for page in pages:
            if page in self._cached:
                del self._cached[page]
            elif not self._references[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page; pages without a holder become cached if they have a name, or else free.

        Later pages of a sequence are worth less than the earlier ones they follow from, so they are to be evicted first.
        """
        for page in reversed(pages):
            if not self._references[page]:
                raise RuntimeError(f"page {page} was released more often than it was held")
            self._references[page] -= 1
            if not self._references[page]:
                if page in self._named:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def name(self, page: int) -> None:
        """The contents of a used page are known from now on: it stays when its last holder lets go."""
        if not self._references[page]:
            raise RuntimeError(f"page {page} is not in use, so it has no contents to name")
        self._named.add(page)

    def clear(self) -> None:
        """Takes every name away, without calling `forget`: cached pages become free."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._named.clear()

    def check(self) -> None:
        """Free, used and cached pages are all pages but the null page, and none is two of these."""
        held = {page for page, count in enumerate(self._references) if count}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free) and not (free & cached or free & held or cached & held), "a page is in two places"
        counted = self.free + self.used + self.cached == self.num_pages - 1 and self.used == len(held)
        assert counted, (self.free, self.used, self.cached, len(held))
        assert 0 not in held | free | cached and cached <= self._named and not free & self._named
