"""Operations of a step by hand, and shares of a peak."""

import types

import jax
import numpy as np

from jrl.models.arch import Arch
from jrl.plan.chips import CHIPS
from jrl.types import Completion, make_rollout
from jrl.utilization import forward_flops, max_memory_gb, mfu, other_flops, update_flops

LAYERS, HIDDEN, MLP, HEADS, KV, HEAD, VOCAB = 2, 16, 32, 4, 2, 4, 64
ARCH = Arch("llama", VOCAB, HIDDEN, MLP, LAYERS, HEADS, KV, HEAD, 1e4, None, 1e-5, True, False, False, False, False, 64)
BODY = LAYERS * (HIDDEN * HEADS * HEAD * 2 + HIDDEN * KV * HEAD * 2 + 3 * HIDDEN * MLP) + (2 * LAYERS + 1) * HIDDEN


def rollout():
    """Two prompts of 3 and 5 tokens, responses of 1, 2 and 4, 0."""
    made = [(0, 0, 1), (0, 1, 2), (1, 0, 4), (1, 1, 0)]
    completions = [
        Completion(r, s, np.zeros(n, np.int32), *(np.zeros(n, np.float32),) * 2, np.zeros(n, np.int32), "eos") for r, s, n in made
    ]
    return make_rollout([np.zeros(3, np.int32), np.zeros(5, np.int32)], completions)


def test_operations_by_hand():
    tokens = 3 + 5 + 1 + 2 + 4
    pairs = (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5) + 4 + (4 + 5) + (6 + 7 + 8 + 9)  # what each token looks at
    attention = LAYERS * HEADS * (2 * HEAD + 2 * HEAD) * pairs  # scores and weighted sums
    whole = 2 * (BODY + HIDDEN * VOCAB) * tokens + attention
    assert forward_flops(ARCH, rollout()) == whole
    assert forward_flops(ARCH, rollout(), head=False) == 2 * BODY * tokens + attention
    assert update_flops(ARCH, rollout(), epochs=2, taught=0.5) == 3 * whole
    assert other_flops(ARCH, [rollout()] * 3, rollout(), 2, 2, critic=False) == 5 * whole
    critic = other_flops(ARCH, [], rollout(), 2, 0, critic=True)
    assert critic == 7 * (2 * BODY * tokens + attention)


def test_a_share_of_the_peak_where_it_is_known():
    tpu = [types.SimpleNamespace(device_kind="TPU v5p")] * 4
    assert mfu(8 * CHIPS["v5p"].flops, 4.0, tpu) == 0.5
    assert mfu(1.0, 0.0, tpu) is None
    assert mfu(1.0, 1.0, jax.devices()) is None


def test_memory_is_the_fullest_devices_or_else_the_process():
    counting = [types.SimpleNamespace(memory_stats=lambda n=n: {"peak_bytes_in_use": n * 2**30}) for n in (1, 3, 2)]
    assert max_memory_gb(counting) == 3
    before = max_memory_gb(jax.devices())
    held = np.ones(1 << 28, np.uint8)
    assert 0.1 < before <= max_memory_gb(jax.devices()) < 64 and held[0] == 1
