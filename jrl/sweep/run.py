"""A sweep from its first run to the page that compares all of them."""

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrl.metrics import safe_line
from jrl.sweep import figure, page, results
from jrl.sweep.execute import BEGUN, FAILED, FINISHED, INTERRUPTED, WAITING, Execution, Pool, held, last_lines
from jrl.sweep.grid import Sweep, check_directory, write_identity

log = logging.getLogger("jrl")


def run(sweep: Sweep, make_pool: Callable[[int], Pool], metrics: Sequence[str] = ()) -> dict[str, Any]:
    """Runs what is left, and returns the summary that the command line prints.

    Args:
      make_pool: from a lock that the runs' processes keep open, see `jrl.sweep.execute.held`.
      metrics: to draw, see `jrl.sweep.results.chosen_metrics`.

    Raises:
      UserError: the directory is in use, or holds something else.
    """
    with held(sweep.directory) as lock:
        check_directory(sweep)
        pool = make_pool(lock)
        write_identity(sweep)
        execution = Execution(sweep, pool)
        number = execution.all(lambda now: write_results(sweep, now.status, metrics))
        rows = write_results(sweep, execution.status, metrics, with_figure=True)
    for failed in (row.run for row in rows if row.status == FAILED):
        log.error("failed: %s (%s)%s", safe_line(failed.name), failed.log, "".join(f"\n    {x}" for x in last_lines(failed)))
    counts = {status: sum(row.status == status for row in rows) for status in (FINISHED, FAILED, INTERRUPTED, BEGUN, WAITING)}
    left = len(rows) - counts[FINISHED]
    if left:
        why = f"{signal.Signals(number).name}: " if number else ""
        log.warning("%s%d of %d runs are not finished; the same command again continues", why, left, len(rows))
    summary = {"runs": len(rows), **{k: v for k, v in counts.items() if v}, "page": str(sweep.directory / page.FILE)}
    if winner := results.best(results.by_arm(sweep, rows)):
        arm, name = winner
        summary |= {"best": arm.arm.values, "by": name, "mean": interval[0] if (interval := arm.of(name)) else None}
    return summary | ({"signal": signal.Signals(number).name} if number else {})


def write_results(
    sweep: Sweep, status: Mapping[str, str], patterns: Sequence[str], with_figure: bool = False
) -> list[results.Row]:
    """The table, the page and, as it takes longest, at the end the picture; returns the runs."""
    rows = results.read_rows(sweep, status)
    metrics, unknown = results.chosen_metrics(rows, patterns)
    notes = [f"--metrics={pattern}: no run has such a metric" for pattern in unknown]
    results.write_csv(sweep, rows, metrics)
    page.write_page(sweep, rows, metrics, notes)
    if with_figure:
        for note in notes:
            log.warning("%s", note)
        arms = results.by_arm(sweep, rows)
        # Of many arms, which have a picture each, the first metric alone: the page shows them all.
        shown = metrics if len(arms) <= results.TOGETHER else metrics[:1]
        if panels := [panel for metric in shown for panel in results.panels(arms, metric)]:
            figure.save_figure(panels, sweep.directory / figure.FILE)
    return rows
