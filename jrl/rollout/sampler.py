"""One token per slot from its logits: temperature, one uniform, inverse CDF; with `Controls`, whatever `Sampling` asks for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.rollout.sampling import MAX_STOP_IDS, Sampling

BLOCK = 256  # tokens summed first, so that the running sum over the vocabulary is two short ones


def uniforms(key: jax.Array, request: jax.Array, position: jax.Array) -> jax.Array:
    """float32[...] in [0, 1): one number per slot from fold_in(fold_in(key, request), position).

    It depends on the request and the position alone, so a sample does not depend on what it was batched with.
    `request` and `position` are integers of the same shape; `key` is a typed PRNG key.
    """

    def one(r, p):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, r), p))

    return jax.vmap(one)(request.reshape(-1), position.reshape(-1)).reshape(request.shape)


def inverse_cdf(probabilities: jax.Array, uniform: jax.Array) -> jax.Array:
    """i32[...]: the first index whose cumulative sum exceeds uniform * total; never one of probability zero.

    Args:
      probabilities: float32[..., V], non-negative, of any positive sum.
      uniform: float32[...] in [0, 1).
    """
    vocab = probabilities.shape[-1]
    pad = -vocab % BLOCK
    p = jnp.pad(probabilities, [(0, 0)] * uniform.ndim + [(0, pad)]) if pad else probabilities
    p = p.reshape(*uniform.shape, -1, BLOCK)
    blocks = jnp.sum(p, axis=-1)
    ends = jnp.cumsum(blocks, axis=-1)  # [..., V / BLOCK]
    goal = (uniform * ends[..., -1])[..., None]
    block = _first_beyond(ends, blocks, goal)[..., None]
    start = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0), axis=-1), 0.0)
    inner = jnp.take_along_axis(p, block[..., None], axis=-2)[..., 0, :]  # [..., BLOCK]
    offset = _first_beyond(start + jnp.cumsum(inner, axis=-1), inner, goal)
    # Probabilities of NaN choose nothing; the index stays inside the vocabulary even so.
    return jnp.minimum(block[..., 0] * BLOCK + offset, vocab - 1).astype(jnp.int32)


def _first_beyond(sums: jax.Array, terms: jax.Array, goal: jax.Array) -> jax.Array:
    """The first index of a positive term whose running sum exceeds the goal, else the last positive term.

    Where running sums are added up as a tree, rounding lets them rise at a term of zero, or all stay below the goal.
    """
    positive = terms > 0
    beyond = positive & (sums > goal)
    last = terms.shape[-1] - 1 - jnp.argmax(jnp.flip(positive, axis=-1), axis=-1)
    return jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), last)


def _choose(scaled: jax.Array, p: jax.Array, uniform: jax.Array, greedy: jax.Array) -> jax.Array:
    """i32[...]: the likeliest token where greedy, elsewhere one drawn with probability p f32[..., V]."""
    token = inverse_cdf(p, uniform)
    likeliest = lambda: jnp.argmax(scaled, axis=-1).astype(jnp.int32)  # noqa: E731
    # A pass over the vocabulary that only greedy slots need.
    return jnp.where(greedy, jax.lax.cond(jnp.any(greedy), likeliest, lambda: token), token)


def sample(logits: jax.Array, temperature: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Samples tokens; temperature 0 takes the most likely one and reports temperature 1.

    Args:
      logits: float32[..., V]; temperature, uniform: float32[...].

    Returns:
      tokens i32[...] and their `logprobs` float32[...]: log_softmax(logits / temperature) over the full vocabulary.
    """
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[..., None]
    top = jnp.max(scaled, axis=-1, keepdims=True)
    p = jnp.exp(scaled - top)
    token = _choose(scaled, p, uniform, greedy)
    picked = jnp.take_along_axis(scaled, token[..., None], axis=-1)[..., 0]
    return token, picked - top[..., 0] - jnp.log(jnp.sum(p, axis=-1))


class Controls(NamedTuple):
    """What slots ask for beyond a temperature; leading shape [R, B], or none for one slot's rows (`control_rows`)."""

    top_k: Any  # i32, 0 is off
    top_p: Any  # f32, 1 is off
    min_p: Any  # f32, 0 is off
    min_tokens: Any  # i32
    repetition: Any  # f32, 1 is off
    presence: Any  # f32, 0 is off
    frequency: Any  # f32, 0 is off
    bias: Any  # f32[R, B, V], -inf where a token is not allowed
    counts: Any  # i32[R, B, V], occurrences in the response
    prompted: Any  # bool[R, B, V], occurs in the prompt
    stops: Any  # i32[R, B, MAX_STOP_IDS], padded with -1


def control_rows(sampling: Sampling, prompt: Sequence[int], response: Sequence[int], vocab_size: int) -> Controls:
    """One slot's rows, in NumPy. The response is what there is of it already, for a sequence that is resumed."""
    bias = np.full(vocab_size, 0 if sampling.allowed_tokens is None else -np.inf, np.float32)
    if sampling.allowed_tokens is not None:
        bias[list(sampling.allowed_tokens)] = 0
    for token, value in dict(sampling.logit_bias).items():
        bias[token] += value
    prompted = np.zeros(vocab_size, bool)
    prompted[np.asarray(prompt, np.int32)] = True
    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    stops[: len(sampling.stop_ids)] = sampling.stop_ids
    return Controls(
        top_k=np.int32(min(sampling.top_k, vocab_size)),
        top_p=np.float32(sampling.top_p),
        min_p=np.float32(sampling.min_p),
        min_tokens=np.int32(min(sampling.min_tokens, np.iinfo(np.int32).max)),
        repetition=np.float32(sampling.repetition_penalty),
        presence=np.float32(sampling.presence_penalty),
        frequency=np.float32(sampling.frequency_penalty),
        bias=bias,
        counts=np.bincount(np.asarray(response, np.int32), minlength=vocab_size).astype(np.int32),
        prompted=prompted,
        stops=stops,
    )


def sample_controlled(
    logits: jax.Array,
    temperature: jax.Array,
    uniform: jax.Array,
    made: jax.Array,
    eos_ids: jax.Array,
    ignore_eos: jax.Array,
    controls: Controls,
) -> tuple[jax.Array, jax.Array, jax.Array, Controls]:
    """Samples tokens as each slot's controls ask; a slot that asks for nothing gets what `sample` would give it.

    Penalties and bias change the raw logits, then the temperature divides them, then the distribution is cut: top-k, top-p
    of what top-k left, and of that what has min_p of the largest probability. Tokens exactly as likely as the last one
    within top-k or top-p are kept too, so there can be more than k. Temperature 0 takes the likeliest of the changed logits.

    Args:
      logits: f32[R, B, V]; temperature, uniform: f32[R, B].
      made: i32[R, B], response tokens so far; below min_tokens the ends of a response are not sampled, unless nothing else
        is allowed.
      eos_ids: i32[E]; ignore_eos: bool[R, B], the EOS is a token like any other.

    Returns:
      tokens i32[R, B]; `logprobs` f32[R, B], log_softmax(logits / temperature) of the logits as they came, at temperature 1
      where it is 0; `sampler_logprobs` f32[R, B], of the distribution sampled from; controls with the tokens counted.
    """
    greedy = temperature == 0
    divisor = jnp.where(greedy, 1.0, temperature)[..., None]
    scaled = _forbid_ends(_change_logits(logits, controls), made, eos_ids, ignore_eos, controls) / divisor
    top = jnp.max(scaled, axis=-1, keepdims=True)
    p = jnp.exp(scaled - top)
    p = jnp.where(_kept(scaled, p, controls), p, 0.0)
    token = _choose(scaled, p, uniform, greedy)
    at = lambda x: jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0]  # noqa: E731
    sampler_logprob = at(scaled) - top[..., 0] - jnp.log(jnp.sum(p, axis=-1))
    full = logits / divisor
    top = jnp.max(full, axis=-1, keepdims=True)
    logprob = at(full) - top[..., 0] - jnp.log(jnp.sum(jnp.exp(full - top), axis=-1))
    add = jax.vmap(jax.vmap(lambda counts, token: counts.at[token].add(1)))
    return token, logprob, jnp.where(greedy, 0.0, sampler_logprob), controls._replace(counts=add(controls.counts, token))


def _change_logits(logits: jax.Array, controls: Controls) -> jax.Array:
    """f32[R, B, V]: with penalties and bias."""
    made = controls.counts > 0
    repetition = jnp.where(controls.prompted | made, controls.repetition[..., None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits -= controls.counts * controls.frequency[..., None] + made * controls.presence[..., None]
    return logits + controls.bias


def _forbid_ends(logits: jax.Array, made: jax.Array, eos_ids: jax.Array, ignore_eos: jax.Array, controls: Controls) -> jax.Array:
    """f32[R, B, V]: without the tokens that would end a response shorter than min_tokens, where others are left."""
    early = made < controls.min_tokens
    vocab = logits.shape[-1]  # as an index out of bounds, which changes nothing

    def forbid():
        eos = jnp.broadcast_to(eos_ids, (*made.shape, eos_ids.shape[0]))
        ends = jnp.concatenate([jnp.where(ignore_eos[..., None], vocab, eos), controls.stops], axis=-1)
        ends = jnp.where(early[..., None] & (ends >= 0), ends, vocab)
        rest = jax.vmap(jax.vmap(lambda x, ids: x.at[ids].set(-jnp.inf, mode="drop")))(logits, ends)
        return jnp.where(jnp.any(rest > -jnp.inf, axis=-1, keepdims=True), rest, logits)

    return jax.lax.cond(jnp.any(early), forbid, lambda: logits)


def _kept(scaled: jax.Array, p: jax.Array, controls: Controls) -> jax.Array:
    """bool[R, B, V]: within top-k, top-p and min-p; p is exp(scaled - max), so its largest is 1."""
    keys = ordered_bits(scaled)
    none = jnp.zeros(scaled.shape[:-1], jnp.uint32)
    limit = lambda wanted, find: jax.lax.cond(jnp.any(wanted), lambda: jnp.where(wanted, find(), none), lambda: none)  # noqa: E731
    top_k = limit(controls.top_k > 0, lambda: threshold(keys, jnp.ones_like(p), controls.top_k.astype(jnp.float32)))

    def nucleus():
        left = jnp.where(keys >= top_k[..., None], p, 0.0)
        # A product that rounds to 0 would be reached by nothing at all.
        goal = jnp.maximum(controls.top_p * jnp.sum(left, axis=-1), jnp.finfo(jnp.float32).tiny)
        return threshold(keys, left, goal)

    top_p = limit(controls.top_p < 1, nucleus)
    return (keys >= jnp.maximum(top_k, top_p)[..., None]) & (p >= controls.min_p[..., None])


def ordered_bits(x: jax.Array) -> jax.Array:
    """u32[...]: integers in the order of the floats: the bits, all of them inverted below 0, the sign bit set from 0 on."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # one zero, not two
    return jnp.where(bits >= jnp.uint32(1 << 31), ~bits, bits | jnp.uint32(1 << 31))


def threshold(keys: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """u32[...]: the largest key that so many have or exceed that their weights sum to the goal; 0 if all weigh less.

    Bisection, bit by bit from the highest: 32 sums over the vocabulary, in place of a sort.

    Args:
      keys: u32[..., V]; weights: f32[..., V], non-negative; goal: f32[...].
    """

    def narrow(i, found):
        higher = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(keys >= higher[..., None], weights, 0.0), axis=-1)
        return jnp.where(weight >= goal, higher, found)

    return jax.lax.fori_loop(0, 32, narrow, jnp.zeros(goal.shape, jnp.uint32))


def best_logprobs(logits: jax.Array, temperature: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The n likeliest tokens, likeliest first, i32[..., n], and their `logprobs` f32[..., n] as `sample` reports them.

    Args:
      logits: f32[..., V], as they came; temperature: f32[...].
    """
    scaled = logits / jnp.where(temperature == 0, 1.0, temperature)[..., None]
    # On a CPU only matrices are spared a whole sort.
    best, tokens = (x.reshape(*temperature.shape, n) for x in jax.lax.top_k(scaled.reshape(-1, scaled.shape[-1]), n))
    top = best[..., :1]
    return tokens, best - top - jnp.log(jnp.sum(jnp.exp(scaled - top), axis=-1, keepdims=True))
