"""Context parallelism: sequences cut into parts on several devices give the numbers of whole ones, for a part of the memory."""

import dataclasses

import jax
import numpy as np
import pytest

from jrl.models import attention, responses
from jrl.models.attention import causal_mask
from jrl.packing import pack
from jrl.sharding.hlo import collectives
from jrl.sharding.layout import Layout
from tests.learners import (
    ARCH,
    assert_same_update,
    compiled,
    make_learner,
    make_params,
    one_device,
    random_batch,
    updated,
)  # fmt: skip

BATCH = random_batch((1, 8, 21, 40), samples=3, longest=40)
ODD_HEADS = dataclasses.replace(ARCH, num_heads=6, num_kv_heads=3)


@pytest.fixture(scope="module")
def whole():
    return updated(one_device(), BATCH)


def test_parts_of_sequences_give_the_update_of_whole_ones(whole):
    assert_same_update(whole, updated(Layout.train({"data": 2, "context": 2, "tensor": 2}), BATCH))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "arch"),
    [
        ({"fsdp": 2, "context": 4}, ARCH),
        ({"context": 8}, ARCH),
        ({"context": 2, "tensor": 4}, ARCH),  # more devices along tensor than KV heads
        ({"fsdp": 2, "context": 2, "tensor": 2}, ODD_HEADS),  # query heads of one device read two KV heads, of the other too
        ({"data": 2, "fsdp": 2, "context": 2}, dataclasses.replace(ARCH, tie_embeddings=True)),
    ],
    ids=str,
)
def test_other_meshes_and_heads(sizes, arch):
    assert_same_update(updated(one_device(), BATCH, arch), updated(Layout.train(sizes), BATCH, arch))


def logprobs(layout, rollout):
    return make_learner(layout, microbatch_tokens=8192).run("logprobs", make_params(layout), rollout)[0]


def test_logprobs_of_a_long_prompt(monkeypatch):
    """The prompt has 4096 tokens, so that queries go chunk by chunk too."""
    rollout, _ = random_batch((4096,), samples=2, longest=60)
    split, mask = Layout.train({"fsdp": 2, "context": 4}), rollout.loss_mask
    one, many = logprobs(one_device(), rollout), logprobs(split, rollout)
    np.testing.assert_allclose(many[mask], one[mask], rtol=1e-5, atol=3e-5)
    assert np.ptp(one[mask]) > 1 and not many[~mask].any()
    # Control: as if every part's queries stood where those of the first do.
    monkeypatch.setattr(responses, "causal_mask", lambda lens, t, part, parts: causal_mask(lens, t, 0, parts))
    assert np.abs(logprobs(split, rollout) - one)[mask].max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("contexts", [(1, 2, 4, 8)], ids=str)
def test_what_a_device_holds_falls_with_the_devices_along_context(contexts, monkeypatch):
    """A prompt of 4096 tokens in each data shard: devices along context share the memory that the shard needs."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", 32)  # the scores that exist at once do not depend on the length
    arch, temps = dataclasses.replace(ARCH, hidden_size=256, intermediate_size=512, num_layers=8), {}
    for context in contexts:
        program, _ = compiled(make_learner(Layout.train({"fsdp": -1, "context": context}), arch), (1, 4096, 1, 64))
        temps[context] = program.memory_analysis().temp_size_in_bytes
        assert temps[context] < 1.5 * temps[1] / context, temps


def test_keys_are_gathered_and_nothing_else_of_a_sequence():
    """Bytes that a device receives in all-gathers, without those of weights: keys and values, forward and once again."""
    sizes, context = (2, 96, 4, 48), 4
    learner = make_learner(Layout.train({"data": 2, "context": context}))
    found = list(collectives(compiled(learner, sizes)[1]))
    tokens = 2 * 96 + 4 * 48
    one_gather = tokens * (context - 1) // context * ARCH.num_kv_heads * ARCH.head_dim * 4
    keys = [c for c in found if c.kind == "all-gather" and c.received.max() == one_gather and c.times == ARCH.num_layers]
    assert len(keys) == 4
    back = [c for c in found if c.kind == "reduce-scatter" and c.times == ARCH.num_layers]
    assert len(back) == 2 and {c.received.max() for c in back} == {one_gather}
    weights = sum(x.size * 4 for x in jax.tree.leaves(learner.abstract_params())) * (context - 1) // context
    rest = sum(int(c.received.max()) * c.times for c in found if c.kind == "all-gather" and c not in keys)
    assert rest < 2 * weights + 4096  # and the lookups' tokens


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 64])
def test_padded_lengths_divide(parts):
    for microbatch in pack(*BATCH, np.arange(len(BATCH[0])), 1, 256, parts):
        _, u, _, t = microbatch.shape
        assert u % parts == 0 and t % parts == 0


def test_join_and_unjoin():
    """Each of as many equal pieces as there are parts holds that part of every sequence."""
    prompts, answers = np.arange(12).reshape(1, 2, 6), 100 + np.arange(12).reshape(1, 3, 4)
    joined = responses.join(prompts, answers, 2)
    assert joined[0, :12].tolist() == [0, 1, 2, 6, 7, 8, 100, 101, 104, 105, 108, 109]
    for x, y in zip(responses.unjoin(joined, (2, 6, 3, 4), 2), (prompts, answers), strict=True):
        np.testing.assert_array_equal(x, y)
