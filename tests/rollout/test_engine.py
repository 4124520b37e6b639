"""The engine against a dense forward of whole sequences in float64, token by token, and what it promises about its state."""

import dataclasses

import jax
import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rollout import prefill
from jrl.rollout.backends import XlaBackend
from jrl.rollout.native import library
from jrl.rollout.paged_attention import Table
from jrl.rollout.programs import Prompts
from jrl.rollout.sampler import uniforms
from jrl.rollout.scheduler import Request
from jrl.sharding.layout import Layout
from tests import dense
from tests.test_invariants import ARCH, EOS, make_engine, make_params

PAGE, SEED = 8, 7  # of make_engine, as are 4 slots, 5 tokens a chunk and 64 tokens a sequence


def prompt(n, seed=0):
    return np.random.default_rng((n, seed)).integers(3, 260, n).astype(np.int32)


def mixed():
    """Prompts of one token, just below, at and above whole pages; samplers of every kind side by side."""
    return [
        Request(prompt(1), 3, 20, 0.7, 0),
        Request(prompt(PAGE), 2, 20, 1.0, 50),
        Request(prompt(PAGE + 1), 1, 20, 0.0, 60),
        Request(prompt(2 * PAGE), 3, 20, 1.3, 70),
        Request(prompt(2 * PAGE + 1), 2, 12, 0.7, 80, ignore_eos=True),
        Request(prompt(21), 2, 43, 0.7, 2**32 - 1),  # ids wrap around
    ]


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def params():
    return dense.float64(make_params())


def by_sample(completions):
    return {(c.request, c.sample): c for c in completions}


def assert_same(got, want):
    got, want = by_sample(got), by_sample(want)
    assert got.keys() == want.keys()
    for key, c in want.items():
        np.testing.assert_array_equal(got[key].tokens, c.tokens, err_msg=str(key))
        np.testing.assert_allclose(got[key].logprobs, c.logprobs, atol=1e-4)
        assert got[key].stop_reason == c.stop_reason


def surprises(params, asked, completions, shift=0):
    """How many tokens are not those that the dense model and the uniform of (request, position) give.

    A token may differ where its uniform lies within 1e-5 of a step of the exact distribution.
    """
    count = 0
    for c in completions:
        r = asked[c.request]
        at = np.arange(len(c.tokens))
        logp = dense.next_token_logprobs(ARCH, params, np.append(r.tokens, c.tokens), r.temperature or 1.0)
        logp = logp[len(r.tokens) - 1 + at]
        chosen = np.take_along_axis(logp, c.tokens[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(c.logprobs, chosen, atol=1e-4)
        if r.temperature == 0:
            count += int((chosen < logp.max(axis=1) - 1e-5).sum())
            assert not c.sampler_logprobs.any()
            continue
        np.testing.assert_array_equal(c.sampler_logprobs, c.logprobs)
        number = np.full(len(at), (r.first_id + c.sample + shift) % 2**32, np.uint32)
        u = np.asarray(uniforms(jax.random.key(SEED), number, at.astype(np.int32)))
        ends = np.cumsum(np.exp(logp), axis=1)
        end = np.take_along_axis(ends, c.tokens[:, None], axis=1)[:, 0]
        begin = end - np.exp(chosen)
        count += int(((u < begin - 1e-5) | (u > end + 1e-5)).sum())
    return count


@pytest.mark.parametrize(
    ("meshes", "options"),
    [({}, {}), ({"replica": 4, "tensor": 2}, {"unroll_layers": True}), ({"replica": 2, "tensor": 4}, {})],
    ids=["one device", "8 devices, layers one by one", "more devices than KV heads"],
)
def test_every_token_is_the_one_that_the_dense_model_and_its_uniform_give(meshes, options, engine, params):
    if meshes:
        engine = make_engine(Layout.rollout(meshes), slots=2, **options)
    asked = mixed()
    completions = engine.generate(asked)
    assert sorted(by_sample(completions)) == [(i, j) for i, r in enumerate(asked) for j in range(r.samples)]
    assert surprises(params, asked, completions) == 0
    assert surprises(params, asked, completions, shift=1) > 50  # the numbers of another sample do not fit
    other = jax.tree.map(lambda x: x * 1.01, params)
    with pytest.raises(AssertionError):
        surprises(other, asked, completions)


def test_stop_reasons(engine):
    free = by_sample(engine.generate(mixed()))
    bound = by_sample(engine.generate([dataclasses.replace(r, ignore_eos=True) for r in mixed()]))
    ended = set()
    for key, c in free.items():
        most = mixed()[key[0]].max_new_tokens
        assert len(bound[key].tokens) == most == len(bound[key].logprobs) and bound[key].stop_reason == "length"
        np.testing.assert_array_equal(bound[key].tokens[: len(c.tokens)], c.tokens)
        if c.stop_reason == "eos":
            ended.add(int(c.tokens[-1]))
            assert c.tokens[-1] in EOS
        else:
            assert len(c.tokens) == most
        if not mixed()[key[0]].ignore_eos:
            assert not set(c.tokens[:-1].tolist()) & set(EOS)
    assert len(ended) > 1  # more than one of the ids was met
    # One token fewer than it wanted: no room for the EOS; exactly as many: an EOS all the same.
    (i, j), c = next((k, c) for k, c in free.items() if c.stop_reason == "eos" and len(c.tokens) > 2)
    r, n = mixed()[i], len(c.tokens)
    cut = [dataclasses.replace(r, samples=1, first_id=r.first_id + j, max_new_tokens=m) for m in (n - 1, n)]
    short, exact = sorted(engine.generate(cut), key=lambda c: c.request)
    assert (short.stop_reason, len(short.tokens)) == ("length", n - 1) and (exact.stop_reason, len(exact.tokens)) == ("eos", n)


def test_samples_of_a_group_do_not_see_each_other(engine, monkeypatch):
    group = Request(prompt(13), 4, 20, 1.0, 300)  # one full page to share, one of four tokens to copy
    alone = [dataclasses.replace(group, samples=1, first_id=300 + i) for i in range(4)]
    together = engine.generate([group])
    apart = [dataclasses.replace(c, request=0, sample=c.request) for r in [engine.generate(alone)] for c in r]
    assert_same(together, apart)
    assert len({c.tokens.tobytes() for c in together}) == 4
    # What copying is good for: without it a sample continues a page that lacks the prompt's last tokens.
    monkeypatch.setattr(engine, "programs", engine.programs._replace(copy=lambda pool, source, target: pool))
    with pytest.raises(AssertionError):
        assert_same(engine.generate([group]), apart)


def test_prefill_in_several_calls_is_the_same(engine, monkeypatch):
    asked = [Request(prompt(n), 1, 6, 0.7, 10 * n) for n in (2 * PAGE + 1, 2 * PAGE + 2, 2 * PAGE + 3)]  # all move in at once
    whole = engine.generate(asked)
    calls, call = [], engine._prefill_call
    monkeypatch.setattr(engine, "_prefill_call", lambda batch: (calls.append(batch), call(batch)))
    engine.load(engine.params, engine.version)  # forgets the cached prompts
    engine.generate(asked)
    assert len(calls) == 1
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", PAGE)
    engine.load(engine.params, engine.version)
    assert_same(engine.generate(asked), whole)
    assert len(calls) == 1 + 2 + 3 + 3  # 16, 17 and 18 tokens, at most 8 at a time


@pytest.mark.slow
def test_a_scarce_pool_makes_groups_wait_and_loses_nothing(engine):
    scarce, used = make_engine(num_pages=10), []
    pages = scarce.scheduler.replicas[0].pages

    def watch(finished):
        used.append(pages.used)
        assert pages.free + pages.used + pages.cached == 9

    assert_same(scarce.generate(mixed(), on_step=watch), engine.generate(mixed()))
    assert max(used) > 5 and pages.used == 0 and scarce.stats.preemptions > 0


def test_weights_are_loaded_only_between_generations(engine):
    asked = [Request(prompt(5), 1, 20, 1.0, 0, ignore_eos=True)]
    before = engine.generate(asked)
    assert set(before[0].versions.tolist()) == {3} and before[0].versions.dtype == np.int32
    engine.submit(asked)
    with pytest.raises(RuntimeError, match="still under way"):  # queued
        engine.load(engine.params, 4)
    assert engine.step() == []
    with pytest.raises(RuntimeError, match="still under way"):  # begun
        engine.load(None, 4)
    engine.abort()
    params = engine.params
    engine.load(jax.tree.map(lambda x: x * 0.5, params), 4)
    after = engine.generate(asked)
    assert set(after[0].versions.tolist()) == {4} and (after[0].tokens != before[0].tokens).any()
    engine.load(None, -1)
    with pytest.raises(RuntimeError, match="no weights are loaded"):
        engine.generate(asked)
    engine.abort()
    engine.load(params, 3)
    assert_same(engine.generate(asked), before)


def test_abort_forgets_everything_and_leaks_no_page(engine):
    want = engine.generate(mixed())
    for steps in range(3):
        engine.submit(mixed())
        for _ in range(steps):
            engine.step()
        assert not engine.idle
        engine.abort()
        pages = engine.scheduler.replicas[0].pages
        assert engine.idle and pages.used == 0 and pages.available == pages.num_pages - 1
    assert_same(engine.generate(mixed()), want)


def test_tickets_and_steps_are_what_generate_loops_over(engine):
    want = engine.generate(mixed())
    first = engine.submit(mixed()[:2])
    done = engine.step()
    rest = engine.submit(mixed()[2:])  # moves in while the first are under way
    while not engine.idle:
        done += engine.step()
    place = {ticket: i for i, ticket in enumerate(first + rest)}
    assert len(place) == len(mixed())
    assert_same([dataclasses.replace(c, request=place[c.request]) for c in done], want)
    assert engine.generate([]) == []


def test_a_second_identical_generation_compiles_nothing(engine):
    def programs():
        return [p._cache_size() for p in engine.programs]

    engine.generate(mixed())
    before, noted = programs(), len(engine.compiled)
    engine.generate(mixed())
    assert programs() == before and len(engine.compiled) == noted == sum(before)
    engine.generate([Request(prompt(40), 1, 2, 1.0, 0)])  # a longer prompt than any before
    assert sum(programs()) > sum(before)


def test_counts(engine):
    asked = mixed()
    engine.load(engine.params, engine.version)
    engine.reset_stats()
    completions = engine.generate(asked)
    stats = engine.stats
    assert stats.decode_tokens == sum(len(c.tokens) for c in completions)
    assert stats.prefill_tokens == sum(len(r.tokens) - 1 for r in asked)  # once for each prompt
    assert stats.hit_tokens == 0 and stats.prompt_tokens == sum((len(r.tokens) - 1) * r.samples for r in asked)
    assert stats.decode_tokens / 4 <= stats.decode_steps < stats.decode_tokens and stats.seconds > 0


@pytest.mark.parametrize(("waiting", "steps"), [(0, 5), (1, 2)])
def test_a_chunk_ends_early_when_a_slot_falls_idle_and_samples_wait(engine, waiting, steps):
    asked = [Request(prompt(3), 1, 2, 1.0, 0, True), Request(prompt(3), 3 + waiting, 20, 1.0, 9, True)]
    engine.reset_stats()
    engine.submit(asked)
    engine.step()
    assert engine.stats.decode_steps == steps
    engine.abort()


def test_the_longest_sequence_fits_and_a_longer_one_is_refused(engine, params):
    full = [Request(prompt(44), 2, 20, 1.0, 0, ignore_eos=True)]
    completions = engine.generate(full)
    assert [len(c.tokens) for c in completions] == [20, 20] and surprises(params, full, completions) == 0
    with pytest.raises(UserError, match="64 tokens"):
        engine.generate([dataclasses.replace(full[0], max_new_tokens=21)])
    assert engine.idle


def test_a_table_in_rows_gives_the_same_tokens(monkeypatch, params):
    monkeypatch.setattr(XlaBackend, "row_pages", 1)
    engine = make_engine(attention="xla")
    tables, make = [], engine.tables.make
    monkeypatch.setattr(engine.tables, "make", lambda replicas: tables.append(make(replicas)) or tables[-1])
    asked = mixed()
    assert surprises(params, asked, engine.generate(asked)) == 0
    assert max(t.own.shape[1] for t in tables) > 4  # slots of several rows
    assert any(t.shared.shape[1] > t.members.shape[1] > 0 for t in tables)  # prefixes of several rows


def test_long_tails_leave_few_slots_idle(params):
    """Responses of 12 tokens and some of 50, in random order: 4 slots are busy as long as samples wait for one."""
    engine = make_engine()
    lengths = np.where(np.random.default_rng(3).random(40) < 0.15, 50, 12)
    engine.submit([Request(prompt(9), 1, int(n), 1.0, 10 * i, True) for i, n in enumerate(lengths)])
    done = 0
    while engine.scheduler.pending:
        done += len(engine.step())
    until_tail = engine.stats.metrics()["rollout/slot_use"]
    while not engine.idle:
        done += len(engine.step())
    assert done == len(lengths) and until_tail >= 0.85
    static = sum(lengths) / sum(4 * max(lengths[i : i + 4]) for i in range(0, len(lengths), 4))
    assert static < 0.7  # what batches that wait for their longest would come to


@pytest.mark.parametrize("name", ["prefill", "copy", "decode", "decode by kernels", "decode with several rows a slot"])
def test_every_program_updates_the_pool_in_place(name):
    if "kernels" in name and (reason := library.reason_against()):
        pytest.skip(reason)
    engine = make_engine(num_pages=400, attention="cpu" if "kernels" in name else "xla")
    rows = lambda *shape: np.zeros((1, *shape), np.int32)  # noqa: E731
    name, _, how = name.partition(" ")
    n, common = (9, 4) if "several" in how else (4, 2)
    own = (rows(n, 8), rows(n), rows(4), rows(4))
    table = Table(*own, rows(common, 2), rows(common), rows(2, 4), rows(4))
    prompts = Prompts(rows(2, 16), rows(2, 16), rows(2), rows(2), rows(2, 2), rows(2, 1))
    arguments = {
        "prefill": (False, engine.params, engine.pool, prompts),
        "copy": (engine.pool, rows(2), rows(2)),
        "decode": (0, engine.decode_params, engine.pool, table, engine.slots, None, engine.key, np.int32(0)),
    }[name]
    program, pool = getattr(engine.programs, name), sum(x.nbytes for x in engine.pool.values())
    memory = program.lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool and memory.temp_size_in_bytes < pool / 2
    kept = jax.jit(program.__wrapped__, static_argnums=() if name == "copy" else 0).lower(*arguments).compile().memory_analysis()
    assert kept.alias_size_in_bytes == 0  # what it looks like when the pool is not donated
    old = engine.pool["k"]
    program(*arguments)
    assert old.is_deleted()
