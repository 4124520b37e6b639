"""Drafts change nothing but the number of forward passes: against plain decoding, the dense model, and what is broken."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.rollout import engine as engine_module
from jrl.rollout import speculate
from jrl.rollout.backends import XlaBackend
from jrl.rollout.sampling import Sampling
from jrl.rollout.scheduler import Request
from jrl.rollout.speculate import RETRY, Pace, count_valid, draft
from jrl.sharding.layout import Layout
from jrl.types import make_rollout
from tests import dense
from tests.rollout.test_engine import assert_same, by_sample, prompt, surprises
from tests.test_invariants import ARCH, EOS, TEMPERATURE, make_engine, make_learner, make_params

DRAFTS, CYCLE = 3, 6


class Always:
    """A pace that nothing moves."""

    def __init__(self, drafting):
        self.drafting, self.recorded = lambda: drafting, []

    def record(self, drafting, seconds):
        self.recorded.append(drafting)


def repeating_params():
    """After each token most likely comes the next of its six; attention and all else have a say, too."""
    params = make_params()
    table = jax.random.normal(jax.random.key(1), (ARCH.vocab_size, ARCH.hidden_size))
    ids = np.arange(ARCH.vocab_size)
    before = ids - ids % CYCLE + (ids - 1) % CYCLE  # of the same six
    before = np.minimum(before, ARCH.vocab_size - 1)
    layers = {name: {k: 0.3 * x for k, x in part.items()} for name, part in params["layers"].items()}
    layers |= {name: params["layers"][name] for name in ("attn_norm", "mlp_norm")}
    return params | {"embed": {"embedding": table}, "layers": layers, "lm_head": {"kernel": 0.3 * table[before].T}}


def cycle(block, times, extra=0):
    return np.resize(np.arange(CYCLE * block, CYCLE * (block + 1)), CYCLE * times + extra).astype(np.int32)


def asked():
    """Repetitive prompts and random ones, groups, more samples than slots, greedy and sampled, with and without an EOS."""
    assert cycle(3, 1)[2] not in EOS and cycle(2, 1)[2] in EOS
    return [
        Request(cycle(3, 2, 1), 3, 30, 1.0, 0, ignore_eos=True),
        Request(cycle(5, 3), 2, 40, 0.0, 10, ignore_eos=True),
        Request(cycle(2, 2, 3), 2, 30, 0.0, 20),  # its EOS is the sixth token, and drafted
        Request(cycle(4, 3), 3, 33, 0.7, 30),
        Request(cycle(7, 1), 1, 1, 1.0, 40),
        Request(prompt(1), 2, 20, 0.7, 50),
        Request(prompt(13), 2, 25, 1.0, 60),
    ]


@pytest.fixture(scope="module")
def engine():
    engine = make_engine(speculate=DRAFTS)
    engine.load(repeating_params(), 3)
    return engine


def generate(engine, drafting, requests):
    engine.speculation.pace = Always(drafting)
    engine.reset_stats()
    return engine.generate(requests)


def assert_exact(got, want):
    assert_same(got, want)
    got = by_sample(got)
    for key, c in by_sample(want).items():
        np.testing.assert_allclose(got[key].logprobs, c.logprobs, atol=1e-5)
        np.testing.assert_allclose(got[key].sampler_logprobs, c.sampler_logprobs, atol=1e-5)


def test_drafts_change_nothing_but_the_number_of_passes(engine):
    plain = generate(engine, False, asked())
    before = dataclasses.asdict(engine.stats)
    assert before["draft_calls"] == before["drafted"] == 0 and before["busy_steps"] == before["decode_tokens"]
    drafted = generate(engine, True, asked())
    assert_exact(drafted, plain)
    stats, metrics = engine.stats, engine.stats.metrics()
    assert stats.draft_calls == stats.decode_calls and metrics["rollout/speculating"] == 1
    assert stats.decode_tokens == before["decode_tokens"] == stats.busy_steps + stats.accepted
    assert 0.5 < metrics["rollout/draft_accepted"] < 1  # some were wrong, too
    assert stats.busy_steps < 0.6 * stats.decode_tokens and stats.decode_steps < 0.7 * before["decode_steps"]
    assert 0 < metrics["rollout/slot_use"] <= 1
    ends = {c.stop_reason for c in drafted}
    assert ends == {"eos", "length"} and engine.scheduler.replicas[0].pages.used == 0
    eos = by_sample(drafted)[2, 0]
    assert eos.tokens.tolist() == [15, 16, 17, 12, 13, 14] and eos.stop_reason == "eos"


def test_tokens_are_those_of_the_dense_model_and_logprobs_the_learners(engine):
    completions = generate(engine, True, asked())
    assert surprises(dense.float64(repeating_params()), asked(), completions) == 0
    warm = [dataclasses.replace(r, temperature=TEMPERATURE) for r in asked()]
    rollout = make_rollout([r.tokens for r in warm], generate(engine, True, warm))
    assert engine.stats.accepted > 50
    learned = make_learner().run("logprobs", repeating_params(), rollout)[0]
    np.testing.assert_allclose(learned[rollout.loss_mask], rollout.logprobs[rollout.loss_mask], atol=1e-4)


@pytest.mark.slow
def test_one_token_too_many_is_seen(engine, monkeypatch):
    few = [Request(cycle(3, 2, 1), 3, 40, 2.5, 0, ignore_eos=True)]  # hot, so that many drafts are wrong
    plain = generate(engine, False, few)
    one_more = lambda d, s, e: jnp.minimum(count_valid(d, s, e) + 1, 1 + jnp.sum(d >= 0, axis=-1))  # noqa: E731
    monkeypatch.setattr(speculate, "count_valid", one_more)
    broken = make_engine(speculate=DRAFTS, page_size=64)
    broken.load(repeating_params(), 3)
    with pytest.raises(AssertionError):
        assert_exact(generate(broken, True, few), plain)


def test_tiny_pages_several_rows_a_slot_and_preemption(engine, monkeypatch):
    """Every pass crosses a page's border; calls draft where there is room for them, and others are plain."""
    monkeypatch.setattr(XlaBackend, "row_pages", 8)
    scarce = make_engine(speculate=DRAFTS, slots=3, page_size=2, num_pages=45, decode_chunk=2)
    scarce.load(repeating_params(), 3)
    few = [Request(cycle(3 + i, 4, 1), 1, 12, 0.5 * i, 10 * i, ignore_eos=True) for i in range(5)]
    assert_exact(generate(scarce, True, few), generate(engine, False, few))
    assert scarce.stats.preemptions > 0 and 0 < scarce.stats.draft_calls < scarce.stats.decode_calls
    assert scarce.stats.accepted > 0 and scarce.scheduler.replicas[0].pages.used == 0


@pytest.mark.slow
def test_replicas_and_tensor_parallelism():
    layout = Layout.rollout({"replica": 2, "tensor": 2}, jax.devices()[:4])
    engine = make_engine(layout, slots=2, page_size=64, speculate=DRAFTS)
    few = [Request(np.tile(prompt(4), 4), 4, 12, 0.7, 0), Request(cycle(3, 3), 2, 12, 0.0, 10)]
    assert surprises(dense.float64(make_params()), few, generate(engine, True, few)) == 0
    assert engine.stats.drafted > 0


def test_controls_and_likeliest_tokens_are_decoded_without_drafts(engine):
    for sampling in (Sampling(top_k=3), Sampling(best=1)):
        request = Request(cycle(3, 2, 1), 1, 2, 1.0, 0, True, sampling)
        generate(engine, True, [request])
        assert engine.stats.draft_calls == 0 and engine.stats.decode_calls > 0


def test_the_pool_is_updated_in_place(engine):
    rows = lambda *shape: np.zeros((1, *shape), np.int32)  # noqa: E731
    table = engine.tables.make(engine.scheduler.replicas)
    history = rows(4, engine.speculation.history.shape[-1])
    arguments = (engine.params, engine.pool, table, engine.slots, history, engine.key, np.int32(0))
    memory = engine.speculation.program.lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in engine.pool.values())


# The parts ---------------------------------------------------------------------------------------------------------------


def drafts_of(tokens, remaining=99, count=4):
    history = np.resize([*tokens, 1, 2], (1, 1, 24)).astype(np.int32)  # what lies beyond is not to be read
    found = jax.jit(draft, static_argnums=3)(history, np.array([[len(tokens) - 1]]), np.array([[remaining]]), count)
    return np.asarray(found)[0, 0].tolist()


def test_a_draft_is_what_followed_the_latest_earlier_occurrence():
    assert drafts_of([1, 2, 7, 8, 9, 9, 9, 1, 2]) == [7, 8, 9, 9]
    assert drafts_of([1, 2, 3, 4, 1, 2, 5, 6, 7, 8, 1, 2]) == [5, 6, 7, 8]  # the later one
    assert drafts_of([1, 2, 5, 1, 2]) == [5, 1, 2, 5]  # a period goes on
    assert drafts_of([3, 3, 3]) == [3, 3, 3, 3]
    assert drafts_of([1, 2, 3, 2]) == drafts_of([1]) == drafts_of([1, 1]) == [-1] * 4  # one token alike is not enough
    assert drafts_of([1, 2, 5, 1, 2], remaining=3) == [5, 1, -1, -1]  # the third is sampled after the second draft
    assert drafts_of([1, 2, 5, 1, 2], remaining=1) == [-1] * 4


def test_drafts_count_up_to_the_first_that_is_wrong_or_ends_the_response():
    def count(drafts, sampled, ended=()):
        ends = np.isin(np.arange(4), ended)
        return int(count_valid(jnp.array([[drafts]]), jnp.array([[sampled]]), jnp.array([[ends]]))[0, 0])

    assert count([5, 6, 7], [5, 6, 7, 8]) == 4
    assert count([5, 6, 7], [5, 9, 7, 8]) == 2
    assert count([5, 6, 7], [9, 6, 7, 8]) == 1 == count([-1] * 3, [5, 6, 7, 8])
    assert count([5, 6, 7], [5, 6, 7, 8], ended=[1]) == 2 and count([5, 6, 7], [5, 6, 7, 8], ended=[3]) == 4


def test_pace_takes_the_faster_way_tries_the_other_again_and_forgives_one_slow_call():
    def run(pace, cost, calls):
        ways = []
        for _ in range(calls):
            ways.append(pace.drafting())
            pace.record(ways[-1], cost[ways[-1]])
        return ways

    pace = Pace()
    ways = run(pace, {False: 1.0, True: 2.0}, 400)
    assert ways[:2] == [False, True] and 3 <= sum(ways[2:]) <= 400 / (2 * RETRY)
    ways = run(pace, {False: 1.0, True: 0.5}, 400)  # texts have become repetitive
    assert sum(ways) > 200 and all(ways[-20:])
    pace.record(True, 50.0)
    assert pace.drafting()
    ways = run(pace, {False: 1.0, True: 2.0}, 10)
    assert not any(ways[-5:])


@pytest.mark.slow
@pytest.mark.parametrize("factor, on", [(0.5, True), (10.0, False)])
def test_the_engine_turns_drafts_on_or_off_by_the_clock(engine, monkeypatch, factor, on):
    """A clock that goes on by 1 for each call of the plain program, by `factor` for the other; tokens are the same anyhow."""
    now = [0.0]

    def timed(program, seconds):
        def call(*args):
            now[0] += seconds
            return program(*args)

        return call

    few = [Request(cycle(3, 2, 1), 4, 40, 0.7, 0, ignore_eos=True)]
    plain = generate(engine, False, few * 3)
    generate(engine, True, few * 3)
    engine.reset_stats()
    engine.speculation.pace = Pace()
    monkeypatch.setattr(engine_module, "time", types.SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))
    monkeypatch.setattr(engine, "programs", engine.programs._replace(decode=timed(engine.programs.decode, 1.0)))
    monkeypatch.setattr(engine.speculation, "program", timed(engine.speculation.program, factor))
    assert_exact(engine.generate(few * 3), plain)
    share = engine.stats.metrics()["rollout/speculating"]
    assert share > 0.6 if on else share < 0.3
    assert engine.stats.decode_calls > 5
