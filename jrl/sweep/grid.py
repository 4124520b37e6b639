"""What a sweep consists of: an arm for each combination of the grid's values, a run for each arm and seed.

Every run has a directory of its own, SWEEP_DIR/ARM/seedK. `sweep.json` says which sweep the directory belongs to: it may be
continued with more values or more seeds, and with nothing else changed.
"""

import copy
import csv
import dataclasses
import functools
import hashlib
import itertools
import json
import operator
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jrl import config as config_lib
from jrl import jsonl
from jrl.agent_configs import agent_configs
from jrl.config import PRESET
from jrl.config_keys import FREE
from jrl.errors import UserError

FILE, LOCK = "sweep.json", "sweep.lock"
NO_GRID = "base"  # the one arm's name
LONGEST_NAME = 120  # characters; file systems allow 255
# Keys that differ from run to run, and what to give instead.
OWN_KEYS = {
    "seed": "--seeds=N takes 0 to N-1", "run_dir": "give --sweep_dir", "resume": "what has begun is resumed by itself",
    "resume_step": "what has begun is resumed from its newest checkpoint",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arm:
    """One combination."""

    name: str  # of its directory
    values: dict[str, Any]  # grid key -> value, of the key's type
    overrides: dict[str, str]  # key -> text: those of all arms, and this one's values
    settings: dict[str, Any]  # every key but `OWN_KEYS` -> value
    agents: tuple[str, ...]  # their names, where an episode has several

    @property
    def label(self) -> str:
        """In few words: the last part of each key, and its value."""
        return ", ".join(f"{key.rpartition('.')[2]}={shown(value)}" for key, value in self.values.items()) or NO_GRID


@dataclasses.dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    config: str  # the file, and its argument
    arm: Arm
    seed: int
    directory: pathlib.Path

    @property
    def name(self) -> str:
        return f"{self.arm.label}, seed {self.seed}"

    @property
    def log(self) -> pathlib.Path:
        """What the run's process writes to stdout and stderr; beside its directory, in which nothing but a run may be."""
        return self.directory.with_name(f"{self.directory.name}.stderr.log")

    def command(self) -> list[str]:
        """The run in a process of its own, from where it was left if it has begun."""
        keys = {**self.arm.overrides, "seed": self.seed, "run_dir": self.directory, **({"resume": True} if self.begun() else {})}
        return [
            sys.executable, "-m", "jrl.main", f"--config={self.config}", *(f"--config.{k}={v}" for k, v in keys.items())
        ]  # fmt: skip

    def parts(self) -> dict[str, pathlib.Path]:
        """The directories that the run writes, by agent; without agents its own, called ""."""
        return {name: self.directory / name for name in self.arm.agents} or {"": self.directory}

    def begun(self) -> bool:
        return self.directory.is_dir() and any(self.directory.iterdir())

    def result(self) -> dict[str, Any] | None:
        """result.json, of agents each with the agent's name before its keys; None before the run has ended well."""
        found: dict[str, Any] = {}
        for agent, directory in self.parts().items():
            try:
                result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):  # ValueError: it was killed while it wrote
                return None
            found |= {prefixed(agent, key): value for key, value in result.items()}
        return found


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All runs, the first seed of every arm first."""

    config: str
    overrides: dict[str, str]
    grid: dict[str, list[Any]]  # key -> values, of the key's type
    seeds: int
    directory: pathlib.Path
    arms: list[Arm]

    @property
    def runs(self) -> list[Run]:
        return [
            Run(self.config, arm, seed, self.directory / arm.name / f"seed{seed}")
            for seed in range(self.seeds) for arm in self.arms
        ]  # fmt: skip


def prefixed(agent: str, key: str) -> str:
    return f"{agent}/{key}" if agent else key


def read_grid(texts: Iterable[str]) -> dict[str, list[str]]:
    """Key -> values as text, of arguments `KEY=VALUE,VALUE`; a value with a comma in it stands in double quotes.

    Raises:
      UserError: an argument of another form, or a key that is there twice.
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        if not key or not values:
            raise UserError(f"--grid={text}: give a key and its values, --grid KEY=VALUE,VALUE")
        if key in grid:
            raise UserError(f"--grid={text}: {key} has values already; give all of them at once, separated by commas")
        _refuse_own(f"--grid={text}", key)
        grid[key] = [value.strip() for value in next(csv.reader([values], skipinitialspace=True))]
    return grid


def _refuse_own(given: str, key: str) -> None:
    if key in OWN_KEYS:
        raise UserError(f"{given}: the sweep sets {key} for every run; {OWN_KEYS[key]}")


def make_sweep(
    config: str, overrides: Mapping[str, str], grid: Mapping[str, Sequence[str]], seeds: int, directory: str | os.PathLike
) -> Sweep:
    """The sweep with every arm's config validated; nothing is written, and no device is touched.

    Args:
      config: the file, and its argument, as of `jrl.config.load`.
      overrides: key -> text, for all arms.
      grid: key -> texts.

    Raises:
      UserError: naming the arm, unless what is wrong is wrong for all of them alike.
    """
    for key, text in overrides.items():
        _refuse_own(f"--config.{key}={text}", key)
        if key in grid:
            raise UserError(f"--config.{key}={text}: --grid has values for it; leave out one of them")
    arms = _make_arms(config, overrides, grid)
    values: dict[str, list[Any]] = {key: [] for key in grid}
    for key, found in values.items():
        for arm in arms:
            found += [] if arm.values[key] in found else [arm.values[key]]
        if len(found) != len(grid[key]):
            raise UserError(f"--grid={key}={','.join(grid[key])}: a value is there twice; give each once")
    return Sweep(config, dict(overrides), values, seeds, pathlib.Path(directory), arms)


def _make_arms(config: str, overrides: Mapping[str, str], grid: Mapping[str, Sequence[str]]) -> list[Arm]:
    arms: list[Arm] = []
    mistakes: dict[str, str] = {}  # what is wrong -> the first arm of which it is
    for texts in itertools.product(*grid.values()):
        own = dict(zip(grid, texts, strict=True))
        try:
            arms.append(_make_arm(config, {**overrides, **own}, list(grid)))
        except UserError as error:
            mistakes.setdefault(str(error), " ".join(f"{key}={value}" for key, value in own.items()))
    for what, arm in mistakes.items():
        raise UserError(what if len(mistakes) == 1 and not arms else f"arm {arm}: {what}")
    return arms


def _make_arm(config: str, overrides: dict[str, str], keys: Sequence[str]) -> Arm:
    loaded = config_lib.load(config, overrides)
    agents = agent_configs(loaded)
    if loaded.stage == "rl":
        for own in agents.values() or [loaded]:
            config_lib.choose_pieces(own)  # for its errors
    settings = _settings(loaded)
    values = {key: value_of(settings, key) for key in keys}
    return Arm(arm_name(values), values, overrides, settings, tuple(agents))


def _settings(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config_lib.flatten(config).items() if key not in OWN_KEYS}


def check_unchanged(run: Run) -> None:
    """Raises UserError if the config's file no longer says what it said when the sweep was made."""
    now = _settings(config_lib.load(run.config, run.arm.overrides))
    for key, value in run.arm.settings.items():
        if now[key] != value:
            raise UserError(
                f"--config={run.config}: was changed after the sweep began, config.{key} from {value!r} to {now[key]!r}"
            )


def value_of(settings: Mapping[str, Any], key: str) -> Any:
    """A key's value among flat settings; keys below `data.options` and the like are inside of that one's value."""
    free = next((f for f in FREE if key.startswith(f"{f}.")), None)
    if free is None:
        return settings[key]
    return functools.reduce(operator.getitem, key.removeprefix(f"{free}.").split("."), settings[free])


def shown(value: Any) -> str:
    return PRESET if value is None else str(value)


def arm_name(values: Mapping[str, Any]) -> str:
    """A directory's name, the same whatever the order of the grid and whichever other arms there are.

    What a file system or a shell could trip over becomes "_", and what is too long is cut; then a digest keeps names apart.
    """
    text = ",".join(f"{key}={shown(values[key])}" for key in sorted(values)) or NO_GRID
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)[:LONGEST_NAME]
    return safe if safe == text else f"{safe}~{hashlib.sha256(text.encode()).hexdigest()[:8]}"


# The directory -----------------------------------------------------------------------------------------------------------


def identity(sweep: Sweep) -> dict[str, Any]:
    """What sweep.json holds: the grid, the seeds, and every setting that all arms share."""
    base = copy.deepcopy(sweep.arms[0].settings)
    for key in sweep.grid:
        if key in base:
            del base[key]
        else:
            *above, leaf = key.split(".")
            del value_of(base, ".".join(above))[leaf]
    found = {"config": sweep.config, "overrides": sweep.overrides, "grid": sweep.grid, "seeds": sweep.seeds, "base": base}
    return json.loads(jsonl.dumps(found))


def check_directory(sweep: Sweep) -> None:
    """Raises UserError if the directory holds something else than this sweep, or than a smaller part of it."""
    directory, where = sweep.directory, f"--sweep_dir={sweep.directory}"
    there = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{where}: {there} is not a directory that can be written to; choose another")
    if there != directory or not any(path.name != LOCK for path in directory.iterdir()):
        return
    try:
        was = json.loads((directory / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{where}: holds files that are no sweep's; give a new or an empty directory") from None
    except ValueError as error:
        raise UserError(f"{where}: {FILE} is not JSON ({error}); repair it, or give another directory") from None
    difference = _difference(was, identity(sweep))
    if difference:
        raise UserError(f"{where}: holds another sweep: {difference}, or another --sweep_dir")


def _difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """How the sweep of the directory is not a part of this one, and what to give to continue it."""
    if set(was["grid"]) != set(now["grid"]):
        keys = ", ".join(sorted(was["grid"])) or "no key"
        return f"its grid is over {keys}, this one over {', '.join(sorted(now['grid'])) or 'no key'}; give the same keys"
    for key in sorted({*was["base"], *now["base"]}):
        old, new = was["base"].get(key), now["base"].get(key)
        if old != new:
            return f"it has config.{key}={shown(old)}, this one {shown(new)}; give --config.{key}={shown(old)}"
    for key, values in was["grid"].items():
        if gone := [value for value in values if value not in now["grid"][key]]:
            return f"its grid has {key}={shown(gone[0])} too; give that besides"
    return f"it has {was['seeds']} seeds; give --seeds={was['seeds']} or more" if was["seeds"] > now["seeds"] else None


def write_identity(sweep: Sweep) -> None:
    write_whole(sweep.directory / FILE, json.dumps(identity(sweep), indent=1) + "\n")


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file so that at no moment there is half of one."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
