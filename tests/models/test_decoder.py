"""The decoder against transformers: logits of every family, every switch, every tensor away from its default."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from jrl.models import attention as attention_module
from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.attention import attention, causal_mask
from jrl.models.hf import load_hf, save_hf

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES = {
    "llama1": (LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": (LlamaConfig, {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_scaling": LLAMA3, "rope_theta": 5e5}),
    "llama_linear_tied": (
        LlamaConfig,
        {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True,
         "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "llama_biases_wide_heads": (
        LlamaConfig,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": (Qwen2Config, {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2_untied": (Qwen2Config, {"num_attention_heads": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "qwen3": (Qwen3Config, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_bias": (Qwen3Config, {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "attention_bias": True}),
}  # fmt: skip


def plain_attend(lens):
    """Dense causal attention over whole rows."""

    def attend(layer, q, k, v, cache):
        del layer
        lift = lambda x: x[:, None]  # noqa: E731  [d, t, ..] -> [d, 1, t, ..]
        mask = causal_mask(lens[:, None], q.shape[1])
        return attention(lift(q), [(lift(k), lift(v), mask)])[:, 0], cache

    return attend


@functools.partial(jax.jit, static_argnums=0)
def our_logits(arch, params, tokens):
    rows, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), tokens.shape)
    hidden, _ = decoder.forward(arch, params, tokens, positions, plain_attend(jnp.full(rows, t)))
    return decoder.logits(arch, params, hidden)


@pytest.fixture(scope="module", params=CASES)
def exported(request, tmp_path_factory):
    """A random model of transformers, every tensor away from its default, saved to disk."""
    cls, options = CASES[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(cls(**SMALL, **options)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            tensor.copy_(centre + 0.3 * torch.randn(tensor.shape))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


def relative_error(ours, theirs):
    return np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()


def loaded(folder):
    arch = Arch.from_hf_config(json.loads((folder / "config.json").read_text()))
    return arch, load_hf(folder, arch)


def test_logits_equal_transformers_and_each_tensor_of_each_layer_matters(exported):
    model, folder = exported
    arch, params = loaded(folder)
    assert arch.num_params() == model.num_parameters()
    tokens = np.random.default_rng(0).integers(0, arch.vocab_size, (2, 40)).astype(np.int32)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert relative_error(our_logits(arch, params, tokens), theirs) < 1e-4
    # The negative control: no tensor of any layer can be dropped, swapped or zeroed without notice.
    leaves, treedef = jax.tree_util.tree_flatten_with_path(jax.tree.map(np.asarray, params))
    for i, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        for layer in range(arch.num_layers) if "layers" in name else [slice(None)]:
            changed = [x for _, x in leaves]
            changed[i] = leaf.copy()
            changed[i][layer] = leaf[layer] * 1.1 + 0.02
            error = relative_error(our_logits(arch, jax.tree_util.tree_unflatten(treedef, changed), tokens), theirs)
            assert error > 1e-4, f"{name} of layer {layer} has no influence"
    if arch.rope_scaling is not None:
        plain = dataclasses.replace(arch, rope_scaling=None)
        assert relative_error(our_logits(plain, params, tokens), theirs) > 1e-3


def test_frequencies_of_llama3_worked_by_hand():
    """Head size 4, theta 10000: 1 and 0.01 rad a token; over the 1000 tokens of pretraining the first turns often."""
    config = dict(SMALL, model_type="llama", hidden_size=8, num_attention_heads=2, rope_theta=10000.0)
    arch = Arch.from_hf_config(config | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 1000}})
    # 0.01 rad a token turns 10 / 2pi = 1.5915 times in 1000 tokens, (1.5915 - 1) / 3 = 0.19718 of the way to "kept":
    # 0.01 * (0.80282 / 8 + 0.19718) = 0.0029753.
    np.testing.assert_allclose(decoder.inverse_frequencies(arch), [1.0, 0.0029753], rtol=1e-4)


def test_export_is_bit_exact_and_opens_in_transformers(exported, tmp_path):
    model, folder = exported
    arch, params = loaded(folder)
    save_hf(tmp_path, arch, params, eos_ids=(2, 3))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours, theirs = again.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert Arch.from_hf_config(again.config.to_dict()) == arch
    assert again.generation_config.eos_token_id == [2, 3]


def test_attention_over_two_blocks_is_attention_over_their_union():
    rng = np.random.default_rng(1)
    draw = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)  # noqa: E731
    q, k, v = draw(1, 2, 3, 4, 8), draw(1, 2, 7, 2, 8), draw(1, 2, 7, 2, 8)
    mask = jnp.asarray(rng.random((1, 2, 3, 7)) < 0.6).at[..., 0].set(True)
    whole = jax.jit(attention)(q, [(k, v, mask)])
    parts = jax.jit(attention)(q, [(k[:, :, :4], v[:, :, :4], mask[..., :4]), (k[:, :, 4:], v[:, :, 4:], mask[..., 4:])])
    np.testing.assert_allclose(whole, parts, atol=1e-6)
    # An independent reference, one head and query at a time.
    for n, t, h in np.ndindex(2, 3, 4):
        scores = np.where(mask[0, n, t], np.asarray(k)[0, n, :, h // 2] @ np.asarray(q)[0, n, t, h] / np.sqrt(8), -np.inf)
        w = np.exp(scores - scores.max())
        np.testing.assert_allclose(whole[0, n, t, h], w / w.sum() @ np.asarray(v)[0, n, :, h // 2], atol=1e-5)


@pytest.mark.parametrize("t", [4, 12, 6, 11, 13])
def test_long_attention_is_the_same_in_chunks_and_has_no_more_queries_at_once(t, monkeypatch):
    rng = np.random.default_rng(2)
    draw = lambda *s: jnp.asarray(rng.standard_normal(s), jnp.float32)  # noqa: E731
    q, k, v, shared_k, shared_v = draw(1, 2, t, 2, 8), *(draw(1, 2, s, 2, 8) for s in (t, t, 5, 5))
    seen = jnp.arange(5) < jnp.array([[5, 3]])[..., None, None]  # one mask for all queries
    at_once = []
    plain = attention_module._attend_queries
    monkeypatch.setattr(attention_module, "_attend_queries", lambda q, *rest: at_once.append(q.shape[2]) or plain(q, *rest))

    def value_and_gradients(chunk):
        monkeypatch.setattr(attention_module, "QUERY_CHUNK", chunk)

        def total(q, k, v, shared_k, shared_v):
            out = attention(q, [(shared_k, shared_v, seen), (k, v, causal_mask(jnp.array([[t, t - 1]]), t))])
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

        return jax.jit(jax.value_and_grad(total, argnums=range(5), has_aux=True))(q, k, v, shared_k, shared_v)

    chunked = value_and_gradients(4)
    assert at_once and max(at_once) <= 4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), chunked, value_and_gradients(512))
    assert max(at_once) == t


def test_remat_changes_no_gradient():
    arch = dataclasses.replace(Arch.from_hf_config(LlamaConfig(**SMALL, num_attention_heads=4).to_dict()), tie_embeddings=True)
    params = decoder.init_params(arch, 0)
    tokens, positions = np.arange(12).reshape(1, 12) % 97, np.arange(12).reshape(1, 12)

    def total(p, policy):
        return decoder.forward(arch, p, tokens, positions, plain_attend(np.array([12])), remat=policy)[0].sum()

    gradients = jax.jit(jax.grad(total), static_argnums=1)
    without = gradients(params, "none")
    for remat in ("full", "dots", "offload"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradients(params, remat), without)
