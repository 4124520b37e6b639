"""The learner's view of the decoder: what the model says of response tokens, one pass over each prompt.

A group's prompt is computed once; its responses attend to the prompt's keys and to their own. The result equals that of
whole sequences (same attention, same positions), for a fraction of the work.
"""

import jax
import jax.numpy as jnp

from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.attention import attention, causal_mask, own_response_mask
from jrl.models.decoder import flat_matmul
from jrl.sharding.context import over_context


def response_hidden(arch: Arch, params, packed, *, dtype, layout, split, remat) -> jax.Array:
    """[d, R, t, D]: the hidden state from which each response token is predicted, that of the token before it.

    Args:
      packed: `jrl.packing.Packed`.
      layout: `jrl.sharding.layout.Layout` of the train mesh. It may split every sequence in equal parts (devices along
        context). Each part goes through the model on its own device, and meets the others in attention alone: there its
        queries take the keys and values of them all, which are small where several query heads share a KV head.
      split: see `decoder.forward`.
    """
    parts = layout.shards("length")
    d, prompts, u = packed.prompt_tokens.shape
    _, rows, t = packed.tokens.shape
    mine = jax.vmap(lambda values, index: values[index])  # [d, P, ...] -> [d, R, ...], within the shard
    prompt_lens = mine(packed.prompt_lens, packed.prompt_of)  # [d, R]
    positions = join(jnp.broadcast_to(jnp.arange(u), (d, prompts, u)), prompt_lens[..., None] + packed.offsets, parts)
    tokens = join(packed.prompt_tokens, packed.tokens, parts)  # [d, P u + R t]

    def attend(layer, q, k, v, cache):
        del layer
        return over_context(layout, attend_to_all, (q, k, v), (packed.prompt_lens, packed.offsets, packed.prompt_of)), cache

    def attend_to_all(part, qkv, others):
        """Queries of one part of every sequence, [d, (P u + R t) / parts, H, K], and keys of all of it."""
        (q, k, v), (prompt_lens, offsets, prompt_of) = qkv, others
        prompt_q, response_q = unjoin(q, (prompts, u // parts, rows, t // parts), 1)
        prompt_k, response_k = unjoin(k, (prompts, u, rows, t), parts)
        prompt_v, response_v = unjoin(v, (prompts, u, rows, t), parts)
        masks = (
            causal_mask(prompt_lens, u, part, parts),
            (jnp.arange(u) < mine(prompt_lens, prompt_of)[..., None])[:, :, None, :],  # [d, R, 1, u]
            own_response_mask(offsets, part, parts),
        )
        prompt_out = attention(prompt_q, [(prompt_k, prompt_v, masks[0])])
        shared = (mine(prompt_k, prompt_of), mine(prompt_v, prompt_of), masks[1])
        response_out = attention(response_q, [shared, (response_k, response_v, masks[2])])
        return join(prompt_out, response_out, 1)

    hidden, _ = decoder.forward(
        arch, params, tokens, positions, attend, dtype=dtype, constrain=layout.constrain, remat=remat, split=split
    )  # fmt: skip
    of_prompts, of_responses = unjoin(hidden, (prompts, u, rows, t), parts)
    ends = mine(_at(of_prompts, jnp.maximum(packed.prompt_lens - 1, 0), parts), packed.prompt_of)  # [d, R, D]
    return jnp.where((packed.offsets == 0)[..., None], ends[:, :, None], _shifted(of_responses, parts))


def by_response(x: jax.Array, packed, constrain) -> jax.Array:
    """[d, R, t] as the tokens lie in rows to [d, N, t], one response each, 0 after its end; as it is without `packed.starts`."""
    if packed.starts is None:
        return x
    d, _, t = x.shape
    flat = constrain(x, ("batch", None, None)).reshape(d, -1)
    places = jnp.where(jnp.arange(t) < packed.lens[..., None], packed.starts[..., None] + jnp.arange(t), flat.shape[1])
    return jax.vmap(lambda values, index: values.at[index].get(mode="fill", fill_value=0.0))(flat, places)


def join(prompts: jax.Array, responses: jax.Array, parts: int) -> jax.Array:
    """[d, P, u, ...] and [d, R, t, ...] to [d, P u + R t, ...]: first what all sequences have in the first of `parts`, and so on.

    So each of as many equal pieces of the result holds the same part of every sequence.
    """

    def by_part(x):
        x = x.reshape(*x.shape[:2], parts, -1, *x.shape[3:])  # [d, n, parts, t / parts, ...]
        x = jnp.moveaxis(x, 2, 1)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    x = jnp.concatenate([by_part(prompts), by_part(responses)], axis=2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def unjoin(x: jax.Array, sizes: tuple[int, int, int, int], parts: int) -> tuple[jax.Array, jax.Array]:
    """`join` undone; sizes are (P, u, R, t)."""
    prompts, u, rows, t = sizes
    x = x.reshape(x.shape[0], parts, -1, *x.shape[2:])

    def whole(x, n, length):
        x = x.reshape(*x.shape[:2], n, length // parts, *x.shape[3:])
        return jnp.moveaxis(x, 1, 2).reshape(x.shape[0], n, length, *x.shape[4:])

    cut = prompts * u // parts
    return whole(x[:, :, :cut], prompts, u), whole(x[:, :, cut:], rows, t)


def _at(x: jax.Array, index: jax.Array, parts: int) -> jax.Array:
    """[d, n, D]: of x [d, n, t, D] what stands at index i32[d, n] of each sequence, looked up in each part by itself."""
    d, n, t, width = x.shape
    each = t // parts
    local = index[..., None] - each * jnp.arange(parts)  # [d, n, parts]
    found = jnp.take_along_axis(
        x.reshape(d, n, parts, each, width), jnp.clip(local, 0, each - 1)[..., None, None], axis=3
    )[..., 0, :]  # fmt: skip
    return jnp.sum(jnp.where(((local >= 0) & (local < each))[..., None], found, 0), axis=2)


def _shifted(x: jax.Array, parts: int) -> jax.Array:
    """x [d, n, t, D] one place later along t, whatever comes first; a part gets one row from the part before it."""
    d, n, t, width = x.shape
    x = x.reshape(d, n, parts, t // parts, width)
    before = jnp.roll(x[:, :, :, -1], 1, axis=2)
    return jnp.concatenate([before[:, :, :, None], x[:, :, :, :-1]], axis=3).reshape(d, n, t, width)


def token_logprobs(
    arch: Arch,
    params,
    hidden: jax.Array,
    tokens: jax.Array,
    temperature: float,
    chunk: int,
    constrain,
    split=None,
    parts: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log_softmax(logits / temperature) of the given tokens, the entropy of that distribution, and whether they are likeliest.

    The logits exist for `chunk` tokens a device at a time and are computed again in the backward pass, so that no [.., V]
    array of the whole batch is ever made.

    Args:
      hidden: [d, R, t, D]; tokens: i32[d, R, t].
      parts: into how many equal parts the mesh splits the sequences.

    Returns:
      three float32[d, R, t]; the last is 1 or 0, and 1 for all of several tokens of one largest probability.
    """
    d, rows, t, width = hidden.shape
    count = rows * t // parts  # tokens of a part
    chunk = min(chunk, count)
    pad = -count % chunk

    def chunks(x):  # [d, R, t, ...] -> [chunks, d, parts chunk, ...]
        x = jnp.moveaxis(x.reshape(d, rows, parts, t // parts, -1), 2, 1).reshape(d, parts, count, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))).reshape(d, parts, -1, chunk, x.shape[-1])
        return jnp.moveaxis(x, 2, 0).reshape(-1, d, parts * chunk, x.shape[-1])

    logits_of = decoder.head(arch, params, split)

    @jax.checkpoint
    def one_chunk(part):
        states, targets = part
        logits = logits_of(states) / temperature
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
        return picked - normalizer, normalizer - expected, (picked >= 0).astype(jnp.float32)

    out = jax.lax.map(one_chunk, (chunks(hidden), chunks(tokens)))

    def rejoin(x):  # [chunks, d, parts chunk] -> [d, R, t]
        x = jnp.moveaxis(x.reshape(-1, d, parts, chunk), 0, 2).reshape(d, parts, -1)[:, :, :count]
        return jnp.moveaxis(x.reshape(d, parts, rows, t // parts), 1, 2).reshape(d, rows, t)

    return rejoin(out[0]), rejoin(out[1]), rejoin(out[2])
