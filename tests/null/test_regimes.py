"""Tables and charts of the comparison with other libraries, from rows made up here."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def row(name: str, m: int, n: int, **ratios: float) -> dict:
    return {"format": name, "m": m, "n": n, "k": 512, **ratios}


ROWS = [
    row("int4 x bf16", 1, 256, over_cublas=2.0, over_best_peer=1.5, best_peer="a", of_floor=0.5),
    row("int4 x bf16", 1, 512, over_cublas=8.0, of_floor=0.9),
    row("int4 x bf16", 64, 256, over_cublas=1.0, over_best_peer=0.9, best_peer="b"),
    row("fp8 x fp8", 1024, 256, over_cublas=2.5, over_best_peer=1.25, best_peer="b"),
    row("fp8 x fp8", 2048, 256),
]
RESULT = {
    "environment": {
        "card": "a card",
        "versions": {"torch": "2.11"},
        "peers": {
            "ours": {"versions": {"humming-kernels": "0.1.0"}},
            "b": {"versions": {"torch": "2.11", "b-kernels": "7"}},
        },
    },
    "runs": [{"date": "2026-01-02"}, {"date": "2026-01-01"}],
    "peers": ROWS,
}


@pytest.fixture
def regimes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import regimes

    return regimes


def test_means_are_geometric_and_of_rows_that_have_the_ratio(regimes):
    assert regimes.mean_of(ROWS[:2], "over_cublas") == pytest.approx(4)
    assert regimes.mean_of(ROWS[:2], "over_best_peer") == pytest.approx(1.5)
    assert regimes.mean_of(ROWS[4:], "over_cublas") is None


def test_regimes_have_a_row_for_each_format(regimes):
    lines = regimes.regime_table(ROWS)
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2] == "| int4 x bf16 | 4.00x | 1.50x | 1.00x | 0.90x |  |  |"
    assert lines[3] == "| fp8 x fp8 |  |  |  |  | 2.50x | 1.25x |"
    by_token = regimes.token_table(ROWS, "over_cublas")
    assert by_token[0] == "| format | M = 1 | M = 64 | M = 1024 | M = 2048 |"
    assert by_token[2] == "| int4 x bf16 | 4.00x | 1.00x |  |  |"


def test_pages_name_card_versions_and_dates(regimes):
    page, readme = "\n".join(regimes.page(RESULT)), "\n".join(regimes.readme(RESULT))
    for text in (page, readme):
        assert "a card, torch 2.11, b-kernels 7; 2026-01-01 to 2026-01-02" in text
    assert "(a 1, b 2)" in page
    for path in regimes.charts(RESULT):
        assert f"({path.removeprefix('docs/')})" in page


def test_charts_are_svg_with_a_line_for_each_format(regimes):
    charts = regimes.charts(RESULT)
    assert {Path(path).stem for path in charts} == {"over_cublas", "over_best_peer", "of_floor"}
    assert charts == regimes.charts(RESULT)
    trees = {Path(path).stem: ElementTree.fromstring(text) for path, text in charts.items()}
    assert len(list(trees["over_cublas"].iter(f"{SVG}polyline"))) == 2
    assert len(list(trees["of_floor"].iter(f"{SVG}polyline"))) == 1
    labels = {element.text for element in trees["over_cublas"].iter(f"{SVG}text")}
    assert {"int4 x bf16", "fp8 x fp8", "16-bit activations", "quantized activations"} <= labels


def test_values_beyond_the_axis_stay_on_it(regimes):
    from plot import Axis

    axis = Axis("x", (0.25, 1, 4))
    assert [axis.at(v) for v in (0.0, 0.25, 1, 4, 99)] == [0, 0, 0.5, 1, 1]
    assert Axis("x", (0, 1), is_log=False).at(0.25) == 0.25


def test_report_writes_and_checks_what_is_recorded(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/benchmarks.md", "docs/measured"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    results = tmp_path / "benchmarks" / "results" / "h200_peers.json"
    results.write_text(json.dumps(RESULT))
    chain = {"model": "m", "format": "f", "m": 1, "relative_error": 1e-3}
    chain |= {"plain_us": 5.0, "dependent_us": 4.0, "cublas_us": 10.0}
    about = {**RESULT["environment"], "compiler": "c", "date": "d"}
    chains = {"environment": about, "chains": [chain]}
    (results.parent / "h200_chain.json").write_text(json.dumps(chains))
    script = tmp_path / "benchmarks" / "report.py"

    def report(*options: str) -> int:
        done = subprocess.run([sys.executable, script, *options], capture_output=True, check=False)
        return done.returncode

    assert report("--check") == 1
    assert report() == 0
    assert report("--check") == 0
    assert "Beside other libraries" in (tmp_path / "README.md").read_text()
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "| m | f | 1 | 5.0 | 4.0 | 10.0 | 2.50 | 1.0e-03 |" in page
    svg = tmp_path / "docs" / "measured" / "over_cublas.svg"
    svg.write_text(svg.read_text() + " ")
    assert report("--check") == 1
