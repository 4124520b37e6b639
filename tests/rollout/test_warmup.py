"""The server's warm-up: what it compiles is all that requests meet."""

import jax
import numpy as np
import pytest

from jrl.models import decoder
from jrl.rollout.engine import Engine
from jrl.rollout.prefill import PREFILL_TOKENS
from jrl.rollout.sampling import Sampling
from jrl.rollout.scheduler import Request
from jrl.rollout.sizes import FewSizes, ladder
from jrl.rollout.warmup import warm_up
from jrl.sharding.layout import Layout
from tests.test_invariants import ARCH


class Compilations:
    """Counts what XLA compiles or finds compiled in a cache on disk."""

    def __init__(self):
        self.count, self.listening = 0, True
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event, seconds, **_):
        self.count += self.listening and event.endswith("backend_compile_duration")


def make_engine(**options):
    layout = Layout.rollout({"replica": 1, "tensor": 1}, jax.devices()[:1])
    settings = dict(slots=2, max_tokens=64, eos_ids=(1,), page_size=16, num_pages=6, decode_chunk=4) | options
    engine = Engine(ARCH, layout, decode_text=lambda ids: " ".join(map(str, ids)), **settings)
    engine.load(decoder.init_params(ARCH, 0, layout), 0)
    return engine


def prompt(n, seed=0):
    return np.random.default_rng((n, seed)).integers(3, 250, n).astype(np.int32)


def mixed(longest):
    """Requests of all kinds, in an order in which prompts of every length meet, some of them cached before."""
    samplings = [
        Sampling(), Sampling(best=3), Sampling(top_k=5, stop=("9 9",)), Sampling(prompt_logprobs=True),
        Sampling(logit_bias={5: 1.0}, best=20),
    ]  # fmt: skip
    lengths = [max(int(longest * x), 1) for x in (0, 0.02, 0.1, 0.4, 0.41, 0.65, 0.8, 0.99, 0.25, 0.4, 0.9, 0.03)]
    asked = [
        Request(prompt(n, i % 2), 1 + i % 4, min(longest - n, 30), float(i % 3 > 0), 100 * i, i % 2 > 0, samplings[i % 5])
        for i, n in enumerate(lengths)
    ]
    known = prompt(lengths[5], 1)
    return asked + [Request(np.concatenate([known, prompt(n)]), 3, 4, 1.0, 9000 + n) for n in (1, longest // 8)]


def serve(engine, requests):
    """As a server does: requests come while others are under way; what was cached stays."""
    done = []
    for i in range(0, len(requests), 3):
        engine.submit(requests[i : i + 3])
        done += engine.step()
    while not engine.idle:
        done += engine.step()
    return done


@pytest.mark.parametrize(
    "options, programs",
    [
        ({}, 11),  # one length of prompts, two numbers of pages cached before, one table
        # Copies, 3 lengths x (2 numbers of prompts, 1 with logprobs) x 3 of pages before, 2 tables x 4 kinds of sampling.
        pytest.param({"slots": 4, "max_tokens": 300, "num_pages": 23}, 1 + 3 * (2 + 1) * 3 + 2 * 4, marks=pytest.mark.slow),
    ],
)
def test_what_was_warmed_up_is_all_that_requests_meet(options, programs):
    engine = make_engine(few_programs=True, **options)
    assert list(warm_up(engine)) == [(i + 1, programs) for i in range(programs)] and len(engine.compiled) == programs
    seen, compiled = set(engine.compiled.seen), Compilations()
    asked = mixed(engine.scheduler.max_tokens)
    assert len(serve(engine, asked)) == sum(r.samples for r in asked)
    assert engine.compiled.seen == seen and not compiled.count
    assert engine.stats.preemptions and engine.stats.hit_tokens
    jax.jit(lambda x: x * programs)(np.ones(programs))
    compiled.listening = False
    assert compiled.count  # it would have been heard


@pytest.mark.slow
def test_few_sizes_change_no_token():
    asked = [Request(prompt(n), 2, 12, float(n % 2), 10 * n, True) for n in (1, 17, 40, 50)]
    few, fine = (
        sorted(make_engine(few_programs=few).generate(asked), key=lambda c: (c.request, c.sample)) for few in (True, False)
    )
    for a, b in zip(few, fine, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("slots, tokens, page_size, row_pages", [(8, 2048, 16, 8), (64, 32768, 16, 8), (1, 100, 512, None)])
def test_sizes_are_few_and_large_enough(slots, tokens, page_size, row_pages):
    width = -(-tokens // page_size)
    sizes = FewSizes(slots, width, page_size, row_pages)
    calls, tables = list(sizes.prefill_calls(False)), list(sizes.tables())
    assert len(calls) + len(tables) < 100
    longest = max(length for _, length, _ in calls)
    for tokens in range(1, longest + 1, 7):
        length = sizes.length(tokens)
        assert tokens <= length <= max(4 * tokens, 64, page_size) and length % page_size == 0
        for count in range(1, min(slots, sizes.most_prompts(length, False)) + 1):
            assert (sizes.prompts(count, length), length, sizes.before(0)) in calls
            assert sizes.prompts(count, length) * length <= max(PREFILL_TOKENS, page_size)
    for pages in range(1, width + 1):
        assert (1, longest, sizes.before(pages)) in calls and pages <= sizes.before(pages) <= max(4 * pages, 8)
    row = sizes.row(width)
    for needed in range(slots + 1, slots * -(-width // row) + 1):
        assert needed <= sizes.rows(needed) and (sizes.rows(needed), row) in tables
    assert (slots, row) in tables


def test_a_ladder_ends_where_it_must():
    assert (
        ladder(8, 128) == (8, 32, 128) and ladder(8, 100) == (8, 32, 100) and ladder(8, 8) == (8,) and ladder(64, 65) == (64, 65)
    )
