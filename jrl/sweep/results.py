"""What the runs of a sweep have left: a row of numbers each, means and intervals by arm, curves by arm; results.csv."""

import csv
import dataclasses
import fnmatch
import io
import itertools
import math
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy.special import stdtrit

from jrl.metrics import points, read_metrics
from jrl.svg import COLORS, Curve
from jrl.sweep.execute import FINISHED
from jrl.sweep.grid import Arm, Run, Sweep, prefixed, shown, write_whole

CSV = "results.csv"
CONFIDENCE = 0.95
# Metrics that are drawn if nothing else is asked for, where a run has them.
MAIN = r"(?:\w+/)?(?:val-core/.*|train/(?:accuracy|loss)|critic/score/mean|actor/(?:kl_ref|entropy)|response_length/mean)"
# By which arms are compared, the first of these that any run has, of agents the first one's; higher is better.
RANKED = ("accuracy_after", "greedy_after", "train/accuracy", "critic/score/mean")
TOGETHER = len(COLORS)  # curves that one picture can hold

Points = list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One run. Of a run that is not finished, only what it is.

    Attributes:
      result: what result.json holds.
      train, evals: metric -> (step, value), finite values only.
    """

    run: Run
    status: str
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: dict[str, Points] = dataclasses.field(default_factory=dict)
    evals: dict[str, Points] = dataclasses.field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """Those of the result, and the last value of each metric of the steps; of evaluations the result has what counts."""
        last = {key: found[-1][1] for key, found in self.train.items()}
        return {k: v for k, v in self.result.items() if isinstance(v, int | float) and not isinstance(v, bool)} | last


def read_rows(sweep: Sweep, status: Mapping[str, str]) -> list[Row]:
    """All runs, as they are now.

    Args:
      status: of each run, by its name.
    """
    return [_read(run) if status[run.name] == FINISHED else Row(run, status[run.name]) for run in sweep.runs]


def _read(run: Run) -> Row:
    train: dict[str, Points] = {}
    evals: dict[str, Points] = {}
    for agent, directory in run.parts().items():
        for found, rows in zip((train, evals), read_metrics(directory), strict=True):
            found |= {prefixed(agent, key): value for key, value in points(rows).items()}
    return Row(run, FINISHED, run.result() or {}, train, evals)


def chosen_metrics(rows: Sequence[Row], patterns: Sequence[str]) -> tuple[list[str], list[str]]:
    """The metrics to draw, in the order in which the runs have them or the patterns ask for them, and patterns that match none.

    Args:
      patterns: as of file names, `val-core/*`; none for the main ones.
    """
    there = list(dict.fromkeys(key for row in rows for key in (*row.evals, *row.train)))
    if not patterns:
        return [key for key in there if re.fullmatch(MAIN, key)], []
    matches = {pattern: [key for key in there if fnmatch.fnmatchcase(key, pattern)] for pattern in patterns}
    return list(dict.fromkeys(itertools.chain(*matches.values()))), [p for p, found in matches.items() if there and not found]


# Statistics ------------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% confidence interval by Student's t; NaN for that of a single value."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, math.nan
    return mean, float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(values) / n**0.5


def text(mean: float, half: float) -> str:
    """`0.512 ± 0.034`: two digits of the interval, and the mean to the same place."""
    if math.isnan(half):
        return f"{mean:.4g}"
    if half == 0:
        return f"{mean:.4g} ± 0"
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:.{digits}f} ± {half:.{digits}f}" if digits <= 6 else f"{mean:.2e} ± {half:.1e}"


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """An arm's finished runs."""

    arm: Arm
    rows: list[Row]
    color: str

    def of(self, name: str) -> tuple[float, float] | None:
        """Mean and half the interval of a number over the seeds that have it; None if none has."""
        values = [row.numbers[name] for row in self.rows if name in row.numbers]
        return interval(values) if values else None

    def curve(self, metric: str) -> Curve | None:
        """The mean over the seeds at each step, with its interval as the band; None if no run has the metric."""
        by_step: dict[int, list[float]] = {}
        smooth = any(metric in row.train for row in self.rows)
        for row in self.rows:
            for step, value in (row.train if smooth else row.evals).get(metric, []):
                by_step.setdefault(step, []).append(value)
        if not by_step:
            return None
        found = [(step, *interval(by_step[step])) for step in sorted(by_step)]
        band = [(mean - half, mean + half) if math.isfinite(half) else (mean, mean) for _, mean, half in found]
        several = any(low < high for low, high in band)
        return Curve(self.arm.label, [(step, mean) for step, mean, _ in found], self.color, smooth, band if several else ())


def by_arm(sweep: Sweep, rows: Sequence[Row]) -> list[ArmResult]:
    """The finished runs of each arm, in the order of the grid."""
    return [
        ArmResult(arm, [row for row in rows if row.run.arm.name == arm.name and row.status == FINISHED], color)
        for arm, color in zip(sweep.arms, itertools.cycle(COLORS), strict=False)
    ]


def best(arms: Sequence[ArmResult]) -> tuple[ArmResult, str] | None:
    """The arm with the highest mean, and of which number; None while no run is finished or none has such a number.

    Only arms with as many seeds as any are compared: the seeds that an arm has survived may be the easy ones.
    """
    agent = next(iter(arms[0].arm.agents), "")
    for name in (prefixed(agent, ranked) for ranked in RANKED):
        counts = [sum(name in row.numbers for row in arm.rows) for arm in arms]
        if most := max(counts, default=0):
            whole = [arm for arm, count in zip(arms, counts, strict=True) if count == most]
            return max(whole, key=lambda arm: (arm.of(name) or (-math.inf,))[0]), name
    return None


@dataclasses.dataclass(frozen=True)
class Panel:
    """One picture: curves of a metric, of one arm (with others to compare with) or of all (called "")."""

    metric: str
    arm: str
    curves: list[Curve]
    behind: list[Curve]


def panels(arms: Sequence[ArmResult], metric: str) -> list[Panel]:
    """One picture of all arms; where they are many, one for each, with the others behind it."""
    curves = [curve for arm in arms if (curve := arm.curve(metric))]
    if len(curves) <= TOGETHER:
        return [Panel(metric, "", curves, [])] if curves else []
    return [Panel(metric, curve.label, [curve], [other for other in curves if other is not curve]) for curve in curves]


# The table of runs -------------------------------------------------------------------------------------------------------


def write_csv(sweep: Sweep, rows: Sequence[Row], metrics: Sequence[str]) -> pathlib.Path:
    """results.csv: a row for each run, with the last value of those metrics that steps have; or an empty cell."""
    metrics = [key for key in metrics if any(key in row.train for row in rows)]
    results = list(dict.fromkeys(key for row in rows for key in row.result))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*sweep.grid, "seed", "status", "directory", *results, *metrics])
    for row in rows:
        own = [shown(row.run.arm.values[key]) for key in sweep.grid]
        cells = [row.result.get(key) for key in results] + [row.numbers.get(key) for key in metrics]
        directory = row.run.directory.relative_to(sweep.directory)
        writer.writerow([*own, row.run.seed, row.status, directory, *cells])
    write_whole(sweep.directory / CSV, file.getvalue())
    return sweep.directory / CSV
