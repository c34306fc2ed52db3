"""The comparison with other libraries: its processes, what it keeps, and when it ends."""

import json
import math
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"

# A library that multiplies on the CPU: "right" is right, "wrong" is not, "broken" raises. Its clock
# says 7 µs a call.
FAKE = """
    import sys, time
    import torch, worker

    class Recorder:
        capture = staticmethod(lambda call, calls: calls)
        replay = staticmethod(lambda calls: 7.0 * calls)

    class Fake(worker.Peer):
        def __init__(self):
            if "absent" in sys.argv:
                raise ImportError("no such library")
            print("libraries print")

        def details(self):
            return {"environment": {"card": sys.argv[1], "versions": {}}}

        def load(self, name, n, k, tokens):
            if name == "other":
                raise worker.NoSuchFormatError(name)
            if name == "unloadable":
                raise ValueError("cannot\\nbe loaded")
            if name == "fatal":
                sys.exit(3)
            if name == "endless":
                time.sleep(60)
            self.weight = torch.randn(n, k)
            self.sampled = worker.SampledWeight.of(n, lambda rows: self.weight[rows])

        def drop(self):
            self.weight = None

        def products(self, m):
            x = torch.randn(m, self.weight.shape[1])
            values = x[worker.sample_tokens(m)].double()
            def product(factor):
                def call(i):
                    if factor == 0:
                        raise RuntimeError("it broke")
                    return factor * (x @ self.weight.T)
                return lambda: worker.Product(call, values, self.sampled, "a note")
            names = {"ours": 1, "cublas bf16": 1, "right": 1, "wrong": 2, "broken": 0}
            return {name: product(factor) for name, factor in names.items()}

    worker.main(Fake, Recorder)
"""


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import compare

    return compare


@pytest.fixture
def fake(compare, tmp_path):
    from peers.processes import Process

    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE))
    environment = {"PYTHONPATH": f"{BENCHMARKS}:{BENCHMARKS / 'peers'}"}
    made = []

    def make(*arguments: str, name: str = "ours") -> Process:
        process = Process(name, [sys.executable, str(script), *arguments], environment)
        made.append(process)
        return process

    yield make
    for process in made:
        process.stop()


@pytest.fixture
def run(compare, fake, monkeypatch, tmp_path):
    """`compare.main` with one fake library; returns its status and the file it wrote."""

    def start(*options: str, card: str = "a card") -> tuple[int, dict]:
        monkeypatch.setattr(
            compare,
            "processes",
            lambda _, names: [fake(card, name=name) for name in names if name == "ours"],
        )
        output = tmp_path / "out" / "peers.json"
        status = compare.main(
            ["--output", str(output), "--wheels", str(tmp_path), "--peers", "ours", *options]
        )
        return status, json.loads(output.read_text()) if output.exists() else {}

    return start


def test_a_worker_answers_every_command(fake):
    process = fake("a card")
    assert process.start()["versions"]["torch"] == torch.__version__
    asked = {"format": "any", "n": 300, "k": 40, "tokens": [5]}
    assert process.ask({"do": "load", **asked}) == {}
    assert process.ask({"do": "compile", **asked}) == {"compiled": False}
    products = process.ask({"do": "capture", "m": 5, "calls": 4})["products"]
    assert products["right"]["relative_error"] < 1e-5
    assert products["wrong"]["relative_error"] == pytest.approx(1, abs=1e-5)
    assert products["broken"] == {"failed": "RuntimeError: it broke"}
    us = process.ask({"do": "replay", "replays": 3})["us"]
    assert us == {name: [7.0] * 3 for name in ("ours", "cublas bf16", "right", "wrong")}


def test_a_worker_tells_what_it_cannot_do(fake):
    process = fake("a card")
    process.start()
    asked = {"n": 8, "k": 8, "tokens": [1]}
    assert process.ask({"do": "load", "format": "other", **asked}) == {"absent": "other"}
    failed = process.ask({"do": "load", "format": "unloadable", **asked})
    assert failed == {"failed": "ValueError: cannot be loaded"}
    assert "status 3" in process.ask({"do": "load", "format": "fatal", **asked})["failed"]
    assert not process.is_running
    assert "versions" in process.start()
    process.patience_s = 0.2
    assert "no answer" in process.ask({"do": "load", "format": "endless", **asked})["failed"]
    assert fake("a card", "absent").start() == {"failed": "ImportError: no such library"}


def test_rows_count_only_what_is_right(run):
    status, found = run("--shapes", "256x32", "--formats", "some  x bf16", "--m", "1,3")
    assert status == 0
    assert found["environment"]["card"] == "a card"
    assert [row["m"] for row in found["peers"]] == [1, 3]
    row = found["peers"][0]
    assert row["us"] == {"ours": 7.0, "cublas bf16": 7.0, "right": 7.0}
    assert row["format"] == "some x bf16"
    assert row["best_peer"] == "right"
    assert row["over_best_peer"] == row["over_cublas"] == 1
    assert row["failed"] == {"broken": "RuntimeError: it broke", "wrong": "relative error 1"}
    assert row["notes"]["ours"] == "a note"


def test_rows_are_kept_and_missing_ones_added(run):
    run("--shapes", "256x32", "--formats", "some x bf16", "--m", "1")
    _, found = run("--shapes", "256x32,128x32", "--formats", "some x bf16", "--m", "1,2")
    rows = {(row["n"], row["m"]): row["run"] for row in found["peers"]}
    assert rows == {(256, 1): 0, (256, 2): 1, (128, 1): 1, (128, 2): 1}
    _, found = run("--shapes", "256x32", "--formats", "some x bf16", "--m", "1", "--redo")
    assert {row["run"] for row in found["peers"] if row["m"] == 1} == {1, 2}
    assert run("--shapes", "256x32", "--formats", "some x bf16", "--m", "2")[0] == 0
    with pytest.raises(SystemExit, match="another --output"):
        run("--shapes", "512x32", "--formats", "some x bf16", "--m", "2", card="another card")


def test_a_library_without_the_format_or_that_ends_leaves_others(run):
    _, found = run("--shapes", "256x32", "--formats", "fatal,other,some x bf16", "--m", "1")
    rows = {row["format"]: row for row in found["peers"]}
    assert "status 3" in rows["fatal"]["failed"]["ours"]
    assert rows["other"]["us"] == {}
    assert "failed" not in rows["other"]
    assert rows["some x bf16"]["us"]["ours"] == 7.0


def test_time_ends_a_run_cleanly(run, compare, monkeypatch):
    grid = ("--shapes", "256x32", "--formats", "some x bf16,endless", "--m", "1")
    monkeypatch.setattr(compare, "SPARE_S", 0.1)
    begun = time.monotonic()
    status, found = run(*grid, "--seconds", "12")
    assert time.monotonic() - begun < 40
    assert status == 1
    assert [row["format"] for row in found["peers"]] == ["some x bf16"]
    status, found = run(*grid, "--seconds", "0")
    assert status == 1
    assert len(found["peers"]) == 1


def test_without_ours_there_is_no_comparison(compare, fake, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compare, "processes", lambda *_: [fake("a card", "absent")])
    options = compare.parse(["--output", "x.json", "--wheels", str(tmp_path)])
    with pytest.raises(SystemExit, match="no comparison without ours"):
        compare.start(options)
    assert "ours is left out: ImportError: no such library" in capsys.readouterr().out


def test_ratios_are_of_the_fastest(compare):
    us = {"ours": 10.0, "cublas bf16": 40.0, "a": 30.0, "b": 20.0, "floor": 7, "floor dependent": 5}
    assert compare.ratios(us) == {
        "over_cublas": 4,
        "best_peer": "b",
        "over_best_peer": 2,
        "of_floor": 0.5,
    }
    assert compare.ratios({"a": 1.0}) == {}
    assert compare.ratios({"ours": 1.0}) == {}


def test_products_that_are_not_numbers_are_wrong(compare):
    weight = compare.Weight(8, 8, "f", (1,))
    products = {"ours": {"relative_error": math.nan, "note": ""}}
    row = compare.row_of(weight, 1, 4, products, {"ours": [1.0]}, {})
    assert row["us"] == {}
    assert "nan" in row["failed"]["ours"]


def test_graphs_are_long_for_short_products_only(compare):
    assert compare.calls_of(4096, 4096, 1) == 48
    assert compare.calls_of(57344, 8192, 8192) == 4


@pytest.mark.parametrize("n", [100, 128, 300, 8192])
def test_sampled_rows_hold_the_first_and_the_last_blocks(compare, monkeypatch, n):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    import worker

    slices = worker.sample_rows(n)
    assert slices[0].start == 0
    assert all(part.start % 128 == 0 and part.stop <= n for part in slices)
    assert max(part.stop for part in slices) > n - 128
    assert worker.sample_tokens(1).tolist() == [0]
    assert worker.sample_tokens(500)[[0, -1]].tolist() == [0, 499]


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
@pytest.mark.parametrize("rows", [1, 128])
def test_fp8_of_the_peers_is_near_what_was_quantized(compare, monkeypatch, granularity, rows):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    import cublas

    x = torch.randn(256, 384)
    codes, scales, values = cublas.quantize(x, granularity, rows)
    shape = {"tensor": (1, 1), "row": (256, 1), "block": (256 // rows, 3)}[granularity]
    assert scales.shape == shape
    assert codes.dtype == torch.float8_e4m3fn
    for part in (slice(0, 128), slice(128, 256)):
        error = (values(part) - x[part]).abs()
        # Half a step of e4m3: 2^-4 of a normal number, 2^-10 of the scale below.
        bound = x[part].abs() * 2**-4 + scales.max() * 2**-10
        assert bool((error <= bound * 1.0001).all())


def test_rows_of_our_weights_are_those_of_the_whole(compare):
    import weight_rows

    import humming
    from humming import reference

    dense = torch.randn(384, 256)
    for name in ("int4_g128", "int3", "fp8_block128", "nvfp4", "uint4_g64_zp", "int8_tensor"):
        weight = humming.quantize(dense, name)
        whole = reference.dequantize(weight)
        for rows in (slice(0, 128), slice(256, 384)):
            assert torch.equal(weight_rows.dequantized_rows(weight, rows), whole[rows]), name


def test_marlin_codes_lie_in_words_from_the_lowest_bit(compare, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    import marlin

    codes = torch.randint(0, 16, (64, 3), dtype=torch.int32)
    words = marlin.pack(codes, 4)
    again = torch.stack([words[i // 8] >> 4 * (i % 8) & 15 for i in range(64)])
    assert torch.equal(again, codes)
    assert marlin.type_id(4) == 1125899907892224


def test_installing_takes_each_wheel_by_name(compare, monkeypatch, tmp_path):
    from peers import processes

    asked = []

    def pip(command, **_):
        asked.append(command)
        (tmp_path / "to" / "deepgemm").mkdir(parents=True)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(processes.subprocess, "run", pip)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    spec = processes.SPECS["deepgemm"]
    processes.install(spec, wheels, tmp_path / "to")
    assert not asked
    (wheels / "sgl_deep_gemm-0.1.5-py3-none-any.whl").touch()
    for _ in range(2):
        folder = processes.install(spec, wheels, tmp_path / "to")
    assert len(asked) == 1
    assert asked[0][-1] == "sgl_deep_gemm"
    monkeypatch.setenv("HUMMING_SIMULATE", "t4")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:/elsewhere")
    alone = processes.environment_of(spec, folder, tmp_path)
    assert alone["PYTHONPATH"].split(":") == [str(folder), str(BENCHMARKS), "/elsewhere"]
    assert "HUMMING_SIMULATE" not in alone
    ours = processes.environment_of(processes.SPECS["ours"], folder, tmp_path)
    assert ours["PYTHONPATH"].split(":") == [str(BENCHMARKS), str(ROOT), "/elsewhere"]
    assert ours["HUMMING_SIMULATE"] == "t4"
