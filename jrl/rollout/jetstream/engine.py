"""JetStream's `Engine` over the paged engine's parts: its programs, page allocator, slots and tables.

JetStream schedules: it has prompts cached one by one, chooses each one's slot, and asks for one token of all slots at a time.
Nothing here waits for the devices; tokens come to the host in JetStream's own thread. What its protocol does to the engine:

- Nobody says when a request ends, unless it ends by itself. Its rows decode on, up to `max_new_tokens`, and keep their pages
  until the slot is taken again.
- An insertion cannot wait for pages, so the pool holds what all slots may need at once.
- A request cannot be refused. A prompt that cannot be served (an id outside the vocabulary, no token at all) gets an empty
  response and a warning in the log; of a prompt that is too long JetStream keeps the last tokens.
- No logprobs, and no sampling of a request's own: the temperature is the engine's.
"""

import contextlib
import dataclasses
import logging
import threading
from typing import Any

import jax
import numpy as np

from jrl.errors import UserError
from jrl.models.arch import Arch
from jrl.rollout.backends import choose_backend
from jrl.rollout.jetstream.compat import engine_api, tokenizer_pb2
from jrl.rollout.jetstream.flags import PREFILL_LENGTHS
from jrl.rollout.jetstream.programs import PagePrograms, Pool, Prefix
from jrl.rollout.jetstream.tokenizer import JetStreamTokenizer
from jrl.rollout.paged_attention import Table
from jrl.rollout.programs import EngineShape, Slots, build
from jrl.rollout.scheduler import Group, Replica, Request, Sample
from jrl.rollout.sizes import FineSizes
from jrl.rollout.tables import TableMaker
from jrl.sharding.layout import Layout

log = logging.getLogger("jrl")


@dataclasses.dataclass(eq=False)
class Weights:
    """What JetStream is given as parameters, and keeps: assign others to `params`, and the next call uses them.

    Sequences under way go on, as do prompts that are cached already: their cached keys stay those of the old weights.
    """

    params: Any  # in the engine's layout and dtype


class DecodeState:
    """Slots of a pool, one row for each sample. Calls of `insert` and `generate` change it and hand it back."""

    def __init__(self, rows: int, num_pages: int, page_size: int, width: int, row_pages: int | None):
        self.replica = Replica(rows, num_pages, page_size, width)
        self.cached = np.zeros(rows, np.int64)  # tokens in each row's cache, or more if it has met an EOS
        self.left = np.zeros(rows, np.int64)  # calls of `generate` that can give a token, or fewer
        self.inserted = 0  # prompts so far
        self.tables = TableMaker(FineSizes(rows, width, page_size, row_pages), row_pages)
        self.table: Table | None = None  # on the devices; None where rows have changed
        self.pool: Pool
        self.slots: Slots  # on the devices

    def insert(self, request: Request, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """Gives rows to the samples of a request; the pages of those who had them come back.

        Returns:
          source i32[C] and target i32[C]: pages of the prefix, and where they are to be copied.
        """
        self.clear(rows)
        pages, size = self.replica.pages, self.replica.index.page_size
        full, partial = divmod(len(request.tokens) - 1, size)
        common = pages.allocate(full)
        group = Group(self.inserted, request)
        pairs = [(i + 1, page) for i, page in enumerate(common)]
        for i, row in enumerate(rows):
            sample = self.replica.slots[row] = Sample(group, i)
            if i:
                pages.share(common)
            own = pages.allocate(1 if partial else 0)
            sample.pages = common + own
            pairs += [(full + 1, page) for page in own]
            self.cached[row], self.left[row] = len(request.tokens) - 1, request.max_new_tokens
        source, target = np.array(pairs, np.int32).reshape(-1, 2).T
        return source, target

    def clear(self, rows: range) -> None:
        """Takes the pages of rows back."""
        for row in rows:
            sample = self.replica.slots[row]
            if sample is not None:
                self.replica.pages.release(sample.pages)
            self.replica.slots[row], self.left[row] = None, 0
        self.table = None

    def grow(self) -> None:
        """Makes room for one more token in each row that may get one."""
        for row, sample in self.replica.busy:
            if self.left[row]:
                self.cached[row] += 1
                self.left[row] -= 1
                if self.cached[row] > len(sample.pages) * self.replica.index.page_size:
                    sample.pages += self.replica.pages.allocate(1)
                    self.table = None

    def check(self) -> None:
        """Free + used == total, and every used page is held by a row."""
        self.replica.pages.check()
        held = {page for _, sample in self.replica.busy for page in sample.pages}
        assert len(held) == self.replica.pages.used, (len(held), self.replica.pages.used)


class JetStreamEngine(engine_api.Engine):
    """Implements `jetstream.engine.engine_api.Engine` on one replica; more of them are more engines for JetStream.

    Args:
      layout: `jrl.sharding.layout.Layout` of a rollout mesh with one replica.
      tokenizer: of `transformers`.
      eos_ids: every id that ends a response.
      weights: in this layout and dtype.
      slots: prompts decoded at once.
      samples_per_slot: responses to each prompt.
      max_tokens: prompt and response together, the most of one sequence.
      max_prefill_length: the longest prompt; one of `flags.PREFILL_LENGTHS`.
      max_new_tokens: the longest response, 0 for as long as `max_tokens` allows.
      temperature: 0 is greedy.
      seed: of every sample's random numbers, together with its number in the order of insertion; engines that serve together
        want different ones.
      attention: name of the attention backend, or "auto" for the best that runs here.
      kv: what the pages hold, "same" for keys and values in `dtype` or "int8".
      unroll_layers: decode without the scan over layers, as `jrl.rollout.engine.Engine`.

    Raises:
      UserError: lengths that contradict each other; more than one replica.
    """

    def __init__(
        self,
        arch: Arch,
        layout: Layout,
        tokenizer: Any,
        eos_ids: tuple[int, ...],
        weights: Weights,
        *,
        slots: int,
        max_tokens: int,
        max_prefill_length: int,
        samples_per_slot: int = 1,
        max_new_tokens: int = 0,
        page_size: int = 16,
        dtype: Any = np.float32,
        temperature: float = 0.0,
        seed: int = 0,
        attention: str = "auto",
        kv: str = "same",
        unroll_layers: bool = False,
    ):
        if layout.batch_shards != 1:
            raise UserError(f"a JetStream engine has one replica, not {layout.batch_shards}; make an engine for each")
        if max_prefill_length not in PREFILL_LENGTHS or max_prefill_length >= max_tokens:
            raise UserError(
                f"max_prefill_length={max_prefill_length}: must be a power of two from {PREFILL_LENGTHS[0]} to"
                f" {PREFILL_LENGTHS[-1]} and below max_tokens={max_tokens}"
            )
        self.arch, self.layout, self.weights, self.temperature = arch, layout, weights, temperature
        self.max_tokens, self.max_new_tokens = max_tokens, max_new_tokens or max_tokens
        self._tokenizer, self._eos_ids = tokenizer, eos_ids
        self._slots, self._samples, self._longest = slots, samples_per_slot, max_prefill_length
        width = -(-max_tokens // page_size)
        self.shape = EngineShape(arch, slots * samples_per_slot * width + 1, page_size, 1, tuple(eos_ids), np.dtype(dtype))
        self.backend, _ = choose_backend(attention, layout.mesh.devices.flat[0].platform, arch, layout, self.shape.dtype, kv)
        self._unroll = unroll_layers
        self._decoded: tuple[Any, Any] = (None, None)  # weights, and what decoding reads in their place
        self._programs = build(self.shape, self.backend, layout)
        self._pages = PagePrograms(self.shape, self.backend, layout)
        self._key = jax.random.key(seed)
        # Two threads may not start programs that communicate on several devices in different orders on each.
        self._starting = threading.Lock() if layout.mesh.size > 1 else contextlib.nullcontext()

    # What JetStream's prefill thread calls ----------------------------------------------------------------------------

    def prefill(
        self,
        *,
        params: Weights,
        existing_prefix: Prefix | None = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
    ) -> Prefix:
        """Caches a prompt in a pool of its own.

        Args:
          existing_prefix: an earlier result, which stays as it is: the prompt is its tokens and these. Its full pages are
            copied, the rest of it is computed again. JetStream's own orchestrator gives none.
          padded_tokens: [n].
          true_length: how many of them are no padding; more than n where JetStream has cut the prompt.

        Raises:
          ValueError: with the existing prefix the prompt leaves no room for a response.
        """
        padded = np.asarray(padded_tokens).astype(np.int32)
        tokens = padded[: min(true_length, len(padded))]
        refused = existing_prefix is not None and not existing_prefix.tokens
        if refused or not len(tokens) or tokens.min() < 0 or tokens.max() >= self.arch.vocab_size:
            log.warning("a prompt of %d tokens gets no response: it is empty, or has ids outside the vocabulary", len(tokens))
            return Prefix({}, ())
        size, earlier = self.shape.page_size, existing_prefix or Prefix({}, ())
        whole = np.concatenate([np.array(earlier.tokens, np.int32), tokens])
        if earlier.tokens and len(whole) >= self.max_tokens:
            raise ValueError(f"{len(earlier.tokens)} + {len(tokens)} prompt tokens leave no room within {self.max_tokens}")
        full = max(len(earlier.tokens) - 1, 0) // size
        room = len(padded) if not earlier.tokens else next(n for n in PREFILL_LENGTHS if n >= len(whole))
        pages = -(-room // size)
        chunk = -(-len(padded) // size) + 1 if full else pages  # what the last page of the earlier ones lacks is one more
        pool: Pool = {}
        if len(whole) > 1:
            with self._starting:
                pool = self._pages.prefill(params.params, whole[:-1], pages, chunk, earlier.pool, full)
        return Prefix(pool, tuple(whole.tolist()))

    # What its generate thread calls -----------------------------------------------------------------------------------

    def init_decode_state(self) -> DecodeState:
        """A pool and its slots, all of them free."""
        width = -(-self.max_tokens // self.shape.page_size)
        rows = self._slots * self._samples
        state = DecodeState(rows, self.shape.num_pages, self.shape.page_size, width, self.backend.row_pages)
        state.pool = self._pages.empty_pool()
        state.slots = Slots(*(self._pages.put(x[None]) for x in self._new_slots(None, rows)))
        return state

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Starts all samples of a prompt in a slot, whoever was in it before."""
        state, rows = decode_state, range(slot * self._samples, (slot + 1) * self._samples)
        request = self._request(prefix, state) if prefix.tokens else None
        if request is None:
            state.clear(rows)
        else:
            source, target = state.insert(request, rows)
            if len(source):
                self._adopt(state, prefix.pool, source, target)
        state.inserted += 1
        new = Slots(*map(self._pages.put, self._new_slots(request, self._samples)))
        state.slots = self._pages.place(state.slots, self._pages.put(np.array(rows, np.int32)), new)
        return state

    def _request(self, prefix: Prefix, state: DecodeState) -> Request:
        tokens = np.array(prefix.tokens, np.int32)
        new_tokens = min(self.max_new_tokens, self.max_tokens - len(tokens))
        return Request(tokens, self._samples, new_tokens, self.temperature, state.inserted * self._samples)

    def _adopt(self, state: DecodeState, pool: Pool, source: np.ndarray, target: np.ndarray) -> None:
        """Copies pages out of a prefix's pool, with as many pairs as any prompt of its length can need: few programs."""
        pages = next(iter(pool.values())).shape[1] // self.arch.num_layers
        pairs = np.zeros((2, pages + self._samples), np.int32)
        pairs[:, : len(source)] = source, target
        pool = jax.device_put(pool, self._pages.shardings)  # it may come from another engine's devices
        state.pool = self._pages.adopt(state.pool, pool, *map(self._pages.put, pairs))

    @staticmethod
    def _new_slots(request: Request | None, count: int) -> Slots:
        """[count] slots at the start of a request's samples; idle ones without it."""
        r, number = request, request.first_id if request else 0
        full = lambda value, dtype: np.full(count, value, dtype)  # noqa: E731
        return Slots(
            token=full(r.tokens[-1] if r else 0, np.int32), lens=full(len(r.tokens) - 1 if r else 0, np.int32),
            remaining=full(r.max_new_tokens if r else 0, np.int32), made=full(0, np.int32),
            request=((number + np.arange(count)) & 0xFFFFFFFF).astype(np.uint32),
            temperature=full(r.temperature if r else 0, np.float32), ignore_eos=full(False, bool),
        )  # fmt: skip

    def generate(self, params: Weights, decode_state: DecodeState) -> tuple[DecodeState, Any]:
        """One token more in every row that has not ended; of the others JetStream learns that they have."""
        state = decode_state
        state.grow()
        if state.table is None:
            state.table = Table(*map(self._pages.put, state.tables.make([state.replica])))
        before = state.slots
        with self._starting:
            state.pool, state.slots, _, out = self._programs.decode(
                0, self._decode_params(params.params), state.pool, state.table, before, None, self._key, np.int32(0)
            )
        data = self._pages.results(out.tokens, before, state.slots)
        return state, engine_api.ResultTokens(
            data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=self._samples
        )

    def _decode_params(self, params: Any) -> Any:
        """As the decode program reads them, made once for each weights that come."""
        if self._decoded[0] is not params:
            self._decoded = (None, None)  # first, so that those to come can take its memory
            self._decoded = (params, self.backend.decode_params(params, self._unroll))
        return self._decoded[1]

    # What it asks for -------------------------------------------------------------------------------------------------

    def load_params(self) -> Weights:
        return self.weights

    def get_prefix_destination_sharding(self) -> Any:
        """One for all arrays of a prefix's pool; `insert` sees to those that want another."""
        return next(iter(self._pages.shardings.values()))

    def get_tokenizer(self) -> Any:
        """Nothing: the tokenizer is here already."""
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
        del metadata
        return JetStreamTokenizer(self._tokenizer, self._eos_ids)

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots, of `samples_per_slot` rows each."""
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        return self._samples

    @property
    def max_prefill_length(self) -> int:
        return self._longest

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.layout.mesh

    @property
    def colocated_cpus(self) -> None:
        return None
