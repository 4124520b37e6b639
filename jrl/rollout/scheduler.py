"""Which sample sits in which slot, and which pages it holds: the host side of the engine, no array on any device.

A request asks for several samples of one prompt. All but the last token of it are cached once, as a `Prefix`; each sample
shares the prefix's full pages by reference count, has the last, partly filled one copied, and starts by feeding the last
prompt token itself, so that every token is sampled in one place. Pages are handed out as sequences grow. When they run out
the youngest sample gives its own back and starts again later from what it has, which is a prefix like any other.
"""

import dataclasses
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from jrl.errors import UserError
from jrl.rollout.prefix import PrefixIndex
from jrl.rollout.programs import Decoded
from jrl.rollout.sampling import Sampling
from jrl.types import Completion

OPEN_PREFIXES = 4  # prompts held ready per replica beyond what its free slots ask for, so that no group waits for another


@dataclasses.dataclass(frozen=True)
class Request:
    """Samples wanted of one prompt."""

    tokens: np.ndarray  # i32[prompt]
    samples: int
    max_new_tokens: int
    temperature: float  # 0 is greedy
    first_id: int  # sample i draws its random numbers as number first_id + i
    ignore_eos: bool = False  # run to max_new_tokens whatever is sampled
    sampling: Sampling = Sampling()
    deadline_s: float | None = None  # seconds from submission; then what there is comes back, aborted


class Group:
    """A request that has been submitted."""

    def __init__(self, ticket: int, request: Request):
        self.ticket, self.request = ticket, request
        self.deadline = math.inf if request.deadline_s is None else time.monotonic() + request.deadline_s
        # The first token follows nothing, and has no probability.
        self.prompt_logprobs = np.full(len(request.tokens), np.nan, np.float32) if request.sampling.prompt_logprobs else None


class Sample:
    """A response under way."""

    def __init__(self, group: Group, index: int):
        self.group, self.index = group, index
        self.pages: list[int] = []
        self.born = -1  # when it first came into a slot
        self.version: int | None = None  # of the weights that filled its pages; None once there are several
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.sampler_logprobs: list[float] = []
        self.versions: list[int] = []
        self.best: list[tuple[np.ndarray, np.ndarray]] = []

    def extend(self, new: Decoded, version: int) -> None:
        """Appends what was sampled for it, [n] each, by the weights of a version."""
        self.tokens += new.tokens.tolist()
        self.logprobs += new.logprobs.tolist()
        self.sampler_logprobs += new.sampler_logprobs.tolist()
        self.versions += [version] * len(new.tokens)
        if count := self.group.request.sampling.best:
            self.best.append((new.best_tokens[:, :count], new.best_logprobs[:, :count]))

    def completion(self, stop_reason: str) -> Completion:
        best = [np.concatenate(x) for x in zip(*self.best, strict=True)]
        return Completion(
            request=self.group.ticket, sample=self.index, tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32), sampler_logprobs=np.array(self.sampler_logprobs, np.float32),
            versions=np.array(self.versions, np.int32), stop_reason=stop_reason,
            best=(best[0], best[1]) if best else None,
            prompt_logprobs=self.group.prompt_logprobs,
        )  # fmt: skip

    @property
    def remaining(self) -> int:
        return self.group.request.max_new_tokens - len(self.tokens)

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are in its pages: all but the last one, which is fed next."""
        return len(self.group.request.tokens) + len(self.tokens) - 1

    def sequence(self) -> np.ndarray:
        """Prompt and response so far, i32[n]."""
        return np.concatenate([self.group.request.tokens, np.array(self.tokens, np.int32)]).astype(np.int32, copy=False)


class Prefix:
    """Tokens that are to be cached for the samples that start from them."""

    def __init__(self, group: Group, waiting: Iterable[Sample]):
        self.group, self.waiting = group, deque(waiting)
        self.tokens = self.waiting[0].sequence()[:-1]
        self.born = self.waiting[0].born  # -1 unless it is a sample that was preempted
        self.pages: list[int] = []
        self.cached = 0  # tokens
        self.scored = group.prompt_logprobs is not None and self.born < 0  # its logprobs are asked for

    @property
    def ready(self) -> bool:
        return self.cached == len(self.tokens)


class Replica:
    """One page pool and its slots."""

    def __init__(self, slots: int, num_pages: int, page_size: int, width: int):
        self.index = PrefixIndex(num_pages, page_size)
        self.pages = self.index.pages
        self.slots: list[Sample | None] = [None] * slots
        self.width = width  # pages of the longest sequence
        self.open: list[Prefix] = []  # they hold pages
        self.preempted: list[Prefix] = []  # oldest first

    @property
    def busy(self) -> list[tuple[int, Sample]]:
        return [(slot, sample) for slot, sample in enumerate(self.slots) if sample is not None]

    @property
    def waiting(self) -> int:
        return sum(len(p.waiting) for p in self.open)

    @property
    def load(self) -> int:
        return len(self.busy) + self.waiting + len(self.preempted)


@dataclasses.dataclass
class Counts:
    """What the scheduler has done since the last reset."""

    prompt_tokens: int = 0  # prompt tokens that a computation per sample would have cost
    hit_tokens: int = 0  # of them, found in the prefix index
    preemptions: int = 0
    moved: int = 0  # samples taken over by an idle replica


class Scheduler:
    """First come, first served among prompts; freed slots go to the group that has the fewest; preempted samples first."""

    def __init__(
        self, replicas: int, slots: int, num_pages: int, page_size: int, max_tokens: int, decode_chunk: int, counts: Counts
    ):
        self.page_size, self.max_tokens, self.decode_chunk = page_size, max_tokens, decode_chunk
        width = -(-max_tokens // page_size)
        self.queue: deque[Prefix] = deque()
        self.replicas = [Replica(slots, num_pages, page_size, width) for _ in range(replicas)]
        self.version, self.clock, self._timed = -1, 0, False
        self.counts = counts

    def check_request(self, ticket: int, request: Request) -> None:
        """Raises UserError for a request that could never run."""
        if not len(request.tokens) > 0 or request.samples < 1 or request.max_new_tokens < 1:
            raise UserError(f"request {ticket}: needs a prompt of at least one token, one sample and one new token")
        total = len(request.tokens) + request.max_new_tokens
        if total > self.max_tokens:
            raise UserError(
                f"request {ticket}: a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones exceed the "
                f"{self.max_tokens} tokens a slot can hold; raise data.max_prompt_tokens or lower rollout.max_new_tokens"
            )
        needed, there = self._pages(total - 1), self.replicas[0].pages.num_pages - 1  # the last token is never fed
        if needed > there:
            raise UserError(f"request {ticket}: needs {needed} pages of the pool's {there}; raise rollout.num_pages")

    def submit(self, ticket: int, request: Request) -> None:
        """Queues a request that `check_request` has let pass."""
        group = Group(ticket, request)
        self._timed |= request.deadline_s is not None
        self.queue.append(Prefix(group, [Sample(group, i) for i in range(request.samples)]))
        self.counts.prompt_tokens += (len(request.tokens) - 1) * request.samples

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @property
    def pending(self) -> bool:
        """Samples wait for a slot."""
        return bool(self.queue) or any(r.open or r.preempted for r in self.replicas)

    @property
    def idle(self) -> bool:
        return not self.pending and not any(r.busy for r in self.replicas)

    # Prefixes ------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Gives pages to the prefixes that are next, as far as pages and slots go; the least loaded replica first."""
        progress = True
        while progress:
            progress = False
            for replica in sorted(self.replicas, key=lambda r: r.load):
                if self._open_next(replica):
                    progress = True
                    break  # loads have changed
        for replica in self.replicas:
            self._take_over(replica)

    def _open_next(self, replica: Replica) -> bool:
        source = replica.preempted or self.queue
        free = len(replica.slots) - len(replica.busy)
        wanted = replica.waiting < free or len(replica.open) < OPEN_PREFIXES
        if not source or not wanted or not self._open(replica, source[0]):
            return False
        del source[0]
        return True

    def _open(self, replica: Replica, prefix: Prefix) -> bool:
        """Allocates a prefix's pages, those found in the index shared, if enough stay for what is under way to grow."""
        found = [] if prefix.scored else replica.index.take(prefix.tokens, self.version)
        needed = self._pages(len(prefix.tokens)) - len(found)
        others = len(replica.busy) + replica.waiting
        reserve = (others + 1) * self._pages(self.decode_chunk) if others else 0
        if replica.pages.available < needed + reserve:
            replica.pages.release(found)
            return False
        prefix.pages = found + replica.pages.allocate(needed)
        prefix.cached = len(found) * self.page_size
        self.counts.hit_tokens += prefix.cached
        replica.open.append(prefix)
        return True

    def _take_over(self, replica: Replica) -> None:
        """A replica half idle takes over waiting samples of the one that has most; a group is split, its prompt cached twice."""
        donor = max(self.replicas, key=lambda r: r.waiting)
        free = len(replica.slots) - len(replica.busy)
        if self.queue or replica.waiting or replica.preempted or 2 * free < len(replica.slots) or None in donor.slots:
            return
        prefix = max(donor.open, key=lambda p: len(p.waiting), default=None)
        count = min(free, len(prefix.waiting) // 2) if prefix else 0
        if not count or prefix is None:
            return
        moved = [prefix.waiting.pop() for _ in range(count)][::-1]
        if self._open(replica, Prefix(prefix.group, moved)):
            self.counts.moved += count
        else:
            prefix.waiting.extend(moved)

    def close(self, replica: Replica, prefix: Prefix) -> None:
        """Takes a prefix's pages back; its samples wait again, first in the line."""
        replica.open.remove(prefix)
        replica.pages.release(prefix.pages)
        self._requeue(replica, prefix)

    def _requeue(self, replica: Replica, prefix: Prefix) -> None:
        prefix.pages, prefix.cached = [], 0
        if prefix.born >= 0:
            replica.preempted.append(prefix)
            replica.preempted.sort(key=lambda p: p.born)
        else:
            self.queue.appendleft(prefix)

    def chunks(self, budget: int) -> Iterator[tuple[int, Prefix, int]]:
        """(replica, prefix, tokens) to compute now, at most `budget` tokens of each replica, a multiple of the page size.

        The caller computes them in this order and adds them to `prefix.cached`, then calls `computed`.
        """
        for index, replica in enumerate(self.replicas):
            left = budget
            for prefix in replica.open:
                count = len(prefix.tokens) - prefix.cached
                if count > left:
                    count = left // self.page_size * self.page_size
                if count > 0:
                    left -= count
                    yield index, prefix, count

    def computed(self, index: int, prefix: Prefix) -> None:
        """Pages of a prefix have been filled: what is full may be shared with whoever begins alike."""
        self.replicas[index].index.add(prefix.tokens[: prefix.cached], prefix.pages, self.version)

    # Samples -------------------------------------------------------------------------------------------------------

    def start(self) -> tuple[list[tuple[int, int, Sample]], list[tuple[int, int, int]]]:
        """Moves samples of ready prefixes into free slots.

        Returns:
          (replica, slot, sample) of those started, and page copies as (replica, source, target), to be made at once.
        """
        started: list[tuple[int, int, Sample]] = []
        copies: list[tuple[int, int, int]] = []
        for index, replica in enumerate(self.replicas):
            shares = Counter(sample.group.ticket for _, sample in replica.busy)
            while None in replica.slots and (ready := [p for p in replica.open if p.ready]):
                prefix = min(ready, key=lambda p: (p.born < 0, shares[p.group.ticket], p.group.ticket))
                slot = replica.slots.index(None)
                sample, copied = self._start(replica, prefix)
                replica.slots[slot] = sample
                shares[sample.group.ticket] += 1
                started.append((index, slot, sample))
                copies += [(index, *pair) for pair in copied]
        return started, copies

    def _start(self, replica: Replica, prefix: Prefix) -> tuple[Sample, list[tuple[int, int]]]:
        """The next sample of a prefix with pages of its own, and the page to copy. The last sample takes the prefix over."""
        sample = prefix.waiting.popleft()
        full, partial = divmod(len(prefix.tokens), self.page_size)
        sample.version = self.version
        if sample.born < 0:
            sample.born, self.clock = self.clock, self.clock + 1
        if not prefix.waiting or (partial and not replica.pages.available):
            replica.open.remove(prefix)
            sample.pages, prefix.pages = prefix.pages, []
            if prefix.waiting:  # no page for a copy: the others wait until there is one
                self._requeue(replica, prefix)
            return sample, []
        replica.pages.share(prefix.pages[:full])
        own = replica.pages.allocate(1) if partial else []
        sample.pages = prefix.pages[:full] + own
        return sample, [(prefix.pages[full], own[0])] if partial else []

    def _wanted(self, sample: Sample, tokens: int) -> int:
        """Pages that a sample lacks for its next tokens."""
        return self._pages(sample.cached + min(sample.remaining, tokens)) - len(sample.pages)

    def has_room(self, tokens: int) -> bool:
        """`grow(tokens)` would find its pages, at nobody's cost."""
        return all(
            sum(max(self._wanted(sample, tokens), 0) for _, sample in replica.busy) <= replica.pages.available
            for replica in self.replicas
        )

    def grow(self, tokens: int) -> list[tuple[int, int]]:
        """Gives each sample the pages of its next `tokens` tokens, oldest first; the youngest pay if there are too few.

        Returns:
          (replica, slot) of the samples that were preempted.
        """
        out: list[tuple[int, int]] = []
        for index, replica in enumerate(self.replicas):
            for slot, sample in sorted(replica.busy, key=lambda x: x[1].born):
                needed = self._wanted(sample, tokens)
                while replica.slots[slot] is sample and replica.pages.available < needed:
                    if replica.open:
                        self.close(replica, replica.open[-1])
                    else:
                        victim, _ = max(replica.busy, key=lambda x: x[1].born)
                        self._preempt(replica, victim)
                        out.append((index, victim))
                if replica.slots[slot] is sample and needed > 0:
                    sample.pages += replica.pages.allocate(needed)
        return out

    def _preempt(self, replica: Replica, slot: int) -> None:
        sample = self._vacate(replica, slot)
        self._requeue(replica, Prefix(sample.group, [sample]))
        self.counts.preemptions += 1

    def _vacate(self, replica: Replica, slot: int) -> Sample:
        sample = replica.slots[slot]
        assert sample is not None
        if sample.version == self.version:
            replica.index.add(sample.sequence()[: sample.cached], sample.pages, self.version)
        replica.pages.release(sample.pages)
        sample.pages, replica.slots[slot] = [], None
        return sample

    def finish(self, index: int, slot: int) -> None:
        """A sample has ended: its slot is free, its pages too unless they are worth keeping."""
        self._vacate(self.replicas[index], slot)

    # Abort, weights, bookkeeping -------------------------------------------------------------------------------------

    def remove(self, wanted: Callable[[Group], bool]) -> list[tuple[Sample, tuple[int, int] | None]]:
        """Ends the samples of groups, wherever they are.

        Returns:
          each sample with the (replica, slot) it sat in, None if it was waiting.
        """
        removed: list[tuple[Sample, tuple[int, int] | None]] = []
        for line in (self.queue, *(r.preempted for r in self.replicas)):
            gone = [p for p in line if wanted(p.group)]
            for prefix in gone:
                line.remove(prefix)
                removed += [(sample, None) for sample in prefix.waiting]
        for index, replica in enumerate(self.replicas):
            for prefix in [p for p in replica.open if wanted(p.group)]:
                replica.open.remove(prefix)
                replica.pages.release(prefix.pages)
                removed += [(sample, None) for sample in prefix.waiting]
            for slot, sample in replica.busy:
                if wanted(sample.group):
                    removed.append((self._vacate(replica, slot), (index, slot)))
        return removed

    def expired(self) -> bool:
        """Some group's deadline has passed."""
        now = time.monotonic()
        return self._timed and any(group.deadline <= now for group in self._groups())

    def _groups(self) -> Iterator[Group]:
        yield from (p.group for p in self.queue)
        for replica in self.replicas:
            yield from (p.group for p in (*replica.open, *replica.preempted))
            yield from (sample.group for _, sample in replica.busy)

    def samples(self) -> Iterator[Sample]:
        """Every sample that has not ended."""
        for prefix in (*self.queue, *(p for r in self.replicas for p in (*r.open, *r.preempted))):
            yield from prefix.waiting
        yield from (sample for r in self.replicas for _, sample in r.busy)

    def new_weights(self, version: int) -> None:
        """Prompts are cached anew from here on; what is under way keeps its pages, of which no one else may profit."""
        self.version = version
        for replica in self.replicas:
            for prefix in list(replica.open):
                self.close(replica, prefix)
            for _, sample in replica.busy:
                sample.version = None
        self.forget()

    def forget(self) -> None:
        """Empties the prefix index: what is cached so far is found by nobody who comes later."""
        for replica in self.replicas:
            replica.index.clear()

    def check(self) -> None:
        """Free + used + cached == total in every pool, and every used page is accounted for by who holds it."""
        for replica in self.replicas:
            replica.index.check()
            held = {page for _, s in replica.busy for page in s.pages} | {page for p in replica.open for page in p.pages}
            assert len(held) == replica.pages.used, (len(held), replica.pages.used)
