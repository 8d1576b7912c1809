"""Charts as SVG text: lines and bars, with nothing to load and nothing that runs. Readable in light and dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#475569", "#92400e")
WIDTH, HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 16, 52


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: (x, y) points with rising x. `strong` draws it heavier, `dashed` as a bound."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    strong: bool = False


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    step = 10 ** math.floor(math.log10(raw))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= raw)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between, with 2 and 5 times them where there are few."""
    whole = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1,) if len(whole) > 4 else (1, 3) if len(whole) > 3 else (1, 2, 5)
    ticks = [factor * 10.0**power for power in whole for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def line_chart(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str] = lambda x: f"{x:,.0f}",
    y_text: Callable[[float], str] = lambda y: f"{y:.2f}",
    y_max: float | None = None,
    title: str = "",
) -> str:
    """Lines over a logarithmic x axis, names at their ends, moved apart where they would cover one another."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    if not xs:
        return ""
    low, high = math.log10(min(xs)), math.log10(max(xs))
    if low == high:
        low, high = low - 0.5, high + 0.5
    top = y_max if y_max is not None else max(*ys, 1e-9) * 1.05
    plot_width, plot_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x_of(x: float) -> float:
        return _LEFT + plot_width * (math.log10(x) - low) / (high - low)

    def y_of(y: float) -> float:
        return _TOP + plot_height * (1 - y / top)

    out = [_open(title)]
    for tick in nice_ticks(0, top):
        y = y_of(tick)
        out.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(y_text(tick))}</text>')
    for tick in log_ticks(10**low, 10**high):
        x = x_of(tick)
        out.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{HEIGHT - _BOTTOM}"/>')
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{escape(x_text(tick))}</text>')
    out.append(f'<text x="{_LEFT + plot_width / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    out.append(
        f'<text transform="translate(16 {_TOP + plot_height / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    labels: list[tuple[float, str, str]] = []
    for at, line in enumerate(lines):
        color = COLORS[at % len(COLORS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(min(y, top)):.1f}" for x, y in line.points)
        width = 3 if line.strong else 1.6
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dash}/>')
        if len(line.points) <= 12:
            out += [
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="{width + 0.8}" fill="{color}"><title>{escape(line.name)}: '
                f"{escape(x_text(x))}, {y:.4f}</title></circle>"
                for x, y in line.points
            ]
        labels.append((y_of(min(line.points[-1][1], top)), line.name, color))
    for y, name, color in _spaced(sorted(labels)):
        out.append(f'<text x="{WIDTH - _RIGHT + 10}" y="{y + 4:.1f}" style="fill:{color}">{escape(name)}</text>')
    return "".join((*out, "</svg>"))


def bar_chart(bars: Sequence[tuple[str, float]], *, text: Callable[[float], str], title: str = "") -> str:
    """Horizontal bars, each with its name and its value."""
    if not bars:
        return ""
    row, left = 30, 190
    height = row * len(bars) + 12
    longest = max(value for _, value in bars) or 1.0
    out = [_open(title, height)]
    for at, (name, value) in enumerate(bars):
        y = 6 + row * at
        length = (WIDTH - left - 130) * value / longest
        out.append(f'<text x="{left - 8}" y="{y + 18}" text-anchor="end">{escape(name)}</text>')
        out.append(
            f'<rect x="{left}" y="{y + 4}" width="{length:.1f}" height="{row - 10}" fill="{COLORS[at % len(COLORS)]}"/>'
        )
        out.append(f'<text x="{left + length + 8:.1f}" y="{y + 18}">{escape(text(value))}</text>')
    return "".join((*out, "</svg>"))


def _open(title: str, height: int = HEIGHT) -> str:
    label = f"<title>{escape(title)}</title>" if title else ""
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">{label}'


def _spaced(labels: Sequence[tuple[float, str, str]], apart: float = 15) -> list[tuple[float, str, str]]:
    """Push labels down until none covers another, and the whole up where the last would fall out."""
    placed: list[tuple[float, str, str]] = []
    for y, name, color in labels:
        placed.append((max(y, placed[-1][0] + apart) if placed else y, name, color))
    over = max(0.0, placed[-1][0] - (HEIGHT - _BOTTOM)) if placed else 0.0
    return [(y - over, name, color) for y, name, color in placed]
