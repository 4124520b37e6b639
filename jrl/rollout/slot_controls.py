"""What slots ask for beyond a temperature: the device's view of it, and the host's watch for stop strings.

The arrays are as wide as the vocabulary, so they exist only once somebody has asked, and they stay on the device between
calls of the decode loop; a slot's row is written when a sample moves in.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError
from jrl.rollout.sampler import Controls, control_rows
from jrl.rollout.sampling import Sampling, StopStrings
from jrl.rollout.scheduler import Request, Sample

NEUTRAL = Sampling()


class SlotControls:
    """Controls of [R, B] slots.

    Args:
      decode_text: token ids to text; None where stop strings are not to be had.
      best: how many likeliest tokens a program may report.
    """

    def __init__(
        self,
        vocab_size: int,
        slots: tuple[int, int],
        layout,
        decode_text: Callable[[list[int]], str] | None,
        best: tuple[int, ...],
    ):
        self.vocab_size, self.decode_text, self.shape, self._layout, self._best = vocab_size, decode_text, slots, layout, best
        self._sampling = np.full(slots, NEUTRAL, object)  # of the sample in each slot
        self._written = np.full(slots, NEUTRAL, object)  # what the device's row says
        self._stops: dict[tuple[int, int], StopStrings] = {}
        self._rows: Controls | None = None

    def check_request(self, number: int, request: Request) -> None:
        """Raises UserError for what cannot be done."""
        try:
            request.sampling.validate(self.vocab_size)
        except UserError as error:
            raise UserError(f"request {number}: {error}") from None
        if request.sampling.stop and self.decode_text is None:
            raise UserError(f"request {number}: stop={request.sampling.stop}: this engine has no tokenizer to look for text with")

    def place(self, at: tuple[int, int], sample: Sample) -> None:
        """A sample moves into a slot, perhaps with tokens that it has made before."""
        request = sample.group.request
        wanted = self._sampling[at] = request.sampling
        self._stops.pop(at, None)
        if wanted.stop and self.decode_text is not None:
            watch = self._stops[at] = StopStrings(wanted.stop, self.decode_text, wanted.min_tokens)
            watch.feed(sample.tokens)
        if wanted.plain and self._written[at] is NEUTRAL:
            return
        rows = control_rows(NEUTRAL if wanted.plain else wanted, request.tokens.tolist(), sample.tokens, self.vocab_size)
        self._write(at, rows)
        self._written[at] = NEUTRAL if wanted.plain else wanted

    def _write(self, at: tuple[int, int], rows: Controls) -> None:
        if self._rows is None:
            self._rows = self._neutral()
        self._rows = _write(self._rows, np.int32(at[0]), np.int32(at[1]), rows)

    def warm_up(self) -> Controls:
        """Compiles what else is compiled here once somebody asks for something; the controls of slots that do not."""
        self._write((0, 0), control_rows(NEUTRAL, [], [], self.vocab_size))
        assert self._rows is not None
        return self._rows

    def _neutral(self) -> Controls:
        """No slot asks for anything."""
        sharding = self._layout.sharding(("batch",))
        row = control_rows(NEUTRAL, [], [], self.vocab_size)
        make = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.broadcast_to(x, (*self.shape, *np.shape(x))), row), out_shardings=sharding
        )
        return make()

    def current(self, busy: np.ndarray) -> tuple[int, Controls | None]:
        """How many likeliest tokens the busy slots, bool[R, B], want at most, and their controls if they have any."""
        asked = list(self._sampling[busy])
        best = max((s.best for s in asked), default=0)
        plain = all(s.plain for s in asked)
        return next(b for b in self._best if b >= best), None if plain else self._rows

    def update(self, rows: Controls | None) -> None:
        """Takes back what `current` gave away."""
        if rows is not None:
            self._rows = rows

    def stopped(self, at: tuple[int, int], tokens: list[int]) -> int | None:
        """How many of a slot's new tokens there are up to the end of a stop string; None if there was none."""
        watch = self._stops.get(at)
        if watch is None:
            return None
        before = watch.count
        end = watch.feed(tokens)
        return None if end is None else end - before


@jax.jit
def _write(rows: Controls, replica: jax.Array, slot: jax.Array, new: Controls) -> Controls:
    return jax.tree.map(lambda old, x: old.at[replica, slot].set(x), rows, new)
