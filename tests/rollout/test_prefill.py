"""Calls that cache prompts: what each costs, and that nothing is left out."""

import jax
import numpy as np
import pytest

from jrl.models import decoder
from jrl.rollout import prefill
from jrl.rollout.engine import Engine
from jrl.rollout.prefill import longest_chunk, most_prompts, next_call, padded_length
from jrl.rollout.scheduler import Request
from jrl.rollout.sizes import FineSizes
from jrl.shapes import power_of_two
from jrl.sharding.layout import Layout
from tests.test_invariants import ARCH


def calls_of(work, page_size):
    """The calls in which all chunks are computed."""
    work, calls = [sorted(chunks, key=lambda chunk: chunk[1]) for chunks in work], []
    while any(work):
        calls.append(next_call(work, FineSizes(40, 16, page_size, None), scored=False))
        work = [[c for c in chunks if c not in taken] for chunks, taken in zip(work, calls[-1], strict=True)]
    return calls


def padded_tokens(call, page_size):
    """Of each replica: as many prompts as of the one that has most, as long as the longest of all."""
    length = max(padded_length(tokens, page_size) for chunks in call for _, tokens in chunks)
    return power_of_two(max(map(len, call))) * length


@pytest.mark.parametrize("page_size", [4, 12, 16])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_no_call_is_larger_than_its_budget_and_every_chunk_is_in_one(page_size, replicas, monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 16 * page_size)
    rng, longest = np.random.default_rng(replicas), longest_chunk(page_size)
    assert padded_length(longest, page_size) <= 16 * page_size < padded_length(longest + page_size, page_size)
    sizes = set()
    for _ in range(50):
        top = rng.integers(1, longest + 1, replicas)
        work = [[(f"{r}.{i}", int(rng.integers(1, top[r] + 1))) for i in range(rng.integers(0, 40))] for r in range(replicas)]
        calls = calls_of(work, page_size)
        done = [sorted(chunk for call in calls for chunk in call[r]) for r in range(replicas)]
        assert done == [sorted(chunks) for chunks in work]
        sizes |= {padded_tokens(call, page_size) for call in calls}
    assert max(sizes) == 16 * page_size


def test_short_prompts_of_one_replica_do_not_ride_with_a_long_one_of_another(monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 64)
    short, long = [(i, 4) for i in range(16)], [("long", 64)]
    assert calls_of([short, long], 4) == [[short, []], [[], long]]
    assert calls_of([short[:1], long], 4) == [[short[:1], long]]  # one does: there is room beside it


def test_the_number_of_prompts_is_a_power_of_two(monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 64)
    assert [most_prompts(n) for n in (4, 12, 16, 24, 32, 48, 64, 100)] == [16, 4, 4, 2, 2, 1, 1, 1]
    assert [len(call[0]) for call in calls_of([[(i, 12) for i in range(5)]], 4)] == [4, 1]  # 8 x 12 tokens would be too many


def test_the_engines_calls_are_within_the_budget_on_every_replica(monkeypatch):
    """Prompts of which one replica's are many and short, and the other's few and long."""
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 32)
    layout = Layout.rollout({"replica": 2, "tensor": 1}, jax.devices()[:2])
    engine = Engine(ARCH, layout, slots=8, max_tokens=64, eos_ids=(1,), page_size=8, decode_chunk=4)
    engine.load(decoder.init_params(ARCH, 0, layout), 0)
    rng = np.random.default_rng(0)
    lengths = [30, 5, 5, 5, 5, 29, 5, 5, 5]
    prompts = [rng.integers(3, 250, n).astype(np.int32) for n in lengths]
    done = engine.generate([Request(p, 1, 2, 1.0, i, True) for i, p in enumerate(prompts)])
    assert len(done) == len(lengths) and engine.stats.prefill_tokens == sum(lengths) - len(lengths)
    calls = [key[2:] for key in engine.compiled.seen if key[0] == "prefill"]
    assert {length for _, length, _ in calls} >= {8, 32}
    assert all(count * length <= 32 for count, length, _ in calls)
