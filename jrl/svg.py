"""Curves over the steps as one SVG document that needs nothing else: smoothed lines or points, perhaps with bands."""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2")
GREY = "#cbd5e1"
_SMOOTHING = 0.8


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a picture and of the margins around its curves, in pixels."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


WIDE = Size(860, 380, 60, 28, 88, 52)
SMALL = Size(430, 250, 52, 14, 44, 44)


@dataclasses.dataclass(frozen=True)
class Curve:
    """What is drawn of one metric.

    Attributes:
      points: step and finite value.
      smooth: draw the points faintly, and their moving average; otherwise the points.
      band: the least and the greatest value to shade around each point; none where it is empty.
    """

    label: str
    points: Sequence[tuple[float, float]]
    color: str
    smooth: bool
    band: Sequence[tuple[float, float]] = ()


@dataclasses.dataclass(frozen=True)
class _Frame:
    """From steps and values to the picture's pixels."""

    size: Size
    steps: tuple[float, float]
    ticks: list[float]  # of the values, the first and the last being the picture's lower and upper edge

    def x(self, step: float) -> float:
        low, high = self.steps
        return round(self.size.left + (step - low) / (high - low) * (self.size.width - self.size.left - self.size.right), 1)

    def y(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        height = self.size.height - self.size.top - self.size.bottom
        return round(self.size.height - self.size.bottom - (value - low) / (high - low) * height, 1)


def picture(curves: Sequence[Curve], title: str, size: Size = WIDE, behind: Sequence[Curve] = (), legend: bool = True) -> str:
    """The document, on a white ground.

    Args:
      curves: at least one point among them.
      behind: others to compare with, in grey.
      legend: write each curve's label in its colour under the title.
    """
    drawn = [*behind, *curves]
    steps = [step for curve in drawn for step, _ in curve.points]
    frame = _Frame(size, (min(steps), max(max(steps), min(steps) + 1)), _ticks(*value_range(drawn)))
    title = html.escape(title)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size.width} {size.height}" width="{size.width}" '
        f'height="{size.height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{size.width}" height="{size.height}" rx="10" fill="#ffffff"/>',
        f'<text x="{size.left}" y="{34 if legend else 28}" font-size="{17 if legend else 14}" font-weight="600" '
        f'fill="#0f172a">{title}</text>',
        *_axes(frame),
    ]
    for curve in behind:
        points = smoothed(curve.points) if curve.smooth else curve.points
        out.append(f'<path d="{_path(points, frame)}" fill="none" stroke="{GREY}"/>')
    out += _bands(curves, frame)
    left = size.left
    for curve in curves:
        out += _curve(curve, frame)
        if legend:
            out.append(f'<rect x="{left}" y="55" width="16" height="4" rx="2" fill="{curve.color}"/>')
            out.append(f'<text x="{left + 22}" y="61" fill="#334155">{html.escape(curve.label)}</text>')
            left += 50 + 7 * len(curve.label)
    return "\n".join([*out, "</svg>"]) + "\n"


def value_range(curves: Iterable[Curve]) -> tuple[float, float]:
    """Least and greatest value to show; bands, which can be huge, widen what the points span by a quarter at either end."""
    curves = list(curves)
    values = [value for curve in curves for _, value in curve.points]
    low, high = min(values), max(values)
    room = (high - low) / 4
    edges = [edge for curve in curves for pair in curve.band for edge in pair if math.isfinite(edge)]
    return max(min([low, *edges]), low - room), min(max([high, *edges]), high + room)


def smoothed(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Exponential moving average, without the pull towards 0 at the start; the page's script smooths likewise."""
    total = weight = 0.0
    out = []
    for step, value in points:
        total, weight = _SMOOTHING * total + value, _SMOOTHING * weight + 1
        out.append((step, total / weight))
    return out


def edges(curve: Curve) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The lower and the upper edge of a curve's band as they are drawn, smoothed where the curve is."""
    sides = [[(step, pair[i]) for (step, _), pair in zip(curve.points, curve.band, strict=True)] for i in (0, 1)]
    low, high = (smoothed(side) if curve.smooth else side for side in sides)
    return low, high


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers, from at most `low` to at least `high`, at least two."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / count))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit * count >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def _axes(frame: _Frame) -> list[str]:
    size, out = frame.size, []
    for tick in frame.ticks:
        y = frame.y(tick)
        out.append(f'<line x1="{size.left}" x2="{size.width - size.right}" y1="{y}" y2="{y}" stroke="#e2e8f0"/>')
        out.append(f'<text x="{size.left - 10}" y="{y + 4}" text-anchor="end" fill="#64748b">{tick:g}</text>')
    for tick in _ticks(*frame.steps, count=8):
        if frame.steps[0] <= tick <= frame.steps[1] and tick == int(tick):
            x, y = frame.x(tick), size.height - size.bottom + 20
            out.append(f'<text x="{x}" y="{y}" text-anchor="middle" fill="#64748b">{tick:g}</text>')
    middle = (size.left + size.width - size.right) / 2
    return [*out, f'<text x="{middle}" y="{size.height - 12}" text-anchor="middle" fill="#64748b">step</text>']


def _path(points: Iterable[tuple[float, float]], frame: _Frame) -> str:
    return "M" + "L".join(f"{frame.x(x)} {frame.y(y)}" for x, y in points)


def _bands(curves: Sequence[Curve], frame: _Frame) -> list[str]:
    """The shaded parts, cut off where the picture's values end (a nested document clips by itself)."""
    size = frame.size
    x, y, width, height = size.left, size.top, size.width - size.left - size.right, size.height - size.top - size.bottom
    shapes = []
    for curve in curves:
        if curve.band:
            low, high = edges(curve)
            shapes.append(f'<path d="{_path([*low, *reversed(high)], frame)}Z" fill="{curve.color}" opacity="0.15"/>')
    box = f'<svg x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{x} {y} {width} {height}">'
    return [box, *shapes, "</svg>"] if shapes else []


def _curve(curve: Curve, frame: _Frame) -> list[str]:
    pen = f'fill="none" stroke="{curve.color}" stroke-linejoin="round" stroke-linecap="round"'
    if curve.smooth:
        faint = f'<path d="{_path(curve.points, frame)}" {pen} stroke-width="1.2" opacity="0.3"/>'
        return [faint, f'<path d="{_path(smoothed(curve.points), frame)}" {pen} stroke-width="2.4"/>']
    dots = [
        f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="4.5" fill="{curve.color}" stroke="#ffffff"/>' for x, y in curve.points
    ]
    return [f'<path d="{_path(curve.points, frame)}" {pen} stroke-width="1.6" stroke-dasharray="2 5"/>', *dots]
