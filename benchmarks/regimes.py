"""What the comparison with other libraries says: tables and charts from its recorded rows.

A figure of several shapes is the geometric mean of their ratios; shapes that lack one are left out
of it, so that the same shapes stand on both sides of every ratio.
"""

import statistics
from collections.abc import Iterable
from typing import Any

from plot import Axis, Lines, line_charts

REGIMES = {"M 1 to 16": (1, 16), "M 32 to 256": (32, 256), "M 512 and more": (512, 1 << 30)}
FLOOR_TOKENS = 64
FOLDER = "docs/measured"
RATIOS = {"over_cublas": "over cuBLAS", "over_best_peer": "over the best peer"}
RATIO_TICKS = (0.25, 0.5, 1, 2, 4)
FLOOR_TICKS = (0, 0.2, 0.4, 0.6, 0.8, 1)

Row = dict[str, Any]


def mean_of(rows: Iterable[Row], ratio: str) -> float | None:
    """The geometric mean of a ratio over the rows that have it; None if none has."""
    values = [row[ratio] for row in rows if ratio in row]
    return statistics.geometric_mean(values) if values else None


def formats_of(rows: list[Row]) -> list[str]:
    """The formats: 16-bit activations first, else by name."""
    return sorted({row["format"] for row in rows}, key=lambda name: (is_quantized(name), name))


def is_quantized(name: str) -> bool:
    """Whether the activations of a format are quantized."""
    return not name.endswith((" bf16", " fp16"))


def regime_table(rows: list[Row], names: Iterable[str] = REGIMES) -> list[str]:
    """A row for each format: both ratios in each regime."""
    regimes = {name: REGIMES[name] for name in names}
    heads = [f"{name}: {told}" for name in regimes for told in RATIOS.values()]
    lines = ["| format | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for name in formats_of(rows):
        cells = []
        for low, high in regimes.values():
            some = [r for r in rows if r["format"] == name and low <= r["m"] <= high]
            cells += [shown(mean_of(some, ratio)) for ratio in RATIOS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def token_table(rows: list[Row], ratio: str) -> list[str]:
    """A row for each format, a column for each number of tokens."""
    tokens = sorted({row["m"] for row in rows})
    lines = [
        "| format | " + " | ".join(f"M = {m}" for m in tokens) + " |",
        "|---|" + "---|" * len(tokens),
    ]
    for name in formats_of(rows):
        line = curve(rows, name, ratio)
        lines.append(f"| {name} | " + " | ".join(shown(line.get(m)) for m in tokens) + " |")
    return lines


def shown(ratio: float | None) -> str:
    """A ratio in a table."""
    return "" if ratio is None else f"{ratio:.2f}x"


def curve(rows: list[Row], name: str, ratio: str) -> dict[int, float]:
    """A ratio of one format by number of tokens."""
    found = {}
    for m in sorted({row["m"] for row in rows}):
        mean = mean_of((r for r in rows if r["format"] == name and r["m"] == m), ratio)
        if mean is not None:
            found[m] = mean
    return found


def charts(result: dict[str, Any]) -> dict[str, str]:
    """SVG files by their paths."""
    rows: list[Row] = result["peers"]
    small = [row for row in rows if row["m"] <= FLOOR_TOKENS]
    found = {}
    for ratio, told in RATIOS.items():
        panels = panels_of(rows, ratio)
        if panels:
            axis = Axis("times faster", RATIO_TICKS)
            found[f"{FOLDER}/{ratio}.svg"] = line_charts(f"Speed-up {told}", panels, axis)
    panels = panels_of(small, "of_floor")
    if panels:
        axis = Axis("time of reading alone / our time", FLOOR_TICKS, is_log=False)
        title = "Fraction of the floor (a kernel that only reads the same bytes)"
        found[f"{FOLDER}/of_floor.svg"] = line_charts(title, panels, axis)
    return found


def panels_of(rows: list[Row], ratio: str) -> dict[str, Lines]:
    """The curves of 16-bit and of quantized activations."""
    found: dict[str, Lines] = {}
    for title, quantized in (("16-bit activations", False), ("quantized activations", True)):
        names = [name for name in formats_of(rows) if is_quantized(name) == quantized]
        lines = {name: line for name in names if (line := curve(rows, name, ratio))}
        if lines:
            found[title] = lines
    return found


def about(result: dict[str, Any]) -> str:
    """What the comparison was measured with."""
    environment = result["environment"]
    versions = {
        name: version
        for peer, hello in environment["peers"].items()
        for name, version in hello["versions"].items()
        if peer != "ours" and name not in ("torch", "triton", "apache-tvm-ffi")
    }
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    dates = sorted({run["date"] for run in result["runs"]})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{environment['card']}, torch {environment['versions']['torch']}, {told}; {when}"


def readme(result: dict[str, Any]) -> list[str]:
    """The README's short table."""
    shapes = {(row["n"], row["k"]) for row in result["peers"]}
    return [
        f"Beside other libraries ({about(result)}), geometric means over {len(shapes)} shapes:",
        "times faster than cuBLAS bf16, and than the fastest other library that has the format.",
        "",
        *regime_table(result["peers"]),
    ]


def page(result: dict[str, Any]) -> list[str]:
    """The section of docs/benchmarks.md."""
    rows: list[Row] = result["peers"]
    shapes = sorted({(row["n"], row["k"]) for row in rows})
    best: dict[str, int] = {}
    for row in rows:
        if "best_peer" in row:
            best[row["best_peer"]] = best.get(row["best_peer"], 0) + 1
    counts = ", ".join(f"{name} {count}" for name, count in sorted(best.items()))
    lines = [
        "## Beside other libraries",
        "",
        f"{about(result)}. Geometric means over N x K: "
        + ", ".join(f"{n} x {k}" for n, k in shapes)
        + ".",
        "The best peer of a row is the fastest other library that has the format "
        f"({counts or 'none'}); where no library has it there is none.",
        "",
        *regime_table(rows),
    ]
    for path in charts(result):
        lines += ["", f"![{path.split('/')[-1][:-4]}]({path.removeprefix('docs/')})"]
    for ratio, told in RATIOS.items():
        lines += ["", f"Times faster, {told}:", "", *token_table(rows, ratio)]
    return lines
