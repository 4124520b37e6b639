"""Compiles an engine's programs before anybody asks for them; those with few sizes (`jrl.rollout.sizes.FewSizes`) only.

Nothing is computed: a program that has been lowered and compiled for arrays of some shapes is there when it is called with
such arrays. Left out are programs of speculation, and programs of the weights' own way to the engine.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jrl.rollout.engine import Engine
from jrl.rollout.paged_attention import Table
from jrl.rollout.programs import Slots
from jrl.rollout.sizes import FewSizes


def warm_up(engine: Engine) -> Iterator[tuple[int, int]]:
    """Compiles one program after the other, what most requests want first; yields how many there are so far, and will be.

    The engine is idle, made with `few_programs`, and its weights are loaded. Whoever stops early leaves the rest to be
    compiled when it is wanted.
    """
    assert isinstance(engine.sizes, FewSizes) and engine.idle and engine.params is not None
    programs = list(_programs(engine, engine.sizes))
    for done, compile_one in enumerate(programs, 1):
        compile_one()
        yield done, len(programs)


def _programs(engine: Engine, sizes: FewSizes) -> Iterator[Callable[[], None]]:
    tables = list(sizes.tables())
    prefills = sorted(sizes.prefill_calls(False), key=lambda size: (size[2] > 0, size[0] * size[1], size[2]))
    yield functools.partial(_copy, engine, sizes)
    for controlled, best in ((False, 0), (True, 0), (False, sizes.best[-1]), (True, sizes.best[-1])):
        yield from (functools.partial(_decode, engine, size, best, controlled) for size in tables)
        if not controlled and not best:  # with these, most requests are served
            yield from (functools.partial(_prefill, engine, size, False) for size in prefills)
    yield from (functools.partial(_prefill, engine, size, True) for size in sizes.prefill_calls(True))


def _compile(program: Any, *args: Any) -> None:
    program.lower(*args).compile()


def _copy(engine: Engine, sizes: FewSizes) -> None:
    pages = engine.rows(np.zeros((engine.replicas, sizes.copies(1)), np.int32))
    engine.compiled.note("copy", sizes.copies(1))
    _compile(engine.programs.copy, engine.pool, pages, pages)


def _prefill(engine: Engine, size: tuple[int, int, int], score: bool) -> None:
    prompts = jax.tree.map(engine.rows, engine.no_prompts(*size))
    engine.compiled.note("prefill", score, *size)
    _compile(engine.programs.prefill, score, engine.params, engine.pool, prompts)


def _decode(engine: Engine, size: tuple[int, int], best: int, controlled: bool) -> None:
    rows, width = size
    slots = engine.slots.lens.shape[1]
    zeros = lambda *shape: np.zeros((engine.replicas, *shape), np.int32)  # noqa: E731
    own = (zeros(rows, width), zeros(rows), zeros(slots), zeros(slots))
    table = Table(*own, zeros(0, 1), zeros(0), zeros(0, 1), zeros(slots))
    engine.compiled.note("decode", *(x.shape[1:] for x in table), best, controlled)
    controls = engine.controls.warm_up() if controlled else None
    _compile(
        engine.programs.decode, best, engine.decode_params, engine.pool, jax.tree.map(engine.rows, table),
        Slots(*map(engine.rows, engine.slots)), controls, engine.key, np.int32(0),
    )  # fmt: skip
