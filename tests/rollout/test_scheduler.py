"""The scheduler alone, no array on any device: what it admits, what it shares, what it gives back."""

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rollout.scheduler import Request, Scheduler

PAGE = 4


def request(prompt, samples=1, new=8):
    return Request(np.arange(prompt, dtype=np.int32), samples, new, 1.0, 0)


def scheduler(replicas=1, slots=4, num_pages=50, max_tokens=32):
    return Scheduler(replicas, slots, num_pages, PAGE, max_tokens)


def submit(s, *requests):
    for ticket, r in enumerate(requests):
        s.submit(ticket, r)


@pytest.mark.parametrize(("prompt", "full", "partial"), [(1, 0, 0), (4, 0, 1), (5, 1, 0), (8, 1, 1), (9, 2, 0), (10, 2, 1)])
def test_full_prompt_pages_are_shared_and_the_last_is_copied(prompt, full, partial):
    """The last prompt token is fed by each sample, so a prompt of n tokens fills n - 1 places."""
    s = scheduler()
    submit(s, request(prompt, samples=3, new=6))
    prefills, copies, started = s.admit()
    assert [(i, g.ticket) for i, g in prefills] == [(0, 0)] and len(prefills[0][1].prompt_pages) == full + partial
    samples = [sample for _, _, sample in started]
    assert [x.index for x in samples] == [0, 1, 2] and [slot for _, slot, _ in started] == [0, 1, 2]
    first = [x.pages[:full] for x in samples]
    assert first[0] == first[1] == first[2] == prefills[0][1].prompt_pages[:full]
    own = [x.pages[full:] for x in samples]
    assert len({p for pages in own for p in pages} | set(first[0])) == full + 3 * len(own[0])  # no page of two samples
    # prompt + new - 1 tokens are ever fed
    assert all(len(x.pages) == -(-(prompt + 6 - 1) // PAGE) for x in samples)
    assert copies == [(0, page, pages[0]) for pages in own for page in prefills[0][1].prompt_pages[full:]]
    for slot, x in enumerate(samples):
        row = s.replicas[0].table[slot]
        assert row[: len(x.pages)].tolist() == x.pages and not row[len(x.pages) :].any()
    s.check()
    for slot in range(3):
        s.finish(0, slot)
        s.check()
    assert s.idle and s.replicas[0].pages.used == 0 and not s.replicas[0].table.any()


def drain(s, rng=None):
    """Runs to the end with samples finishing in any order; returns (ticket, sample) in the order of starting."""
    order, most = [], 0
    while not s.idle:
        _, copies, started = s.admit()
        order += [(x.group.ticket, x.index) for _, _, x in started]
        # A copy's source must still hold the prompt: nobody else's page, unless it was opened for the same group.
        targets = {(r, t) for r, _, t in copies}
        assert not targets & {(r, source) for r, source, _ in copies} and len(targets) == len(copies)
        s.check()
        busy = [(i, b) for i, r in enumerate(s.replicas) for b, x in enumerate(r.slots) if x]
        assert busy, "nothing is under way although something waits"
        most = max(most, len(busy))
        done = busy[:1] if rng is None else [busy[i] for i in rng.permutation(len(busy))[: rng.integers(1, len(busy) + 1)]]
        for at in done:
            s.finish(*at)
            s.check()
    assert all(r.pages.used == 0 and r.pages.free == r.pages.num_pages - 1 for r in s.replicas)
    return order, most


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("num_pages", [8, 12, 60])
def test_every_sample_starts_once_whatever_has_to_wait(replicas, num_pages):
    rng = np.random.default_rng(num_pages)
    asked = [request(int(rng.integers(1, 16)), int(rng.integers(1, 6)), int(rng.integers(1, 9))) for _ in range(25)]
    s = scheduler(replicas, slots=3, num_pages=num_pages, max_tokens=24)
    submit(s, *asked)
    order, most = drain(s, rng)
    assert sorted(order) == [(i, j) for i, r in enumerate(asked) for j in range(r.samples)]
    assert most == 3 * replicas or num_pages < 60
    if replicas == 1:
        assert order == sorted(order)  # first come, first served


def test_a_small_pool_makes_groups_wait():
    asked = [request(6, 2, 6), request(6, 2, 6)]  # 2 prompt pages (1 full) and 2 own pages a sample
    small, large = scheduler(num_pages=7), scheduler(num_pages=13)
    for s, started in ((small, 2), (large, 4)):
        submit(s, *asked)
        assert len(s.admit()[2]) == started
    assert small.pending and not large.pending
    assert small.replicas[0].pages.free == 1  # the copied page of the prompt is back already
    drain(small)


def test_groups_go_to_the_least_loaded_replica_and_stay_there():
    s = scheduler(replicas=2, slots=4)
    submit(s, request(3, 3), request(3, 1), request(3, 2), request(3, 5))
    _, _, started = s.admit()
    where = {}
    for replica, _, x in started:
        where.setdefault(x.group.ticket, set()).add(replica)
    assert where[0] == {0} and where[1] == {1} and where[2] == {1} and len(where[3]) == 1
    assert s.pending


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (request(0), "at least one token"),
        (request(3, samples=0), "one sample"),
        (request(3, new=0), "one new token"),
        (request(20, new=13), "exceed the 32 tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(bad, says):
    s = scheduler()
    with pytest.raises(UserError, match=says):
        s.submit(3, bad)
    assert s.idle


def test_a_request_larger_than_the_pool_is_refused_and_the_largest_that_fits_runs():
    fits = request(10, new=10)  # 3 prompt pages, 2 of them full, and 3 own pages: 6
    with pytest.raises(UserError, match="needs 6 pages of the pool's 5; raise rollout.num_pages"):
        scheduler(num_pages=6).submit(0, fits)
    s = scheduler(num_pages=7)
    submit(s, fits, fits)
    assert drain(s)[0] == [(0, 0), (1, 0)]
