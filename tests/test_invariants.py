"""The promises that hold the rooms together, on a small random model; each beside what it looks like when broken."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.rollout.engine import Engine
from jrl.rollout.sampler import uniforms
from jrl.rollout.scheduler import Request
from jrl.sharding.layout import Layout
from jrl.types import make_rollout
from tests.learners import ARCH, TEMPERATURE, assert_same_update, make_learner, make_params

EOS = tuple(range(2, 264, 12))  # many, so that random weights meet one now and then


def make_engine(layout=None, **options):
    layout = layout or Layout.rollout({}, jax.devices()[:1])
    settings = {"slots": 4, "max_tokens": 64, "eos_ids": EOS, "page_size": 8, "decode_chunk": 5, "seed": 7}
    engine = Engine(ARCH, layout, **(settings | options))
    engine.load(make_params(layout), 3)
    return engine


def requests():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 260, n).astype(np.int32) for n in (1, 8, 9, 21, 17)]  # one token, a whole page, one more, ...
    counts = (3, 4, 1, 6, 2)
    return [Request(p, count, 24, TEMPERATURE, 100 * i) for i, (p, count) in enumerate(zip(prompts, counts, strict=True))]


@pytest.fixture(scope="module")
def rollout():
    asked = requests()
    return make_rollout([r.tokens for r in asked], make_engine().generate(asked))


@pytest.fixture(scope="module")
def learner():
    return make_learner()


@pytest.fixture(scope="module")
def columns(rollout):
    mask = rollout.loss_mask
    advantages = np.random.default_rng(1).standard_normal(mask.shape).astype(np.float32) * mask
    share = (mask / mask.sum()).astype(np.float32)
    return {"weight": share, "share": share, "advantages": advantages, "rollout_logprobs": rollout.logprobs}


def naive_logprobs(params, rollout):
    """Row by row, the whole sequence, no packing: log_softmax(logits / temperature) of each response token."""
    from tests.models.test_decoder import our_logits

    out = np.zeros_like(rollout.logprobs)
    for row, (p, n) in enumerate(zip(rollout.prompt_lens, rollout.lens, strict=True)):
        tokens = rollout.tokens[row : row + 1, :n]
        logp = jax.nn.log_softmax(our_logits(ARCH, params, tokens)[0] / TEMPERATURE)
        out[row, p:n] = np.asarray(logp)[np.arange(p - 1, n - 1), tokens[0, p:]]
    return out


def test_rollout_logprobs_are_the_learners_and_those_of_whole_sequences(rollout, learner):
    assert len(set(rollout.response_lens.tolist())) > 3 and {"eos", "length"} == set(rollout.stop_reasons.tolist())
    learned = learner.run("logprobs", make_params(), rollout)[0]
    mask = rollout.loss_mask
    np.testing.assert_allclose(learned[mask], rollout.logprobs[mask], atol=1e-4)
    np.testing.assert_allclose(naive_logprobs(make_params(), rollout)[mask], rollout.logprobs[mask], atol=1e-4)
    assert not learned[~mask].any()
    other = make_learner(temperature=1.0).run("logprobs", make_params(), rollout)[0]
    assert np.abs(other[mask] - rollout.logprobs[mask]).max() > 0.01


def test_eos_ends_a_response_and_belongs_to_it(rollout):
    for tokens, reason in zip(rollout.responses(), rollout.stop_reasons, strict=True):
        assert (tokens[-1] in EOS) == (reason == "eos") and not set(tokens[:-1].tolist()) & set(EOS)
    assert (rollout.logprobs[np.arange(len(rollout)), rollout.lens - 1] < 0).all()


@pytest.mark.parametrize(
    "options",
    [pytest.param({"slots": 1}, marks=pytest.mark.slow), {"slots": 16, "page_size": 4, "decode_chunk": 24}, {"num_pages": 8}],
    ids=["alone", "all", "scarce"],
)
def test_a_sample_does_not_depend_on_its_company(rollout, options):
    asked = requests()
    engine = make_engine(**options)
    again = make_rollout([r.tokens for r in asked], engine.generate(asked))
    assert_same_but_for_rounding(again, rollout)
    pages = engine.scheduler.replicas[0].pages
    assert pages.used == 0 and pages.available == pages.num_pages - 1
    programs = len(engine.compiled)
    moved = [dataclasses.replace(r, first_id=r.first_id + 1) for r in asked]
    assert (make_rollout([r.tokens for r in asked], engine.generate(moved)).tokens != rollout.tokens).any()
    if not engine.stats.preemptions:  # a sample that was preempted resumes at whatever length it had
        assert len(engine.compiled) <= programs + 2  # other lengths may fall into another bucket


def test_replicas_and_tensor_parallelism_give_the_same_samples(rollout):
    asked = requests()
    engine = make_engine(Layout.rollout({"replica": 4, "tensor": 2}), slots=2)
    again = make_rollout([r.tokens for r in asked], engine.generate(asked))
    same = assert_same_but_for_rounding(again, rollout)
    assert same.sum() >= len(rollout) - 2
    np.testing.assert_allclose(again.logprobs[same], rollout.logprobs[same], atol=1e-4)


def assert_same_but_for_rounding(a, b):
    """Which rows agree; the first difference of any other must lie where the uniform is within 1e-5 of a step of the CDF.

    Splitting a product over devices rounds it otherwise, and then such a threshold may fall on the other side.
    """
    from tests.models.test_decoder import our_logits

    ids = [r.first_id + sample for r in requests() for sample in range(r.samples)]
    same = np.ones(len(b), bool)
    for row in range(len(b)):
        width = min(a.tokens.shape[1], b.tokens.shape[1])
        different = np.flatnonzero(a.tokens[row, :width] != b.tokens[row, :width])
        if not len(different):
            continue
        same[row], t, start = False, different[0], b.prompt_lens[row]
        p = jax.nn.softmax(our_logits(ARCH, make_params(), b.tokens[row : row + 1, :t])[0, -1] / TEMPERATURE)
        uniform = uniforms(jax.random.key(7), jnp.uint32([ids[row]]), jnp.int32([t - start]))
        assert np.abs(np.cumsum(p) - float(uniform[0])).min() < 1e-5, (row, t)
    return same


def updated(learner, rollout, columns, layout=None):
    rows = np.arange(len(rollout))
    return learner.update(learner.init_state(make_params(layout)), rollout, columns, rows)


def test_the_gradient_does_not_depend_on_microbatches_or_devices(rollout, learner, columns):
    whole = updated(learner, rollout, columns)
    assert_same_update(whole, updated(make_learner(microbatch_tokens=64), rollout, columns), rtol=1e-5)
    layout = Layout.train({"data": 2, "fsdp": 2, "tensor": 2})
    assert_same_update(whole, updated(make_learner(layout), rollout, columns, layout))
    with pytest.raises(AssertionError):
        assert_same_update(whole, updated(learner, rollout, columns | {"advantages": columns["advantages"] * 1.01}), rtol=1e-5)


def test_the_first_update_is_on_policy(rollout, learner, columns):
    old = learner.run("logprobs", make_params(), rollout)[0]
    _, metrics = updated(learner, rollout, columns | {"old_logprobs": old})
    assert metrics["ratio_deviation"] < 1e-5 and abs(metrics["rollout_corr/k3_kl"]) < 1e-8 and metrics["pg_clipfrac"] == 0
    _, stale = updated(learner, rollout, columns | {"old_logprobs": old - 0.3 * rollout.loss_mask})
    assert stale["ratio_deviation"] > 0.1 and stale["pg_clipfrac"] > 0


def test_a_non_finite_update_is_skipped_and_an_empty_one_teaches_nothing(rollout, learner, columns):
    last = np.arange(rollout.tokens.shape[1]) == rollout.lens[0] - 1
    broken = columns | {"advantages": np.where(last, np.nan, columns["advantages"])}
    before = jax.tree.map(np.array, make_params())
    state, metrics = updated(learner, rollout, broken)
    assert metrics["skipped"] == 1 and int(state.skipped) == 1 and int(state.step) == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    _, nothing = updated(learner, rollout, {k: np.zeros_like(v) for k, v in columns.items()})
    assert nothing["grad_norm"] == 0 and nothing["skipped"] == 0


def test_no_array_of_tokens_by_vocabulary_is_made(rollout, columns):
    def vocabulary_rows(learner):
        state = learner.init_state(make_params())
        packed = next(learner._microbatches(rollout, columns, np.arange(len(rollout)), "update"))[1]
        text = learner._accumulate.lower(state.params, learner._zeros(), packed).compile().as_text()
        sizes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
        mine = [s for s in sizes if ARCH.vocab_size in s and ARCH.hidden_size not in s]
        return max((int(np.prod(s)) // ARCH.vocab_size for s in mine), default=0)

    learner = make_learner(microbatch_tokens=2048)
    assert 0 < vocabulary_rows(learner) <= 32
    assert vocabulary_rows(make_learner(microbatch_tokens=2048, logit_chunk=4096)) > 32
