"""Speculative decoding with drafts from a sequence's own text; tokens are those of plain decoding, several from one pass.

Draft: the last NGRAM tokens of a sequence, prompt and response, are looked up in what lies before them; what followed their
latest earlier occurrence is guessed to follow again (prompt lookup decoding, A. Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). Check: one forward pass over the token to be fed and the drafts gives
the distribution after each of them (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192). Their rejection rule keeps the
distribution; here the tokens themselves are kept: each is sampled with the uniform of its request and position, as it would
be without drafts, and those after a draft count for as long as the draft is what was sampled.

A call in which a slot asks for controls of its distribution (top-k, penalties, bias, stop ids and so on) or for the likeliest
tokens is decoded without drafts. Stop strings and prompt logprobs go with drafts: the host and the prefill see to them.

Letters: R replicas, B slots of a replica, k drafts, T = k + 1 tokens of a slot in one pass.
"""

import functools
import statistics
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.rollout.backends import Backend
from jrl.rollout.programs import Decoded, EngineShape, Slots, some_busy
from jrl.rollout.sampler import uniforms

# A pass costs the same with wrong drafts as with none, so rare matches are a loss; after a single token, guesses are poor.
NGRAM = 2
RECENT = 3  # calls of each way of decoding whose median counts: one that was held up by something else decides nothing
RETRY = 32  # calls of the faster way for each of the slower, times by how much it is slower, so that retries cost little


def draft(history: jax.Array, lens: jax.Array, remaining: jax.Array, count: int) -> jax.Array:
    """i32[R, B, k]: the tokens guessed to come next, -1 where there is no guess or no room for another token after it.

    Where what followed ends with the sequence it is repeated from its start, as a period would be.

    Args:
      history: i32[R, B, M] tokens of each sequence; what lies beyond it is not read.
      lens: i32[R, B], place of the last one.
      remaining: i32[R, B] tokens still allowed.
    """
    place, last = jnp.arange(history.shape[-1]), lens[..., None]
    same = (place >= NGRAM - 1) & (place < last)
    for back in range(NGRAM):
        wanted = jnp.take_along_axis(history, jnp.maximum(last - back, 0), axis=-1)
        same &= jnp.roll(history, back, axis=-1) == wanted
    found = jnp.max(jnp.where(same, place, 0), axis=-1, keepdims=True)  # where the latest occurrence ends
    steps = jnp.arange(count)
    guess = jnp.take_along_axis(history, found + 1 + steps % jnp.maximum(last - found, 1), axis=-1)
    # One token is sampled without any draft, and one more after each.
    return jnp.where(jnp.any(same, axis=-1, keepdims=True) & (steps + 1 < remaining[..., None]), guess, -1)


def count_valid(drafts: jax.Array, sampled: jax.Array, ended: jax.Array) -> jax.Array:
    """i32[R, B], 1 to T: how many of the sampled tokens plain decoding would have sampled too.

    Args:
      drafts: i32[R, B, k]; sampled: i32[R, B, T], after the token fed and after each draft.
      ended: bool[R, B, T], the response ends with this token.
    """
    right = (drafts == sampled[..., :-1]) & ~ended[..., :-1]
    return 1 + jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=-1), axis=-1)


class Tally(NamedTuple):
    """Of one call, each i32[R, B]."""

    passes: Any  # in which the slot was busy
    drafted: Any  # tokens
    accepted: Any  # of them


def _put(rows: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
    """rows[R, B, M] with new[R, B, T] written from at[R, B] on."""
    return jax.vmap(jax.vmap(lambda row, i, x: jax.lax.dynamic_update_slice(row, x, (i,))))(rows, at, new)


def decode(shape: EngineShape, backend: Backend, drafts: int, params, pool, table, slots: Slots, history, key, leave_at):
    """`jrl.rollout.programs.decode` with drafts: up to `decode_chunk` passes, each of 1 to T tokens in every busy slot.

    Args:
      history: i32[R, B, max_tokens + T] tokens of each slot's sequence, the one to be fed its last.

    Returns:
      pool and slots as they stand; `Decoded` [R, B, decode_chunk * T], which beyond a slot's own progress has no meaning, and
      no likeliest tokens; `Tally`.
    """
    width = drafts + 1
    eos, steps = jnp.asarray(shape.eos_ids, jnp.int32), jnp.arange(width)
    flat = lambda x: x.reshape(x.shape[0], -1)  # noqa: E731  [R, B, T] to [R, B T]
    each = lambda x: flat(jnp.broadcast_to(x[..., None], (*x.shape, width)))  # noqa: E731  [R, B] to [R, B T]

    def one_pass(carry):
        i, pool, s, history, out, tally = carry
        active = s.remaining > 0
        guess = draft(history, s.lens, s.remaining, drafts)
        fed = jnp.concatenate([s.token[..., None], jnp.maximum(guess, 0)], axis=-1)  # [R, B, T]
        attend = backend.decode_attend(table, s.lens, active, shape.num_pages, shape.page_size, width)
        logits, pool = backend.logits(params, flat(fed), flat(s.lens[..., None] + steps), attend, pool, each(active))
        uniform = uniforms(key, each(s.request), flat(s.made[..., None] + steps))
        token, logprob = (x.reshape(fed.shape) for x in backend.sample(logits, each(s.temperature), uniform, each(active)))
        ended = jnp.any(token[..., None] == eos, axis=-1) & ~s.ignore_eos[..., None]
        count = jnp.where(active, count_valid(guess, token, ended), 0)
        new = (token, logprob, jnp.where(s.temperature[..., None] > 0, logprob, 0.0))
        out = tuple(_put(old, s.made - slots.made, x) for old, x in zip(out, new, strict=True))
        history = _put(history, s.lens + 1, token)  # what is not valid is overwritten by the next pass, like its keys
        over = jnp.any(ended & (steps < count[..., None]), axis=-1)
        last = jnp.take_along_axis(token, jnp.maximum(count - 1, 0)[..., None], axis=-1)[..., 0]
        tally = Tally(
            tally.passes + active,
            tally.drafted + jnp.where(active, jnp.sum(guess >= 0, axis=-1), 0),
            tally.accepted + jnp.maximum(count - 1, 0),
        )
        s = s._replace(
            token=jnp.where(active, last, s.token),
            lens=s.lens + count,
            made=s.made + count,
            remaining=jnp.where(over, 0, s.remaining - count),
        )
        return i + 1, pool, s, history, out, tally

    most = (*slots.token.shape, shape.decode_chunk * width)
    out = (jnp.zeros(most, jnp.int32), jnp.zeros(most, jnp.float32), jnp.zeros(most, jnp.float32))
    tally = Tally(*[jnp.zeros_like(slots.made)] * 3)
    go_on = lambda carry: some_busy(carry[0], shape.decode_chunk, carry[2], leave_at)  # noqa: E731
    _, pool, after, _, out, tally = jax.lax.while_loop(go_on, one_pass, (jnp.int32(0), pool, slots, history, out, tally))
    none = jnp.zeros((*most, 0))
    return pool, after, Decoded(*out, none.astype(jnp.int32), none), tally


class Pace:
    """Which way of decoding has been faster, plain or with drafts, by the median of the last `RECENT` calls of each.

    The measure is seconds per pass by tokens per pass of a busy slot: it does not depend on how many slots are busy. Calls
    that compile are not to be recorded. The slower way is tried again now and then, as texts change.
    """

    def __init__(self):
        self._recent = {drafting: deque(maxlen=RECENT) for drafting in (False, True)}
        self._since = 0  # calls since the slower way was measured

    def drafting(self) -> bool:
        """Whether the next call should draft."""
        for way, seconds in self._recent.items():
            if not seconds:
                return way
        plain, drafting = (statistics.median(self._recent[way]) for way in (False, True))
        faster = drafting < plain
        return faster != (self._since >= RETRY * max(plain, drafting) / min(plain, drafting))

    def record(self, drafting: bool, seconds: float) -> None:
        """Takes the measure of a call."""
        mine, other = self._recent[drafting], self._recent[not drafting]
        slower = bool(mine and other) and statistics.median(mine) > statistics.median(other)
        self._since = 0 if slower else self._since + 1
        mine.append(seconds)


class Speculation:
    """The host's side: the slots' histories, the compiled program, and the pace of both ways of decoding.

    Args:
      drafts: tokens guessed in a pass at the most.
      slots: (R, B).
    """

    def __init__(self, drafts: int, shape: EngineShape, backend: Backend, layout, slots: tuple[int, int], max_tokens: int):
        self.pace = Pace()
        self.room = shape.decode_chunk * (drafts + 1)  # tokens of a slot that a call may make
        self.history = np.zeros((*slots, max_tokens + drafts + 1), np.int32)
        pools = {n: layout.sharding(x.axes, x.shape) for n, x in backend.pool_arrays(shape.num_pages, shape.page_size).items()}
        rows = layout.sharding(("batch",))
        self.program = jax.jit(  # (params, pool, table, slots, history, key, leave_at)
            functools.partial(decode, shape, backend, drafts),
            donate_argnums=1,
            out_shardings=(pools, rows, rows, rows),
        )

    def write(self, at: tuple[int, int], begin: int, tokens: np.ndarray) -> None:
        """Tokens of a slot's sequence, from place `begin` on."""
        self.history[at][begin : begin + len(tokens)] = tokens
