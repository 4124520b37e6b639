"""Scores N samples by weighted reward functions, none of which can stop a run or let a bad value through."""

import dataclasses
import difflib
import importlib.util
import inspect
import itertools
import logging
import math
import os
import pathlib
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jrl.config import default_config
from jrl.config_conflicts import OF_REWARDS
from jrl.data.prompts import Prompt
from jrl.errors import UserError
from jrl.rewards import formats, rules, sandbox, verifiers
from jrl.rewards.per_sample import PerSample
from jrl.rewards.remote import remote
from jrl.rewards.runners import Abandonable, Batches, Inline, Outcome, Process, Row, Runner
from jrl.rewards.worker import RewardFailure

log = logging.getLogger(__name__)

Arguments = tuple[list, list, dict[str, list]]  # prompts, completions, columns
RewardFn = Callable[..., Any]  # (prompts: list[str], completions: list[str], **columns: list) -> N numbers


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A function of `jrl.rewards.verifiers`, and the module and package behind it."""

    name: str
    module: str
    package: str


@dataclasses.dataclass(frozen=True)
class Configured:
    """A reward that needs settings: `make` gives its runner from the config's section `reward`."""

    make: Callable[[Any], Runner]


REWARDS: dict[str, RewardFn | Verifier | Configured] = {
    "exact_match": rules.exact_match,
    "last_number": rules.last_number,
    "first_number": rules.first_number,
    "gsm8k_strict": rules.gsm8k_strict,
    "gsm8k_flexible": rules.gsm8k_flexible,
    "reasoning_gym": Verifier("reasoning_gym", "reasoning_gym", "reasoning-gym"),
    "math_verify": Verifier("math_verify", "math_verify", "math-verify"),
    "think_answer": formats.think_answer,
    "regex": Configured(lambda section: _regex(section)),
    "length_penalty": Configured(lambda section: Inline(formats.length_penalty(section.length_free, section.length_full))),
    "python_tests": Configured(lambda section: _python_tests(section)),
    "remote": Configured(lambda section: remote(section.remote.to_dict())),
}
HANG_SHARE = 0.25  # of the deadline: how long one sample may take where each is scored by itself
LENGTHS = "completion_tokens"  # the column that the trainer adds to the data's


@dataclasses.dataclass(frozen=True)
class RewardResult:
    total: np.ndarray  # f32[N], sum of weight * part; 0 where not valid
    parts: dict[str, np.ndarray]  # f32[N] of each function before its weight; 0 where it failed
    valid: np.ndarray  # bool[N], False where any function failed
    failures: dict[str, int]  # samples by "function/kind"; kinds: error, result, timeout, crash, load, nan


class RewardManager:
    """Runs the functions side by side, each with the deadline. Failures are counted, and logged once per kind."""

    def __init__(self, functions: Sequence[tuple[str, RewardFn | Runner | str, float]], timeout_s: float, section: Any = None):
        """
        Args:
          functions: (name of the part, function, weight); the function is a Python callable, a runner, or a string: a name in
            `REWARDS`, "module:function" or "file.py:function".
          timeout_s: seconds for one call of `score`; starting a worker process is not counted.
          section: the config's section `reward`, for the functions that need settings; by default with its defaults.

        Raises:
          UserError: unknown or broken function, a package that is not installed, two parts of one name.
        """
        _check_names(functions)
        section = default_config().reward if section is None else section
        self._functions: list[tuple[str, Runner, float]] = [
            (name, _runner(fn, section), weight) for name, fn, weight in functions
        ]
        self._places = [f"config.reward.functions={fn}" if isinstance(fn, str) else "reward" for _, fn, _ in functions]
        self._timeout_s = timeout_s
        self._logged: set[str] = set()

    @classmethod
    def from_config(
        cls, section: Any, reward: RewardFn | None = None, given: Mapping[str, Runner] | None = None
    ) -> "RewardManager":
        """From the config's section `reward`; a Python function takes the place of `functions`.

        Args:
          given: runners for names that stand for nothing in `REWARDS`.
        """
        if reward is not None:
            return cls([(getattr(reward, "__name__", "reward").strip("<>"), reward, 1.0)], section.timeout_s, section)
        runners = given or {}
        functions = [(name, runners.get(fn, fn), weight) for name, fn, weight in parse_functions(section.functions)]
        return cls(functions, section.timeout_s, section)

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
                misfit = runner.misfit({*columns, LENGTHS})
            except RewardFailure as failure:
                raise UserError(f"{place}: {name} cannot be loaded: {failure.text}") from None
            if misfit:
                raise UserError(f"{place}: {name} {misfit}; the data have {', '.join(sorted(map(str, columns)))}")

    def submit(self, prompt: Prompt, completion: str, tokens: int) -> None:
        """Starts what can be scored of one sample by itself, for a call of `score_prompts` that will ask for it.

        Args:
          tokens: of the completion.
        """
        for _, runner, _ in self._functions:
            if isinstance(runner, PerSample):
                runner.submit(prompt.text, completion, prompt.columns | {LENGTHS: tokens}, self._timeout_s)

    def score_prompts(
        self, prompts: Sequence[Prompt], completions: Sequence[str], tokens: Sequence[int], mine: Sequence[bool] | None = None
    ) -> RewardResult:
        """`score` with the texts and the columns of the prompts, one prompt for each completion.

        Args:
          tokens: how many each completion has, as the column `completion_tokens`.
          mine: see `score`.
        """
        names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
        columns: dict[str, Sequence] = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
        return self.score(
            [prompt.text for prompt in prompts], list(completions), columns | {LENGTHS: [int(n) for n in tokens]}, mine
        )

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence],
        mine: Sequence[bool] | None = None,
    ) -> RewardResult:  # fmt: skip
        """Rewards of N completions.

        Args:
          prompts: N texts as rendered.
          completions: N texts.
          columns: name -> N values, handed to the functions by name.
          mine: of the processes of a run, which each give this all completions, the ones that this process is to score; by
            default all.
        """
        n = len(completions)
        rows = np.arange(n) if mine is None else np.flatnonzero(mine)
        everything: Arguments = (list(prompts), list(completions), {name: list(values) for name, values in columns.items()})
        own = everything if len(rows) == n else _picked(everything, rows)

        def ask(runner: Runner) -> Outcome:
            prompts, completions, columns = everything if _of_all(runner) else own
            return runner.run(prompts, completions, columns, self._timeout_s)

        with ThreadPoolExecutor(len(self._functions)) as pool:
            running = [pool.submit(ask, runner) for _, runner, _ in self._functions]
            outcomes = [future.result() for future in running]
        if mine is not None:
            outcomes = self._joined(outcomes, rows, n)
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

    def _joined(self, outcomes: list[Outcome], rows: np.ndarray, n: int) -> list[Outcome]:
        """With what the other processes have scored."""
        from jrl.sharding.hosts import gather  # here, as workers that import this package need no jax

        alone = [not _of_all(runner) for _, runner, _ in self._functions]
        parts = gather((rows, list(itertools.compress(outcomes, alone))), "the others' rewards")
        joined = []
        for number in range(sum(alone)):
            rewards = np.full(n, np.nan, np.float32)
            for theirs, made in parts:
                rewards[theirs] = made[number][0]
            joined.append((rewards, [failure for _, made in parts for failure in made[number][1]]))
        left = iter(joined)
        return [next(left) if own else outcome for own, outcome in zip(alone, outcomes, strict=True)]

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


def _of_all(runner: Runner) -> bool:
    """Whether a reward is computed by all processes of a run together, on all samples."""
    return getattr(runner, "of_all", False)


def _picked(arguments: Arguments, rows: np.ndarray) -> Arguments:
    pick = lambda values: [values[i] for i in rows]  # noqa: E731
    prompts, completions, columns = arguments
    return pick(prompts), pick(completions), {name: pick(values) for name, values in columns.items()}


def _check_names(functions: Sequence[tuple[str, RewardFn | Runner | str, float]]) -> None:
    """Metrics and samples tell the parts of the reward apart by their names alone."""
    seen: dict[str, RewardFn | Runner | str] = {}
    for name, fn, _ in functions:
        if name not in seen:
            seen[name] = fn
        elif fn == seen[name]:
            raise UserError(f"reward.functions: {name} occurs more than once; give it once, with the sum of the weights")
        else:
            raise UserError(f"reward.functions: {seen[name]} and {fn} are both called {name}; rename one of the functions")


# Choosing the runner -------------------------------------------------------------------------------------------------


def _runner(fn: RewardFn | Runner | str, section: Any) -> Runner:
    if isinstance(fn, str):
        return _runner_by_name(fn, section)
    if not callable(fn) and hasattr(fn, "misfit"):
        return fn
    if inspect.iscoroutinefunction(fn) or not callable(fn):
        raise UserError(f"reward {fn!r}: must be a plain function (prompts, completions, **columns) -> numbers")
    try:
        pickled = pickle.dumps(fn)
    except Exception:  # lambdas, closures, bound objects of all kinds
        return Abandonable(fn)
    if b"__main__" in pickled:  # a script's or a notebook's: the worker process has another __main__
        return Abandonable(fn)
    try:
        return _users(pickled, section)
    except RewardFailure as failure:
        log.info("reward %r runs in a thread, as a process of its own cannot load it: %s", fn, failure.text)
        return Abandonable(fn)


def _runner_by_name(name: str, section: Any) -> Runner:
    if ":" in name:
        place, _, function = name.rpartition(":")
        file = pathlib.Path(place).expanduser()
        if place.endswith(".py") and not file.is_file():
            raise UserError(f"reward.functions={name}: no such file {file.absolute()}")
        try:
            return _users(f"{file.absolute()}:{function}" if place.endswith(".py") else name, section)
        except RewardFailure as failure:
            raise UserError(f"reward.functions={name}: cannot be loaded: {failure.text}") from None
    if name not in REWARDS:
        names = dict.fromkeys((*REWARDS, *OF_REWARDS))  # with those that a trainer makes
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? There are" if near else "there are"
        raise UserError(f"reward.functions={name}: unknown; {hint} {', '.join(names)}, MODULE:FUNCTION, FILE.py:FUNCTION")
    reward = REWARDS[name]
    if isinstance(reward, Configured):
        return reward.make(section)
    if not isinstance(reward, Verifier):
        return Inline(reward)
    if importlib.util.find_spec(reward.module) is None:
        raise UserError(f"reward.functions={name}: needs the package {reward.package}; pip install 'jrl[rewards]'")
    return _rows([Process(f"{verifiers.__file__}:{reward.name}", reward.module) for _ in range(_workers(section))])


def _users(spec: bytes | str, section: Any) -> Runner:
    """A user's function, of all samples or, as its parameters say, of one. Raises RewardFailure if it cannot be loaded."""
    process = Process(spec)
    if process.ask("per_sample"):
        return _rows([process, *(Process(spec) for _ in range(_workers(section) - 1))])
    return Batches(process)


def _rows(processes: Sequence[Process]) -> PerSample:
    return PerSample([Row(process) for process in processes], share=HANG_SHARE)


def _workers(section: Any) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return section.workers or cores


def _regex(section: Any) -> Runner:
    try:
        re.compile(section.pattern)
    except re.error as error:
        raise UserError(f"config.reward.pattern={section.pattern}: no regular expression: {error}") from None
    if not section.pattern:
        raise UserError("config.reward.pattern=: the reward regex needs an expression; give one")
    spec, options = f"{formats.__file__}:regex", {"pattern": section.pattern}
    return _rows([Process(spec, options=options) for _ in range(_workers(section))])


def _python_tests(section: Any) -> Runner:
    options = section.sandbox.to_dict()
    place, weak = "config.reward.functions=python_tests", "--config.reward.sandbox.allow_weak=True"
    if options["wall_s"] > HANG_SHARE * section.timeout_s - sandbox.LATE_S:
        least = (options["wall_s"] + sandbox.LATE_S) / HANG_SHARE
        raise UserError(
            f"config.reward.sandbox.wall_s={options['wall_s']}: a sample may take a quarter of reward.timeout_s="
            f"{section.timeout_s}, in which the sandbox needs {sandbox.LATE_S} s; give a timeout_s of {least:g} or more"
        )
    try:
        weakness, kept = sandbox.check(options)
    except OSError as error:
        raise UserError(
            f"{place}: no sandbox that holds can be made here ({error}); allow unprivileged user namespaces, or give {weak} to "
            "run the programs with your own rights but for some limits"
        ) from None
    broken = [promise for promise, holds in kept.items() if not holds]
    log.info("sandbox: seen to hold: %s", ", ".join(promise for promise, holds in kept.items() if holds))
    if (broken or weakness) and not options["allow_weak"]:
        raise UserError(f"{place}: the sandbox does not keep what it promises ({', '.join(broken)}); give {weak} to go on")
    if broken or weakness:
        log.warning("sandbox: WEAK (%s); NOT kept: %s", weakness, ", ".join(broken) or "nothing of what was tried")
    spec = f"{sandbox.__file__}:python_tests"
    return _rows([Process(spec, options=options) for _ in range(_workers(section))])
