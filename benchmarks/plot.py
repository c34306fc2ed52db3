"""Line charts as SVG text: the same numbers give the same bytes, which a test can compare."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 46, 40
LEGEND_LINE, LEGEND_COLUMNS = 16, 2
# Told apart by colour-blind readers too (after Okabe and Ito); beyond them lines are dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444", "#8c6d31")
DASHES = ("", "6 3", "2 2")

Lines = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Axis:
    """The vertical axis: what it shows, where its lines are, and whether it is logarithmic."""

    label: str
    ticks: Sequence[float]
    is_log: bool = True

    def at(self, value: float) -> float:
        """Where a value is, 0 at the lowest tick and 1 at the highest; beyond them at the edge."""
        low, high = self._scaled(self.ticks[0]), self._scaled(self.ticks[-1])
        return min(1.0, max(0.0, (self._scaled(value) - low) / (high - low)))

    def _scaled(self, value: float) -> float:
        return math.log2(max(value, 1e-9)) if self.is_log else value


def line_charts(title: str, panels: Mapping[str, Lines], axis: Axis) -> str:
    """Charts side by side over numbers of tokens, each with its own legend below."""
    longest = max(len(lines) for lines in panels.values())
    height = HEIGHT + LEGEND_LINE * -(-longest // LEGEND_COLUMNS) + 8
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f"<title>{escaped(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(width / 2, 16, title, "middle", size=14),
    ]
    for index, (name, lines) in enumerate(panels.items()):
        parts.append(f'<g transform="translate({index * WIDTH} 0)">')
        parts += panel(name, lines, axis)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(name: str, lines: Lines, axis: Axis) -> Iterable[str]:
    """One chart."""
    tokens = sorted({m for line in lines.values() for m in line})
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(m: int) -> float:
        return LEFT + (right - LEFT) * (tokens.index(m) + 0.5) / len(tokens)

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * axis.at(value)

    yield text((LEFT + right) / 2, TOP - 10, name, "middle", size=12)
    for tick in axis.ticks:
        colour = "#888888" if tick == 1 else "#dddddd"
        yield (
            f'<line x1="{LEFT}" y1="{y(tick):.1f}" x2="{right}" y2="{y(tick):.1f}" '
            f'stroke="{colour}"/>'
        )
        yield text(LEFT - 6, y(tick) + 4, f"{tick:g}", "end")
    for m in tokens:
        yield text(x(m), bottom + 15, str(m), "middle", size=9)
    yield text((LEFT + right) / 2, bottom + 30, "tokens (M)", "middle")
    middle = (TOP + bottom) / 2
    yield (
        f'<text x="14" y="{middle:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle:.1f})">{escaped(axis.label)}</text>'
    )
    for index, (label, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        style = f'stroke="{colour}" stroke-width="1.8"' + (
            f' stroke-dasharray="{dash}"' if dash else ""
        )
        points = " ".join(f"{x(m):.1f},{y(line[m]):.1f}" for m in sorted(line))
        yield f'<polyline points="{points}" fill="none" {style}/>'
        for m in sorted(line):
            yield f'<circle cx="{x(m):.1f}" cy="{y(line[m]):.1f}" r="2" fill="{colour}"/>'
        row, column = divmod(index, LEGEND_COLUMNS)
        left = LEFT + column * (right - LEFT) / LEGEND_COLUMNS
        at = HEIGHT + row * LEGEND_LINE
        yield f'<line x1="{left:.1f}" y1="{at}" x2="{left + 22:.1f}" y2="{at}" {style}/>'
        yield text(left + 28, at + 4, label, "start")


def text(x: float, y: float, content: str, anchor: str, size: int = 11) -> str:
    """A text element."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escaped(content)}</text>"
    )


def escaped(content: str) -> str:
    """Text as XML takes it."""
    return content.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
