"""The reference of the rooms' tests: one whole sequence at a time, dense attention, no cache, no packing, written from scratch.

In NumPy float64; with `xp=jax.numpy` the same lines are differentiable.
"""

import jax
import numpy as np


def rms_norm(x, scale, eps, xp):
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rotate(x, theta, xp):
    """x [t, heads, K]: channel i turns with channel i + K/2, by position * theta^(-2i/K) radians."""
    t, _, size = x.shape
    angle = np.arange(t)[:, None, None] * theta ** (-np.arange(0, size, 2) / size)
    a, b = x[..., : size // 2], x[..., size // 2 :]
    return xp.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def hidden(arch, params, tokens, xp=np):
    """[t, D], after the final norm, of one sequence i32[t]."""
    t, layers = len(tokens), params["layers"]
    x = params["embed"]["embedding"][tokens]
    unseen = np.where(np.tril(np.ones((t, t), bool)), 0.0, -np.inf)

    def linear(name, i, y):
        bias = layers[name].get("bias")
        return y @ layers[name]["kernel"][i] + (0.0 if bias is None else bias[i])

    for i in range(arch.num_layers):
        y = rms_norm(x, layers["attn_norm"]["scale"][i], arch.rms_norm_eps, xp)
        q, k, v = (linear(name, i, y).reshape(t, -1, arch.head_dim) for name in "qkv")
        q, k = rotate(q, arch.rope_theta, xp), rotate(k, arch.rope_theta, xp)
        outs = []
        for h in range(arch.num_heads):
            j = h // (arch.num_heads // arch.num_kv_heads)
            scores = q[:, h] @ k[:, j].T / arch.head_dim**0.5 + unseen
            e = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
            outs.append(e / xp.sum(e, axis=-1, keepdims=True) @ v[:, j])
        x = x + linear("o", i, xp.concatenate(outs, axis=-1))
        y = rms_norm(x, layers["mlp_norm"]["scale"][i], arch.rms_norm_eps, xp)
        gate = linear("gate", i, y)
        x = x + linear("down", i, gate / (1 + xp.exp(-gate)) * linear("up", i, y))
    return rms_norm(x, params["final_norm"]["scale"], arch.rms_norm_eps, xp)


def log_softmax(x, xp=np):
    x = x - xp.max(x, axis=-1, keepdims=True)
    return x - xp.log(xp.sum(xp.exp(x), axis=-1, keepdims=True))


def next_token_logprobs(arch, params, tokens, temperature=1.0, xp=np):
    """[t, V]: log_softmax(logits / temperature) after each token of one sequence."""
    kernel = params["embed"]["embedding"].T if arch.tie_embeddings else params["lm_head"]["kernel"]
    return log_softmax(hidden(arch, params, tokens, xp) @ kernel / temperature, xp)


def float64(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)
