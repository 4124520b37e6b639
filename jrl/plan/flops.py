"""Operations of a program, counted in its jaxpr: every matrix product, with the trips of the scans that it is in."""

import math
from typing import Any

from jax.extend import core


def matmul_flops(jaxpr: Any) -> float:
    """Multiplications and additions of all matrix products of a (closed) jaxpr, on all devices together.

    A scan counts its length, a `while` one trip, a conditional its costliest branch, a `shard_map` once for each of its
    devices. Pallas kernels are not looked into.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        a, b = (v.aval.shape for v in equation.invars)
        return _product_flops(a, b, params["dimension_numbers"])
    if name == "pallas_call":
        return 0.0
    inner = [matmul_flops(sub) for value in params.values() for sub in _jaxprs(value)]
    if name == "cond":
        return max(inner, default=0.0)
    if name == "scan":
        return params["length"] * sum(inner)
    return sum(inner) * (params["mesh"].size if name == "shard_map" else 1)


def _jaxprs(value: Any) -> list[Any]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [v for v in values if isinstance(v, core.Jaxpr | core.ClosedJaxpr)]


def _product_flops(a: tuple[int, ...], b: tuple[int, ...], dimension_numbers: Any) -> float:
    (contracted, _), (batch, _) = dimension_numbers
    shared = math.prod(a[i] for i in (*contracted, *batch))
    return 2.0 * math.prod(a) * math.prod(b) / shared if shared else 0.0
