"""The command line: python -m jrl.main --config=configs/NAME.py[:ARG] [--config.KEY=VALUE ...] [--dry_run] [--help]

The last line on stdout is one JSON object, the run's summary. A mistake in the config or the data is one line on stderr
and exit status 2.
"""

import dataclasses
import json
import sys
import textwrap
from collections.abc import Callable, Sequence

from jrl import config as config_lib
from jrl import logs
from jrl.algorithms.presets import BASE, PRESETS, TABLES
from jrl.config import PRESET
from jrl.config_keys import FREE, GIVEN, KEYS
from jrl.errors import UserError, entry_point

FLAGS = ("--config", "--dry_run", "--help")


@dataclasses.dataclass(frozen=True)
class Command:
    """What the arguments ask for."""

    config: str | None
    overrides: dict[str, str]  # key -> text
    dry_run: bool
    help: bool


def parse(args: Sequence[str]) -> Command:
    """Reads `--config.a.b=v`, `--config.a.b v`, `--config.a.flag` and `--noconfig.a.flag`, with one dash or two.

    Raises:
      UserError: an argument that is none of these, or a flag without its value.
    """
    config, overrides, switches, rest = None, {}, {"dry_run": False, "help": False}, list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.lstrip("-").partition("=")
        negated = name.startswith("noconfig.")
        name = name.removeprefix("no") if negated else name
        key = name.removeprefix("config.")
        if not arg.startswith("-"):
            raise UserError(f"{arg!r}: arguments start with --config, --config.KEY=VALUE, --dry_run or --help")
        if name in ("help", "h", "dry_run") and not equals:
            switches["help" if name == "h" else name] = True
        elif name == "config" or (name.startswith("config.") and not negated):
            if not equals:
                value = _next_value(name, key, rest)
            if name == "config":
                config = value
            else:
                overrides[key] = value
        elif negated and not equals:
            overrides[key] = _off(arg, key)
        else:
            meant = f"--config.{arg.lstrip('-')}" if _is_key(name) else config_lib.closest(f"--{name}", FLAGS)
            raise UserError(f"{arg}: there is no such flag; " + (f"did you mean {meant}?" if meant else "see --help"))
    return Command(config, overrides, **switches)


def _is_key(name: str) -> bool:
    return name in KEYS or name.startswith(tuple(f"{free}." for free in FREE))


def _off(arg: str, key: str) -> str:
    """The value that `--noconfig.KEY` stands for; an unknown key is left to the config, which knows what was meant."""
    known = KEYS.get(key)
    if known and not isinstance(known.default, bool):
        raise UserError(f"{arg}: config.{key} is no switch but takes {config_lib.type_name(known)}; give --config.{key}=VALUE")
    return "false"


def _next_value(name: str, key: str, rest: list[str]) -> str:
    """The value of a flag without "=": the next argument, or true for a switch."""
    if key in KEYS and isinstance(KEYS[key].default, bool):
        return "true"
    # A negative number is a value; anything else with a dash is the next flag.
    if not rest or (rest[0].startswith("-") and not rest[0][1:2].isdigit()):
        raise UserError(f"--{name}: needs a value, --{name}=VALUE")
    return rest.pop(0)


def help_text() -> str:
    """Every key with its type, default and meaning."""
    lines = [
        "Trains a language model: by reinforcement learning, or in the stages before it (--config.stage).",
        "",
        "  python -m jrl.main --config=configs/NAME.py[:ARG] [--config.KEY=VALUE ...] [--dry_run]",
        "",
        "  --config=FILE[:ARG]   a file with get_config(), and its argument if it takes one",
        "  --config.KEY=VALUE    overrides one key, after the file",
        "  --dry_run             print the plan (meshes, batches, bytes per device, programs) and stop",
        "  --help                this text",
        "",
        "Keys, with the defaults that hold where neither the file nor the command line says otherwise:",
    ]
    section = None
    for key in KEYS.values():
        if key.name.partition(".")[0] != section and "." in key.name:
            section = key.name.partition(".")[0]
            lines.append("")
        rule = f" [{key.rule.text}]" if key.rule and key.rule is not GIVEN else ""
        default = {} if isinstance(key.default, dict) else PRESET if key.default is None else key.default
        head = f"  --config.{key.name}={default!r}"
        about = f"{config_lib.type_name(key)}; {key.doc}{rule}"
        lines += [head, *_wrapped(about)]
    return "\n".join(lines + _presets_text())


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False)


def _presets_text() -> list[str]:
    """What each algorithm.name chooses, and what can be chosen."""
    told = lambda choices: " ".join(f"{name}={value}" for name, value in choices.items())  # noqa: E731
    lines = [
        "",
        "Presets: what algorithm.name chooses where a key of algorithm is left to 'preset'",
        "  all, if not said otherwise",
    ]
    lines += _wrapped(told(BASE))
    for name, choices in PRESETS.items():
        lines += [f"  {name}", *_wrapped(told(choices) or "nothing else")]
    for kind, table in TABLES.items():
        lines += ["", f"algorithm.{kind}, or FILE.py:FUNCTION or MODULE:FUNCTION"]
        lines += [f"  {name:<30}{piece.about}" for name, piece in table.items()]
    return lines


def run(command: Command) -> None:
    """Does what the command asks for, and prints to stdout."""
    if command.help:
        print(help_text())
        return
    if command.config is None:
        raise UserError("--config is missing: python -m jrl.main --config=configs/demo.py; --help says more")
    config = config_lib.load(command.config, command.overrides)
    if command.dry_run:
        print(plan_text(config))
        return
    from jrl.launch import cluster

    trainer = _trainer(config)
    logs.configure(config.log.json)
    with cluster.member(config.hosts):
        cluster.check_alike(config_lib.flatten(config))
        result = trainer(config).train()
        if cluster.is_first():
            print(json.dumps(result), flush=True)


def _trainer(config) -> Callable:
    """The class that trains as the config says."""
    if config.stage != "rl":
        from jrl.supervised import SupervisedTrainer

        return SupervisedTrainer
    if config.agents.turns:
        from jrl.agents import Agents

        return Agents
    from jrl.trainer import Trainer

    return Trainer


def plan_text(config) -> str:
    """What a run will do."""
    from jrl import plan  # here, so that help and mistakes do not wait for jax to load
    from jrl.agent_configs import agent_configs
    from jrl.models.load import read_arch
    from jrl.plan.auto import resolve
    from jrl.plan.supervised import make_stage_plan

    if config.stage != "rl":
        return make_stage_plan(config, read_arch(config.model.path), plan.num_devices(config)).text()
    texts = []
    for name, own in (agent_configs(config) or {"": config}).items():
        config_lib.choose_pieces(own)  # for its errors
        own = resolve(own)
        text = plan.make_plan(own, read_arch(own.model.path), plan.num_devices(own)).text()
        texts.append(f"agent      {name}, on the same devices as the others\n{text}" if name else text)
    return "\n\n".join(texts)


@entry_point
def main(args: Sequence[str]) -> None:
    """Does what the arguments say."""
    run(parse(args))


if __name__ == "__main__":
    sys.exit(main())
