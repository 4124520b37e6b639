"""Curves by arm as a picture for a paper or a README, drawn by matplotlib; the page draws its own and needs no matplotlib."""

import logging
import pathlib
from collections.abc import Sequence

from jrl.svg import GREY, Curve, edges, smoothed, value_range
from jrl.sweep.results import Panel

log = logging.getLogger("jrl")

FILE = "curves.png"
COLUMNS = 3
PANEL_INCHES = (3.4, 2.5)


def save_figure(panels: Sequence[Panel], path: pathlib.Path, ylabel: str = "") -> bool:
    """Writes the picture in the format that the path's ending names; False, with a line in the log, without matplotlib.

    Args:
      panels: at least one.
      ylabel: by default the metric, where it stands in no title.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        log.info("%s is left out: matplotlib is not installed (pip install -e '.[plot]')", path.name)
        return False
    alike = len({panel.metric for panel in panels}) == 1
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context({"svg.hashsalt": "jrl", "font.size": 8}):  # the same bytes for the same data
        figure = Figure(figsize=(columns * PANEL_INCHES[0], rows * PANEL_INCHES[1]), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.axis("off")
        for axes, panel in zip(grid.flat, panels, strict=False):
            for curve in panel.behind:
                axes.plot(*_xy(smoothed(curve.points) if curve.smooth else curve.points), color=GREY, lw=0.8)
            for curve in panel.curves:
                _draw(axes, curve)
            low, high = value_range([*panel.behind, *panel.curves])
            margin = 0.04 * (high - low) or 0.5
            axes.set_ylim(low - margin, high + margin)
            axes.set_title(panel.metric if not panel.arm else panel.arm if alike else f"{panel.metric}\n{panel.arm}")
            axes.grid(color="0.92")
        if len(panels[0].curves) > 1:
            handles, labels = grid.flat[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
        figure.supxlabel("step")
        figure.supylabel(ylabel or (panels[0].metric if alike and panels[0].arm else ""))
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def _draw(axes, curve: Curve) -> None:
    xs, ys = _xy(curve.points)
    if curve.smooth:
        axes.plot(xs, ys, color=curve.color, lw=0.8, alpha=0.3)
    axes.plot(*_xy(smoothed(curve.points) if curve.smooth else curve.points), color=curve.color, label=curve.label,
              marker=None if curve.smooth else "o", markersize=3)  # fmt: skip
    if curve.band:
        low, high = edges(curve)
        axes.fill_between(xs, [y for _, y in low], [y for _, y in high], color=curve.color, alpha=0.15, lw=0)


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
