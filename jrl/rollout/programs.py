"""The engine's compiled programs: prefill, the decode loop, and the copy of shared pages.

Each takes the pool donated and gives it back, updated in place. Sizes are static per call and bucketed by the caller.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.models import decoder
from jrl.models.arch import Arch
from jrl.models.responses import token_logprobs
from jrl.rollout.backends import Backend
from jrl.rollout.sampler import Controls, best_logprobs, sample_controlled, uniforms

LOGIT_CHUNK = 256  # prompt tokens whose logits exist at once


class Slots(NamedTuple):
    """The decode loop's view of the slots, each [R, B]; NumPy on the host, device arrays inside a program."""

    token: Any  # i32, the next token to feed
    lens: Any  # i32, tokens in the cache
    remaining: Any  # i32, tokens still allowed; 0 for an idle slot
    made: Any  # i32, response tokens so far, the position of the next uniform
    request: Any  # u32, identity of the sample for its random numbers
    temperature: Any  # f32, 0 is greedy
    ignore_eos: Any  # bool


class Prompts(NamedTuple):
    """Chunks of prompts to be cached, P of each replica."""

    tokens: Any  # i32[R, P, t]
    targets: Any  # i32[R, P, t], the token after each; read where prompt logprobs are asked for
    start: Any  # i32[R, P], tokens cached before
    lens: Any  # i32[R, P], new ones
    table: Any  # i32[R, P, t / page_size]
    prior: Any  # i32[R, P, W], pages cached before


class Decoded(NamedTuple):
    """What a call of the decode loop has sampled, [R, B, n]; what lies beyond a slot's own progress is 0."""

    tokens: Any  # i32
    logprobs: Any  # f32, of the whole distribution at the slot's temperature
    sampler_logprobs: Any  # f32, of the distribution that was sampled
    best_tokens: Any  # i32[R, B, n, best]
    best_logprobs: Any  # f32[R, B, n, best]


class EngineShape(NamedTuple):
    """What is fixed for an engine's life."""

    arch: Arch
    num_pages: int  # per replica and layer, the null page included
    page_size: int  # tokens
    decode_chunk: int  # tokens per device call at the most
    eos_ids: tuple[int, ...]
    dtype: Any


def prefill(shape: EngineShape, backend: Backend, constrain, score: bool, params, pool, prompts: Prompts):
    """Runs prompts and writes their keys and values to their pages.

    Returns:
      the pool, and where `score` the logprobs f32[R, P, t] of `targets`, at temperature 1, otherwise None.
    """
    replicas, count, length = prompts.tokens.shape
    positions = prompts.start[..., None] + jnp.arange(length)
    pages = (prompts.table, prompts.prior)
    attend = backend.prefill_attend(*pages, prompts.start, prompts.lens, shape.num_pages, shape.page_size)
    flat = (replicas, count * length)
    hidden, pool = decoder.forward(
        shape.arch, params, prompts.tokens.reshape(flat), positions.reshape(flat), attend, pool, dtype=shape.dtype,
        constrain=constrain,
    )  # fmt: skip
    if not score:
        return pool, None
    hidden = hidden.reshape(*prompts.tokens.shape, -1)
    return pool, token_logprobs(shape.arch, params, hidden, prompts.targets, 1.0, LOGIT_CHUNK, constrain)[0]


def some_busy(i: jax.Array, n: int, slots: Slots, leave_at: jax.Array) -> jax.Array:
    """Whether a decode loop goes on after i of n rounds: while more than `leave_at` slots are busy, and for one round anyway."""
    left = jnp.sum(slots.remaining > 0)
    return (i < n) & (left > 0) & ((left > leave_at) | (i == 0))


def decode(
    shape: EngineShape, backend: Backend, best: int, params, pool, table, slots: Slots,
    controls: Controls | None, key, leave_at,
):  # fmt: skip
    """Decodes up to `decode_chunk` tokens in every busy slot, without the host.

    Leaves early when at most `leave_at` slots are still busy, so that others can move in.

    Args:
      params: of the backend's `decode_params`.
      best: how many of the likeliest tokens to report besides.
      controls: of the slots' distributions; None where nobody asks for any.

    Returns:
      pool, slots and controls as they stand, `Decoded`.
    """
    n = shape.decode_chunk
    eos = jnp.asarray(shape.eos_ids, jnp.int32)

    def one_token(carry):
        i, pool, s, controls, out = carry
        active = s.remaining > 0
        attend = backend.decode_attend(table, s.lens, active, shape.num_pages, shape.page_size)
        logits, pool = backend.logits(params, s.token, s.lens, attend, pool, active)
        uniform = uniforms(key, s.request, s.made)
        if controls is None:
            token, logprob = backend.sample(logits, s.temperature, uniform, active)
            # Without truncation the sampled distribution is the full one; greedy choice is certain.
            sampler_logprob = jnp.where(s.temperature > 0, logprob, 0.0)
        else:
            token, logprob, sampler_logprob, controls = sample_controlled(
                logits, s.temperature, uniform, s.made, eos, s.ignore_eos, controls
            )
        chosen = (token, logprob, sampler_logprob) + (best_logprobs(logits, s.temperature, best) if best else ())
        out = Decoded(*(
            old.at[:, :, i].set(jnp.where(active.reshape(active.shape + (1,) * (new.ndim - 2)), new, 0))
            for old, new in zip(out, chosen, strict=False)
        ), *out[len(chosen):])  # fmt: skip
        step = active.astype(jnp.int32)
        ended = jnp.any(token[..., None] == eos, axis=-1) & ~s.ignore_eos
        if controls is not None:
            ended |= jnp.any(token[..., None] == controls.stops, axis=-1)
        s = s._replace(
            token=jnp.where(active, token, s.token),
            lens=s.lens + step,
            made=s.made + step,
            remaining=jnp.where(ended, 0, s.remaining - step),
        )
        return i + 1, pool, s, controls, out

    made = lambda dtype, *more: jnp.zeros((*slots.token.shape, n, *more), dtype)  # noqa: E731
    go_on = lambda carry: some_busy(carry[0], n, carry[2], leave_at)  # noqa: E731
    out = Decoded(made(jnp.int32), made(jnp.float32), made(jnp.float32), made(jnp.int32, best), made(jnp.float32, best))
    _, *result = jax.lax.while_loop(go_on, one_token, (jnp.int32(0), pool, slots, controls, out))
    return tuple(result)


class Programs(NamedTuple):
    prefill: Any  # (score, params, pool, prompts)
    decode: Any  # (best, params, pool, table, slots, controls, key, leave_at)
    copy: Any  # (pool, source, target)


def build(shape: EngineShape, backend: Backend, layout) -> Programs:
    """Jits the programs for a layout (`jrl.sharding.layout.Layout`) of the rollout mesh; the pool is donated."""
    pools = {n: layout.sharding(x.axes, x.shape) for n, x in backend.pool_arrays(shape.num_pages, shape.page_size).items()}
    rows = layout.sharding(("batch",))

    def copy(pool, source, target):
        return backend.copy_pages(pool, source, target, shape.arch.num_layers, shape.num_pages)

    return Programs(
        prefill=jax.jit(
            functools.partial(prefill, shape, backend, layout.constrain),
            static_argnums=0,
            donate_argnums=2,
            out_shardings=(pools, rows),
        ),
        decode=jax.jit(
            functools.partial(decode, shape, backend),
            static_argnums=0,
            donate_argnums=(2, 5),
            out_shardings=(pools, rows, rows, rows),
        ),
        copy=jax.jit(copy, donate_argnums=0, out_shardings=pools),
    )
