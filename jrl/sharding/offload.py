"""What waits in the hosts' memory: optimizer state between updates, a reference's parameters between and during its passes.

Both stay on their own devices' hosts, split as ever (memory kind `pinned_host`), so no network is crossed. They come to the
devices layer by layer, inside of the program that uses them, and moments go back as they are made: a device holds those of
few layers at a time. Embedding and head come as a whole, each split like its weight.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrl.errors import UserError
from jrl.sharding.layout import Layout
from jrl.sharding.memory_kinds import DEVICE, HOST


class Optimizer(NamedTuple):
    """An optax transformation, a clip of the global norm before another one, with its parts in reach."""

    init: Any
    update: Any
    after_clip: optax.GradientTransformation
    max_grad_norm: float


def check_host_memory(key: str, layout: Layout, other: str = DEVICE) -> None:
    """For a key that asks for memory of the hosts.

    Args:
      key: of the config, with its value: "learner.optimizer_memory=pinned_host".
      other: the value that needs none.

    Raises:
      UserError: a device of the layout has no host memory that it can reach by itself.
    """
    for device in layout.mesh.devices.flat:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise UserError(f"config.{key}: {device} has no {HOST} memory, only {', '.join(kinds)}; give {other}")


def placed(shardings: Any, memory: str) -> Any:
    """The same placements, in the hosts' memory where that is asked for."""
    return jax.tree.map(lambda s: s.with_memory_kind(HOST), shardings) if memory == HOST else shardings


def near(tree: Any) -> Any:
    """Inside jit: what lies in host memory is brought to the devices, the rest is as it is."""
    return jax.tree.map(lambda x: x if _is_near(x) else jax.device_put(x, jax.memory.Space.Device), tree)


def _is_near(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Device


def update_from_host(optimizer: Optimizer, gradients: Any, state: Any, params: Any, stacked: list[bool]) -> tuple[Any, Any]:
    """What `optimizer.update` and `optax.apply_updates` do, inside jit, for a state whose moments lie in host memory.

    Args:
      state: of the clip, and of what comes after it.
      stacked: of each parameter, whether its first axis is that of layers, which are then taken one at a time.

    Returns:
      New parameters, and the new state, its moments in host memory.
    """
    inner = optimizer.after_clip
    names: Any = jax.tree.structure(params)
    outline: Any
    like_params = lambda x: jax.tree.structure(x) == names  # noqa: E731
    parts, outline = jax.tree.flatten(state[1], is_leaf=like_params)
    which = [like_params(part) for part in parts]  # moments, not counters
    norm = optax.global_norm(gradients)

    def some(p: list, g: list, moments: list[list]) -> tuple[list, list[list], list]:
        """The update of some parameters; `moments` are lists like `p`. New parameters, moments and counters."""
        brought = iter(near(moments))
        before = outline.unflatten([next(brought) if moment else part for moment, part in zip(which, parts, strict=True)])
        g = [jnp.where(norm < optimizer.max_grad_norm, x, x / norm * optimizer.max_grad_norm) for x in g]
        updates, after = inner.update(g, before, p)
        new = outline.flatten_up_to(after)
        far = jax.device_put([x for x, moment in zip(new, which, strict=True) if moment], jax.memory.Space.Host)
        return optax.apply_updates(p, updates), far, [x for x, moment in zip(new, which, strict=True) if not moment]  # type: ignore[return-value]

    def of(tree: Any, layers: bool) -> list:
        return [x for x, mine in zip(jax.tree.leaves(tree), stacked, strict=True) if mine == layers]

    def arguments(layers: bool) -> tuple[list, list, list[list]]:
        kinds = [of(part, layers) for part, moment in zip(parts, which, strict=True) if moment]
        return of(params, layers), of(gradients, layers), kinds

    def one_layer(i: jax.Array, held: tuple[list, list[list]]) -> tuple[list, list[list]]:
        """All is changed where it lies; as outputs of a scan there would be two of everything."""
        layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), (held[0], layer_g, held[1]))
        new_p, far, _ = some(*layer)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), held, (new_p, far))

    flat_p, flat_m, counters = some(*arguments(False))
    layer_p, layer_g, layer_m = arguments(True)
    layer_p, layer_m = jax.lax.fori_loop(0, len(layer_g[0]), one_layer, (layer_p, layer_m))

    def merged(flat: list, layered: list) -> Any:
        flat_ones, layered_ones = iter(flat), iter(layered)
        return names.unflatten([next(layered_ones if mine else flat_ones) for mine in stacked])

    moments = iter([merged(*pair) for pair in zip(flat_m, layer_m, strict=True)])
    rest = iter(counters)
    new_state = outline.unflatten([next(moments if moment else rest) for moment in which])
    return merged(flat_p, layer_p), (state[0], new_state)
