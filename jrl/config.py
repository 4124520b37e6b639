"""The configuration: how it is built, read and changed, and the checks before any work.

The keys are in `jrl.config_keys`, what does not go together in `jrl.config_conflicts`. A config file's `get_config`
starts from `default_config()`, which is locked, so a misspelt key is an error there, on the command line and in
`validate` alike. The exceptions are `data.options`, whose names belong to whoever makes the data, and `agents.options`.
"""

import ast
import difflib
import functools
import inspect
import pathlib
import re
import runpy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jrl.algorithms.pieces import PYTHON, PYTHON_CRITIC, Pieces, choose
from jrl.algorithms.presets import preset
from jrl.config_conflicts import conflicts
from jrl.config_keys import FREE, KEYS, SECTIONS, Key
from jrl.errors import UserError
from jrl.sharding.memory_kinds import DEVICE

PRESET = "preset"  # on the command line: the value that the preset chooses

# Building and reading ------------------------------------------------------------------------------------------------


def default_config() -> ConfigDict:
    """Every key at its default, locked; `model.path` and `data.train` are empty and have to be set."""
    tree: dict[str, Any] = {}
    for key in KEYS.values():
        *sections, leaf = key.name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = dict(key.default) if isinstance(key.default, dict) else key.default
    config = ConfigDict(tree).lock()
    for name in FREE:
        functools.reduce(getattr, name.split("."), config).unlock()
    return config


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """`{"rollout.group_size": 8, ...}`; `data.options` and `agents.options` stay one value each, a dict."""

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if not isinstance(value, ConfigDict):
                yield prefix + name, value
            elif prefix + name in FREE:
                yield prefix + name, value.to_dict()
            else:
                yield from walk(value, f"{prefix}{name}.")

    return dict(walk(config, ""))


def load(path_with_arg: str, overrides: Mapping[str, Any]) -> ConfigDict:
    """The validated config of a file.

    Args:
      path_with_arg: `configs/NAME.py` or `configs/NAME.py:ARG`; the file defines `get_config()` or `get_config(arg)`.
      overrides: key -> value, as text (as on the command line) or of the key's type.

    Raises:
      UserError: no such file, an error inside it, an unknown key, a value that does not fit.
    """
    config = _run_file(path_with_arg)
    for name, value in overrides.items():
        override(config, name, value)
    validate(config)
    return config


def override(config: ConfigDict, name: str, value: Any) -> None:
    """Sets one key; text is read as the key's type."""
    for free in FREE:
        if name.startswith(f"{free}."):
            _override_free(config, free, name, value)
            return
    if name not in KEYS:
        raise UserError(f"config.{name}={value!r}: {_unknown(name)}")
    value = _typed(KEYS[name], _parse(KEYS[name], value) if isinstance(value, str) else value)
    *sections, leaf = name.split(".")
    node = config
    for section in sections:
        node = node[section]
    node[leaf] = value


def _override_free(config: ConfigDict, free: str, name: str, value: Any) -> None:
    """Sets a value inside of a key that holds names of others' choice."""
    section, _, key = free.rpartition(".")
    options = config[section][key].to_dict()
    *parents, leaf = name.removeprefix(f"{free}.").split(".")
    node = options
    for depth, parent in enumerate(parents, 1):
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            above = ".".join((free, *parents[:depth]))
            raise UserError(f"config.{name}={value!r}: {above} is {node!r} and has no parts; give {above}=VALUE")
    node[leaf] = _literal(value) if isinstance(value, str) else value
    config[section][key] = options


def parse_arg(arg: str | None, **defaults: Any) -> ConfigDict:
    """A config file's argument, `name=value,name=value`, read as the types of the defaults; a bare name means true.

    Raises:
      UserError: a name without a default, or a value of another type.
    """
    values = ConfigDict(defaults)
    for part in (arg or "").split(","):
        if not part.strip():
            continue
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if name not in defaults:
            raise UserError(f"config argument {part.strip()!r}: {name} is not known; there are {', '.join(defaults)}")
        key = Key(name, defaults[name], "argument of the config file")
        values[name] = _typed(key, _parse(key, text if equals else "true"))
    return values.lock()


def _run_file(path_with_arg: str) -> ConfigDict:
    path, separator, arg = path_with_arg.partition(".py:")
    path = f"{path}.py" if separator else path
    file = pathlib.Path(path)
    if not file.is_file():
        here = sorted(str(p) for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        remedy = f"there are {', '.join(here)}" if here else "give its path"
        raise UserError(f"--config={path}: no such file; {remedy}")
    try:
        get_config = runpy.run_path(path)["get_config"]
        if separator and not inspect.signature(get_config).parameters:
            raise UserError(f"takes no argument, but got {arg!r}")
        config = get_config(arg) if separator else get_config()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:
        raise UserError(f"{path}: {_explain(error, path)}") from error
    if not isinstance(config, ConfigDict):
        got = type(config).__name__
        raise UserError(f"{path}: get_config returns {got}; return jrl.config.default_config(), changed")
    return config


def _explain(error: Exception, path: str) -> str:
    """One line on what went wrong inside a config file."""
    if isinstance(error, KeyError) and error.args == ("get_config",):
        return "defines no get_config()"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where, line = (f"line {frames[-1].lineno}: ", frames[-1].line or "") if frames else ("", "")
    # ml_collections says `Key "x" does not exist` on writing and `'x'` on reading; only the line has the section.
    named = re.match(r"""\W*(?:Key "(\w+)" does not exist|(\w+)\W*(?:$|\\n))""", str(error))
    if named and isinstance(error, AttributeError | KeyError):
        leaf = named[1] or named[2]
        dotted = re.search(rf"\b\w+\.((?:\w+\.)*{leaf})\b", line)
        name = dotted[1] if dotted else leaf
        return f"{where}config.{name}: {_unknown(name)}"
    assigned = re.match(r"\w+\.([\w.]+)\s*=\s*(.*)", line)
    if isinstance(error, TypeError) and assigned and assigned[1] in KEYS:
        key = KEYS[assigned[1]]
        return f"{where}config.{key.name} = {assigned[2]}: expected {type_name(key)} ({key.doc})"
    return f"{where}{type(error).__name__}: " + " ".join(str(error).split())[:300]


def with_python_data(config: ConfigDict, train: bool, held_out: bool) -> ConfigDict:
    """A copy for a run whose data are handed over in Python: the sources are called "python", reasoning-gym's keys fall away."""
    config = ConfigDict(config).copy_and_resolve_references()
    if train:
        config.data.train, config.data.repeats = "python", False
    if held_out:
        config.data.eval = "python"
    if not any(config.data[kind].startswith("reasoning_gym:") for kind in ("train", "eval")):
        config.data.options = ConfigDict()
    return config


# Validation ----------------------------------------------------------------------------------------------------------


def validate(config: ConfigDict) -> None:
    """Checks names, types, values and how they go together.

    Raises:
      UserError: one line with the key, its value and the remedy.
    """
    values = flatten(config)
    for name, value in values.items():
        if name not in KEYS:
            raise UserError(f"config.{name}={value!r}: {_unknown(name)}")
    for name, key in KEYS.items():
        if name not in values:
            raise UserError(f"config.{name}: is missing; start from jrl.config.default_config()")
        value = _typed(key, values[name])
        if key.rule and value is not None and not key.rule.holds(value):
            raise UserError(f"config.{name}={value!r}: must be {key.rule.text} ({key.doc})")
    resolved = with_preset(config)
    for name, remedy in conflicts(resolved):
        raise UserError(f"config.{name}={flatten(resolved)[name]!r}: {remedy}")


def with_preset(config: ConfigDict, given: Pieces | None = None) -> ConfigDict:
    """A copy in which the preset has made every choice that nobody else has.

    Args:
      given: the pieces of the run; those that are Python functions take the place of the names.
    """
    config = ConfigDict(config).copy_and_resolve_references()
    for name, value in preset(config.algorithm.name).items():
        if config.algorithm[name] is None:
            config.algorithm[name] = value
    for kind in given.python if given else ():
        config.algorithm[kind] = PYTHON_CRITIC if kind == "advantage" and given.critic else PYTHON
    return config


def choose_pieces(config: ConfigDict, **functions: Callable | None) -> Pieces:
    """The functions that a config's algorithm is put together from, see `jrl.algorithms.pieces`.

    Args:
      functions: advantage, policy_loss, filter; Python functions in place of the keys.

    Raises:
      UserError: a piece that cannot be had, or a choice that these pieces do not read.
    """
    pieces = choose(with_preset(config).algorithm, functions)
    if not pieces.critic and config.critic.optimizer_memory != DEVICE:
        memory = config.critic.optimizer_memory
        raise UserError(f"config.critic.optimizer_memory={memory!r}: there is no critic; give {DEVICE}, or algorithm.name=ppo")
    if pieces.greedy and config.max_staleness:
        told = f"config.max_staleness={config.max_staleness}"
        raise UserError(f"{told}: the advantage compares with a greedy response of the same weights; give 0")
    return pieces


# Values and names ----------------------------------------------------------------------------------------------------

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a dict"}
_WORDS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def type_name(key: Key) -> str:
    return _TYPES[key.kind]


def _wrong_type(key: Key, value: Any) -> UserError:
    return UserError(f"config.{key.name}={value!r}: expected {type_name(key)} ({key.doc})")


def _parse(key: Key, text: str) -> Any:
    """Text from the command line as the type of the key's default; "preset" gives a choice back to the preset."""
    kind = key.kind
    if key.default is None and text == PRESET:
        return None
    if kind is str:
        return text
    try:
        return _WORDS[text.lower()] if kind is bool else _literal(text) if kind is dict else kind(text)
    except (KeyError, ValueError):
        raise _wrong_type(key, text) from None


def _typed(key: Key, value: Any) -> Any:
    """The value, if it has the key's type; whole numbers pass for numbers, True does not pass for 1."""
    kind = key.kind
    if key.default is None and value is None:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong_type(key, value)
    return value


def _literal(text: str) -> Any:
    """A Python literal, true or false, or else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant: the same last part elsewhere, or the most similar spelling."""
    names = list(names)
    leaf = name.rpartition(".")[2]
    same_leaf = [n for n in names if n.rpartition(".")[2] == leaf]
    similar_leaf = [n for n in names if difflib.get_close_matches(leaf, [n.rpartition(".")[2]], 1, 0.75)]
    for candidates, cutoff in ((same_leaf, 0.0), (names, 0.8), (similar_leaf, 0.0), (names, 0.6)):
        if found := difflib.get_close_matches(name, candidates, 1, cutoff):
            return found[0]
    return None


def _unknown(name: str) -> str:
    if name in SECTIONS:
        return f"is a section, not a key; it has {', '.join(n for n in KEYS if n.startswith(f'{name}.'))}"
    meant = closest(name, [*KEYS, *SECTIONS])
    return "there is no such key; " + (f"did you mean {meant}?" if meant else "python -m jrl.main --help lists all")
