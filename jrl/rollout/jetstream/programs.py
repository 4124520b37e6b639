"""What JetStream's split of the work adds to the engine's programs: a prompt's pages in a pool of their own, and their way over.

A prompt is cached by one thread while another one decodes, perhaps on other devices, so its pages cannot come from the pool
that is being decoded from. As in every pool a page is a row of each layer's block, and page 0 is the null page.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError
from jrl.rollout.backends import Backend
from jrl.rollout.programs import EngineShape, Prompts, Slots, prefill
from jrl.sharding.layout import Layout

Pool = dict[str, jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["pool"], meta_fields=["tokens"])
@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prompt whose keys and values are cached, those of its last token excepted."""

    pool: Pool  # page i + 1 holds tokens i * page_size and on; empty where there is nothing to cache
    tokens: tuple[int, ...]  # none of a prompt that was refused


class PagePrograms:
    """Compiled for a layout of one replica; `shape` is the decoding pool's.

    Raises:
      UserError: a backend whose pool is not made of rows, layer after layer.
    """

    def __init__(self, shape: EngineShape, backend: Backend, layout: Layout):
        self._shape, self._backend, self._layout = shape, backend, layout
        arrays = backend.pool_arrays(shape.num_pages, shape.page_size)
        if any(x.shape[:2] != (1, shape.arch.num_layers * shape.num_pages) for x in arrays.values()):
            raise UserError(f"attention backend {backend.name!r}: its pages cannot be moved between pools; choose another")
        self._rows = layout.sharding(("batch",))
        self.shardings = {name: layout.sharding(x.axes, x.shape) for name, x in arrays.items()}
        self.adopt = jax.jit(
            functools.partial(adopt, shape.arch.num_layers, shape.num_pages), donate_argnums=0, out_shardings=self.shardings
        )
        self.place = jax.jit(place, out_shardings=self._rows)
        self.results = jax.jit(results, out_shardings=self._rows)
        self._prefill = functools.cache(self._make_prefill)

    def put(self, x: np.ndarray) -> jax.Array:
        return jax.device_put(x, self._rows)

    def empty_pool(self) -> Pool:
        """The decoding pool."""
        return self._empty(self._shape.num_pages, out_shardings=self.shardings)()

    def _empty(self, num_pages: int, **options: Any) -> Any:
        arrays = self._backend.pool_arrays(num_pages, self._shape.page_size)
        return jax.jit(lambda: {name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items()}, **options)

    def _make_prefill(self, pages: int, chunk: int, before: int) -> Any:
        """The program (params, earlier pool, prompts) -> pool.

        Args:
          pages: of the pool that is made.
          chunk: pages of the tokens that are computed, with their padding.
          before: pages of the earlier pool, which are copied to the same places first; 0 where there is none.
        """
        shape, empty = self._shape._replace(num_pages=pages + 1), self._empty(pages + 1)

        def run(params, earlier: Pool, prompts: Prompts):
            pool, places = empty(), jnp.arange(1, before + 1)
            if before:
                pool = adopt(shape.arch.num_layers, shape.num_pages, pool, earlier, places, places)
            assert prompts.table.shape[-1] == chunk
            return prefill(shape, self._backend, self._layout.constrain, False, params, pool, prompts)[0]

        return jax.jit(run, out_shardings=self.shardings)

    def prefill(self, params: Any, tokens: np.ndarray, pages: int, chunk: int, earlier: Pool, full: int) -> Pool:
        """Caches tokens i32[n], n > 0, in a new pool.

        Args:
          pages: that the pool has room for.
          chunk: that the tokens after the first `full` pages have room in.
          earlier: a pool whose first `full` pages hold the first tokens; empty for none.
        """
        size = self._shape.page_size
        before = next(iter(earlier.values())).shape[1] // self._shape.arch.num_layers - 1 if full else 0
        new = tokens[full * size :]
        padded = np.zeros((1, 1, chunk * size), np.int32)
        padded[0, 0, : len(new)] = new
        places, used = np.arange(chunk), -(-len(new) // size)
        table = np.where(places < used, full + 1 + places, 0).astype(np.int32)[None, None]
        prior = np.where(np.arange(before) < full, np.arange(1, before + 1), 0).astype(np.int32)[None, None]
        number = lambda x: np.full((1, 1), x, np.int32)  # noqa: E731
        prompts = Prompts(padded, np.zeros_like(padded), number(full * size), number(len(new)), table, prior)
        earlier = jax.device_put(earlier, self.shardings) if full else {}  # it may come from another engine's devices
        return self._prefill(pages, chunk, before)(params, earlier, Prompts(*map(self.put, prompts)))


def adopt(num_layers: int, num_pages: int, pool: Pool, prefix: Pool, source: jax.Array, target: jax.Array) -> Pool:
    """Copies pages `source` of a prefix's pool to pages `target` of a pool of `num_pages`, in every layer.

    Args:
      source, target: i32[C]; the pair (0, 0) does nothing.
    """
    layer = jnp.arange(num_layers)[:, None]

    def one(rows, theirs):
        read = theirs[:, (layer * (theirs.shape[1] // num_layers) + source).reshape(-1)]
        return rows.at[:, (layer * num_pages + target).reshape(-1)].set(read)

    return {name: one(pool[name], prefix[name]) for name in pool}


def place(slots: Slots, at: jax.Array, new: Slots) -> Slots:
    """Slots [1, B] with those numbered `at`, i32[k], set to `new`, [k] each."""
    return jax.tree.map(lambda old, x: old.at[0, at].set(x), slots, new)


def results(tokens: jax.Array, before: Slots, after: Slots) -> jax.Array:
    """i32[B, 3] of a step: the token, whether there is one, and how many there are by now; tokens i32[1, B, 1]."""
    return jnp.stack([tokens[0, :, 0], after.made[0] - before.made[0], after.made[0]], axis=1)
