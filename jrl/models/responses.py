"""The learner's view of the decoder: what the model says of response tokens, one pass over each prompt.

A group's prompt is computed once; its responses attend to the prompt's keys and to their own. The result equals that of
whole sequences (same attention, same positions), for a fraction of the work.
"""

import jax
import jax.numpy as jnp

from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.attention import attention, causal_mask
from jrl.models.decoder import flat_matmul


def response_hidden(arch: Arch, params, packed, *, dtype, constrain, remat) -> jax.Array:
    """[d, N, t, D]: the hidden state from which each response token is predicted, that of the token before it.

    Args:
      packed: `jrl.packing.Packed`.
    """
    d, prompts, u = packed.prompt_tokens.shape
    _, rows, t = packed.tokens.shape
    flat = lambda x: x.reshape(d, -1, *x.shape[3:])  # noqa: E731
    mine = jax.vmap(lambda values, index: values[index])  # [d, P, ...] -> [d, N, ...], within the shard
    prompt_lens = mine(packed.prompt_lens, packed.prompt_of)  # [d, N]
    positions = jnp.broadcast_to(jnp.arange(u), (d, prompts, u))
    positions = jnp.concatenate([flat(positions), flat(prompt_lens[..., None] + jnp.arange(t))], axis=1)
    tokens = jnp.concatenate([flat(packed.prompt_tokens), flat(packed.tokens)], axis=1)  # [d, P u + N t]
    prompt_mask = causal_mask(packed.prompt_lens, u)
    response_masks = (
        (jnp.arange(u) < prompt_lens[..., None])[:, :, None, :],  # [d, N, 1, u]
        causal_mask(packed.lens, t),  # [d, N, t, t]
    )

    def attend(layer, q, k, v, cache):
        del layer
        head = lambda x: x[:, : prompts * u].reshape(d, prompts, u, *x.shape[2:])  # noqa: E731
        tail = lambda x: x[:, prompts * u :].reshape(d, rows, t, *x.shape[2:])  # noqa: E731
        prompt_out = attention(head(q), [(head(k), head(v), prompt_mask)])
        shared = (mine(head(k), packed.prompt_of), mine(head(v), packed.prompt_of), response_masks[0])
        response_out = attention(tail(q), [shared, (tail(k), tail(v), response_masks[1])])
        return jnp.concatenate([flat(prompt_out), flat(response_out)], axis=1), cache

    hidden, _ = decoder.forward(arch, params, tokens, positions, attend, dtype=dtype, constrain=constrain, remat=remat)
    ends = hidden[:, : prompts * u].reshape(d, prompts, u, -1)
    last = jnp.maximum(packed.prompt_lens - 1, 0)
    ends = jnp.take_along_axis(ends, last[..., None, None], axis=2)  # [d, P, 1, D]
    body = hidden[:, prompts * u :].reshape(d, rows, t, -1)[:, :, :-1]
    return jnp.concatenate([mine(ends, packed.prompt_of), body], axis=2)


def token_logprobs(
    arch: Arch, params, hidden: jax.Array, tokens: jax.Array, temperature: float, chunk: int, constrain
) -> tuple[jax.Array, jax.Array]:
    """log_softmax(logits / temperature) of the given tokens, and the entropy of that distribution.

    The logits exist for `chunk` tokens a shard at a time and are computed again in the backward pass, so that no [.., V]
    array of the whole batch is ever made.

    Args:
      hidden: [d, N, t, D]; tokens: i32[d, N, t].

    Returns:
      two float32[d, N, t]
    """
    d, rows, t, width = hidden.shape
    count = rows * t
    chunk = min(chunk, count)
    pad = -count % chunk
    split = lambda x: jnp.moveaxis(  # noqa: E731
        jnp.pad(x.reshape(d, count, -1), ((0, 0), (0, pad), (0, 0))).reshape(d, -1, chunk, x.shape[-1]), 1, 0
    )

    @jax.checkpoint
    def one_chunk(part):
        states, targets = part
        logits = decoder.logits(arch, params, states) / temperature
        logits = constrain(logits, ("batch", "length", "act_vocab"))
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        shifted = logits - top  # what follows is small where probable, so rounded products lose little
        exps = jnp.exp(shifted)
        total = jnp.sum(exps, axis=-1)
        normalizer = jnp.log(total)
        picked = jnp.take_along_axis(shifted, targets, axis=-1)[..., 0]
        # Entropy is log Z - E[logit]. The expectation is a product with a column of ones: XLA on CPU runs the plain sum of a
        # product ten times slower.
        expected = flat_matmul(exps * shifted, jnp.ones((logits.shape[-1], 1), logits.dtype))[..., 0] / total
        return picked - normalizer, normalizer - expected

    out = jax.lax.map(one_chunk, (split(hidden), split(tokens[..., None])))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(d, -1)[:, :count].reshape(d, rows, t)  # noqa: E731
    return join(out[0]), join(out[1])
