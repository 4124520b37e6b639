"""Sequences of 32,768 tokens: right to the end, and in memory that follows what is in use."""

import dataclasses
import resource

import jax
import numpy as np
import pytest

from jrl.models import decoder
from jrl.models.load import RANDOM
from jrl.rollout.engine import Engine
from jrl.rollout.sampling import Sampling
from jrl.rollout.scheduler import Request
from jrl.sharding.layout import Layout

LONG, PAGE, SLOTS = 32_768, 64, 4
ARCH = dataclasses.replace(RANDOM["tiny"], max_position=LONG)


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


@pytest.mark.slow
def test_a_sequence_of_32k_tokens_beside_short_ones():
    """The pool has room for one long sequence and a few short ones, a quarter of what all slots could ask for.

    What was sampled one token at a time, with its prompt's four tokens, is then read as a prompt, chunk by chunk: both must
    give every token the same logprob.
    """
    engine = Engine(
        ARCH, Layout.rollout({}, jax.devices()[:1]), slots=SLOTS, max_tokens=LONG + 1, eos_ids=(), page_size=PAGE,
        num_pages=LONG // PAGE + 40, decode_chunk=512,
    )  # fmt: skip
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, decoder.init_params(ARCH, 0))  # far from uniform
    engine.load(params, 0)
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 260, 4).astype(np.int32)
    short = [Request(rng.integers(3, 260, 20).astype(np.int32), 2, 200, 1.0, 10 * i) for i in range(1, 20)]
    begun = peak_mib()
    completions = engine.generate([Request(prompt, 1, LONG - len(prompt), 1.0, 0), *short])
    long = next(c for c in completions if c.request == 0)
    assert len(long.tokens) == LONG - len(prompt) and len(completions) == 1 + 2 * len(short)
    # Scores of all queries and keys at once would be 4 heads x 32,768^2 x 4 bytes = 16 GiB.
    sequence = np.concatenate([prompt, long.tokens]).astype(np.int32)
    [again] = engine.generate([Request(sequence, 1, 1, 1.0, 0, sampling=Sampling(prompt_logprobs=True))])
    assert peak_mib() - begun < 1500, f"{peak_mib() - begun:.0f} MiB above the {begun:.0f} MiB of the start"
    read = again.prompt_logprobs[len(prompt) :]
    np.testing.assert_allclose(read, long.logprobs, atol=2e-4)
    assert np.abs(read[1:] - long.logprobs[:-1]).mean() > 0.1  # control: they are not all alike
    engine.scheduler.check()
