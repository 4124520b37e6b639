"""The scheduler alone, no array on any device: what it admits, shares, preempts and gives back."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jrl.errors import UserError
from jrl.rollout.programs import Decoded
from jrl.rollout.scheduler import Counts, Request, Scheduler

PAGE, CHUNK = 4, 3


def request(prompt, samples=1, new=8, first=0, **options):
    return Request(np.arange(first, first + prompt, dtype=np.int32), samples, new, 1.0, 0, **options)


def scheduler(replicas=1, slots=4, num_pages=50, max_tokens=32):
    s = Scheduler(replicas, slots, num_pages, PAGE, max_tokens, CHUNK, Counts())
    s.new_weights(1)
    return s


def submit(s, *requests, first=0):
    for ticket, r in enumerate(requests, first):
        s.check_request(ticket, r)
        s.submit(ticket, r)


def admit(s, budget=1000):
    """What the engine does before it decodes, without the arrays."""
    s.open()
    for index, prefix, count in list(s.chunks(budget)):
        assert count % PAGE == 0 or prefix.cached + count == len(prefix.tokens)
        prefix.cached += count
        s.computed(index, prefix)
    started, copies = s.start()
    s.check()
    preempted = s.grow(CHUNK)
    s.check()
    return started, copies, preempted


def decode(s, rng=None):
    """Makes up to CHUNK tokens in each slot; returns the samples that ended."""
    ended = []
    for index, replica in enumerate(s.replicas):
        for slot, sample in replica.busy:
            assert len(sample.pages) * PAGE >= sample.cached + min(sample.remaining, CHUNK), "no page for the next tokens"
            count = min(sample.remaining, CHUNK)
            stop = rng is not None and rng.random() < 0.2
            new = np.arange(count if not stop else 1)
            sample.extend(Decoded(new, new * 0.0, new * 0.0, new[:, None], new[:, None]), 1)
            if stop or not sample.remaining:
                ended.append(sample)
                s.finish(index, slot)
    s.check()
    return ended


def drain(s, rng=None, budget=1000):
    """Runs to the end; returns the samples in the order of starting and of ending."""
    began, ended = [], []
    for _ in range(2000):
        if s.idle:
            break
        began += [(x.group.ticket, x.index) for _, _, x in admit(s, budget)[0]]
        assert any(r.busy for r in s.replicas) or any(p.cached for r in s.replicas for p in r.open), "nothing is under way"
        ended += decode(s, rng)
    assert s.idle and all(r.pages.used == 0 for r in s.replicas)
    return began, ended


@pytest.mark.parametrize(("prompt", "full", "partial"), [(1, 0, 0), (4, 0, 1), (5, 1, 0), (8, 1, 1), (9, 2, 0), (10, 2, 1)])
def test_full_prompt_pages_are_shared_and_the_last_is_copied_but_for_the_last_sample(prompt, full, partial):
    """The last prompt token is fed by each sample, so a prompt of n tokens fills n - 1 places."""
    s = scheduler()
    submit(s, request(prompt, samples=3, new=2))
    started, copies, _ = admit(s)
    samples = [sample for _, _, sample in started]
    assert [x.index for x in samples] == [0, 1, 2] and [slot for _, slot, _ in started] == [0, 1, 2]
    first = [x.pages[:full] for x in samples]
    assert first[0] == first[1] == first[2] and len(first[0]) == full
    own = [x.pages[full:] for x in samples]
    assert len({p for pages in own for p in pages} | set(first[0])) == full + sum(map(len, own))  # no page of two samples
    source = own[2][:partial]  # the last to start takes the prompt's own page
    assert copies == [(0, source[0], own[i][0]) for i in range(2) if partial]
    drain(s)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("num_pages", [7, 9, 12, 60])
def test_every_sample_ends_once_whatever_has_to_wait(replicas, num_pages):
    rng = np.random.default_rng(num_pages)
    asked = [request(int(rng.integers(1, 16)), int(rng.integers(1, 6)), int(rng.integers(1, 9)), 100 * i) for i in range(25)]
    s = scheduler(replicas, slots=3, num_pages=num_pages, max_tokens=24)
    submit(s, *asked)
    _, ended = drain(s, rng)
    assert sorted((x.group.ticket, x.index) for x in ended) == [(i, j) for i, r in enumerate(asked) for j in range(r.samples)]
    assert s.counts.preemptions if num_pages < 12 else num_pages < 60 or not s.counts.preemptions


def test_the_youngest_is_preempted_and_goes_on_from_what_it_has():
    s = scheduler(slots=2, num_pages=8)  # 7 pages, and two sequences of 5 in the end
    submit(s, request(8, new=12), request(8, new=12, first=50))
    seen = []
    while not s.counts.preemptions:
        _, _, preempted = admit(s)
        seen += preempted
        decode(s)
    (prefix,) = s.replicas[0].preempted or s.replicas[0].open
    assert seen == [(0, 1)] and prefix.group.ticket == 1
    assert 0 < len(prefix.waiting[0].tokens) < 12 and len(prefix.tokens) == 7 + len(prefix.waiting[0].tokens)
    _, ended = drain(s)
    assert {x.group.ticket: len(x.tokens) for x in ended}[1] == 12


def test_a_prompt_longer_than_the_budget_is_cached_bit_by_bit_while_others_decode():
    s = scheduler(max_tokens=60)
    submit(s, request(3, new=20), request(40, new=2, first=100))
    steps, busy = 0, lambda: {sample.group.ticket for _, sample in s.replicas[0].busy}
    while 1 not in busy():
        admit(s, budget=8)
        assert 0 in busy()
        steps += 1
        decode(s) if 1 not in busy() else None
    assert steps == 6  # 39 tokens, of which the first step had room for 4
    drain(s)


def test_a_large_group_does_not_keep_a_small_one_waiting():
    s = scheduler(slots=4, num_pages=200)
    submit(s, request(3, samples=40, new=3))
    admit(s)
    submit(s, request(5, samples=1, new=3, first=70), first=1)
    decode(s)
    started, _, _ = admit(s)
    assert (1, 0) in [(x.group.ticket, x.index) for _, _, x in started]
    drain(s)


def test_prompts_that_begin_alike_are_cached_once():
    s = scheduler()
    system = np.arange(12)
    asked = [Request(np.r_[system, 100 + i, 101 + i, 102 + i].astype(np.int32), 1, 2, 1.0, 0) for i in range(3)]
    submit(s, asked[0])
    drain(s)
    submit(s, *asked[1:], first=1)
    drain(s)
    assert s.counts.hit_tokens == 2 * 12
    s.new_weights(2)
    submit(s, asked[1], first=3)
    drain(s)
    assert s.counts.hit_tokens == 2 * 12  # the pages of other weights are not found


def test_a_conversation_finds_what_it_has_said():
    s = scheduler()
    submit(s, request(6, new=8))
    (first,) = drain(s)[1]
    said = first.sequence()
    submit(s, Request(np.r_[said, 90, 91].astype(np.int32), 1, 4, 1.0, 0), first=1)
    drain(s)
    assert s.counts.hit_tokens == (len(said) - 1) // PAGE * PAGE == 12


def test_groups_go_to_the_least_loaded_replica_and_an_idle_one_takes_over():
    s = scheduler(replicas=2, slots=4)
    submit(s, request(3, 3), request(3, 1, first=10), request(3, 2, first=20))
    where = {}
    for replica, _, x in admit(s)[0]:
        where.setdefault(x.group.ticket, set()).add(replica)
    assert where == {0: {0}, 1: {1}, 2: {1}}
    drain(s)
    submit(s, request(3, samples=20, new=3), first=3)
    admit(s)
    admit(s)
    assert [len(r.busy) for r in s.replicas] == [4, 4] and s.counts.moved == 4
    drain(s)


def test_remove_ends_a_group_wherever_it_is():
    for steps in range(4):
        s = scheduler(slots=2, num_pages=8, max_tokens=20)
        submit(s, request(8, 3, 12), request(8, 2, 12, first=50))
        for _ in range(steps):
            admit(s)
            decode(s)
        gone = s.remove(lambda group: group.ticket == 0)
        assert sorted(x.index for x, _ in gone) == [0, 1, 2]
        s.check()
        assert all(x.group.ticket == 1 for x in s.samples())
        assert {x.group.ticket for x in drain(s)[1]} == {1}


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
        s.check_request(3, bad)
    assert s.idle


def test_a_request_larger_than_the_pool_is_refused_and_the_largest_that_fits_runs():
    fits = request(10, 2, new=11)  # 20 tokens are ever fed: 5 pages
    with pytest.raises(UserError, match="needs 5 pages of the pool's 4; raise rollout.num_pages"):
        scheduler(num_pages=5).check_request(0, fits)
    s = scheduler(num_pages=6)
    submit(s, fits, fits)
    assert len(drain(s)[1]) == 4


class Storm(RuleBasedStateMachine):
    """Any order of submitting, admitting, decoding, aborting and loading: no page is lost and every sample ends once."""

    def __init__(self):
        super().__init__()
        self.s, self.tickets, self.open, self.rng = scheduler(2, 3, 9, 24), 0, {}, np.random.default_rng(0)

    @rule(prompt=st.integers(1, 14), samples=st.integers(1, 5), new=st.integers(1, 10), first=st.sampled_from([0, 0, 0, 40]))
    def ask(self, prompt, samples, new, first):
        submit(self.s, request(prompt, samples, new, first), first=self.tickets)
        self.open[self.tickets] = samples
        self.tickets += 1

    def end(self, samples):
        for sample in samples:
            self.open[sample.group.ticket] -= 1
            assert self.open[sample.group.ticket] >= 0

    @rule(budget=st.sampled_from([4, 8, 100]))
    def go(self, budget):
        admit(self.s, budget)
        self.end(decode(self.s, self.rng))

    @precondition(lambda self: self.tickets)
    @rule(which=st.integers(0, 100))
    def give_up(self, which):
        ticket = which % self.tickets
        gone = self.s.remove(lambda group: group.ticket == ticket)
        assert len(gone) == self.open[ticket]
        self.end([sample for sample, _ in gone])

    @rule()
    def load(self):
        self.s.new_weights(self.s.version + 1)

    @invariant()
    def nothing_is_lost(self):
        self.s.check()
        left = {}
        for sample in self.s.samples():
            left[sample.group.ticket] = left.get(sample.group.ticket, 0) + 1
        assert left == {t: n for t, n in self.open.items() if n}

    def teardown(self):
        self.end(drain(self.s)[1])
        assert not any(self.open.values())


TestStorm = Storm.TestCase
TestStorm.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
