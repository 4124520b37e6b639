"""The process in which reward functions run that could hang or crash: `python worker.py FD`.

It answers pickled messages on the socket FD: ("load", sys.path, spec, module, options) first, then ("batch", prompts,
completions, columns), ("row", prompt, completion, columns of the row), ("misfit", arguments, names of columns) or
("per_sample",). A reply is ("ok", value) or (kind of failure, text).
The file runs as a script that needs neither jrl nor jax, so a worker starts fast and never opens an accelerator.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np


class RewardFailure(Exception):
    """A reward function gave no usable rewards; `kind` is error, result, timeout, crash or load."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind, self.text = kind, text


def call(fn: Callable, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence]) -> np.ndarray:
    """f32[N] from a reward function, which gets the columns that its signature takes.

    Raises:
      RewardFailure: it raised, or returned something other than N numbers. None among them counts as NaN.
    """
    try:
        result = fn(prompts, completions, **accepted(fn, columns))
        rewards = np.asarray(result.tolist() if hasattr(result, "tolist") else result)
    except RewardFailure:
        raise
    except (Exception, SystemExit) as error:
        raise RewardFailure("error", describe(error)) from error
    if rewards.dtype == object and all(x is None or isinstance(x, float | int) for x in rewards.flat):
        rewards = rewards.astype(np.float32)  # None becomes NaN
    if rewards.dtype.kind not in "biuf" or rewards.shape != (len(completions),):
        got = f"{rewards.dtype} of shape {rewards.shape}" if rewards.ndim else type(result).__name__
        raise RewardFailure("result", f"returned {got}, not {len(completions)} numbers, one for each completion")
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and masked as such
        return rewards.astype(np.float32)


def accepted(fn: Callable, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that are parameters of the function; all if it has **kwargs or no signature."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return dict(columns)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(columns)
    return {name: values for name, values in columns.items() if name in parameters}


def misfit(fn: Callable, arguments: Sequence[str], columns: Iterable[str]) -> str:
    """Why no call `fn(*arguments, **columns)` can work; "" where it may.

    The outermost function alone is asked, as a decorator may itself fill in what the function inside of it needs.
    """
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # it has none to ask
        return ""
    named = accepted(fn, dict.fromkeys(columns))
    try:
        filled = {*signature.bind_partial(*arguments).arguments, *named}
        wanted = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        missing = [repr(p.name) for p in wanted if p.default is p.empty and p.name not in filled]
        if missing:
            return f"needs the column{'s' * (len(missing) > 1)} {', '.join(missing)}"
        signature.bind(*arguments, **named)
    except TypeError as error:
        return f"cannot be called with ({', '.join(arguments)}, **columns): {error}"
    return ""


def per_sample(fn: Callable) -> bool:
    """Whether a function is of one sample, `fn(completion, ...)`, and not of all, `fn(prompts, completions, ...)`."""
    try:
        return "completion" in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False


def row(fn: Callable, prompt: str, completion: str, columns: Mapping[str, Any]) -> float:
    """The reward of one sample; a column that the function needs and the row lacks is None."""
    given = {**columns, "prompt": prompt, "completion": completion}
    parameters = inspect.signature(fn).parameters.values()
    needed = {p.name: None for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return float(fn(**needed | accepted(fn, given)))


def describe(error: BaseException) -> str:
    """What was raised and where, in one line."""
    where = traceback.extract_tb(error.__traceback__)
    at = f" ({where[-1].filename}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{at}"


def load(spec: bytes | str, module: str = "", options: Mapping[str, Any] | None = None) -> Callable:
    """A function from "module:function", "file.py:function" or a pickle of it; `module` is imported besides.

    With `options` it is what the function so named returns for them.
    """
    if module:
        importlib.import_module(module)
    found = pickle.loads(spec) if isinstance(spec, bytes) else _by_name(spec)
    return found if options is None else found(**options)


def _by_name(spec: str) -> Callable:
    place, _, name = spec.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    file = importlib.util.spec_from_file_location(f"reward_{os.path.basename(place)[:-3]}", place)
    if file is None or file.loader is None:
        raise ImportError(place)
    sys.modules[file.name] = loaded = importlib.util.module_from_spec(file)  # dataclasses look their module up
    sys.path.append(os.path.dirname(place))
    file.loader.exec_module(loaded)
    return getattr(loaded, name)


def _attempt(action: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    try:
        return "ok", action(*arguments)
    except RewardFailure as failure:
        return failure.kind, failure.text
    except (Exception, SystemExit) as error:
        return "error", describe(error)


_ACTIONS: dict[str, Callable[..., Any]] = {"batch": call, "row": row, "misfit": misfit, "per_sample": per_sample}


def _serve(connection: Connection) -> None:
    fn: Any = None  # not callable yet
    while True:
        status, message = _attempt(pickle.loads, connection.recv_bytes())
        if status != "ok":
            connection.send((status, message))
        elif message[0] == "load":
            sys.path[:] = message[1]
            status, fn = _attempt(load, *message[2:])
            connection.send((status, None if status == "ok" else fn))
        else:
            connection.send(_attempt(_ACTIONS[message[0]], fn, *message[1:]))


def _leave_with_parent() -> None:
    """Ends this process when its parent is gone, even in the middle of a reward that never returns."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # the parent closed the connection
        _serve(Connection(int(sys.argv[1])))
