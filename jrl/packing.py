"""From sequences to the learner's microbatches: each prompt once, its responses beside it, in arrays of bucketed sizes.

Responses to one prompt lie in rows, several of them end to end where they are short, so that one long response among them
does not pad the others to its length. Whole sequences without a prompt in common may lie in rows likewise (`pack_rows`).

A microbatch has a leading axis of data shards, so that every shard finds the prompts
of its own responses at home and no gather crosses devices. d shards; of a shard P prompts, R rows and N responses; u the
padded length of prompts, t that of rows.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrl.shapes import bucket, length_step, power_of_two
from jrl.types import Sequences


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """One microbatch, NumPy on the host or on the devices. Empty places have length 0; `row` is -1 there."""

    prompt_tokens: Any  # i32[d, P, u]
    prompt_lens: Any  # i32[d, P]
    tokens: Any  # i32[d, R, t], responses
    offsets: Any  # i32[d, R, t], a token's place in its response; -1 where there is none
    prompt_of: Any  # i32[d, R], which of the shard's prompts the responses of a row belong to
    starts: Any  # i32[d, N], where a response begins in the rows laid end to end; None: columns and results lie as the tokens do
    lens: Any  # i32[d, N]
    columns: dict[str, Any]  # f32[d, N, t] each, by response token; without `starts` f32[d, R, t]
    row: Any  # i32[d, N], position in the rollout

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(P, u, R, t), what the model sees."""
        return (*self.prompt_tokens.shape[1:], *self.tokens.shape[1:])

    @property
    def axes(self) -> "Packed":
        """The logical axes of each array."""
        by_shard, tokens = ("batch", None), ("batch", None, "length")
        # Of responses, whole: sums over one are the losses' business.
        of_columns = tokens if self.starts is None else ("batch", None, None)
        of_responses = None if self.starts is None else by_shard
        columns = dict.fromkeys(self.columns, of_columns)
        return Packed(tokens, by_shard, tokens, tokens, by_shard, of_responses, of_responses, columns, of_responses)


def groups_by_prompt(rollout: Sequences, rows: np.ndarray, step: int) -> list[list[int]]:
    """Rows of one group that share a prompt, longest responses first (in buckets from `step` on), so that a microbatch
    holds similar lengths.
    """
    groups: dict[tuple[int, bytes], list[int]] = {}
    for row in rows:
        prompt = rollout.tokens[row, : rollout.prompt_lens[row]].tobytes()
        groups.setdefault((int(rollout.group_ids[row]), prompt), []).append(int(row))
    lens = rollout.response_lens
    return sorted(groups.values(), key=lambda g: -bucket(int(lens[g].max()), step))


def pack(
    rollout: Sequences,
    columns: dict[str, np.ndarray],
    rows: np.ndarray,
    shards: int,
    microbatch_tokens: int,
    parts: int = 1,
    together: bool = False,
) -> Iterator[Packed]:
    """Splits `rows` of a rollout into microbatches of at most `microbatch_tokens` padded tokens a shard.

    Args:
      columns: f32[N, T] arrays, indexed like the rollout's tokens.
      rows: which sequences, in any order; a sequence longer than the budget gets a microbatch of its own.
      parts: divides the padded lengths.
      together: no group is split; one that is longer than the budget gets a microbatch of its own. Where all groups are of one
        size, those of a shard lie one after another among its responses, whichever comes first in each.
    """
    step, lens = length_step(parts), rollout.response_lens
    groups = groups_by_prompt(rollout, rows, step)
    if not groups:
        return
    # The whole rollout's largest group and longest prompt, so that the choice of rows makes no new program.
    group_size = int(np.unique(rollout.group_ids, return_counts=True)[1].max())
    prompt_length = bucket(int(rollout.prompt_lens.max()), step)
    queue = groups[::-1]  # popped from the end
    while queue:
        # Of the next two groups: what is left of a group that was split may be shorter than the group after it.
        length = bucket(max(int(lens[group].max()) for group in queue[-2:]), step)
        fewest = microbatch_groups(microbatch_tokens, prompt_length, group_size, length)[0]
        each = [len(laid_in_rows(group, lens, length)) for group in queue[-shards * fewest :]]
        rows_each = min(n for n in row_counts(group_size) if n >= sum(each) / len(each))
        most, size = microbatch_groups(microbatch_tokens, prompt_length, rows_each, length)
        size = max(size, len(laid_in_rows(queue[-1], lens, length))) if together else size
        # By powers of two: a program compiled for each count would cost more than the padding.
        prompts = min(most, power_of_two(math.ceil(len(queue) / shards)))
        taken = [_take(queue, lens, length, prompts, prompts * size, together) for _ in range(shards)]
        yield _build(rollout, columns, taken, (prompts, prompt_length, prompts * size, length), prompts * group_size)


def row_counts(group_size: int) -> list[int]:
    """For how many rows of each group there may be room: as many as responses, half of that, ...; each may cost a program."""
    return [-(-group_size // (1 << halvings)) for halvings in range((group_size - 1).bit_length() + 1)]


def microbatch_groups(budget: int, prompt_length: int, rows_each: int, length: int) -> tuple[int, int]:
    """How many groups a full microbatch has, and for how many rows of each there is room: whole groups where they fit, since a
    group's prompt is computed once.
    """
    groups = budget // (prompt_length + rows_each * length)
    return (groups, rows_each) if groups else (1, max((budget - prompt_length) // length, 1))


def laid_in_rows(group: list[int], lens: np.ndarray, length: int) -> list[list[int]]:
    """Responses of one prompt, end to end in rows of `length` tokens: the longest first, each where it first fits."""
    rows: list[list[int]] = []
    room: list[int] = []
    for response in sorted(group, key=lambda i: -lens[i]):
        place = next((i for i, left in enumerate(room) if left >= lens[response]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(response)
        room[place] -= int(lens[response])
    return rows


def _take(
    queue: list[list[int]], lens: np.ndarray, length: int, prompts: int, room: int, together: bool
) -> list[list[list[int]]]:
    """The rows of each prompt of one shard: at most `room` rows and `prompts` prompts; what is left of a group stays."""
    shard = []
    while queue and room and len(shard) < prompts:
        rows = laid_in_rows(queue[-1], lens, length)
        if together and len(rows) > room:
            break
        queue.pop()
        shard.append(rows[:room])
        if rows[room:]:
            queue.append([response for row in rows[room:] for response in row])
        room -= len(shard[-1])
    return shard


def _build(
    rollout: Sequences, columns: dict[str, np.ndarray], taken: list[list[list[list[int]]]], shape: tuple, responses: int
) -> Packed:
    (prompts, prompt_length, rows, length), d = shape, len(taken)
    packed = Packed(
        prompt_tokens=np.zeros((d, prompts, prompt_length), np.int32),
        prompt_lens=np.zeros((d, prompts), np.int32),
        tokens=np.zeros((d, rows, length), np.int32),
        offsets=np.full((d, rows, length), -1, np.int32),
        prompt_of=np.zeros((d, rows), np.int32),
        starts=np.zeros((d, responses), np.int32),
        lens=np.zeros((d, responses), np.int32),
        columns={name: np.zeros((d, responses, length), np.float32) for name in columns},
        row=np.full((d, responses), -1, np.int32),
    )
    for s, groups in enumerate(taken):
        laid = [(p, row) for p, group in enumerate(groups) for row in group]
        packed.prompt_of[s, : len(laid)] = [p for p, _ in laid]
        places = [(p, place) for r, (p, row) in enumerate(laid) for place in _places(row, rollout.response_lens, r * length)]
        flat_tokens, flat_offsets = packed.tokens[s].reshape(-1), packed.offsets[s].reshape(-1)
        for i, (p, (response, start)) in enumerate(places):
            n, end = rollout.prompt_lens[response], rollout.lens[response]
            packed.prompt_tokens[s, p, :n], packed.prompt_lens[s, p] = rollout.tokens[response, :n], n
            packed.starts[s, i], packed.lens[s, i], packed.row[s, i] = start, end - n, response
            flat_tokens[start : start + end - n] = rollout.tokens[response, n:end]
            flat_offsets[start : start + end - n] = np.arange(end - n)
            for name, column in columns.items():
                packed.columns[name][s, i, : end - n] = column[response, n:end]
    return packed


def _places(row: list[int], lens: np.ndarray, start: int) -> Iterator[tuple[int, int]]:
    """The responses of a row that begins at `start`, and where each of them does."""
    for response in row:
        yield response, start
        start += int(lens[response])


def pack_groups(
    sequences: Sequences, columns: dict[str, np.ndarray], rows: np.ndarray, shards: int, microbatch_tokens: int, parts: int = 1
) -> Iterator[Packed]:
    """`pack` without splitting a group."""
    return pack(sequences, columns, rows, shards, microbatch_tokens, parts, together=True)


def pack_rows(
    sequences: Sequences, columns: dict[str, np.ndarray], rows: np.ndarray, shards: int, microbatch_tokens: int, parts: int = 1
) -> Iterator[Packed]:
    """Microbatches whose rows hold whole sequences, prompts and all, one after another; there are no shared prompts.

    Rows are as long as `sequences` are wide, which bounds the programs: give every batch the same width. Columns and results
    lie as the tokens do, so `unpack` is not for these. Arguments are those of `pack`.
    """
    step = length_step(parts)
    length = bucket(sequences.tokens.shape[1], step)
    left = laid_in_rows([int(row) for row in rows], sequences.lens, length)
    most = max((microbatch_tokens - step) // length, 1)
    while left:
        size = min(most, power_of_two(math.ceil(len(left) / shards)))
        taken = [left[i : i + size] for i in range(0, size * shards, size)]
        del left[: size * shards]
        yield _build_rows(sequences, columns, taken, (step, size, length))


def _build_rows(sequences: Sequences, columns: dict[str, np.ndarray], taken: list[list[list[int]]], shape: tuple) -> Packed:
    (prompt_length, size, length), d = shape, len(taken)
    packed = Packed(
        prompt_tokens=np.zeros((d, 1, prompt_length), np.int32),  # an empty one
        prompt_lens=np.zeros((d, 1), np.int32),
        tokens=np.zeros((d, size, length), np.int32),
        offsets=np.full((d, size, length), -1, np.int32),
        prompt_of=np.zeros((d, size), np.int32),
        starts=None, lens=None, row=None,
        columns={name: np.zeros((d, size, length), np.float32) for name in columns},
    )  # fmt: skip
    for s, n in np.ndindex(d, size):
        for row, begin in _places(taken[s][n], sequences.lens, 0) if n < len(taken[s]) else ():
            count = int(sequences.lens[row])
            span = slice(begin, begin + count)
            packed.tokens[s, n, span], packed.offsets[s, n, span] = sequences.tokens[row, :count], np.arange(count)
            for name, column in columns.items():
                packed.columns[name][s, n, span] = column[row, :count]
    return packed


def unpack(out: np.ndarray, values: np.ndarray, packed: Packed, prompt_lens: np.ndarray) -> None:
    """Writes per-token results f32[d, N, t] of a microbatch back to their places in `out` f32[N, T]."""
    for s, n in zip(*np.nonzero(packed.row >= 0), strict=True):
        row, count = packed.row[s, n], packed.lens[s, n]
        begin = prompt_lens[row]
        out[row, begin : begin + count] = values[s, n, :count]
