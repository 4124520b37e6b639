"""One config for several agents: what holds for all of them, and what `agents.options` changes for one."""

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jrl import config as config_lib
from jrl.errors import UserError


def turns(config) -> list[str]:
    """Who speaks about a prompt, in this order; a name may come again."""
    return [name.strip() for name in config.agents.turns.split(",") if name.strip()]


def agent_configs(config) -> dict[str, ConfigDict]:
    """Each agent's own config, in the order in which they first speak; its run_dir lies in that of all.

    Raises:
      UserError: options of an agent that never speaks, or values that do not fit.
    """
    names = list(dict.fromkeys(turns(config)))
    options = config.agents.options.to_dict()
    for name in options:
        if name not in names:
            raise UserError(
                f"config.agents.options.{name}: agents.turns={config.agents.turns!r} has no such agent; name one of it"
            )
    configs = {}
    for name in names:
        own = ConfigDict(config).copy_and_resolve_references()
        own.agents.options = ConfigDict()
        own.run_dir = f"{config.run_dir}/{name}"
        try:
            for key, value in _flat(options.get(name, {})):
                config_lib.override(own, key, value)
            config_lib.validate(own)
        except UserError as error:
            raise UserError(f"agents.options.{name}: {error}") from None
        configs[name] = own
    _same(configs)
    return configs


# What all agents have in common, as their episodes are the same.
SHARED = (
    "steps", "seed", "resume", "stage", "data.train", "data.eval", "data.train_size", "data.eval_size", "agents.turns",
    "rollout.prompts_per_step", "rollout.group_size", "eval.every_steps", "eval.samples", "eval.at_start",
    "checkpoint.every_steps",
)  # fmt: skip


def _same(configs: Mapping[str, ConfigDict]) -> None:
    flat = {name: config_lib.flatten(c) for name, c in configs.items()}
    for key in SHARED:
        for name, values in flat.items():
            if values[key] != next(iter(flat.values()))[key]:
                raise UserError(f"agents.options.{name}.{key}={values[key]!r}: is the same for all agents; set {key} itself")


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in config_lib.FREE:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
