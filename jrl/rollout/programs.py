"""The engine's three compiled programs: prefill, the decode loop, and the copy of shared pages.

Each takes the pool donated and gives it back, updated in place. Sizes are static per call and bucketed by the caller.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.rollout import paged_attention as paged
from jrl.rollout.sampler import sample, uniforms


class Slots(NamedTuple):
    """The decode loop's view of the slots, each [R, B]; NumPy on the host, device arrays inside a program."""

    token: Any  # i32, the next token to feed
    lens: Any  # i32, tokens in the cache
    remaining: Any  # i32, tokens still allowed; 0 for an idle slot
    made: Any  # i32, response tokens so far, the position of the next uniform
    request: Any  # u32, identity of the sample for its random numbers
    temperature: Any  # f32, 0 is greedy
    ignore_eos: Any  # bool


class EngineShape(NamedTuple):
    """What is fixed for an engine's life."""

    arch: Arch
    num_pages: int  # per replica and layer, the null page included
    page_size: int  # tokens
    decode_chunk: int  # tokens per device call at the most
    eos_ids: tuple[int, ...]
    dtype: Any


def prefill(shape: EngineShape, constrain, params, pool, tokens, lens, table):
    """Runs prompts i32[R, P, t] and writes their keys and values to `table`'s pages; the output is the pool."""
    replicas, prompts, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    attend = paged.prefill_attend(table, lens, length, shape.num_pages, shape.page_size)
    flat = (replicas, prompts * length)
    _, pool = decoder.forward(
        shape.arch, params, tokens.reshape(flat), positions.reshape(flat), attend, pool, dtype=shape.dtype, constrain=constrain
    )
    return pool


def decode(shape: EngineShape, constrain, params, pool, table, slots: Slots, key, leave_at):
    """Decodes up to `decode_chunk` tokens in every busy slot, without the host.

    Leaves early when at most `leave_at` slots are still busy, so that others can move in.

    Returns:
      pool, slots as they stand, tokens i32[R, B, n], logprobs f32[R, B, n]; what lies beyond a slot's own progress
      (the growth of `made`) is 0.
    """
    n = shape.decode_chunk
    eos = jnp.asarray(shape.eos_ids, jnp.int32)

    def busy(carry):
        i, _, s, _, _ = carry
        left = jnp.sum(s.remaining > 0)
        return (i < n) & (left > 0) & ((left > leave_at) | (i == 0))

    def one_token(carry):
        i, pool, s, tokens, logprobs = carry
        active = s.remaining > 0
        attend = paged.decode_attend(jnp.where(active[..., None], table, 0), s.lens, shape.num_pages, shape.page_size)
        hidden, pool = decoder.forward(
            shape.arch, params, s.token, s.lens, attend, pool, dtype=shape.dtype, constrain=constrain
        )
        logits = constrain(decoder.logits(shape.arch, params, hidden), ("batch", "slots", "act_vocab"))
        token, logprob = sample(logits, s.temperature, uniforms(key, s.request, s.made))
        step = active.astype(jnp.int32)
        ended = jnp.any(token[..., None] == eos, axis=-1) & ~s.ignore_eos
        tokens = tokens.at[..., i].set(jnp.where(active, token, 0))
        logprobs = logprobs.at[..., i].set(jnp.where(active, logprob, 0.0))
        s = s._replace(
            token=jnp.where(active, token, s.token),
            lens=s.lens + step,
            made=s.made + step,
            remaining=jnp.where(ended, 0, s.remaining - step),
        )
        return i + 1, pool, s, tokens, logprobs

    empty = jnp.zeros((*slots.token.shape, n))
    start = (jnp.int32(0), pool, slots, empty.astype(jnp.int32), empty.astype(jnp.float32))
    _, pool, slots, tokens, logprobs = jax.lax.while_loop(busy, one_token, start)
    return pool, slots, tokens, logprobs


class Programs(NamedTuple):
    prefill: Any
    decode: Any
    copy: Any


def build(shape: EngineShape, layout) -> Programs:
    """Jits the programs for a layout (`jrl.sharding.layout.Layout`) of the rollout mesh; the pool is donated."""
    pool_sharding = layout.sharding(paged.POOL_AXES)
    pools = {"k": pool_sharding, "v": pool_sharding}
    rows = layout.sharding(("batch",))
    slots = Slots(*[rows] * len(Slots._fields))

    def copy(pool, source, target):
        return paged.copy_pages(pool, source, target, shape.arch.num_layers, shape.num_pages)

    return Programs(
        prefill=jax.jit(functools.partial(prefill, shape, layout.constrain), donate_argnums=1, out_shardings=pools),
        decode=jax.jit(
            functools.partial(decode, shape, layout.constrain), donate_argnums=1, out_shardings=(pools, slots, rows, rows)
        ),
        copy=jax.jit(copy, donate_argnums=0, out_shardings=pools),
    )
