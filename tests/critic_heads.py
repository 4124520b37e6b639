"""A critic's head that a user may have written: helper of tests."""

import jax
import jax.numpy as jnp
from flax import nnx


class TwoLayers(nnx.Module):
    """A head of the user's own, of weights that state no axes."""

    def __init__(self, arch, rngs):
        self.first = nnx.Linear(arch.hidden_size, 3, rngs=rngs)
        self.second = nnx.Param(jnp.array([1.0, -2.0, 0.5]))

    def __call__(self, hidden):
        return jax.nn.relu(self.first(hidden)) @ self.second[...]
