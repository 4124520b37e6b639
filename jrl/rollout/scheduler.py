"""Which sample sits in which slot, and which pages it holds: the host side of the engine, no array on any device.

A request asks for several samples of one prompt. Its prompt is prefilled once, all but the last token; the samples share
the full pages by reference count and copy the last, partly filled one. Each then starts by feeding the last prompt token,
so that every token is sampled in one place. A sample's pages are reserved when it starts, so nothing runs out midway.
"""

import dataclasses
from collections import deque

import numpy as np

from jrl.errors import UserError
from jrl.rollout.pages import PageAllocator


@dataclasses.dataclass(frozen=True)
class Request:
    """Samples wanted of one prompt."""

    tokens: np.ndarray  # i32[prompt]
    samples: int
    max_new_tokens: int
    temperature: float  # 0 is greedy
    first_id: int  # sample i draws its random numbers as number first_id + i
    ignore_eos: bool = False  # run to max_new_tokens whatever is sampled


class Sample:
    """A response under way."""

    def __init__(self, group: "Group", index: int):
        self.group, self.index = group, index
        self.pages: list[int] = []
        self.tokens: list[np.ndarray] = []
        self.logprobs: list[np.ndarray] = []
        self.versions: list[int] = []  # one for each entry of `tokens`


class Group:
    """A request that has been submitted, and the pages of its prompt while samples of it still wait."""

    def __init__(self, ticket: int, request: Request):
        self.ticket, self.request = ticket, request
        self.waiting = deque(range(request.samples))
        self.prompt_pages: list[int] = []


@dataclasses.dataclass
class Replica:
    """One page pool and its slots; `table` is i32[B, W], a row per slot."""

    pages: PageAllocator
    slots: list[Sample | None]
    table: np.ndarray
    head: Group | None = None  # the group whose samples are being started

    @property
    def load(self) -> int:
        return sum(s is not None for s in self.slots) + (len(self.head.waiting) if self.head else 0)


class Scheduler:
    """First come, first served; a group goes to the least loaded replica and stays there."""

    def __init__(self, replicas: int, slots: int, num_pages: int, page_size: int, max_tokens: int):
        self.page_size, self.max_tokens = page_size, max_tokens
        width = -(-max_tokens // page_size)
        self.queue: deque[Group] = deque()
        self.replicas = [
            Replica(PageAllocator(num_pages), [None] * slots, np.zeros((slots, width), np.int32)) for _ in range(replicas)
        ]

    def submit(self, ticket: int, request: Request) -> None:
        if not len(request.tokens) > 0 or request.samples < 1 or request.max_new_tokens < 1:
            raise UserError(f"request {ticket}: needs a prompt of at least one token, one sample and one new token")
        if len(request.tokens) + request.max_new_tokens > self.max_tokens:
            raise UserError(
                f"request {ticket}: a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones exceed the "
                f"{self.max_tokens} tokens a slot can hold; raise data.max_prompt_tokens or lower rollout.max_new_tokens"
            )
        if self._prompt_pages(request) + self._own_pages(request) >= self.replicas[0].pages.num_pages:
            raise UserError(
                f"request {ticket}: needs {self._prompt_pages(request) + self._own_pages(request)} pages of the pool's "
                f"{self.replicas[0].pages.num_pages - 1}; raise rollout.num_pages"
            )
        self.queue.append(Group(ticket, request))

    @property
    def pending(self) -> bool:
        """Samples wait for a slot."""
        return bool(self.queue) or any(r.head for r in self.replicas)

    @property
    def idle(self) -> bool:
        return not self.pending and not any(r.load for r in self.replicas)

    def _cached(self, request: Request) -> int:
        return len(request.tokens) - 1  # the last prompt token is fed by each sample itself

    def _prompt_pages(self, request: Request) -> int:
        return -(-self._cached(request) // self.page_size)

    def _own_pages(self, request: Request) -> int:
        # The last sampled token is never fed, hence one less.
        total = -(-(len(request.tokens) + request.max_new_tokens - 1) // self.page_size)
        return total - self._cached(request) // self.page_size

    def admit(self) -> tuple[list[tuple[int, Group]], list[tuple[int, int, int]], list[tuple[int, int, Sample]]]:
        """Moves waiting samples into free slots while pages last.

        Returns:
          groups to prefill as (replica, group), page copies as (replica, source, target), and the started samples as
          (replica, slot, sample). Prefills come before copies.
        """
        prefills: list[tuple[int, Group]] = []
        copies: list[tuple[int, int, int]] = []
        started: list[tuple[int, int, Sample]] = []
        opened: list[tuple[Replica, list[int]]] = []
        progress = True
        while progress:
            progress = False
            for index in sorted(range(len(self.replicas)), key=lambda i: self.replicas[i].load):
                replica = self.replicas[index]
                if replica.head is None and self.queue and None in replica.slots:
                    group = self._open(replica)
                    if group is not None:
                        prefills.append((index, group))
                        progress = True
                while (group := replica.head) is not None and self._start(index, replica, group, copies, started):
                    progress = True
                    if not group.waiting:
                        opened.append((replica, group.prompt_pages))
                        replica.head = None
        for replica, pages in opened:
            # Only now: a page given back earlier could be prefilled for another group before it has been copied.
            replica.pages.release(pages)
        return prefills, copies, started

    def _open(self, replica: Replica) -> Group | None:
        """Takes the next group in if its prompt and one sample fit."""
        request = self.queue[0].request
        if replica.pages.free < self._prompt_pages(request) + self._own_pages(request):
            return None
        group = replica.head = self.queue.popleft()
        group.prompt_pages = replica.pages.allocate(self._prompt_pages(request))
        return group

    def _start(self, index: int, replica: Replica, group: Group, copies: list, started: list) -> bool:
        request = group.request
        if None not in replica.slots or replica.pages.free < self._own_pages(request):
            return False
        slot = replica.slots.index(None)
        sample = Sample(group, group.waiting.popleft())
        full = self._cached(request) // self.page_size
        shared = group.prompt_pages[:full]
        replica.pages.share(shared)
        own = replica.pages.allocate(self._own_pages(request))
        copies.extend((index, page, own[0]) for page in group.prompt_pages[full:])
        sample.pages = shared + own
        replica.slots[slot] = sample
        replica.table[slot] = 0
        replica.table[slot, : len(sample.pages)] = sample.pages
        started.append((index, slot, sample))
        return True

    def finish(self, index: int, slot: int) -> None:
        replica = self.replicas[index]
        replica.pages.release(replica.slots[slot].pages)
        replica.slots[slot] = None
        replica.table[slot] = 0

    def check(self) -> None:
        """Free + used == total in every pool, and every held page is accounted for by who holds it."""
        for replica in self.replicas:
            replica.pages.check()
            held = {p for s in replica.slots if s for p in s.pages} | set(replica.head.prompt_pages if replica.head else ())
            assert len(held) == replica.pages.used, (len(held), replica.pages.used)
