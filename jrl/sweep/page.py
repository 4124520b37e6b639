"""index.html: a sweep on one page that needs nothing but itself, with links to the reports of its runs.

It has no script. Whatever comes from configs, metrics or logs is escaped, and shown as text.
"""

import html
import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Sequence

from jrl.svg import SMALL, picture
from jrl.sweep.execute import FAILED, FINISHED, last_lines
from jrl.sweep.grid import Sweep, shown, write_whole
from jrl.sweep.results import RANKED, ArmResult, Row, best, by_arm, panels, text

FILE = "index.html"
REPORT = "report.html"
_TEMPLATE = pathlib.Path(__file__).with_name("page.html")


def write_page(sweep: Sweep, rows: Sequence[Row], metrics: Sequence[str], notes: Sequence[str] = ()) -> pathlib.Path:
    """Writes the page from what the runs have left so far.

    Args:
      metrics: whose curves it shows.
      notes: lines for its head.
    """
    arms = by_arm(sweep, rows)
    values = {
        "title": _escape(sweep.directory.resolve().name), "facts": _facts(sweep, rows, notes),
        "arms": _arms(sweep, arms, metrics), "best": _best(arms), "curves": _curves(arms, metrics), "runs": _runs(sweep, rows),
    }  # fmt: skip
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _TEMPLATE.read_text(encoding="utf-8"))
    write_whole(sweep.directory / FILE, page)
    return sweep.directory / FILE


def _escape(value: object) -> str:
    return html.escape(str(value).encode("utf-8", "replace").decode())  # half a surrogate pair cannot be written


def _row(cells: Iterable[str], kind: str = "td", of: str = "") -> str:
    opened = f'<tr class="{of}">' if of else "<tr>"
    return opened + "".join(f"<{kind}>{cell}</{kind}>" for cell in cells) + "</tr>\n"


def _facts(sweep: Sweep, rows: Sequence[Row], notes: Sequence[str]) -> str:
    counts = [f"{sum(row.status == status for row in rows)} {status}" for status in dict.fromkeys(row.status for row in rows)]
    facts = {"config": sweep.config, "overrides": " ".join(f"{k}={v}" for k, v in sweep.overrides.items())}
    facts |= {key: ", ".join(map(shown, values)) for key, values in sweep.grid.items()}
    facts |= {"seeds": str(sweep.seeds), "runs": ", ".join(counts)}
    items = [f"<li><span>{_escape(name)}</span>{_escape(value)}</li>" for name, value in facts.items() if value]
    return "".join([*items, *(f"<li>{_escape(note)}</li>" for note in notes)])


def _swatch(color: str) -> str:
    return f'<i class="swatch" style="background: {color}"></i>'


def _arms(sweep: Sweep, arms: Sequence[ArmResult], metrics: Sequence[str]) -> str:
    """A row for each arm: its values, its seeds, and the mean of every number with its interval."""
    finished = [row for arm in arms for row in arm.rows]
    wanted = dict.fromkeys((*(key for row in finished for key in row.result), *metrics, *RANKED))
    names = [name for name in wanted if any(name in row.numbers for row in finished)]
    winner = best(arms)
    out = [_row(map(_escape, [*sweep.grid, "seeds", *names]), "th")]
    for arm in arms:
        first = winner is not None and arm is winner[0]
        values = [_escape(shown(arm.arm.values[key])) for key in sweep.grid]
        seeds = f"{len(arm.rows)} of {sweep.seeds}" + ('<span class="chip good">best</span>' if first else "")
        found = [arm.of(name) for name in names]
        cells = [*values, seeds, *("" if pair is None else text(*pair) for pair in found)]
        out.append(_row([_swatch(arm.color) + cells[0], *cells[1:]], of="best" if first else ""))
    return "".join(out)


def _best(arms: Sequence[ArmResult]) -> str:
    """Which arm is best, by what, and how sure that is."""
    winner = best(arms)
    if winner is None:
        return ""
    arm, name = winner
    mean, half = arm.of(name) or (0.0, 0.0)
    alike = []
    for other in arms:
        pair = other.of(name)
        if other is not arm and pair and not pair[0] + pair[1] < mean - half:  # NaN, of a single seed, tells them not apart
            alike.append(other.arm.label)
    sure = f"; its interval meets that of {', '.join(alike)}" if alike else ""
    return f"Best by the mean of {_escape(name)}: {_escape(arm.arm.label + sure)}."


def _curves(arms: Sequence[ArmResult], metrics: Sequence[str]) -> str:
    together, apart = [], []
    for metric in metrics:
        drawn = panels(arms, metric)
        cards = [f'<div class="card">{picture(p.curves, p.arm or p.metric, SMALL, p.behind, legend=False)}</div>' for p in drawn]
        if len(cards) > 1:
            apart.append(f'<h3>{_escape(metric)}</h3><div class="charts">{"".join(cards)}</div>')
        together += cards if len(cards) == 1 else []
    if not together and not apart:
        return '<p class="faint">No run is finished yet.</p>'
    names = (f"<span>{_swatch(arm.color)}{_escape(arm.arm.label)}</span>" for arm in arms)
    legend = "".join(names) if together else ""  # else every picture has its arm's name
    return f'<p class="legend">{legend}</p><div class="charts">{"".join(together)}</div>{"".join(apart)}'


def _runs(sweep: Sweep, rows: Sequence[Row]) -> str:
    """A row for each run, with its reports, or with the end of what a failed one said."""
    out = [_row(["arm", "seed", "status", "seconds", ""], "th")]
    for row in rows:
        run, told = row.run, ""
        if row.status == FINISHED:
            pages = {agent or "report": directory / REPORT for agent, directory in run.parts().items()}
            told = " ".join(_link(sweep, path, name) for name, path in pages.items())
        elif row.status == FAILED:
            lines = "\n".join(last_lines(run))
            told = f"{_link(sweep, run.log, run.log.name)}<pre>{_escape(lines)}</pre>"
        kind = {FINISHED: " good", FAILED: " bad"}.get(row.status, "")
        status = f'<span class="chip{kind}">{row.status}</span>'
        out.append(_row([_escape(run.arm.label), str(run.seed), status, _seconds(row), told]))
    return "".join(out)


def _seconds(row: Row) -> str:
    return f"{row.numbers['seconds']:.1f}" if "seconds" in row.numbers else ""


def _link(sweep: Sweep, path: pathlib.Path, text: str) -> str:
    there = urllib.parse.quote(path.relative_to(sweep.directory).as_posix())
    return f'<a href="{_escape(there)}">{_escape(text)}</a>'
