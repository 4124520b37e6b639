"""What an update needs beside its arguments, as compiled, and that what saves memory changes no gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import learner as learner_module
from jrl.losses import policy_loss
from jrl.models import decoder
from jrl.sharding.layout import Layout
from tests.learners import (
    ALGORITHM,
    ARCH,
    compiled,
    make_learner,
    make_params,
    one_device,
    random_batch,
    tpu_devices,
)  # fmt: skip

SLOW = pytest.mark.slow
# Weights far larger than what few tokens need beside them, most of them in the layers.
HEAVY = dataclasses.replace(ARCH, hidden_size=256, intermediate_size=1024, num_layers=6)
FEW = (1, 16, 1, 16)  # prompts, their tokens, responses, their tokens
BATCH = random_batch((3, 20), samples=3, longest=20)


def weight_bytes(arch, layers_only: bool) -> int:
    params = decoder.abstract_params(arch)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params["layers"] if layers_only else params))


def two_sets(forward, loss, params, gradients, packed):
    """What `_accumulate` does, with the gradients of the microbatch beside their sum."""
    new, metrics = jax.grad(lambda p: loss(forward, p, packed), has_aux=True)(params)
    return jax.tree.map(jnp.add, gradients, new), metrics


def temporaries(layout, arch, sizes=FEW, **options) -> int:
    return compiled(make_learner(layout, arch, **options), sizes)[0].memory_analysis().temp_size_in_bytes


def test_gradients_are_added_where_the_sum_lies():
    assert temporaries(one_device(), HEAVY) < 0.6 * weight_bytes(HEAVY, layers_only=True)


@SLOW
def test_a_second_set_of_gradients_would_be_seen(monkeypatch):
    in_place = temporaries(one_device(), HEAVY)
    monkeypatch.setattr(learner_module, "_accumulate", two_sets)
    assert in_place < temporaries(one_device(), HEAVY) - 0.8 * weight_bytes(HEAVY, layers_only=True)


@SLOW
def test_the_sum_of_gradients_is_that_of_plain_addition():
    """The embedding is tied: used twice, its two parts reach the sum one after the other."""
    arch, layout = dataclasses.replace(ARCH, tie_embeddings=True), one_device()
    learner, params = make_learner(layout, arch), make_params(layout, arch)
    packed = a_microbatch(learner)
    plain = jax.jit(functools.partial(two_sets, learner.forward, policy_loss(ALGORITHM)))
    ours, theirs = learner._zeros(), learner._zeros()
    for times in (1, 2):
        theirs, _ = plain(params, theirs, packed)
        ours, _ = learner._accumulate(params, ours, packed)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6 * np.abs(y).max())
            assert times > 1 or np.array_equal(x, y)


def a_microbatch(learner):
    return next(learner._microbatches(*BATCH, np.arange(len(BATCH[0])), "update"))[1]


@SLOW
@pytest.mark.parametrize("remat", ["none", "dots", "offload"])
def test_what_is_computed_again_changes_no_gradient(remat):
    layout, gradients = Layout.train({"fsdp": 2, "tensor": 2}, jax.devices()[:4]), []
    for policy in ("full", remat):
        learner = make_learner(layout, remat=policy)
        gradients.append(learner._accumulate(make_params(layout), learner._zeros(), a_microbatch(learner))[0])
    for x, y in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())


def test_without_remat_gathered_weights_are_kept_of_no_layer():
    layout = Layout.train({"fsdp": 4}, jax.devices()[:4])
    assert temporaries(layout, HEAVY, remat="none") < 0.9 * weight_bytes(HEAVY, layers_only=True)


@SLOW
def test_gathered_weights_that_are_kept_would_be_seen(monkeypatch):
    layout, whole = Layout.train({"fsdp": 4}, jax.devices()[:4]), weight_bytes(HEAVY, layers_only=True)
    needed, gather, times = temporaries(layout, HEAVY, remat="none"), decoder._whole, decoder.Linear.__call__
    # All of a layer's gathered first, as where something is computed again.
    monkeypatch.setattr(decoder, "_whole", lambda split, param, but_matrices: gather(split, param, False))
    monkeypatch.setattr(decoder.Linear, "__call__", lambda self, x, split=None: times(self, x))
    assert needed < temporaries(layout, HEAVY, remat="none") - 0.95 * whole


@SLOW
def test_what_is_kept_more_takes_more():
    layout, sizes = Layout.train({"fsdp": 2}, jax.devices()[:2]), (2, 64, 8, 64)
    full, dots, none = (temporaries(layout, ARCH, sizes, remat=remat) for remat in ("full", "dots", "none"))
    assert full <= dots <= none


@SLOW
def test_on_a_tpu_layer_inputs_wait_in_host_memory():
    # Large enough that layer inputs do not stay in the chip's vector memory.
    arch = dataclasses.replace(
        ARCH, vocab_size=2048, hidden_size=512, intermediate_size=1024, num_layers=24, num_heads=4, num_kv_heads=4, head_dim=128
    )
    layout, sizes = Layout.train({"fsdp": 4}, tpu_devices("v5e:2x2")), (4, 128, 32, 128)
    inputs = arch.num_layers * 36 * 128 * arch.hidden_size * 2
    full, offload = (
        compiled(make_learner(layout, arch, jnp.bfloat16, remat=remat, logit_chunk=512), sizes)[0].memory_analysis()
        for remat in ("full", "offload")
    )
    assert offload.host_temp_size_in_bytes == pytest.approx(inputs, rel=0.05)
    assert offload.temp_size_in_bytes < full.temp_size_in_bytes - 0.9 * inputs
