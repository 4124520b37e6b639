"""The engine over 8-bit weights and 8-bit pages: the tokens of what they stand for, and the promises that pages keep."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jrl.algorithms.kl import kl
from jrl.models import decoder
from jrl.models.quantize import quantize_params
from jrl.rollout import paged_attention, prefill
from jrl.rollout.paged_attention import Table
from jrl.rollout.scheduler import Request
from jrl.rollout.weights import weight_publisher
from jrl.sharding.digest import digest
from jrl.sharding.layout import Layout
from tests.models.test_quantize import dequantized
from tests.rollout.test_engine import assert_same, by_sample, prompt
from tests.runs import a_run
from tests.test_invariants import ARCH, make_engine, make_params

PAGE = 8  # of make_engine
GROUP = Request(prompt(13), 4, 20, 1.0, 300)  # one full page to share, one of five tokens to copy
ASKED = [GROUP, Request(prompt(21), 2, 20, 0.7, 40)]


@pytest.fixture(scope="module")
def engine():
    """Float weights, integer pages."""
    return make_engine(kv="int8")


@pytest.fixture(scope="module")
def want(engine):
    return engine.generate(ASKED)


def distance(got, want):
    """The largest difference of logprobs, of each sample up to where its tokens part, and the share of samples that do not."""
    got, want = by_sample(got), by_sample(want)
    assert got.keys() == want.keys()
    gap, same = 0.0, []
    for key, c in want.items():
        n = min(len(c.tokens), len(got[key].tokens))
        parts = np.flatnonzero(got[key].tokens[:n] != c.tokens[:n])
        same.append(not len(parts) and len(c.tokens) == len(got[key].tokens))
        n = parts[0] if len(parts) else n
        gap = max(gap, np.abs(got[key].logprobs[:n] - c.logprobs[:n]).max(initial=0))
    return gap, np.mean(same)


def assert_alike(got, want):
    """Rounding in another order may move an integer by one, seldom; its effect is far below that of all integers together."""
    gap, same = distance(got, want)
    assert gap < 5e-3 and same >= 0.8, (gap, same)


# Weights ---------------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_the_dequantized_weights():
    engine, asked = make_engine(), [dataclasses.replace(GROUP, samples=1, temperature=0.0), GROUP]
    given = engine.params
    quantized = quantize_params(given, jnp.float32)
    engine.load(quantized, 4)
    got = engine.generate(asked)
    engine.load(dequantized(quantized), 5)
    assert_same(got, engine.generate(asked))
    engine.load(given, 6)
    with pytest.raises(AssertionError):
        assert_same(got, engine.generate(asked))


def test_decoding_keeps_no_float_copy_of_the_weights(monkeypatch):
    rows = lambda *shape: np.zeros((1, *shape), np.int32)  # noqa: E731
    table = Table(rows(4, 8), rows(4), rows(4), rows(4), rows(0, 1), rows(0), rows(0, 1), rows(4))

    def converted_before_the_loop():
        """Of the matrices, those that the program makes floats of at its beginning."""
        engine = make_engine(unroll_layers=True)
        engine.load(quantize_params(engine.params, jnp.float32), 4)
        arguments = (0, engine.decode_params, engine.pool, table, engine.slots, None, engine.key, np.int32(0))
        entry = engine.programs.decode.lower(*arguments).compile().as_text().split("\nENTRY ")[1]
        sizes = {x.shape[-2:] for x in jax.tree.leaves(engine.decode_params) if x.dtype == jnp.int8}
        return {size for size in sizes if re.search(rf"= f32\[{size[0]},{size[1]}\]", entry)}

    assert not converted_before_the_loop()
    monkeypatch.setattr(decoder, "with_input", lambda integers, x: (integers, x))
    assert converted_before_the_loop()


@pytest.mark.slow
def test_tensor_parallel_engines_give_the_samples_of_one_device(engine):
    train, rollout = Layout.train({"fsdp": 4, "tensor": 2}), Layout.rollout({"replica": 4, "tensor": 2})
    published = weight_publisher(ARCH, train, rollout, jnp.float32, "int8")(make_params(train))
    layers = published["layers"]
    assert layers["gate"]["kernel"].sharding.spec == P(None, None, "tensor") and layers["gate"]["kernel"].dtype == jnp.int8
    assert layers["gate"]["scale"].sharding.spec == P(None, "tensor") and layers["down"]["scale"].sharding.spec == P()
    assert published["lm_head"]["scale"].sharding.spec == published["embed"]["scale"].sharding.spec == P("tensor")
    alone = quantize_params(make_params(), jnp.float32)
    assert digest(published) == digest(alone) != digest(jax.tree.map(lambda x: -x, alone))
    many = make_engine(rollout, slots=2, kv="int8")
    many.load(published, 4)
    shards = {name: x.addressable_shards[0].data.shape for name, x in many.pool.items()}
    assert shards["k"][2] == shards["k_scale"][2] == ARCH.num_kv_heads // 2
    before = engine.params
    engine.load(alone, 4)
    assert_alike(many.generate(ASKED), engine.generate(ASKED))
    engine.load(before, 3)


# Pages -----------------------------------------------------------------------------------------------------------------


def test_pages_hold_integers_and_give_nearly_the_logprobs_of_floats(engine, want):
    pool, floats = engine.pool, make_engine()
    assert pool["k"].dtype == pool["v"].dtype == jnp.int8 and pool["k_scale"].dtype == jnp.float32
    bytes_of = lambda pool: sum(x.nbytes for x in pool.values())  # noqa: E731
    assert bytes_of(pool) / bytes_of(floats.pool) == (1 + 4 / ARCH.head_dim) / 4
    gap, _ = distance(want, floats.generate(ASKED))
    assert 5e-3 < gap < 0.1  # off by a little, and by more than `assert_alike` allows


def test_stored_keys_are_within_half_a_step(engine):
    k = jax.random.normal(jax.random.key(0), (2, 3, 5, 16)) * jnp.array([1e-3, 1.0, 1e3])[:, None, None]
    stored = paged_attention._as_stored(engine.pool, k, 2 * k)
    read = paged_attention._as_read(stored, jnp.float32)
    for x, name, back in ((k, "k", read[0]), (2 * k, "v", read[1])):
        steps = np.abs(back - x) / stored[f"{name}_scale"][..., None]
        assert 0.4 < steps.max() <= 0.5 + 1e-3


def test_groups_share_pages(engine, want):
    alone = [dataclasses.replace(GROUP, samples=1, first_id=300 + i) for i in range(4)]
    apart = [dataclasses.replace(c, request=0, sample=c.request) for r in [engine.generate(alone)] for c in r]
    assert_alike(apart, [c for c in want if c.request == 0])


def test_prefill_in_several_calls_reads_what_the_first_wrote(engine, want, monkeypatch):
    calls, call = [], engine._prefill_call
    monkeypatch.setattr(engine, "_prefill_call", lambda batch: (calls.append(batch), call(batch)))
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", PAGE)
    engine.load(engine.params, engine.version)
    assert_alike(engine.generate(ASKED), want)
    assert len(calls) == 2 + 3  # 12 and 20 tokens, at most 8 at a time


@pytest.mark.slow
def test_preempted_samples_go_on_as_if_they_had_not_been(want):
    scarce = make_engine(num_pages=10, kv="int8")
    assert_alike(scarce.generate(ASKED), want)
    assert scarce.stats.preemptions > 0


# Training --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_corrects_for_its_rollout_and_tells_how_far_off_it_is(tmp_path):
    options = {"reward": lambda prompts, completions, **_: [float(len(c)) for c in completions]}
    int8 = {"rollout__weights": "int8", "rollout__kv": "int8", "algorithm__rollout_is_cap": 1.0}
    short = {"steps": 1, "eval__every_steps": 0, "checkpoint__every_steps": 0, "algorithm__minibatches": 1}
    trainer = a_run(tmp_path / "run", "", options, **int8, **short)
    p, seen, update = trainer.parts, {}, trainer.update

    def watched(step, states, batch):
        params = states["policy"].params
        assert digest(p.engine.params) == digest(quantize_params(params, p.dtype))
        seen["old"], seen["batch"] = p.policy.run("logprobs", params, batch.rollout)[0], batch
        seen["metrics"] = update(step, states, batch)
        return seen["metrics"]

    trainer.update = watched
    assert trainer.train()["steps"] == 1
    batch, metrics = seen["batch"], seen["metrics"]
    taught = batch.loss_mask & np.any(batch.advantages != 0, axis=1)[:, None]
    old, rollout = seen["old"][taught], batch.rollout.logprobs[taught]
    ratio = np.exp(old.astype(float) - rollout)
    assert metrics["rollout_corr/logprob_abs_diff"] == pytest.approx(np.abs(old - rollout).mean(), rel=1e-2)
    assert metrics["rollout_corr/logprob_abs_diff"] > 1e-4 and metrics["rollout_corr/k3_kl"] > 0
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(float(kl(rollout[None], old[None], "k3").mean()), rel=0.05)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(np.minimum(ratio, 1.0).mean(), rel=1e-5)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx((ratio > 1).mean(), abs=0.02)
