"""The paged rollout engine: `submit(requests)`, `step() -> finished`, `load(params, version)`; `generate` loops over these.

It owns the KV pool and the slots on its own named mesh, and borrows the weights: they are an argument of every compiled
program, so an update is passing another pytree. The host wakes once per `decode_chunk` tokens.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.arch import Arch
from jrl.rollout import paged_attention as paged
from jrl.rollout.programs import EngineShape, Slots, build
from jrl.rollout.scheduler import Group, Request, Sample, Scheduler
from jrl.shapes import ProgramLog, bucket
from jrl.types import Completion

PREFILL_TOKENS = 4096  # padded prompt tokens of one prefill call, per replica


@dataclasses.dataclass
class EngineStats:
    """Counts since the last reset."""

    decode_tokens: int = 0  # sampled tokens
    decode_steps: int = 0  # iterations of the decode loop, each over all slots
    prefill_tokens: int = 0  # prompt tokens computed, padding not counted
    prompt_tokens: int = 0  # prompt tokens that a computation per sample would have cost
    seconds: float = 0.0


class Engine:
    """Generates from the loaded weights.

    Args:
      layout: `jrl.sharding.layout.Layout` of the rollout mesh.
      slots: sequences decoded at once, per replica.
      max_tokens: prompt and response together, the most of one sequence.
      num_pages: pages of each replica's pool, 0 for as many as all slots can need at once.
      seed: of every sample's random numbers, together with `Request.first_id`.
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
    ):
        self.arch, self.layout, self.num_slots = arch, layout, slots
        width = -(-max_tokens // page_size)
        # Each slot's own pages, a prompt being opened, and the null page.
        num_pages = num_pages or slots * width + width + 1
        self.replicas = layout.batch_shards
        self.shape = EngineShape(arch, num_pages, page_size, decode_chunk, tuple(eos_ids), dtype)
        self.scheduler = Scheduler(self.replicas, slots, num_pages, page_size, max_tokens)
        self.programs, self.compiled = build(self.shape, layout), ProgramLog("rollout")
        self.key = jax.random.key(seed)
        self.params, self.version, self.tickets = None, -1, 0
        self.stats = EngineStats()
        zeros = lambda dtype: np.zeros((self.replicas, slots), dtype)  # noqa: E731
        self.slots = Slots(
            token=zeros(np.int32), lens=zeros(np.int32), remaining=zeros(np.int32), made=zeros(np.int32),
            request=zeros(np.uint32), temperature=zeros(np.float32), ignore_eos=zeros(bool),
        )  # fmt: skip
        self.pool = self._make_pool()

    def _make_pool(self):
        shape = paged.pool_shape(self.arch, self.replicas, self.shape.num_pages, self.shape.page_size)
        sharding = self.layout.sharding(paged.POOL_AXES, shape)
        make = jax.jit(lambda: {n: jnp.zeros(shape, self.shape.dtype) for n in ("k", "v")}, out_shardings=sharding)
        return make()

    # The three verbs ---------------------------------------------------------------------------------------------

    def load(self, params, version: int) -> None:
        """Serves `params` (on the rollout mesh) from the next token on; `None` drops the reference to the old ones.

        Requires that nothing is under way: the cached keys of other weights are never continued.
        """
        if not self.scheduler.idle:
            raise RuntimeError("weights can be loaded only between generations: sequences are still under way")
        self.params, self.version = params, version

    def submit(self, requests: list[Request]) -> list[int]:
        """Queues requests; returns their tickets."""
        tickets = []
        for request in requests:
            self.scheduler.submit(self.tickets, request)
            tickets.append(self.tickets)
            self.tickets += 1
        return tickets

    def step(self) -> list[Completion]:
        """Admits what fits, decodes up to `decode_chunk` tokens, and returns what finished; `request` is the ticket."""
        if self.params is None:
            raise RuntimeError("no weights are loaded: call load(params, version) first")
        began = time.perf_counter()
        prefills, copies, started = self.scheduler.admit()
        self._prefill(prefills)
        self._copy(copies)
        for replica, slot, sample in started:
            self._place(replica, slot, sample)
        finished = self._decode() if (self.slots.remaining > 0).any() else []
        self.scheduler.check()
        self.stats.seconds += time.perf_counter() - began
        return finished

    def generate(self, requests: list[Request], on_step=lambda engine: None) -> list[Completion]:
        """All completions of the requests; `Completion.request` is the position in `requests`."""
        tickets = {ticket: i for i, ticket in enumerate(self.submit(requests))}
        completions = []
        while not self.scheduler.idle:
            completions += self.step()
            on_step(self)
        return [dataclasses.replace(c, request=tickets[c.request]) for c in completions]

    def abort(self) -> None:
        """Forgets everything under way and queued."""
        self.scheduler.queue.clear()
        for index, replica in enumerate(self.scheduler.replicas):
            if replica.head is not None:
                replica.pages.release(replica.head.prompt_pages)
                replica.head = None
            for slot, sample in enumerate(replica.slots):
                if sample is not None:
                    self.scheduler.finish(index, slot)
        self.slots.remaining[:] = 0

    # Parts of a step ---------------------------------------------------------------------------------------------

    def _rows(self, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, self.layout.sharding(("batch",)))

    def _prefill(self, prefills: list[tuple[int, Group]]) -> None:
        """Prefills prompts, shortest first so that a call's padding is small, as many a call as PREFILL_TOKENS allow."""
        page = self.shape.page_size
        by_replica: list[list[Group]] = [[] for _ in range(self.replicas)]
        for index, group in prefills:
            cached = len(group.request.tokens) - 1
            self.stats.prefill_tokens += cached
            self.stats.prompt_tokens += cached * group.request.samples
            if cached:
                by_replica[index].append(group)
        for groups in by_replica:
            groups.sort(key=lambda g: len(g.request.tokens))
        while any(by_replica):
            longest = max(len(groups[0].request.tokens) for groups in by_replica if groups)
            fit = max(PREFILL_TOKENS // bucket(longest, page), 1)
            batch = [groups[:fit] for groups in by_replica]
            longest = max(len(g.request.tokens) - 1 for groups in batch for g in groups)
            length = -(-bucket(longest, page) // page) * page
            fit = max(PREFILL_TOKENS // length, 1)
            batch = [groups[:fit] for groups in by_replica]
            by_replica = [groups[fit:] for groups in by_replica]
            self._prefill_call(batch, bucket(max(map(len, batch))), length)

    def _prefill_call(self, batch: list[list[Group]], prompts: int, length: int) -> None:
        page = self.shape.page_size
        tokens = np.zeros((self.replicas, prompts, length), np.int32)
        lens = np.zeros((self.replicas, prompts), np.int32)
        table = np.zeros((self.replicas, prompts, length // page), np.int32)
        for r, groups in enumerate(batch):
            for p, group in enumerate(groups):
                n = len(group.request.tokens) - 1
                tokens[r, p, :n], lens[r, p] = group.request.tokens[:-1], n
                table[r, p, : len(group.prompt_pages)] = group.prompt_pages
        self.compiled.note("prefill", prompts, length)
        self.pool = self.programs.prefill(self.params, self.pool, *map(self._rows, (tokens, lens, table)))

    def _copy(self, copies: list[tuple[int, int, int]]) -> None:
        if not copies:
            return
        most = max(sum(c[0] == r for c in copies) for r in range(self.replicas))
        pairs = np.zeros((2, self.replicas, bucket(most)), np.int32)
        filled = [0] * self.replicas
        for replica, source, target in copies:
            pairs[:, replica, filled[replica]] = source, target
            filled[replica] += 1
        self.compiled.note("copy", pairs.shape[-1])
        self.pool = self.programs.copy(self.pool, self._rows(pairs[0]), self._rows(pairs[1]))

    def _place(self, replica: int, slot: int, sample: Sample) -> None:
        request, s, at = sample.group.request, self.slots, (replica, slot)
        s.token[at], s.lens[at] = request.tokens[-1], len(request.tokens) - 1
        s.remaining[at], s.made[at] = request.max_new_tokens, 0
        s.request[at], s.temperature[at] = (request.first_id + sample.index) & 0xFFFFFFFF, request.temperature
        s.ignore_eos[at] = request.ignore_eos

    def _decode(self) -> list[Completion]:
        busy = self.slots.remaining > 0
        longest = int((self.slots.lens + np.minimum(self.slots.remaining, self.shape.decode_chunk))[busy].max())
        full = self.scheduler.replicas[0].table.shape[1]
        width = min(bucket(-(-longest // self.shape.page_size)), full)
        table = np.stack([r.table[:, :width] for r in self.scheduler.replicas])
        # With samples waiting, an eighth of the slots falling idle is worth a trip to the host.
        leave_at = int(busy.sum()) - max(int(busy.sum()) // 8, 1) if self.scheduler.pending else 0
        self.compiled.note("decode", width)
        slots = Slots(*map(self._rows, self.slots))
        self.pool, *out = self.programs.decode(
            self.params, self.pool, self._rows(table), slots, self.key, np.int32(leave_at)
        )
        after, tokens, logprobs = jax.device_get(out)
        made = after.made - self.slots.made
        self.slots = Slots(*(np.array(x) for x in after))  # writable copies
        self.stats.decode_tokens += int(made.sum())
        self.stats.decode_steps += int(made.max())
        finished = []
        for replica, slot in zip(*np.nonzero(busy), strict=True):
            count = made[replica, slot]
            sample = self.scheduler.replicas[replica].slots[slot]
            sample.tokens.append(tokens[replica, slot, :count])
            sample.logprobs.append(logprobs[replica, slot, :count])
            sample.versions += [self.version] * int(count)
            if self.slots.remaining[replica, slot] == 0:
                finished.append(self._completion(sample))
                self.scheduler.finish(replica, slot)
        return finished

    def _completion(self, sample: Sample) -> Completion:
        request = sample.group.request
        tokens, logprobs = np.concatenate(sample.tokens), np.concatenate(sample.logprobs)
        ended = not request.ignore_eos and int(tokens[-1]) in self.shape.eos_ids
        return Completion(
            request=sample.group.ticket,
            sample=sample.index,
            tokens=tokens,
            logprobs=logprobs,
            # Without truncation the sampled distribution is the full one; greedy choice is certain.
            sampler_logprobs=logprobs.copy() if request.temperature > 0 else np.zeros_like(logprobs),
            versions=np.array(sample.versions, np.int32),
            stop_reason="eos" if ended else "length",
        )
