"""One token per slot from its logits: temperature, one uniform, inverse CDF."""

import jax
import jax.numpy as jnp

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
    token = inverse_cdf(p, uniform)
    likeliest = lambda: jnp.argmax(scaled, axis=-1).astype(jnp.int32)  # noqa: E731
    # A pass over the vocabulary that only greedy slots need.
    token = jnp.where(greedy, jax.lax.cond(jnp.any(greedy), likeliest, lambda: token), token)
    picked = jnp.take_along_axis(scaled, token[..., None], axis=-1)[..., 0]
    return token, picked - top[..., 0] - jnp.log(jnp.sum(p, axis=-1))
