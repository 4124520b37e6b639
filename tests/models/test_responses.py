"""Logprobs and entropies in chunks, against float64; responses that lie end to end, against each by itself."""

import dataclasses

import numpy as np
import pytest

from jrl.models import responses
from jrl.models.attention import causal_mask
from jrl.models.load import RANDOM
from jrl.models.responses import token_logprobs
from jrl.packing import pack
from tests.learners import assert_same_update, one_device, random_batch, updated

ARCH = dataclasses.replace(RANDOM["tiny"], tie_embeddings=False)


def reference(logits, tokens):
    logits = logits.astype(np.float64)
    logp = logits - logits.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    return np.take_along_axis(logp, tokens[..., None], -1)[..., 0], -(np.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize("gap", [0.0, 3.0, 12.0, 60.0])
def test_entropy_keeps_its_digits_where_the_policy_is_sure(gap):
    """One token is ahead of the others by `gap`, and all logits are far from 0."""
    rng = np.random.default_rng(0)
    logits = 40 + rng.standard_normal((1, 2, 5, ARCH.vocab_size)).astype(np.float32)
    logits[..., 7] += np.float32(gap)
    tokens = rng.integers(0, ARCH.vocab_size, (1, 2, 5)).astype(np.int32)
    # A head that is the identity: hidden states are the logits.
    params = {"lm_head": {"kernel": np.eye(ARCH.vocab_size, dtype=np.float32)}}
    logp, entropy, likeliest = token_logprobs(ARCH, params, logits, tokens, 1.0, 4, lambda x, axes: x)
    expected_logp, expected_entropy = reference(logits, tokens)
    np.testing.assert_array_equal(likeliest, logits.argmax(-1) == tokens)
    np.testing.assert_allclose(logp, expected_logp, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5, atol=3e-7)  # the last bits of 1, not those of the logits


def test_responses_beside_each_other_learn_as_if_each_were_alone(monkeypatch):
    """Of a group that shares its prompt and its rows, against each sequence with a prompt of its own: the naive way."""
    rollout, columns = random_batch((20, 7), samples=6, longest=40)
    apart = dataclasses.replace(rollout, group_ids=np.arange(len(rollout), dtype=np.int32))
    shapes = [next(pack(r, {}, np.arange(12), 1, 4096)).shape for r in (rollout, apart)]
    assert shapes[0][0] == 2 and shapes[0][2] < 12 <= shapes[1][0] == shapes[1][2]
    naive = updated(one_device(), (apart, columns), microbatch_tokens=4096)
    assert_same_update(naive, updated(one_device(), (rollout, columns), microbatch_tokens=4096), rtol=1e-5)
    # Control: a response that sees those before it in its row.
    monkeypatch.setattr(responses, "own_response_mask", all_before)
    with pytest.raises(AssertionError):
        assert_same_update(naive, updated(one_device(), (rollout, columns), microbatch_tokens=4096), rtol=1e-3)


def all_before(offsets, part, parts):
    return causal_mask((offsets >= 0).sum(-1), offsets.shape[-1])
