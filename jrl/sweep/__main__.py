"""Sweeps: python -m jrl.sweep --config=configs/x.py --grid KEY=VALUE,VALUE [--grid ...] --seeds=3 [--config.KEY=VALUE ...]

Each combination of the grid's values is trained with each seed, in a process and a directory of its own; what is finished is
compared in results.csv, curves.png and index.html. Given again, the same command continues what is unfinished and tries again
what failed. The last line on stdout is one JSON object. Exit status: 1 if a run failed, 2 after a mistake in the arguments.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Sequence

from jrl import logs
from jrl.errors import UserError, entry_point
from jrl.flags import check_values, read_flags, without_config
from jrl.main import parse as parse_config
from jrl.sweep.execute import FAILED, FINISHED, Pool, Processes, status_on_disk
from jrl.sweep.grid import Sweep, check_directory, make_sweep, read_grid
from jrl.sweep.run import run

ABOUT_ALL = (
    "Trains every combination of some keys' values with several seeds, and compares them. --config=FILE and --config.KEY=VALUE"
    " are as for python -m jrl.main. The same command continues a sweep that was interrupted or failed in part; with more values"
    " or seeds it adds runs."
)
ABOUT = {
    "grid": "KEY=VALUE,VALUE: a key of the config and its values; once for each key; a value with a comma in double quotes",
    "seeds": "runs of each combination, with seed 0, 1, ...",
    "sweep_dir": "directory of the runs and of what compares them",
    "metrics": "to draw, comma separated, * for any characters (val-core/*); by default accuracy, reward, KL, entropy and length",
    "parallel": "runs at a time on this machine; all of them see all devices, so accelerators ask for --ray and --num_gpus",
    "ray": "run as tasks of the Ray cluster at RAY_ADDRESS, or of one started here",
    "num_cpus": "of each run, with --ray",
    "num_gpus": "of each run, with --ray; with 0 it sees none",
    "dry_run": "check everything, print the commands of the runs that are left, and stop",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The flags besides `--config`."""

    grid: tuple[str, ...] = ()
    seeds: int = 1
    sweep_dir: str = "runs/sweep"
    metrics: str = ""
    parallel: int = 1
    ray: bool = False
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    dry_run: bool = False


def parse(args: Sequence[str]) -> tuple[Settings, Sweep]:
    """Flags, and the sweep that they ask for, with every arm validated and its directory looked at.

    Raises:
      UserError: a flag or a key that does not exist or has a value that does not fit, or a directory that is another sweep's.
    """
    own, of_config = without_config(args)
    settings = read_flags(Settings, "python -m jrl.sweep", ABOUT_ALL, ABOUT, own)
    check_values(settings, {"seeds": 1, "parallel": 1, "num_cpus": 0, "num_gpus": 0})
    for field in dataclasses.fields(Settings):
        given = getattr(settings, field.name)
        if field.name in ("num_cpus", "num_gpus") and given != field.default and not settings.ray:
            raise UserError(f"--{field.name}={given:g}: is for --ray; give that too, or leave it out")
    if settings.ray and settings.parallel != 1:
        raise UserError(
            f"--parallel={settings.parallel}: Ray runs as many at a time as --num_cpus and --num_gpus allow; leave it out"
        )
    command = parse_config(of_config)
    if command.config is None:
        raise UserError("--config is missing: python -m jrl.sweep --config=configs/x.py --grid KEY=VALUE,VALUE; --help says more")
    sweep = make_sweep(command.config, command.overrides, read_grid(settings.grid), settings.seeds, settings.sweep_dir)
    port = max(arm.settings["log.prometheus_port"] for arm in sweep.arms)
    if port and (settings.ray or settings.parallel > 1):
        raise UserError(
            f"config.log.prometheus_port={port}: runs at the same time would all want it; give 0, or run one at a time"
        )
    check_directory(sweep)
    return settings, sweep


def plan_text(sweep: Sweep) -> str:
    """What is left to do, as commands."""
    status = {run.name: status_on_disk(run) for run in sweep.runs}
    left = [run for run in sweep.runs if status[run.name] != FINISHED]
    lines = [f"# {len(sweep.arms)} arms x {sweep.seeds} seeds = {len(sweep.runs)} runs, {len(sweep.runs) - len(left)} finished"]
    return "\n".join([*lines, *(shlex.join(run.command()) for run in left)])


def _pool(settings: Settings) -> Callable[[int], Pool]:
    """Where the runs are to run."""
    if not settings.ray:
        return lambda lock: Processes(settings.parallel, lock)
    try:
        from jrl.sweep.on_ray import RayPool
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("--ray: the package ray is not installed; pip install -e '.[ray]', or leave out --ray") from None
    return lambda lock: RayPool(settings.num_cpus, settings.num_gpus)


@entry_point
def main(args: Sequence[str]) -> int:
    """The exit status: 0, or 1 if a run failed."""
    settings, sweep = parse(args)
    if settings.dry_run:
        print(plan_text(sweep))
        return 0
    pool = _pool(settings)
    logs.configure(as_json=False)
    patterns = [part.strip() for part in settings.metrics.split(",") if part.strip()]
    summary = run(sweep, pool, patterns)
    print(json.dumps(summary), flush=True)
    return 1 if FAILED in summary or ("signal" not in summary and summary.get(FINISHED) != summary["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
