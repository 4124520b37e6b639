"""The functions that an algorithm is put together from: looked up by name, loaded from a user's file, called by name.

A piece says by the names of its parameters what it wants, so that one written in ten lines takes the place of any other:

    advantage    (rewards, group_ids, valid, ...) -> f32[N] or f32[N, T], and the returns f32[N, T] if it wants `values`
    policy_loss  (logprobs, old_logprobs, advantages, ...) -> f32[N, T], or that and {name: f32[N, T]} to report
    filter       (rewards, group_ids, valid, ...) -> bool[N], which responses stay
    critic_head  a class, (arch, rngs) -> module, hidden states f32[..., D] -> f32[...]

What may be wanted is in `ARRAYS`, and any key of `config.algorithm` besides. An advantage that wants `values` makes the run have
a critic, one that wants `greedy_rewards` makes it take one greedy response a prompt.
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jrl.algorithms.presets import LINEAR, TABLES, Piece, preset
from jrl.errors import UserError

_OF_SAMPLES = {
    "rewards": "f32[N], of the whole response",
    "reward_parts": "{name: f32[N]}, each reward before its weight",
    "reward_weights": "{name: float}",
    "group_ids": "i32[N]",
    "valid": "bool[N], whose reward is known",
    "lens": "i32[N], tokens of the response",
    "truncated": "bool[N], cut off at its length limit",
}
ARRAYS: dict[str, dict[str, str]] = {
    "advantage": _OF_SAMPLES
    | {
        "token_rewards": "f32[N, T], the same rewards on the tokens, a KL in the reward subtracted",
        "mask": "bool[N, T], tokens that the policy chose",
        "values": "f32[N, T], the critic's",
        "greedy_rewards": "f32[N], of the greedy response to the same prompt",
        "rollout_logprobs": "f32[N, T]",
    },
    "policy_loss": {
        "logprobs": "f32[N, T], of the policy that learns; the gradient goes here",
        "old_logprobs": "f32[N, T], before the updates on these samples",
        "rollout_logprobs": "f32[N, T], as sampled",
        "advantages": "f32[N, T]",
        "entropy": "f32[N, T], of the policy that learns",
        "mask": "bool[N, T], tokens with a loss",
        "selected": "bool[N, T], tokens chosen from the whole minibatch",
    },
    "filter": _OF_SAMPLES,
}


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What `config.algorithm` and the trainer's arguments choose."""

    advantage: Callable
    policy_loss: Callable
    filter: Callable
    prepare: Callable | None  # chooses tokens of the whole minibatch before its update
    linear: bool  # the policy loss of a row is 0 where its advantages are
    python: tuple[str, ...]  # which of them are functions given in Python

    @property
    def critic(self) -> bool:
        return "values" in wanted(self.advantage)

    @property
    def greedy(self) -> bool:
        return "greedy_rewards" in wanted(self.advantage)


def choose(algorithm: Mapping[str, Any], functions: Mapping[str, Callable | None]) -> Pieces:
    """The pieces of a run.

    Args:
      algorithm: config.algorithm with every choice made.
      functions: "advantage", "policy_loss", "filter" -> a Python function in place of the key, or None.

    Raises:
      UserError: a name or path that leads nowhere, a function that wants what is not there, a choice that nothing reads.
    """
    found: dict[str, Callable] = {}
    known: dict[str, Piece | None] = {}
    for kind, table in TABLES.items():
        given, name = functions.get(kind), algorithm[kind]
        known[kind] = None if given else table.get(name)
        found[kind] = given or load(f"config.algorithm.{kind}={name}", known[kind].path if known[kind] else name, table)
        _check_wants(kind, found[kind], algorithm)
    loss = known["policy_loss"]
    prepare = load("", loss.prepare, {}) if loss and loss.prepare else None
    if "selected" in wanted(found["policy_loss"]) and prepare is None:
        raise UserError(f"policy_loss {_called(found['policy_loss'])}: selected is there for clip_cov and kl_cov alone")
    _check_read(algorithm, [*found.values(), *([prepare] if prepare else [])])
    python = tuple(kind for kind in TABLES if functions.get(kind))
    return Pieces(**found, prepare=prepare, linear=loss is not None and prepare is None, python=python)


def critic_head_named(name: str) -> Callable | None:
    """The class that `critic.head` names; None for the linear one, and for one that was handed over in Python."""
    return None if name in (LINEAR, PYTHON) else load(f"config.critic.head={name}", name, {LINEAR: None})


# What a run needs for its algorithm, as far as its config tells -----------------------------------------------------------

PYTHON, PYTHON_CRITIC = "python", "python with a critic"  # what the config says of a function that was given in Python


def needs_critic(algorithm: Mapping[str, Any]) -> bool:
    """Whether the advantage wants the critic's values; `algorithm` is config.algorithm with every choice made."""
    name = algorithm["advantage"]
    if name in (PYTHON, PYTHON_CRITIC):
        return name == PYTHON_CRITIC
    known = TABLES["advantage"].get(name)
    return known.critic if known else "values" in wanted(load(f"config.algorithm.advantage={name}", name, {}))


def needs_selection(algorithm: Mapping[str, Any]) -> bool:
    """Whether the policy loss wants tokens chosen from the whole minibatch."""
    known = TABLES["policy_loss"].get(algorithm["policy_loss"])
    return bool(known and known.prepare)


def needs_old_logprobs(algorithm: Mapping[str, Any]) -> bool:
    """Whether the learner has to compute the logprobs before its updates; in the one update on its samples the current
    ones stand for them."""
    a = algorithm
    before = a["kl_in"] == "reward" or a["kl_controller"] == "adaptive" or needs_selection(a)
    return a["proximal"] == "learner" and (before or a["epochs"] * a["minibatches"] > 1)


# Names and paths -------------------------------------------------------------------------------------------------------


def is_path(name: str) -> bool:
    """Whether it is FILE.py:FUNCTION or MODULE:FUNCTION rather than a name."""
    place, colon, function = name.rpartition(":")
    return bool(colon and place.strip() and function.isidentifier())


def load(place: str, path: str, names: Mapping[str, Any]) -> Callable:
    """The function at FILE.py:FUNCTION or MODULE:FUNCTION.

    Args:
      place: the key and its value, for errors.
      names: what might have been meant instead.

    Raises:
      UserError: one line on what is missing or broken.
    """
    if not is_path(path):
        raise UserError(f"{place}: not known; there are {', '.join(names)}, FILE.py:FUNCTION and MODULE:FUNCTION")
    where, _, function = path.rpartition(":")
    try:
        module = _run_file(where) if where.endswith(".py") else importlib.import_module(where)
        found = getattr(module, function)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    except Exception as error:  # whatever a user's module does
        raise UserError(f"{place}: cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not callable(found):
        raise UserError(f"{place}: {function} is no function")
    return found


def _run_file(where: str) -> Any:
    file = pathlib.Path(where).expanduser().absolute()
    if not file.is_file():
        raise UserError(f"no such file {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


# Calling by name -------------------------------------------------------------------------------------------------------


@functools.cache
def wanted(fn: Callable) -> tuple[str, ...]:
    """The names of the parameters that a piece has to be given; those of **more are not known."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(name for name, p in inspect.signature(fn).parameters.items() if p.kind in kinds)


def call(fn: Callable, available: Mapping[str, Any]) -> Any:
    """Calls it with what it wants of what there is; what is not there is left to its default."""
    return fn(**{name: available[name] for name in wanted(fn) if name in available})


def settings(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `config.algorithm` as arguments: a dual clip of 0 is none."""
    return dict(algorithm.items()) | {"dual_clip": algorithm["dual_clip"] or None}


def _called(fn: Callable) -> str:
    return getattr(fn, "__name__", repr(fn))


def _check_wants(kind: str, fn: Callable, algorithm: Mapping[str, Any]) -> None:
    required = {n for n, p in inspect.signature(fn).parameters.items() if p.default is p.empty and n in wanted(fn)}
    # What one piece makes for another is not in the user's hands.
    known = set(ARRAYS[kind]) | set(algorithm)
    if strange := sorted(required - known):
        there = ", ".join(ARRAYS[kind])
        raise UserError(f"{kind} {_called(fn)}: nobody knows its {', '.join(strange)}; there are {there}, and algorithm's keys")


# Choices that the trainer makes itself, some of them idle unless another one is as it says.
_TRAINERS: dict[str, tuple[str, Callable[[Any], bool]] | None] = {
    "advantage": None, "policy_loss": None, "aggregation": None, "dynamic_sampling": None, "filter": ("dynamic_sampling", bool),
    "max_refills": ("dynamic_sampling", bool), "overlong_penalty": None, "overlong_buffer": ("overlong_penalty", bool),
    "overlong_filter": None, "positive_lm_coef": None, "resample": None, "replay_steps": None,
    "resample_power": ("resample", lambda method: method == "power"),
}  # fmt: skip


def _check_read(algorithm: Mapping[str, Any], functions: list[Callable]) -> None:
    """A choice that differs from the preset's and that nothing reads is a mistake."""
    read = {name for fn in functions for name in wanted(fn)}
    pair = ", ".join(f"{kind}={algorithm[kind]}" for kind in ("advantage", "policy_loss"))
    for name, chosen in preset(algorithm["name"]).items():
        where, other = pair, _TRAINERS.get(name)
        if other:
            where = f"{other[0]}={algorithm[other[0]]}"
        idle = not other[1](algorithm[other[0]]) if other else name not in read and name not in _TRAINERS
        if idle and algorithm[name] != chosen:
            raise UserError(f"config.algorithm.{name}={algorithm[name]!r}: has no effect with {where}; leave it out")
    if algorithm["proximal"] != "learner" and "old_logprobs" not in read:
        raise UserError(f"config.algorithm.proximal={algorithm['proximal']!r}: has no effect with {pair}, which has no ratio")
