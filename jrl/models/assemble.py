"""Parameters from a reader of tensors, each made directly in its place: a host reads only what its devices hold."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jrl.models.arch import Arch
from jrl.models.decoder import MASTER_DTYPE, Decoder, Params, RewardModel, abstract_params, param_axes
from jrl.models.names import tensors

# (name in the file, index of the slice as stored) -> that part, in any float dtype
Read = Callable[[str, tuple[slice, ...]], np.ndarray]


def assemble(arch: Arch, style: str, read: Read, layout: Any = None, scores: bool = False) -> Params:
    """The parameter dict, float32, on the layout's mesh or on the default device.

    Args:
      style: naming of the tensors, see `jrl.models.names`.
      read: returns a part of a tensor as the file holds it, linear weights [out, in].
      scores: of a reward model.
    """
    model = RewardModel if scores else Decoder
    shapes, axes = abstract_params(arch, model), param_axes(arch, model)
    params: Params = {}
    for path, template, transposed in tensors(arch, style, scores):
        shape, names = at(shapes, path).shape, at(axes, path)
        stacked = "{}" in template

        def part(index, template=template, transposed=transposed, shape=shape, stacked=stacked):
            index = tuple(slice(*s.indices(n)) for s, n in zip(index, shape, strict=True))
            out = np.empty([s.stop - s.start for s in index], MASTER_DTYPE)
            layers = range(index[0].start, index[0].stop) if stacked else [None]
            for i, layer in enumerate(layers):
                inner = index[1:] if stacked else index
                stored = read(template.format(layer), inner[::-1] if transposed else inner)
                (out[i] if stacked else out)[...] = stored.T if transposed else stored
            return out

        if layout is None:
            array = jax.numpy.asarray(part((slice(None),) * len(shape)))
        else:
            array = jax.make_array_from_callback(shape, layout.sharding(names, shape), part)
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = array
    return params


def at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
