"""The paged rollout engine: `submit(requests)`, `step() -> finished`, `load(params, version)`; `generate` loops over these.

It owns the KV pool and the slots on its own named mesh, and borrows the weights: they are an argument of every compiled
program, so an update is passing another pytree. The host wakes once per `decode_chunk` tokens.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.arch import Arch
from jrl.rollout.backends import PoolArray, choose_backend
from jrl.rollout.paged_attention import Table
from jrl.rollout.prefill import longest_chunk, next_call
from jrl.rollout.programs import Decoded, EngineShape, Prompts, Slots, build
from jrl.rollout.scheduler import Counts, Group, Prefix, Request, Sample, Scheduler
from jrl.rollout.sizes import FewSizes, FineSizes, Sizes
from jrl.rollout.slot_controls import SlotControls
from jrl.rollout.speculate import Speculation, Tally
from jrl.rollout.tables import TableMaker
from jrl.shapes import ProgramLog
from jrl.sharding.hosts import fetch, put
from jrl.types import Completion

log = logging.getLogger("jrl")


@dataclasses.dataclass
class EngineStats(Counts):
    """Counts since the last reset."""

    decode_tokens: int = 0  # sampled tokens
    decode_steps: int = 0  # iterations of the decode loop: forward passes, each over all slots
    slot_steps: int = 0  # the same times the slots of all replicas
    busy_steps: int = 0  # of them, those whose slot was busy, and made a token; with drafts, one or more
    decode_calls: int = 0  # of the decode loop, each of at most `decode_chunk` iterations
    draft_calls: int = 0  # of them, those with drafts
    drafted: int = 0  # tokens guessed
    accepted: int = 0  # of them, those that were sampled
    prefill_tokens: int = 0  # prompt tokens computed, padding not counted
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Shares from 0 to 1, and counts.

        `slot_use`: of the slots' steps, those in which the slot was busy. `draft_accepted`: of the tokens drafted, those that
        were right. `speculating`: of the decode loop's calls, those with drafts. `prefix_hit_rate`: of the prompt tokens that
        groups needed, those found in the prefix index. `prefill_saved`: of the prompt tokens that every sample would have
        computed for itself, those that were not.
        """
        return {
            "rollout/slot_use": self.busy_steps / max(self.slot_steps, 1),
            "rollout/draft_accepted": self.accepted / max(self.drafted, 1),
            "rollout/speculating": self.draft_calls / max(self.decode_calls, 1),
            "rollout/prefix_hit_rate": self.hit_tokens / max(self.hit_tokens + self.prefill_tokens, 1),
            "rollout/prefill_saved": 1 - self.prefill_tokens / max(self.prompt_tokens, 1),
            "rollout/preemptions": self.preemptions,
        }


def sum_stats(parts: Iterable[EngineStats]) -> EngineStats:
    """Of several engines; their seconds, which pass side by side, are the longest."""
    rows = [dataclasses.asdict(part) for part in parts]
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    return EngineStats(**total | {"seconds": max(row["seconds"] for row in rows)})


class Engine:
    """Generates from the loaded weights.

    Args:
      layout: `jrl.sharding.layout.Layout` of the rollout mesh.
      slots: sequences decoded at once, per replica.
      max_tokens: prompt and response together, the most of one sequence.
      num_pages: pages of each replica's pool, 0 for as many as all slots can need at once.
      seed: of every sample's random numbers, together with `Request.first_id`.
      attention: name of the attention backend, or "auto" for the best that runs here.
      kv: what the pages hold, "same" for keys and values in `dtype` or "int8".
      unroll_layers: decode without the scan over layers (`jrl.models.unstack`): faster, but slower to compile; on CPU only, and
        where backend `cpu` has packed the weights of no effect.
      decode_text: token ids to text, for stop strings; without it requests with such are refused.
      speculate: tokens drafted per slot and forward pass (`jrl.rollout.speculate`), in calls where that has been faster; 0 for
        none ever. Tokens are the same with drafts as without, logprobs but for rounding.
      few_programs: sizes as `jrl.rollout.sizes.FewSizes`, whose programs can be compiled in advance.
    """

    def __init__(
        self,
        arch: Arch,
        layout,
        *,
        slots: int,
        max_tokens: int,
        eos_ids: tuple[int, ...],
        page_size: int = 16,
        num_pages: int = 0,
        decode_chunk: int = 32,
        dtype=jnp.float32,
        seed: int = 0,
        attention: str = "auto",
        kv: str = "same",
        unroll_layers: bool = False,
        decode_text: Callable[[list[int]], str] | None = None,
        speculate: int = 0,
        few_programs: bool = False,
    ):
        self.arch, self.layout = arch, layout
        width = -(-max_tokens // page_size)
        # Each slot's own pages, a prompt being opened, and the null page.
        num_pages = num_pages or slots * width + width + 1
        self.replicas = layout.batch_shards
        self.shape = EngineShape(arch, num_pages, page_size, decode_chunk, tuple(eos_ids), dtype)
        self.stats = EngineStats()
        self.scheduler = Scheduler(self.replicas, slots, num_pages, page_size, max_tokens, decode_chunk, self.stats)
        backend, others = choose_backend(attention, layout.mesh.devices.flat[0].platform, arch, layout, dtype, kv)
        self.backend = backend
        log.info("attention backend: %s; %s", backend.name, "; ".join(f"not {name}: {why}" for name, why in others))
        kind: type[FewSizes | FineSizes] = FewSizes if few_programs else FineSizes
        self.sizes: Sizes = kind(slots, width, page_size, backend.row_pages)
        self.programs, self.compiled = build(self.shape, backend, layout), ProgramLog("rollout")
        self.key = jax.random.key(seed)
        self.params, self.version, self.tickets = None, -1, 0
        self.unroll_layers = unroll_layers
        self.decode_params: Any = None
        self.controls = SlotControls(arch.vocab_size, (self.replicas, slots), layout, decode_text, self.sizes.best)
        zeros = lambda dtype: np.zeros((self.replicas, slots), dtype)  # noqa: E731
        self.slots = Slots(
            token=zeros(np.int32), lens=zeros(np.int32), remaining=zeros(np.int32), made=zeros(np.int32),
            request=zeros(np.uint32), temperature=zeros(np.float32), ignore_eos=zeros(bool),
        )  # fmt: skip
        self.speculation = (
            Speculation(speculate, self.shape, backend, layout, (self.replicas, slots), max_tokens) if speculate else None
        )
        self.tables = TableMaker(self.sizes, backend.row_pages)
        self.pool = self._make_pool(backend.pool_arrays(num_pages, page_size))

    def _make_pool(self, arrays: dict[str, PoolArray]):
        shardings = {name: self.layout.sharding(x.axes, x.shape) for name, x in arrays.items()}
        return jax.jit(lambda: {n: jnp.zeros(x.shape, x.dtype) for n, x in arrays.items()}, out_shardings=shardings)()

    def reset_stats(self) -> None:
        self.stats = self.scheduler.counts = EngineStats()

    # The three verbs, and what servers need besides ------------------------------------------------------------------

    def load(self, params, version: int, under_way: bool = False) -> None:
        """Serves `params` (on the rollout mesh) from the next token on; `None` drops the reference to the old ones.

        Args:
          under_way: allow it while sequences are under way. They go on: their cached keys stay those of the old weights,
            and each token records the version that chose it.
        """
        if not self.idle and not under_way:
            raise RuntimeError("weights can be loaded only between generations: sequences are still under way")
        self.params, self.version = params, version
        self.decode_params = None  # first, so that those to come can take its memory
        if params is not None:
            self.decode_params = self.backend.decode_params(params, self.unroll_layers)
        self.scheduler.new_weights(version)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def submit(self, requests: list[Request]) -> list[int]:
        """Queues requests; returns their tickets.

        Raises:
          UserError: a request that can never run; then none of them is queued.
        """
        for number, request in enumerate(requests, self.tickets):
            self.scheduler.check_request(number, request)
            self.controls.check_request(number, request)
        tickets = list(range(self.tickets, self.tickets + len(requests)))
        self.tickets += len(requests)
        for ticket, request in zip(tickets, requests, strict=True):
            self.scheduler.submit(ticket, request)
        return tickets

    def step(self) -> list[Completion]:
        """Admits what fits, makes up to `decode_chunk` passes of decoding, and returns what finished; `request` is the ticket."""
        if self.params is None:
            raise RuntimeError("no weights are loaded: call load(params, version) first")
        began = time.perf_counter()
        finished = self._expire()
        self.scheduler.open()
        self._prefill()
        started, copies = self.scheduler.start()
        self._copy(copies)
        for replica, slot, sample in started:
            self._place(replica, slot, sample)
        drafting = self._drafting()
        for at in self.scheduler.grow(self.speculation.room if drafting else self.shape.decode_chunk):
            self.slots.remaining[at] = 0
        if (self.slots.remaining > 0).any():
            finished += self._decode(drafting)
        self.scheduler.check()
        self.stats.seconds += time.perf_counter() - began
        return finished

    def generate(self, requests: list[Request], on_step=lambda finished: None) -> list[Completion]:
        """All completions of the requests; `Completion.request` is the position in `requests`.

        After each step `on_step` is called with those that it finished.

        They are, bit by bit, the same whatever was generated before: prompts cached by earlier calls are not used, as what is
        read from the cache may differ in its last bits from what is computed with the rest of the prompt. With `speculate`
        that holds but for rounding, since speed decides which calls draft.
        """
        if self.idle:
            self.scheduler.forget()
            self.tables.forget()
        tickets = {ticket: i for i, ticket in enumerate(self.submit(requests))}
        completions = []
        while not self.idle:
            finished = [dataclasses.replace(c, request=tickets[c.request]) for c in self.step()]
            completions += finished
            on_step(finished)
        return completions

    def running(self) -> Iterator[Completion]:
        """What every sample under way has so far; the stop reason is empty."""
        return (sample.completion("") for sample in self.scheduler.samples())

    def abort(self, tickets: Iterable[int] | None = None) -> list[Completion]:
        """Ends the samples of some requests, of all by default; returns what there is of them."""
        wanted = None if tickets is None else set(tickets)
        return self._end(lambda group: wanted is None or group.ticket in wanted)

    def close(self) -> None:
        """Nothing is held outside of this process."""

    def _expire(self) -> list[Completion]:
        if not self.scheduler.expired():
            return []
        now = time.monotonic()
        return self._end(lambda group: group.deadline <= now)

    def _end(self, wanted: Callable[[Group], bool]) -> list[Completion]:
        ended = self.scheduler.remove(wanted)
        for _, at in ended:
            if at is not None:
                self.slots.remaining[at] = 0
        return [sample.completion("aborted") for sample, _ in ended]

    # Parts of a step ---------------------------------------------------------------------------------------------

    def rows(self, x: np.ndarray) -> jax.Array:
        """An array [R, ..] on the devices of its replicas."""
        return put(x, self.layout.sharding(("batch",)))

    def _prefill(self) -> None:
        """Caches the next part of the open prompts; those of like length together, so that a call's padding is small."""
        work: list[list[tuple[Prefix, int]]] = [[] for _ in range(self.replicas)]
        for index, prefix, count in self.scheduler.chunks(longest_chunk(self.shape.page_size)):
            work[index].append((prefix, count))
            self.stats.prefill_tokens += count
        for chunks in work:
            chunks.sort(key=lambda chunk: (chunk[0].cached > 0, chunk[0].scored, chunk[1]))
        while any(work):
            kind = self._kind(next(chunks[0] for chunks in work if chunks))
            batch = next_call([[c for c in chunks if self._kind(c) == kind] for chunks in work], self.sizes, scored=kind[1])
            work = [[c for c in chunks if c not in taken] for chunks, taken in zip(work, batch, strict=True)]
            self._prefill_call(batch)

    @staticmethod
    def _kind(chunk: tuple[Prefix, int]) -> tuple[bool, bool]:
        """What cannot share a call: a program either reads pages cached before or not, and gives logprobs or not."""
        return chunk[0].cached > 0, chunk[0].scored

    def _prefill_call(self, batch: list[list[tuple[Prefix, int]]]) -> None:
        page = self.shape.page_size
        chunks = [(r, p, *chunk) for r, of_replica in enumerate(batch) for p, chunk in enumerate(of_replica)]
        length = self.sizes.length(max(count for *_, count in chunks))
        most = self.sizes.prompts(max(map(len, batch)), length)
        before = self.sizes.before(max(prefix.cached for _, _, prefix, _ in chunks) // page)
        prompts = self.no_prompts(most, length, before)
        for r, p, prefix, count in chunks:
            begin, end, done = prefix.cached, prefix.cached + count, prefix.cached // page
            prompts.tokens[r, p, :count] = prefix.tokens[begin:end]
            prompts.start[r, p], prompts.lens[r, p] = begin, count
            pages = prefix.pages[done : -(-end // page)]
            prompts.table[r, p, : len(pages)] = pages
            prompts.prior[r, p, :done] = prefix.pages[:done]
            if prefix.scored:
                prompts.targets[r, p, :count] = prefix.group.request.tokens[begin + 1 : end + 1]
        score = chunks[0][2].scored
        self.compiled.note("prefill", score, most, length, before)
        self.pool, logprobs = self.programs.prefill(score, self.params, self.pool, Prompts(*map(self.rows, prompts)))
        logprobs = fetch(logprobs) if score else None
        for r, p, prefix, count in chunks:
            if prefix.group.prompt_logprobs is not None and logprobs is not None:
                prefix.group.prompt_logprobs[prefix.cached + 1 : prefix.cached + 1 + count] = logprobs[r, p, :count]
            prefix.cached += count
            self.scheduler.computed(r, prefix)

    def no_prompts(self, most: int, length: int, before: int) -> Prompts:
        """In NumPy, of these sizes, to be filled."""
        zeros = lambda *shape: np.zeros((self.replicas, most, *shape), np.int32)  # noqa: E731
        return Prompts(zeros(length), zeros(length), zeros(), zeros(), zeros(length // self.shape.page_size), zeros(before))

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        if not copies:
            return
        most = max(sum(c[0] == r for c in copies) for r in range(self.replicas))
        pairs = np.zeros((2, self.replicas, self.sizes.copies(most)), np.int32)
        filled = [0] * self.replicas
        for replica, source, target in copies:
            pairs[:, replica, filled[replica]] = source, target
            filled[replica] += 1
        self.compiled.note("copy", pairs.shape[-1])
        self.pool = self.programs.copy(self.pool, self.rows(pairs[0]), self.rows(pairs[1]))

    def _place(self, replica: int, slot: int, sample: Sample) -> None:
        request, s, at = sample.group.request, self.slots, (replica, slot)
        s.token[at] = sample.tokens[-1] if sample.tokens else request.tokens[-1]
        s.lens[at], s.remaining[at], s.made[at] = sample.cached, sample.remaining, len(sample.tokens)
        s.request[at], s.temperature[at] = (request.first_id + sample.index) & 0xFFFFFFFF, request.temperature
        s.ignore_eos[at] = request.ignore_eos
        self.controls.place(at, sample)
        if self.speculation is not None:
            self.speculation.write(at, 0, sample.sequence())

    def _drafting(self) -> bool:
        """Whether the next call of the decode loop drafts: where that has been faster, can be done and has room."""
        if self.speculation is None:
            return False
        possible = self.controls.current(self.slots.remaining > 0) == (0, None)
        return possible and self.speculation.pace.drafting() and self.scheduler.has_room(self.speculation.room)

    def _decode(self, drafting: bool) -> list[Completion]:
        busy = self.slots.remaining > 0
        table = self.tables.make(self.scheduler.replicas)
        # With samples waiting, an eighth of the slots falling idle is worth a trip to the host.
        leave_at = np.int32(busy.sum() - max(busy.sum() // 8, 1) if self.scheduler.pending else 0)
        if self.speculation is not None:
            jax.block_until_ready(self.pool)  # the prefill's time is not this call's
        began = time.perf_counter()
        comparable, after, out, tally = (self._draft_call if drafting else self._plain_call)(table, leave_at)
        seconds = time.perf_counter() - began
        made = after.made - self.slots.made
        passes = made if tally is None else tally.passes
        if self.speculation is not None and comparable:
            self.speculation.pace.record(drafting, seconds / int(passes.max()) * int(passes.sum()) / int(made.sum()))
        self.slots = Slots(*(np.array(x) for x in after))  # writable copies
        self._count(made, passes, tally)
        return [c for at in zip(*np.nonzero(busy), strict=True) if (c := self._advance(at, int(made[at]), out)) is not None]

    def _plain_call(self, table: Table, leave_at: np.int32) -> tuple[bool, Slots, Decoded, None]:
        """Whether its time is that of plain decoding alone, without compiling and controls; and what there is after it."""
        best, controls = self.controls.current(self.slots.remaining > 0)
        new = self.compiled.note("decode", *(x.shape[1:] for x in table), best, controls is not None)
        table, slots = Table(*map(self.rows, table)), Slots(*map(self.rows, self.slots))
        self.pool, slots, controls, out = self.programs.decode(
            best, self.decode_params, self.pool, table, slots, controls, self.key, leave_at
        )
        self.controls.update(controls)
        return not new and (best, controls) == (0, None), *fetch((slots, out)), None

    def _draft_call(self, table: Table, leave_at: np.int32) -> tuple[bool, Slots, Decoded, Tally]:
        """As `_plain_call`, with drafts; nobody asks for controls."""
        new = self.compiled.note("speculate", *(x.shape[1:] for x in table))
        table, slots = Table(*map(self.rows, table)), Slots(*map(self.rows, self.slots))
        self.pool, *rest = self.speculation.program(
            self.decode_params, self.pool, table, slots, self.rows(self.speculation.history), self.key, leave_at
        )
        return not new, *fetch(rest)

    def _count(self, made: np.ndarray, passes: np.ndarray, tally: Tally | None) -> None:
        """Tokens and forward passes of each slot in a call, both i32[R, B], which are the same without drafts."""
        stats, steps = self.stats, int(passes.max())  # a slot that is busy at the end has been so from the start
        stats.decode_calls += 1
        stats.decode_tokens += int(made.sum())
        stats.decode_steps += steps
        stats.slot_steps += steps * passes.size
        stats.busy_steps += int(passes.sum())
        if tally is not None:
            stats.draft_calls += 1
            stats.drafted += int(tally.drafted.sum())
            stats.accepted += int(tally.accepted.sum())

    def _advance(self, at: tuple[int, int], count: int, out: Decoded) -> Completion | None:
        """Takes over what a slot has sampled; its completion if that is its end."""
        sample = self.scheduler.replicas[at[0]].slots[at[1]]
        assert sample is not None
        stopped = self.controls.stopped(at, out.tokens[at][:count].tolist())
        count = count if stopped is None else stopped
        if self.speculation is not None:
            self.speculation.write(at, sample.cached + 1, out.tokens[at][:count])
        sample.extend(Decoded(*(x[at][:count] for x in out)), self.version)
        ended = stopped is not None or self.slots.remaining[at] == 0
        if not ended:
            return None
        self.slots.remaining[at] = 0
        self.scheduler.finish(*at)
        return sample.completion("stop" if stopped is not None else self._stop_reason(sample))

    def _stop_reason(self, sample: Sample) -> str:
        request, last = sample.group.request, sample.tokens[-1]
        if last in request.sampling.stop_ids:
            return "stop"
        return "eos" if not request.ignore_eos and last in self.shape.eos_ids else "length"
