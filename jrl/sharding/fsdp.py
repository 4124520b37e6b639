"""Fully sharded weights at work (ZeRO stage 3, arXiv:1910.02054): whole for the layer that uses them, split at all other times.

A weight is cast where it lies and gathered after that, so that the links carry the dtype of computation. Its gradient's sum
over devices comes back split like the weight. XLA would find some placement by itself; it is told here because what it finds
may be to gather activations, to reduce whole gradients, or to do either once per step of a loop that needs it once.

Gradients are summed between devices in the dtype of computation too, as MaxText does: sums over microbatches and over the
steps of a loop, which have many more terms, are float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.sharding.layout import Axes, Layout

# Axes of weights that split what is held and not what is worked with, to those of work.
_WHOLE = {"embed": "act_embed"}


class FullySharded:
    """How a forward pass reads weights that lie in a train layout.

    Args:
      layout: of more than one device.
      dtype: of computation.
    """

    def __init__(self, layout: Layout, dtype: Any):
        self.layout, self.dtype = layout, dtype

    def whole(self, w: jax.Array, axes: Axes) -> jax.Array:
        """A weight with logical `axes` in the dtype of computation, split over tensor alone; differentiable."""
        constrain = self.layout.constrain

        @jax.custom_vjp
        def gather(w):
            return constrain(constrain(w, axes), _at_work(axes))

        # The gradient is wanted in parts, so its sum over devices is a reduce-scatter. That of a plain constraint is wanted
        # in the constraint's own placement: whole.
        gather.defvjp(lambda w: (gather(w), None), lambda _, g: (constrain(g, axes),))
        return gather(w.astype(self.dtype))

    def rows(self, table: jax.Array, axes: Axes, tokens: jax.Array) -> jax.Array:
        """Rows of a table [V, D], in the dtype of computation, of tokens i32[d, t]: [d, t, D].

        The table stays where it is, since it is larger than the rows. Each device looks up its part of the hidden size for
        the tokens of all that share the table with it, then they exchange parts: one all-to-all of the rows. Over tensor
        each has its part of the vocabulary, and the rows that it lacks are 0 in a sum.
        """
        layout = self.layout
        vocab, embed = (layout.splitting(axis) for axis in axes)

        def look_up(table, tokens):
            everyones = jax.lax.all_gather(tokens, embed, tiled=True) if embed else tokens
            first = jax.lax.axis_index(vocab) * table.shape[0] if vocab else 0
            here = everyones - first
            mine = (here >= 0) & (here < table.shape[0])
            rows = jnp.take(table, jnp.where(mine, here, 0), axis=0).astype(self.dtype)
            rows = jnp.where(mine[..., None], rows, 0)
            if embed:
                rows = jax.lax.all_to_all(rows, embed, split_axis=0, concat_axis=2, tiled=True)
            return jax.lax.psum(rows, vocab) if vocab else rows

        places = layout.spec(axes), layout.spec(("batch", "length"))
        out = layout.spec(("batch", "length", "act_embed"))
        return jax.shard_map(look_up, mesh=layout.mesh, in_specs=places, out_specs=out)(table, tokens)

    def product(self, w: jax.Array, axes: Axes, contract: int) -> Callable[[jax.Array], jax.Array]:
        """x [d, t, D] -> float32 x w [d, t, V], for a loop that multiplies with one weight many times.

        The weight is gathered here, once. Its gradient is summed over the loop's steps on each device by itself, in float32,
        and over the devices once at the end. In the gradient of x, that of the product is rounded to the dtype of computation.

        Args:
          w: [D, V] or [V, D]; contract: the index of its axis D.
        """
        layout, here = self.layout, ("batch", "length", *_at_work(axes))
        parts = (layout.batch_shards, layout.shards("length"))  # a gradient for each, on its own device
        matrix = [2, 3] if contract == 0 else [3, 2]  # for einsum: batch 0, tokens 1, D 2, V 3

        @jax.custom_vjp
        def tap(w):
            """Stands for w where its gradient is collected; no value of it is ever read."""
            return jnp.zeros((*parts, *w.shape), jnp.float32)

        def over_devices(sums):
            total = sums.astype(self.dtype).reshape(sums.shape[2:])
            if split := layout.splitting("embed"):
                total = jax.lax.psum_scatter(total, split, scatter_dimension=contract, tiled=True)
            copies = tuple(name for name in layout.splitting("batch", "length") if name not in split)
            return (jax.lax.psum(total, copies) if copies else total).astype(w.dtype)

        def collected(_, sums):
            return (jax.shard_map(over_devices, mesh=layout.mesh, in_specs=layout.spec(here), out_specs=layout.spec(axes))(sums),)

        tap.defvjp(lambda w: (tap(w), None), collected)

        @jax.custom_vjp
        def multiply(x, whole, sums):
            del sums
            return jnp.einsum(x, [0, 1, 2], whole, matrix, [0, 1, 3], preferred_element_type=jnp.float32)

        def backward(saved, g):
            x, whole = saved
            g = g.astype(x.dtype)
            dx = jnp.einsum(g, [0, 1, 3], whole, matrix, [0, 1, 2])
            x, g = (y.reshape(*parts, -1, y.shape[-1]) for y in (x, g))
            dw = jnp.einsum(x, [0, 4, 1, 2], g, [0, 4, 1, 3], [0, 4, *matrix], preferred_element_type=jnp.float32)
            return layout.constrain(dx, ("batch", "length", "act_embed")), None, layout.constrain(dw, here)

        multiply.defvjp(lambda x, whole, sums: (multiply(x, whole, sums), (x, whole)), backward)
        whole, sums = jax.lax.stop_gradient(self.whole(w, axes)), tap(w)
        return lambda x: multiply(x, whole, sums)


def _at_work(axes: Axes) -> Axes:
    return tuple(_WHOLE.get(axis, axis) if axis else axis for axis in axes)
