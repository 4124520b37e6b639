"""The sizes of the programs that a run may compile, as packing and engine round them."""

import itertools
import math

from jrl.algorithms.pieces import needs_old_logprobs
from jrl.packing import microbatch_groups, row_counts
from jrl.rollout.backends import Backend
from jrl.rollout.prefill import longest_chunk, most_prompts, padded_length
from jrl.rollout.scheduler import OPEN_PREFIXES
from jrl.shapes import bucket, length_step
from jrl.sharding.layout import Layout


def _buckets(most: int, least: int = 1) -> list[int]:
    """What `bucket` makes of 1 to `most`."""
    sizes = [bucket(1, least)]
    while sizes[-1] < most:
        sizes.append(bucket(sizes[-1] + 1, least))
    return sizes if most > 0 else []


def _powers(most: int) -> list[int]:
    return [1 << i for i in range((most - 1).bit_length() + 1)] if most > 0 else []


def volume(sizes: tuple[int, ...]) -> int:
    return math.prod(max(n, 1) for n in sizes)


def program_sizes(
    config, layouts: dict[str, Layout], batch: dict[str, int], backend: Backend
) -> dict[str, list[tuple[int, ...]]]:
    """All sizes that rounding allows; a run meets few of them, because its prompts have few lengths.

    They are those of prompts as long as allowed. Where the longest is shorter there are no more of them, but the pages of a
    decode call's row may end at another number.
    """
    a, axes = config.algorithm, "(prompts, prompt tokens, rows of responses, tokens of a row)"
    samples = max(batch["group_size"], config.eval.samples)

    def passes(name: str, rows: int) -> list[tuple[int, ...]]:
        return learner_shapes(batch, rows, layouts[name])

    programs: dict[str, list[tuple[int, ...]]] = {
        "rollout.prefill (prompts, tokens, pages cached before)": prefill_sizes(batch),
        "rollout.decode (rows, pages of a row, shared prefixes, their members, their rows, pages of such a row)": decode_sizes(
            batch, samples, backend.row_pages
        ),
        "rollout.speculate (rows, pages of a row, shared prefixes, their members, their rows, pages of such a row)": (
            decode_sizes(batch, samples, backend.row_pages) if config.rollout.speculate else []
        ),
        "rollout.copy (pages)": [(n,) for n in _buckets(batch["slots"])] if samples > 1 else [],
        f"policy.update {axes}": passes("learner", batch["minibatch_sequences"]),
    }
    if needs_old_logprobs(a):
        programs[f"policy.logprobs {axes}"] = passes("learner", batch["sequences"])
    if "reference" in layouts:
        programs[f"reference.logprobs {axes}"] = passes("reference", batch["sequences"])
    if "critic" in layouts:
        programs[f"critic.values {axes}"] = passes("critic", batch["sequences"])
        programs[f"critic.update {axes}"] = passes("critic", batch["minibatch_sequences"])
    return {name: sizes for name, sizes in programs.items() if sizes}


def _longest_prefix(batch: dict[str, int]) -> int:
    """Tokens that are cached at once for samples to start from: all but the last one of what there is of a sequence."""
    preempted = batch["num_pages"] - 1 < batch["slots"] * batch["width"]  # then it is a prompt and most of its response
    return batch["prompt_tokens"] - 1 + (batch["response_tokens"] - 1) * preempted


def prefill_sizes(batch: dict[str, int]) -> list[tuple[int, ...]]:
    """(prompts, tokens, pages cached before), as `Engine` rounds them.

    Any number of pages may come before any number of tokens, as a call has several prompts.
    """
    page, longest = batch["page_size"], _longest_prefix(batch)
    together = max(batch["slots"], OPEN_PREFIXES)
    sizes = set()
    for before, left in ((0, longest), *((n, longest - page) for n in _powers((longest - 1) // page))):
        for size in _buckets(min(left, longest_chunk(page)), page):
            length = padded_length(size, page)
            sizes |= {(n, length, before) for n in _powers(min(most_prompts(length), together))}
    return sorted(sizes)


def decode_sizes(batch: dict[str, int], samples: int, row_pages: int | None) -> list[tuple[int, ...]]:
    """(rows, pages of a row, shared prefixes, their members, their rows, pages of such a row), as `TableMaker` rounds them.

    Room that was made for other prefixes is used again where it is not much too large, so a run meets few of these pairs.
    """
    slots, width = batch["slots"], batch["width"]
    row = min(width, row_pages or width)
    rows = [(slots, n) for n in sorted({min(n, row) for n in _buckets(width)})]
    most = slots * -(-width // row)
    rows += [(n, row) for n in sorted({max(bucket(n), slots + 1) for n in range(slots + 1, most + 1)})]
    shareable = _longest_prefix(batch) // batch["page_size"]
    members = _powers(min(samples, slots))[1:] if shareable else []
    shared = [(0, 1, 0, 1)]
    for p in _powers(slots // 2) if members else []:
        pages = sorted({min(n, row_pages or n) for n in _powers(shareable)})
        of_rows = [(p, n) for n in pages]
        if shareable > pages[-1]:
            of_rows += [(n, pages[-1]) for n in _powers(p * -(-shareable // pages[-1])) if n > p]
        shared += [(p, n, *other) for n in members for other in of_rows]
    return [(*one, *other) for one in rows for other in shared]


def microbatch_sequences(budget: int, group_size: int, prompt: int, response: int, step: int) -> int:
    """Responses of a full microbatch where all are as long as allowed."""
    return math.prod(microbatch_groups(budget, bucket(prompt, step), group_size, bucket(response, step)))


def packed_row_shapes(tokens: int, sequences: int, budget: int, layout: Layout) -> list[tuple[int, ...]]:
    """Sizes of the microbatches, on one data shard, into which `jrl.packing.pack_rows` splits them, at most `tokens` long."""
    step = length_step(layout.shards("length"))
    rows_per_shard = -(-sequences // layout.batch_shards)
    return sorted(
        (1, step, min(n, max((budget - step) // t, 1)), t) for t in _buckets(tokens, step) for n in _powers(rows_per_shard)
    )


def learner_shapes(batch: dict[str, int], rows: int, layout: Layout) -> list[tuple[int, ...]]:
    """Sizes of the microbatches, on one data shard, into which `jrl.packing.pack` splits `rows` sequences."""
    group, budget = batch["group_size"], batch["microbatch_tokens"]
    step = length_step(layout.shards("length"))
    rows_per_shard = -(-rows // layout.batch_shards)
    remainders = _powers(-(-rows_per_shard // group))  # groups that are left for each shard
    shapes = set()
    for u, t in itertools.product(_buckets(batch["prompt_tokens"], step), _buckets(batch["response_tokens"], step)):
        for laid in row_counts(group):
            most, each = microbatch_groups(budget, u, laid, t)
            shapes |= {(p, u, p * each, t) for p in (min(most, n) for n in remainders)}
    return sorted(shapes)
