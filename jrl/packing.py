"""From sequences to the learner's microbatches: each prompt once, its responses beside it, padded to bucketed sizes.

A microbatch has a leading axis of data shards, so that every shard finds the prompts of its own responses at home and no
gather crosses devices. d shards, P prompts and N responses of a shard, u and t their padded lengths.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jrl.shapes import bucket, length_step
from jrl.types import Rollout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """One microbatch, NumPy on the host or on the devices. Empty places have length 0; `row` is -1 there."""

    prompt_tokens: Any  # i32[d, P, u]
    prompt_lens: Any  # i32[d, P]
    tokens: Any  # i32[d, N, t], responses
    lens: Any  # i32[d, N]
    prompt_of: Any  # i32[d, N], which of the shard's prompts a response belongs to
    columns: dict[str, Any]  # f32[d, N, t] each, by response token
    row: Any  # i32[d, N], position in the rollout

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(P, u, N, t)"""
        return (*self.prompt_tokens.shape[1:], *self.tokens.shape[1:])

    @property
    def axes(self) -> "Packed":
        """The logical axes of each array."""
        row, tokens = ("batch", None), ("batch", None, "length")
        return Packed(tokens, row, tokens, row, row, dict.fromkeys(self.columns, tokens), row)


def groups_by_prompt(rollout: Rollout, rows: np.ndarray, step: int) -> list[list[int]]:
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
    rollout: Rollout, columns: dict[str, np.ndarray], rows: np.ndarray, shards: int, microbatch_tokens: int, parts: int = 1
) -> Iterator[Packed]:
    """Splits `rows` of a rollout into microbatches of at most `microbatch_tokens` padded tokens a shard.

    Args:
      columns: f32[N, T] arrays, indexed like the rollout's tokens.
      rows: which sequences, in any order; a sequence longer than the budget gets a microbatch of its own.
      parts: divides the padded lengths.
    """
    step = length_step(parts)
    groups = groups_by_prompt(rollout, rows, step)
    if not groups:
        return
    group_size = max(map(len, groups))
    # The whole rollout's longest prompt, so that the choice of rows makes no new program.
    prompt_length = bucket(int(rollout.prompt_lens.max()), step)
    queue = [group for group in reversed(groups)]  # popped from the end
    left = len(rows)
    while queue:
        # Of the next two groups: what is left of a group that was split may be shorter than the group after it.
        length = bucket(max(int(rollout.response_lens[group].max()) for group in queue[-2:]), step)
        whole_groups = microbatch_tokens // (prompt_length + group_size * length)
        most = max(whole_groups * group_size or (microbatch_tokens - prompt_length) // length, 1)
        # Groups by powers of two: a program compiled for each count would cost more than the padding.
        size = min(most, group_size << (math.ceil(left / (shards * group_size)) - 1).bit_length())
        prompts = -(-size // group_size)
        taken = [_take(queue, size, prompts) for _ in range(shards)]
        left -= sum(len(group) for shard in taken for group in shard)
        yield _build(rollout, columns, taken, (prompts, prompt_length, size, length))


def _take(queue: list[list[int]], size: int, prompts: int) -> list[list[int]]:
    """Groups, or parts of them, for one shard: at most `size` rows and `prompts` prompts."""
    shard, room = [], size
    while queue and room and len(shard) < prompts:
        group = queue.pop()
        shard.append(group[:room])
        if group[room:]:
            queue.append(group[room:])
        room -= len(shard[-1])
    return shard


def _build(rollout: Rollout, columns: dict[str, np.ndarray], taken: list[list[list[int]]], shape: tuple) -> Packed:
    (prompts, prompt_length, size, length), d = shape, len(taken)
    packed = Packed(
        prompt_tokens=np.zeros((d, prompts, prompt_length), np.int32),
        prompt_lens=np.zeros((d, prompts), np.int32),
        tokens=np.zeros((d, size, length), np.int32),
        lens=np.zeros((d, size), np.int32),
        prompt_of=np.zeros((d, size), np.int32),
        columns={name: np.zeros((d, size, length), np.float32) for name in columns},
        row=np.full((d, size), -1, np.int32),
    )
    for s, groups in enumerate(taken):
        place = 0
        for p, group in enumerate(groups):
            n = rollout.prompt_lens[group[0]]
            packed.prompt_tokens[s, p, :n], packed.prompt_lens[s, p] = rollout.tokens[group[0], :n], n
            for row in group:
                span = slice(n, rollout.lens[row])
                count = rollout.lens[row] - n
                packed.tokens[s, place, :count] = rollout.tokens[row, span]
                packed.lens[s, place], packed.prompt_of[s, place], packed.row[s, place] = count, p, row
                for name, column in columns.items():
                    packed.columns[name][s, place, :count] = column[row, span]
                place += 1
    return packed


def unpack(out: np.ndarray, values: np.ndarray, packed: Packed, prompt_lens: np.ndarray) -> None:
    """Writes per-token results f32[d, N, t] of a microbatch back to their places in `out` f32[N, T]."""
    for s, n in zip(*np.nonzero(packed.row >= 0), strict=True):
        row, count = packed.row[s, n], packed.lens[s, n]
        begin = prompt_lens[row]
        out[row, begin : begin + count] = values[s, n, :count]
