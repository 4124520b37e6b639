"""The planner: python -m jrl.plan --model=DIR_OR_ID --chip=v5p --chips=64 [--config.KEY=VALUE ...] [--json] [--help]

Which meshes, microbatch, remat and slots make the fastest step that fits, before a chip is rented; with `--compile`, what
the TPU compiler says of the very programs. Needs no device and no weights, of the model only its config.json.
"""

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from jrl import config as config_lib
from jrl.errors import UserError, entry_point
from jrl.flags import check_values, read_flags, without_config
from jrl.main import parse as parse_config

ABOUT_ALL = (
    "Plans a run: chooses meshes, microbatch, remat and slots for a model, a batch and a number of chips. Batch and"
    " algorithm are those of --config=FILE and --config.KEY=VALUE, as for python -m jrl.main."
)
ABOUT = {
    "model": "a Hugging Face directory or hub id; by default the config's",
    "chip": "v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200 or mi300x",
    "chips": "number of devices",
    "topology": "of a TPU slice, such as v5p:4x4x4, in place of --chip and --chips",
    "as_configured": "take the config's meshes, microbatch, remat and slots instead of choosing",
    "compile": "compile the learner's update, prefill, decode and the move of the weights for --topology",
    "top": "choices to show",
    "json": "print one JSON object",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags besides `--config`."""

    model: str = ""
    chip: str = ""
    chips: int = 0
    topology: str = ""
    as_configured: bool = False
    compile: bool = False
    top: int = 5
    json: bool = False


def parse(args: Sequence[str]) -> tuple[Settings, Any]:
    """Flags and validated config.

    Raises:
      UserError: a flag or a key that does not exist or has a value that does not fit.
    """
    mine, of_config = without_config(args)
    settings = read_flags(Settings, "python -m jrl.plan", ABOUT_ALL, ABOUT, mine)
    check_values(settings, {"chips": 0, "top": 1})
    command = parse_config(of_config)
    overrides: dict[str, Any] = {"model.path": settings.model} if settings.model else {}
    overrides |= command.overrides
    if command.config is not None:
        config = config_lib.load(command.config, overrides)
    else:
        if not settings.model:
            raise UserError("--model is missing: python -m jrl.plan --model=DIR_OR_ID --chip=v5p --chips=64; --help says more")
        config = config_lib.default_config()
        for name, value in {"data.train": "none", **overrides}.items():
            config_lib.override(config, name, value)
        config_lib.validate(config)
    if config.rollout.workers:
        raise UserError(f"config.rollout.workers={config.rollout.workers}: nothing is known of their devices; leave it out")
    if any(config.pools.values()) and not settings.as_configured:
        apart = ", ".join(f"pools.{name}" for name, count in config.pools.items() if count)
        raise UserError(f"config.{apart}: meshes are chosen over all devices; leave it out, or plan --as_configured")
    if settings.topology and (settings.chip or settings.chips):
        raise UserError(f"--topology={settings.topology}: says chip and number; leave out --chip and --chips")
    if not settings.topology and not (settings.chip and settings.chips):
        raise UserError("--chip and --chips are needed, or --topology: --chip=v5p --chips=64, --topology=v5p:4x4x4")
    if settings.compile and not settings.topology:
        raise UserError("--compile: for which slice? give --topology=v5p:4x4x4 in place of --chip and --chips")
    return settings, config


def run(settings: Settings, config: ConfigDict) -> dict[str, Any] | str:
    """What is to be printed: a dict for json, text otherwise."""
    import jax  # here and below, so that help and mistakes do not wait for it to load

    jax.config.update("jax_platforms", "cpu")  # no chip of this machine is wanted, nor should it be taken
    from jrl.models.load import read_arch
    from jrl.plan.chips import chip_named
    from jrl.plan.search import choose, search, search_apart

    name, _, shape = settings.topology.partition(":")
    chip = chip_named(name or settings.chip)
    chips = settings.chips or _devices_of(settings.topology, shape)
    arch = read_arch(config.model.path)
    choices = (
        [choose(config, arch, chip, chips, {})] if settings.as_configured else search(config, arch, chip, chips, settings.top)
    )
    best = choices[0]
    found: dict[str, Any] = {"chip": dataclasses.asdict(chip), "chips": chips, "choices": [c.to_dict() for c in choices]}
    parts = [best.plan.text(), best.cost.text()]
    if not settings.as_configured:
        apart = search_apart(config, arch, chip, chips)
        found["apart"] = apart and apart.to_dict()
        parts += [_settings_text(best), _others_text(choices), _apart_text(apart)]
    if settings.compile:
        compiled = _compile(settings.topology, best.applied(config), arch)
        found["compiled"] = [c.to_dict() for c in compiled]
        parts.append(_compiled_text(compiled, chip))
    return found if settings.json else "\n\n".join(parts)


def _devices_of(topology: str, shape: str) -> int:
    sizes = shape.split("x")
    if not all(size.isdigit() and int(size) for size in sizes):
        raise UserError(f"--topology={topology}: give a chip and the sizes of its slice, such as v5e:4x4 or v5p:4x4x4")
    return math.prod(map(int, sizes))


def _settings_text(choice: Any) -> str:
    lines = [f"  --config.{name}={value}" for name, value in choice.settings.items()]
    return "\n".join(["to run it so", *lines])


def _others_text(choices: Sequence[Any]) -> str:
    from jrl.plan.plan import size_text

    lines = [f"{'choices, fastest first':<86}{'step, s':>10}{'peak':>12}"]
    for c in choices:
        learner, rollout = c.plan.meshes["learner"], c.plan.meshes["rollout"]
        shape = lambda mesh: " ".join(f"{k}={v}" for k, v in mesh.items() if v > 1) or "one device"  # noqa: E731
        batch = c.plan.batch
        what = f"{shape(learner)} | {shape(rollout)}, {batch['slots']} slots, microbatch {batch['microbatch_tokens']}"
        lines.append(
            f"  {what + ', remat ' + c.settings['learner.remat']:<84}{c.seconds:>10.2f}{size_text(c.plan.peak_bytes):>12}"
        )
    return "\n".join(lines)


def _apart_text(apart: Any) -> str:
    if apart is None:
        return "learner and rollout on devices of their own: fits in no split by quarters"
    return (
        f"learner and rollout on devices of their own, {apart.learner_devices} + {apart.rollout_devices}, one step behind:"
        f" {apart.seconds:.2f} s a step (a prediction: runs share their devices so far)"
    )


def _compile(topology: str, config: ConfigDict, arch: Any) -> list[Any]:
    from jrl.plan.aot import compile_programs, compile_publish, topology_devices
    from jrl.plan.programs import abstract_publish, run_programs

    devices = topology_devices(topology)
    plan, programs = run_programs(config, arch, devices)
    compiled = []
    publish = (compile_publish(plan, *abstract_publish(config, arch, devices)) for _ in range(1))  # when its turn has come
    for one in itertools.chain(compile_programs(plan, programs), publish):
        compiled.append(one)
        print(f"compiled {one.name} in {one.compile_seconds:.0f} s", file=sys.stderr, flush=True)
    return compiled


def _compiled_text(compiled: Sequence[Any], chip: Any) -> str:
    from jrl.plan.aot import table
    from jrl.plan.plan import size_text

    worst = max(compiled, key=lambda c: c.peak_bytes)
    verdict = "fits" if worst.peak_bytes <= chip.hbm_bytes else "DOES NOT FIT"
    most = f"{size_text(worst.peak_bytes)} at most, in {worst.name}: {verdict} {size_text(chip.hbm_bytes)} of {chip.name}"
    return f"{table(compiled)}\n{most}"


@entry_point
def main(args: Sequence[str]) -> None:
    """Prints a plan; that nothing fits is told as a mistake is."""
    found = run(*parse(args))
    print(json.dumps(found) if isinstance(found, dict) else found)


if __name__ == "__main__":
    sys.exit(main())
