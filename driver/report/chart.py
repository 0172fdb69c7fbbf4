"""Charts as HTML with inline SVG: the drawing stretches with the page, the text keeps its size.

The SVG fills its box whatever the aspect ratio; strokes and dots do not scale with it, and labels
are HTML at positions in percent. So one chart is readable on a phone and on a wide screen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

Point = tuple[float, float]
SIZE = 1000  # of the drawing's own coordinates
WHOLE = ("step", "response length (tokens)")  # axes of integers


def ticks(low: float, high: float, least: int = 4, *, whole: bool = False) -> list[float]:
    """Round numbers between two values: the widest steps of 1, 2 or 5 that give enough of them.

    Args:
        low, high: the range of an axis.
        least: how many there are at least.
        whole: integers only, fewer where the range holds fewer.

    Example:
        >>> ticks(0, 9.2)
        [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    span = high - low
    if not span > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span))
    for step in (power * m for m in (5, 2, 1, 0.5, 0.2, 0.1)):
        step = max(step, 1.0) if whole else step
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 >= least or (whole and step == 1.0):
            break
    return [round(index * step, 12) for index in range(first, last + 1)]


def short(value: float) -> str:
    """A number in a few characters.

    Example:
        >>> short(12500), short(0.25), short(3.0)
        ('12.5k', '0.25', '3')
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


class Chart:
    """One plot with axes.

    Args:
        x, y: lowest and highest value shown.
        x_label, y_label: what the axes are; an x axis named in `WHOLE` has whole ticks only.
        label: for readers who cannot see it.

    Example:
        >>> chart = Chart((0, 10), (0, 1), "step", "reward", "Reward by step")
        >>> chart.line([(0, 0.1), (10, 0.9)], "var(--run-a)")
        >>> "<polyline" in chart.html()
        True
    """

    def __init__(self, x: Point, y: Point, x_label: str, y_label: str, label: str) -> None:
        self.x, self.y = _widen(x), _widen(y)
        self.x_label, self.y_label, self.label = x_label, y_label, label
        self._shapes: list[str] = []
        self._texts: list[str] = []

    def line(
        self,
        points: Iterable[Point],
        color: str,
        *,
        width: float = 2,
        opacity: float = 1,
        dashed: bool = False,
    ) -> None:
        """A curve through points."""
        path = " ".join(f"{self._at_x(x):.1f},{self._at_y(y):.1f}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{path}" style="stroke:{color};stroke-width:{width};'
            f'opacity:{opacity}{";stroke-dasharray:7 6" * dashed}"/>'
        )

    def dots(self, points: Iterable[Point], color: str, title: str, size: float = 7) -> None:
        """Round marks with a tooltip each."""
        for x, y in points:
            at = f"M{self._at_x(x):.1f} {self._at_y(y):.1f}h.01"
            text = escape(f"{title}: {short(y)} at {self.x_label} {short(x)}")
            self._shapes.append(
                f'<path d="{at}" style="stroke:{color};stroke-width:{size}"><title>{text}</title>'
                "</path>"
            )

    def bar(self, x: Point, y: Point, color: str, title: str = "") -> None:
        """A filled box from x[0] to x[1] and from y[0] to y[1]."""
        left, top = self._at_x(x[0]), self._at_y(y[1])
        width, height = self._at_x(x[1]) - left, self._at_y(y[0]) - top
        tip = f"<title>{escape(title)}</title>" if title else ""
        self._shapes.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
            f' style="fill:{color}">{tip}</rect>'
        )

    def mark(self, x: float, text: str, row: int = 0) -> None:
        """A vertical line with a label at its top, `row` lines down."""
        at = self._at_x(x)
        self._shapes.append(f'<path class="mark" d="M{at:.1f} 0V{SIZE}"/>')
        side = "left" if at < 0.7 * SIZE else "right"
        self._texts.append(
            f'<span class="note {side}" style="left:{at / SIZE:.2%};top:{row * 1.25}em">'
            f"{escape(text)}</span>"
        )

    def html(self) -> str:
        """The chart as a `<figure>`."""
        grid, labels = [], []
        for value in ticks(*self.y):
            at = self._at_y(value)
            grid.append(f'<path class="grid" d="M0 {at:.1f}H{SIZE}"/>')
            labels.append(f'<span class="yt" style="top:{at / SIZE:.2%}">{short(value)}</span>')
        for value in ticks(*self.x, 3, whole=self.x_label in WHOLE):
            at = self._at_x(value)
            labels.append(f'<span class="xt" style="left:{at / SIZE:.2%}">{short(value)}</span>')
        return (
            f'<figure class="chart" role="img" aria-label="{escape(self.label)}">'
            f'<div class="axis">{escape(self.y_label)}</div><div class="plot">'
            f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none">'
            f"{''.join(grid)}{''.join(self._shapes)}</svg>"
            f"{''.join(labels)}{''.join(self._texts)}</div>"
            f'<div class="axis x">{escape(self.x_label)}</div></figure>'
        )

    def _at_x(self, value: float) -> float:
        return SIZE * _share(value, self.x)

    def _at_y(self, value: float) -> float:
        return SIZE * (1 - _share(value, self.y))


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Colours and what they stand for.

    Args:
        entries: (colour, text).
    """
    chips = "".join(
        f'<span><i style="background:{color}"></i>{escape(text)}</span>' for color, text in entries
    )
    return f'<div class="legend">{chips}</div>'


def _widen(span: Point) -> Point:
    low, high = span
    return span if high > low else (low, low + 1)


def _share(value: float, span: Point) -> float:
    share = (value - span[0]) / (span[1] - span[0])
    return min(1.0, max(0.0, share))
