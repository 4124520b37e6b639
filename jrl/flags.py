"""Command lines with one flag for each field of a dataclass."""

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from jrl.errors import UserError

S = TypeVar("S")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help says more")


def read_flags(kind: type[S], prog: str, about_all: str, about: Mapping[str, str], args: Sequence[str]) -> S:
    """A dataclass of settings from a command line with one flag for each of its fields; `about` is their help.

    The flag of a field of type `tuple[str, ...]` may be given several times.

    Raises:
      UserError: a flag that does not exist, lacks its value, or has a value of another type.
    """
    parser = _Parser(prog=prog, description=about_all, allow_abbrev=False)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.type is bool:
            parser.add_argument(f"--{field.name}", action="store_true", help=about[field.name])
            continue
        if field.type == tuple[str, ...]:
            parser.add_argument(f"--{field.name}", action="append", default=[], metavar="X", help=about[field.name])
            continue
        of = str if field.type == str | None else field.type
        needed = field.default is dataclasses.MISSING
        shown = "" if needed or field.default in (None, "", 0) else f" [{field.default}]"
        default = None if needed else field.default
        parser.add_argument(
            f"--{field.name}", type=of, required=needed, default=default, metavar="X", help=about[field.name] + shown
        )
    values = vars(parser.parse_args(args))
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def without_config(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command's own arguments, and those that `jrl.main.parse` reads: --config and --config.KEY, with their values."""
    own: list[str] = []
    config: list[str] = []
    side = own
    for arg in args:
        if arg.startswith("-") and not arg[1:2].isdigit():  # else it is the value of the flag before it
            side = config if re.match(r"--?(no)?config\b", arg) else own
        side.append(arg)
    return own, config


def check_values(settings: Any, least: Mapping[str, float], choices: Mapping[str, Sequence[str]] = MappingProxyType({})) -> None:
    """Raises UserError for a number below the least, a port that does not exist, or a word that is not among the choices."""
    for name, smallest in least.items():
        value = getattr(settings, name)
        if not value >= smallest or (name == "replica" and value == 0):
            raise UserError(f"--{name}={value}: must be at least {smallest or 0}" + (" and not 0" if name == "replica" else ""))
        if name.endswith("port") and value > 65535:
            raise UserError(f"--{name}={value}: ports end at 65535")
    for name, words in choices.items():
        if (value := getattr(settings, name)) not in words:
            raise UserError(f"--{name}={value}: must be {', '.join(words[:-1])} or {words[-1]}")
