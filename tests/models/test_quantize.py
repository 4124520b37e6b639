"""8-bit integers: how far they are from what they stand for, and that the model computes with them what they stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import decoder
from jrl.models.load import RANDOM
from jrl.models.quantize import SUMMED_AXIS, int8, quantize_params
from tests.models.test_decoder import our_logits, relative_error

UNTIED = dataclasses.replace(RANDOM["tiny"], tie_embeddings=False)
MODELS = {"untied": UNTIED, "tied": dataclasses.replace(UNTIED, tie_embeddings=True, qkv_bias=True, o_bias=True, mlp_bias=True)}


def perturbed(arch):
    """Weights far from their defaults; channels of very different size, so that one scale for all would not do."""

    def one(x):
        key = jax.random.key(x.size)
        sizes = jnp.exp(jax.random.normal(key, x.shape[-1:]))
        return x + 0.2 * sizes * jax.random.normal(key, x.shape)

    return jax.tree.map(one, decoder.init_params(arch, 0))


def dequantized(params):
    """The parameters in float32 that quantized ones stand for."""
    out = {}
    for name, x in params.items():
        if isinstance(x, dict):
            out[name] = dequantized(x)
        elif name in SUMMED_AXIS:
            out[name] = x.astype(jnp.float32) * jnp.expand_dims(params["scale"], SUMMED_AXIS[name])
        elif not (name == "scale" and SUMMED_AXIS.keys() & params.keys()):
            out[name] = x
    return out


@pytest.mark.parametrize("axis", [-2, -1])
def test_the_error_is_at_most_half_a_step_of_each_channel(axis):
    x = np.random.default_rng(0).standard_normal((2, 40, 30)) * 10.0 ** np.random.default_rng(1).integers(-6, 6, 30)
    q, scale = int8(jnp.float32(x), axis)
    assert q.dtype == jnp.int8 and scale.dtype == jnp.float32 and list(scale.shape) == np.delete(x.shape, axis).tolist()
    steps = np.expand_dims(np.asarray(scale, np.float64), axis)
    error = np.abs(np.float32(x) - np.asarray(q, np.float64) * steps) / steps
    assert 0.49 < error.max() <= 0.5 + 1e-4
    assert np.abs(np.asarray(q, int)).max(axis=axis).min() == 127  # each channel uses all of the range
    one_scale = np.abs(x).max() / 127
    assert (np.abs(np.round(x / one_scale) * one_scale - x) > 0.5 * steps).any()  # what channels are good for


def test_nothing_and_what_is_not_finite():
    q, scale = int8(jnp.array([[0.0, 0.0], [1.0, np.nan], [1.0, np.inf]]), -1)
    assert not q[0].any() and scale[0] == 0
    assert np.isnan(q * scale[:, None])[1:].all()  # it does not become a number


@pytest.mark.parametrize("name", MODELS, ids=["untied", "tied, with biases"])
def test_logits_are_those_of_the_dequantized_weights(name):
    arch = MODELS[name]
    params = perturbed(arch)
    quantized = quantize_params(params, jnp.float32)
    shapes = decoder.abstract_params(arch, decoder.Int8Decoder)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), quantized) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    bytes_of = lambda p: sum(x.nbytes for x in jax.tree.leaves(p))  # noqa: E731
    assert bytes_of(quantized) < 0.3 * bytes_of(params)
    tokens = np.random.default_rng(0).integers(0, arch.vocab_size, (2, 40)).astype(np.int32)
    ours = our_logits(arch, quantized, tokens)
    assert relative_error(ours, our_logits(arch, dequantized(quantized), tokens)) < 1e-5
    assert relative_error(ours, our_logits(arch, params, tokens)) > 1e-3  # they are not those of the weights themselves
    # The negative control: no scale of any layer can be left out.
    leaves, treedef = jax.tree_util.tree_flatten_with_path(quantized)
    for i, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        if "scale" not in name or "norm" in name:
            continue
        changed = [x for _, x in leaves]
        changed[i] = leaf * 1.01
        assert relative_error(our_logits(arch, jax.tree_util.tree_unflatten(treedef, changed), tokens), ours) > 1e-5, name
