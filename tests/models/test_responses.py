"""Logprobs and entropies in chunks, against float64."""

import dataclasses

import numpy as np
import pytest

from jrl.models.load import RANDOM
from jrl.models.responses import token_logprobs

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
    logp, entropy = token_logprobs(ARCH, params, logits, tokens, 1.0, 4, lambda x, axes: x)
    expected_logp, expected_entropy = reference(logits, tokens)
    np.testing.assert_allclose(logp, expected_logp, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5, atol=3e-7)  # the last bits of 1, not those of the logits
