"""What the functions of this room check at their door: shapes, so that nothing broadcasts by accident, and names."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError

Array = jax.Array | np.ndarray  # what the functions of this room take; they return jax arrays


def check_shapes(axes: str, **arrays: Any) -> None:
    """Every array has exactly the axes, such as "N T", and all have the same sizes.

    Raises:
      ValueError: naming the first array that differs, and what its shape should have been.
    """
    letters = axes.split()
    first_name, first = next(iter(arrays.items()))
    for name, x in arrays.items():
        if jnp.ndim(x) != len(letters):
            raise ValueError(f"{name} has shape {jnp.shape(x)}: expected [{', '.join(letters)}]")
        if jnp.shape(x) != jnp.shape(first):
            raise ValueError(f"{name} has shape {jnp.shape(x)}: expected {jnp.shape(first)}, that of {first_name}")


def check_name(key: str, name: str, known: Iterable[str]) -> None:
    """Raises UserError, which lists the known names, if `name` is not one of them."""
    if name not in known:
        raise UserError(f"{key} {name!r} is not known; use one of {', '.join(known)}")
