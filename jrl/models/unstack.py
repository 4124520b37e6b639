"""The layers of a model one by one, as views of the stacked weights: no byte is copied.

A scan over stacked weights cuts each layer's out of the stack before it multiplies with them, and XLA on CPU does that by
copying: a quarter of the time of a decode step of 32 sequences. A program that takes the layers as separate arguments reads
them where they lie, and takes several times as long to compile. On a CPU an array can stand on memory that another one
owns, so both programs can be given the same weights.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jrl.errors import UserError

LEAST_TOKENS = 32  # compiling SmolLM2 takes about 10 s longer, a step of 32 sequences nearly 30 ms less


def unstack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters with `layers` a tuple of L trees instead of one whose leaves have a leading axis L.

    Args:
      params: arrays on CPU devices, their axis of layers not split. To donate or delete them invalidates the result.
    """
    leaves, structure = jax.tree.flatten(params["layers"])
    columns = [_views(x) for x in leaves]
    return {**params, "layers": tuple(jax.tree.unflatten(structure, layer) for layer in zip(*columns, strict=True))}


def worth_it(choice: str, platform: str, new_tokens: int) -> bool:
    """Whether to decode with the layers one by one.

    Args:
      choice: "on", "off", or "auto": on a CPU, where responses are long enough to earn the longer compilation back in a few
        steps.
      platform: of the devices.
      new_tokens: the most of a response.

    Raises:
      UserError: "on" where arrays cannot share memory.
    """
    if choice == "on" and platform != "cpu":
        raise UserError(
            f"layers are taken one by one, without a copy of them, on a CPU only, and this is {platform}; choose auto"
        )
    return choice == "on" or (choice == "auto" and platform == "cpu" and new_tokens >= LEAST_TOKENS)


def _views(stacked: jax.Array) -> list[jax.Array]:
    """[L, ...] to L arrays [...] on the same memory, split over the same devices."""
    [platform] = {device.platform for device in stacked.devices()}
    assert platform == "cpu", platform
    shards = [(np.asarray(shard.data), shard.device) for shard in stacked.addressable_shards]
    cut = [[jax.device_put(host[i], device, may_alias=True) for host, device in shards] for i in range(stacked.shape[0])]
    sharding = stacked.sharding
    if not isinstance(sharding, NamedSharding):
        return [layer for [layer] in cut]
    assert not sharding.spec or sharding.spec[0] is None, sharding
    one = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return [jax.make_array_from_single_device_arrays(stacked.shape[1:], one, layer) for layer in cut]
