"""Scores N samples by weighted reward functions, none of which can stop a run or let a bad value through."""

import dataclasses
import difflib
import importlib.util
import inspect
import logging
import math
import pathlib
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jrl.data.prompts import Prompt
from jrl.errors import UserError
from jrl.rewards import rules, verifiers
from jrl.rewards.runners import Abandonable, Batches, Inline, Rows, Runner
from jrl.rewards.worker import RewardFailure

log = logging.getLogger(__name__)

RewardFn = Callable[..., Any]  # (prompts: list[str], completions: list[str], **columns: list) -> N numbers


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A function of `jrl.rewards.verifiers`, and the module and package behind it."""

    name: str
    module: str
    package: str


REWARDS: dict[str, RewardFn | Verifier] = {
    "exact_match": rules.exact_match,
    "last_number": rules.last_number,
    "first_number": rules.first_number,
    "gsm8k_strict": rules.gsm8k_strict,
    "gsm8k_flexible": rules.gsm8k_flexible,
    "reasoning_gym": Verifier("reasoning_gym", "reasoning_gym", "reasoning-gym"),
    "math_verify": Verifier("math_verify", "math_verify", "math-verify"),
}


@dataclasses.dataclass(frozen=True)
class RewardResult:
    total: np.ndarray  # f32[N], sum of weight * part; 0 where not valid
    parts: dict[str, np.ndarray]  # f32[N] of each function before its weight; 0 where it failed
    valid: np.ndarray  # bool[N], False where any function failed
    failures: dict[str, int]  # samples by "function/kind"; kinds: error, result, timeout, crash, load, nan


class RewardManager:
    """Runs the functions side by side, each with the deadline. Failures are counted, and logged once per kind."""

    def __init__(self, functions: Sequence[tuple[str, RewardFn | str, float]], timeout_s: float):
        """
        Args:
          functions: (name of the part, function, weight); the function is a Python callable or a string: a name in
            `REWARDS`, "module:function" or "file.py:function".
          timeout_s: seconds for one call of `score`; starting a worker process is not counted.

        Raises:
          UserError: unknown or broken function, a package that is not installed, two parts of one name.
        """
        _check_names(functions)
        self._functions: list[tuple[str, Runner, float]] = [(name, _runner(fn), weight) for name, fn, weight in functions]
        self._places = [f"config.reward.functions={fn}" if isinstance(fn, str) else "reward" for _, fn, _ in functions]
        self._timeout_s = timeout_s
        self._logged: set[str] = set()

    @classmethod
    def from_config(cls, section: Any, reward: RewardFn | None = None) -> "RewardManager":
        """From the config's section `reward`; a Python function takes the place of `functions`."""
        if reward is not None:
            return cls([(getattr(reward, "__name__", "reward").strip("<>"), reward, 1.0)], section.timeout_s)
        return cls(parse_functions(section.functions), section.timeout_s)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part in the total."""
        return {name: weight for name, _, weight in self._functions}

    def check_columns(self, columns: Collection[str]) -> None:
        """Makes sure that every function can be called with the data's columns, before anything is sampled for it.

        Raises:
          UserError: naming the columns that a function needs and those that there are.
        """
        for place, (name, runner, _) in zip(self._places, self._functions, strict=True):
            try:
                misfit = runner.misfit(columns)
            except RewardFailure as failure:
                raise UserError(f"{place}: {name} cannot be loaded: {failure.text}") from None
            if misfit:
                raise UserError(f"{place}: {name} {misfit}; the data have {', '.join(sorted(map(str, columns)))}")

    def score_prompts(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> RewardResult:
        """`score` with the texts and the columns of the prompts, one prompt for each completion."""
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        return self.score([prompt.text for prompt in prompts], list(completions), columns)

    def score(self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence]) -> RewardResult:
        """Rewards of N completions.

        Args:
          prompts: N texts as rendered.
          completions: N texts.
          columns: name -> N values, handed to the functions by name.
        """
        n = len(completions)
        lists = {name: list(values) for name, values in columns.items()}
        arguments = (list(prompts), list(completions), lists, self._timeout_s)
        with ThreadPoolExecutor(len(self._functions)) as pool:
            running = [pool.submit(runner.run, *arguments) for _, runner, _ in self._functions]
            outcomes = [future.result() for future in running]
        total, valid = np.zeros(n, np.float32), np.ones(n, bool)
        parts, counts = {}, Counter[str]()
        for (name, _, weight), (rewards, failures) in zip(self._functions, outcomes, strict=True):
            fine = np.isfinite(rewards)
            valid &= fine
            parts[name] = np.where(fine, rewards, np.float32(0))
            total += np.float32(weight) * parts[name]
            for failure in failures:
                self._count(counts, f"{name}/{failure.kind}", failure.samples, failure.text)
            if strange := n - int(fine.sum()) - sum(failure.samples for failure in failures):
                self._count(counts, f"{name}/nan", strange, "the reward is not a finite number")
        return RewardResult(np.where(valid, total, np.float32(0)), parts, valid, dict(counts))

    def _count(self, counts: Counter[str], kind: str, samples: int, text: str) -> None:
        counts[kind] += samples
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("reward %s: %d samples masked: %s (from now on only counted)", kind, samples, text)


def parse_functions(text: str) -> list[tuple[str, str, float]]:
    """(name of the part, function, weight) from "name, module:function*0.5"."""
    functions = []
    for item in text.split(","):
        function, star, weight = (piece.strip() for piece in item.partition("*"))
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = math.nan
        if not function or not math.isfinite(number):
            raise UserError(f"reward.functions={text!r}: {item.strip()!r} is neither NAME nor NAME*WEIGHT")
        functions.append((function.rpartition(":")[2], function, number))
    return functions


def _check_names(functions: Sequence[tuple[str, RewardFn | str, float]]) -> None:
    """Metrics and samples tell the parts of the reward apart by their names alone."""
    seen: dict[str, RewardFn | str] = {}
    for name, fn, _ in functions:
        if name not in seen:
            seen[name] = fn
        elif fn == seen[name]:
            raise UserError(f"reward.functions: {name} occurs more than once; give it once, with the sum of the weights")
        else:
            raise UserError(f"reward.functions: {seen[name]} and {fn} are both called {name}; rename one of the functions")


# Choosing the runner -------------------------------------------------------------------------------------------------


def _runner(fn: RewardFn | str) -> Runner:
    if isinstance(fn, str):
        return _runner_by_name(fn)
    if inspect.iscoroutinefunction(fn) or not callable(fn):
        raise UserError(f"reward {fn!r}: must be a plain function (prompts, completions, **columns) -> numbers")
    try:
        pickled = pickle.dumps(fn)
    except Exception:  # lambdas, closures, bound objects of all kinds
        return Abandonable(fn)
    if b"__main__" in pickled:  # a script's or a notebook's: the worker process has another __main__
        return Abandonable(fn)
    try:
        return Batches(pickled)
    except RewardFailure as failure:
        log.info("reward %r runs in a thread, as a process of its own cannot load it: %s", fn, failure.text)
        return Abandonable(fn)


def _runner_by_name(name: str) -> Runner:
    if ":" in name:
        place, _, function = name.rpartition(":")
        file = pathlib.Path(place).expanduser()
        if place.endswith(".py") and not file.is_file():
            raise UserError(f"reward.functions={name}: no such file {file.absolute()}")
        try:
            return Batches(f"{file.absolute()}:{function}" if place.endswith(".py") else name)
        except RewardFailure as failure:
            raise UserError(f"reward.functions={name}: cannot be loaded: {failure.text}") from None
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {near[0]}? There are" if near else "there are"
        raise UserError(f"reward.functions={name}: unknown; {hint} {', '.join(REWARDS)}, MODULE:FUNCTION, FILE.py:FUNCTION")
    reward = REWARDS[name]
    if not isinstance(reward, Verifier):
        return Inline(reward)
    if importlib.util.find_spec(reward.module) is None:
        raise UserError(f"reward.functions={name}: needs the package {reward.package}; pip install 'jrl[rewards]'")
    return Rows(f"{verifiers.__file__}:{reward.name}", reward.module)
