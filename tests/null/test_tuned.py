"""Tuned records: their files, precedence, merging, and what the composer makes of them."""

import json
import logging
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from humming import compiler, composer, plugins, tuned
from humming.composer import M_RANGES, TUNED_RANGES, choices, compose, decide, m_ranges
from humming.decision import Ready
from humming.errors import UnsupportedError
from humming.problem import GemmProblem
from humming.tuned import (
    NO_RECORDS,
    Entry,
    ProblemKey,
    Records,
    kept_entries,
    merge_record,
    read_record,
    records_for,
)

Shell = Any  # of conftest.py, which tests do not import
H200 = plugins.capabilities("h200")
PROBLEM = GemmProblem.parse("int4_g128 x bf16", 4096, 4096)
WHEN = {"card": "NVIDIA H200", "date": "2026-12-01", "versions": {"humming": "0.1.0"}}


@pytest.fixture(autouse=True)
def _places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Records are heeded, and every place of them is empty."""
    monkeypatch.delenv("HUMMING_RECORDS")
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    tuned.forget()
    yield
    tuned.forget()


def another(problem: GemmProblem = PROBLEM, m_range: tuple[int, int | None] = (1, 8)) -> Ready:
    """Some kernel that the cost model does not choose."""
    decision = decide(problem, H200, m_range, plugins.registry(), records=NO_RECORDS)
    chosen = decision.chosen
    return random.choice([o for o in choices(decision) if o.tile != chosen.tile])


def entry(
    problem: GemmProblem = PROBLEM,
    m_range: tuple[int, int | None] = (1, 8),
    option: Ready | None = None,
    us: float = 12.125,
) -> Entry:
    option = option or another(problem, m_range)
    times = {m_range[0]: us} | ({} if m_range[1] is None else {m_range[1]: us + 1})
    name = option.lowering.name
    return Entry(ProblemKey.of(problem), m_range, name, option.tile, times, **WHEN)


def written(path: Path, *entries: Entry) -> Path:
    merge_record(path, "h200", entries)
    return path


def decided(m_range: tuple[int, int | None] = (1, 8), problem: GemmProblem = PROBLEM, **kwargs):
    return decide(problem, H200, m_range, plugins.registry(), **kwargs)


# -- files ----------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    wanted = [entry(m_range=m_range) for m_range in TUNED_RANGES]
    wanted.append(entry(replace(PROBLEM, batch_invariant=True), (1, None)))
    read = read_record(written(tmp_path / "h200.json", *random.sample(wanted, len(wanted))))
    assert read.device == "h200"
    assert not read.refused
    assert read.entries == {(e.key, e.m_range): e for e in wanted}


def test_files_are_sorted_and_have_a_line_per_entry(tmp_path: Path) -> None:
    entries = [entry(m_range=r) for r in TUNED_RANGES[:3]]
    one = written(tmp_path / "one.json", *entries)
    two = tmp_path / "two.json"
    for item in reversed(entries):
        written(two, item)
    assert one.read_text() == two.read_text()
    lines = one.read_text().splitlines()
    assert [json.loads(line.rstrip(","))["m"] for line in lines[4:-2]] == [
        [1, 8],
        [9, 16],
        [17, 32],
    ]


def test_merging_replaces_the_same_problem_and_range_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "h200.json", entry(us=10.0), entry(m_range=(9, 16)))
    newer = entry(us=8.0)
    written(path, newer)
    kept = kept_entries(path, "h200")
    assert len(kept) == 2
    assert kept[newer.key, (1, 8)] == newer


def test_an_interrupted_write_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "h200.json", entry())
    before = path.read_text()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuned.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(path, entry(m_range=(9, 16)))
    assert path.read_text() == before
    assert list(tmp_path.glob(".*")) == []


def test_a_record_is_not_mixed_with_that_of_another_device(tmp_path: Path) -> None:
    path = written(tmp_path / "h200.json", entry())
    with pytest.raises(UnsupportedError, match="of h200, not of h20"):
        merge_record(path, "h20", [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "has no schema"),
        ('{"schema": 2, "device": "h200", "entries": []}', "its schema is 2"),
        ('{"schema": 1, "device": "h200"}', "schema, device and entries alone"),
        ('{"schema": 1, "device": "h200", "entries": [], "more": 1}', "alone"),
    ],
    ids=["no-json", "no-object", "newer-schema", "no-entries", "unknown-key"],
)
def test_no_record_is_refused_where_it_is_named_and_warned_of_elsewhere(
    text: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "named.json"
    path.write_text(text)
    with pytest.raises(UnsupportedError, match=why):
        records_for("h200", path)
    own = tuned.user_record("h200")
    own.parent.mkdir(parents=True)
    own.write_text(text)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # as a tuner does, which has files read again that it has written
            assert not records_for("h200").of(PROBLEM)
            tuned.forget()
    assert caplog.text.count(why) == 1


def _changed(**values: Any) -> Any:
    return lambda raw: raw | values


def _tile(**values: Any) -> Any:
    return lambda raw: raw | {"tile": raw["tile"] | values}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_changed(speed=3), "unknown keys speed"),
        (lambda raw: {k: v for k, v in raw.items() if k != "date"}, "lacks date"),
        (_tile(cluster_x=2), "unknown keys cluster_x"),
        (_tile(block_n=True), "block_n = True is no whole number"),
        (_tile(block_k=63), "breaks block_k"),
        (_changed(tile=7), "tile = 7"),
        (_changed(problem="int99 x bf16"), "int99"),
        (_changed(problem=5), "no 'WEIGHT x ACTIVATION'"),
        (_changed(problem=["a"]), "no 'WEIGHT x ACTIVATION'"),
        (_tile(warps_n=0), "tile warps_n = 0"),
        (_tile(cluster_n=0), "tile cluster_n = 0"),
        (_changed(us={"8": 10**400}), "no time"),
        (_changed(n="4096"), "n = '4096'"),
        (_changed(demands={"fast": True}), "unknown demands fast"),
        (_changed(demands={"batch_invariant": 1}), "batch_invariant = 1"),
        (_changed(m=[8, 1]), "ends before it begins"),
        (_changed(m=8), "no \\[low, high\\]"),
        (_changed(us={"9": 1.0}), "tokens outside"),
        (_changed(us={"8": -1.0}), "no time"),
        (_changed(us={"8": float("nan")}), "no time"),
        (_changed(us={"x": 1.0}), "no number of tokens"),
        (_changed(us={}), "no object of times"),
        (_changed(card=None), "card: no text"),
        (_changed(versions={"humming": 1}), "humming: no text"),
        (lambda raw: [], "no object"),
    ],
)
def test_an_entry_that_cannot_be_read_is_told_and_left_out(
    change: Any, why: str, tmp_path: Path
) -> None:
    good = entry(m_range=(9, 16))
    raw = [change(entry().to_dict()), good.to_dict()]
    path = tmp_path / "h200.json"
    path.write_text(json.dumps({"schema": 1, "device": "h200", "entries": raw}))
    read = read_record(path)
    assert list(read.entries.values()) == [good]
    (told,) = read.refused
    assert told.startswith(f"entry 0 of {path} is ignored: ")
    assert re.search(why, told)
    with pytest.raises(UnsupportedError, match="entries would be lost"):
        written(path, good)


def test_what_a_tile_has_by_default_need_not_be_told(tmp_path: Path) -> None:
    wanted = entry(option=decided(records=NO_RECORDS).chosen)
    raw = wanted.to_dict()
    assert "cluster_n" not in raw["tile"]
    for told in (raw, raw | {"tile": raw["tile"] | {"cluster_n": 1}}):
        assert Entry.from_dict(json.loads(json.dumps(told))) == wanted


def test_of_two_entries_for_the_same_the_first_counts(tmp_path: Path) -> None:
    first, second = entry(us=1.0), entry(us=2.0)
    path = tmp_path / "h200.json"
    raw = [first.to_dict(), second.to_dict()]
    path.write_text(json.dumps({"schema": 1, "device": "h200", "entries": raw}))
    read = read_record(path)
    assert list(read.entries.values()) == [first]
    assert "an earlier one" in read.refused[0]


def test_a_folder_that_cannot_be_read_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refused)
    with caplog.at_level(logging.WARNING):
        assert not records_for("h200").of(PROBLEM)
    assert "Permission denied" in caplog.text


# -- precedence -----------------------------------------------------------------------------------


def test_the_nearest_place_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are taken away one by one, the first in precedence first."""
    argument = written(tmp_path / "argument.json", entry(us=1.0))
    by_environment = written(tmp_path / "fleet" / "h200.json", entry(us=2.0))
    own = written(tuned.user_record("h200"), entry(us=3.0))
    shipped = written(tuned.SHIPPED / "h200.json", entry(us=4.0), entry(m_range=(9, 16), us=5.0))
    monkeypatch.setenv("HUMMING_RECORDS", str(by_environment.parent))

    def found(named: Path | None = None) -> tuple[float, Path]:
        tuned.forget()
        first = records_for("h200", named).of(PROBLEM)[1, 8]
        return first.entry.us[1], first.path

    assert found(argument) == (1.0, argument)
    assert found() == (2.0, by_environment)
    monkeypatch.delenv("HUMMING_RECORDS")
    assert found() == (3.0, own)
    # Entries count one by one: what a nearer file does not have, a farther one may.
    assert records_for("h200").of(PROBLEM)[9, 16].entry.us[9] == 5.0
    own.unlink()
    assert found() == (4.0, shipped)
    monkeypatch.setenv("HUMMING_RECORDS", "off")
    assert not records_for("h200").of(PROBLEM)
    assert found(argument) == (1.0, argument), "what is named counts even then"


def test_a_name_of_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_RECORDS", str(tmp_path / "absent"))
    with pytest.raises(UnsupportedError, match=r"no such file or folder.*HUMMING_RECORDS=off"):
        compose(PROBLEM, H200, (1, 8))


def test_a_file_of_another_device_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "h200.json", entry())
    with pytest.raises(UnsupportedError, match=r"one of h200, not of h20\. Name one of h20"):
        records_for("h20", path)
    assert records_for("sim:h200", path).of(PROBLEM), "a variant is like its row"
    assert not records_for("h20", tmp_path).files, "a folder has a file per device"
    monkeypatch.setenv("HUMMING_RECORDS", str(path))
    with caplog.at_level(logging.WARNING):
        (file,) = records_for("h20").files
    assert not file.entries
    assert f"{path} is ignored: it is one of h200, not of h20" in caplog.text
    assert records_for("h200").of(PROBLEM)


def test_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tuned.user_record("h200"), entry())
    reads, read = [], tuned.read_record
    monkeypatch.setattr(tuned, "read_record", lambda path: reads.append(path) or read(path))
    for m_range in M_RANGES:
        compose(PROBLEM, H200, m_range)
    assert len(reads) == 1


# -- what identifies a problem --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("same", "change"),
    [
        (True, {"out_dtype": "float32"}),
        (True, {"bias": True}),
        (False, {"n": 4097}),
        (False, {"k": 8192}),
        (False, {"weight": "int4_g64"}),
        (False, {"activation": "float16"}),
        (False, {"batch_invariant": True}),
        (False, {"deterministic": False}),
        (False, {"fp16_accumulation": True}),
        (False, {"allow_undocumented": True}),
        (False, {"experts": 8}),
    ],
    ids=str,
)
def test_what_tells_problems_apart(same: bool, change: dict[str, Any]) -> None:
    assert (ProblemKey.of(replace(PROBLEM, **change)) == ProblemKey.of(PROBLEM)) is same


# -- the composer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("m_range", TUNED_RANGES, ids=str)
def test_a_measured_kernel_is_composed(m_range: tuple[int, int | None], tmp_path: Path) -> None:
    option = another(m_range=m_range)
    written(tuned.user_record("h200"), entry(m_range=m_range, option=option))
    made = compose(PROBLEM, H200, m_range)
    assert (made.lowering, made.tile) == (option.lowering, option.tile)
    assert made.decision.record.entry.m_range == m_range
    assert made.source == composer.compose_as(PROBLEM, H200, m_range, *option[:2]).source
    others = [other.lowering.name for other in made.decision.ready]
    assert len(others) == len(set(others)), "alternatives are those that were not chosen"


def test_only_the_range_that_was_measured_is_chosen_by_it() -> None:
    written(tuned.user_record("h200"), entry(m_range=(9, 16)))
    for m_range in M_RANGES:
        by_model = decided(m_range, records=NO_RECORDS)
        made = decided(m_range)
        assert (made == by_model) is (m_range != (9, 16))
        assert (made.record is None) is (m_range != (9, 16))


def test_the_range_without_end_is_in_parts_where_one_was_measured() -> None:
    assert m_ranges(PROBLEM, H200) == M_RANGES
    written(tuned.user_record("h200"), entry(m_range=(9, 16)))
    assert m_ranges(PROBLEM, H200) == M_RANGES
    written(tuned.user_record("h200"), entry(m_range=(1025, 2048)))
    assert m_ranges(PROBLEM, H200) == TUNED_RANGES
    assert m_ranges(replace(PROBLEM, n=8192), H200) == M_RANGES
    as_before = compose(PROBLEM, H200, M_RANGES[-1], records=NO_RECORDS)
    for part in ((513, 1024), (2049, None)):
        assert compose(PROBLEM, H200, part).source == as_before.source, "no kernel more"
    plan = composer.plan(PROBLEM, "h200", m=1500)
    assert plan.m_range == (1025, 2048)
    assert plan.decision.record


def test_one_entry_serves_all_tokens_of_what_must_not_depend_on_them() -> None:
    problem = replace(PROBLEM, batch_invariant=True)
    option = another(problem, (1, None))
    written(tuned.user_record("h200"), entry(problem, (1, None), option))
    assert m_ranges(problem, H200) == M_RANGES
    made = [compose(problem, H200, m_range) for m_range in M_RANGES]
    assert {(plan.lowering, plan.tile) for plan in made} == {option[:2]}
    assert len({plan.source for plan in made}) == 1


def test_plans_with_records_are_deterministic() -> None:
    written(tuned.user_record("h200"), entry())
    first = compose(PROBLEM, H200, (1, 8))
    tuned.forget()
    assert compose(PROBLEM, H200, (1, 8)) == first


def _no_such_lowering(option: Ready) -> Entry:
    return replace(entry(option=option), lowering="mma of the past, scales in operand, cp_async")


def _no_such_tile(option: Ready) -> Entry:
    tile = replace(option.tile, num_stages=option.tile.num_stages + 7)
    return entry(option=option._replace(tile=tile))


def _too_large(option: Ready) -> Entry:
    tile = replace(option.tile, block_n=16 * option.tile.block_n)
    return entry(option=option._replace(tile=tile))


@pytest.mark.parametrize(
    ("stale", "why"),
    [
        (_no_such_lowering, "mma of the past, scales in operand, cp_async cannot be built"),
        (_no_such_tile, "has no tile"),
        (_too_large, "has no tile"),
    ],
)
def test_an_entry_that_is_out_of_date_is_told_and_not_heeded(stale: Any, why: str) -> None:
    path = written(tuned.user_record("h200"), stale(another()))
    decision = decided()
    assert decision.record is None
    assert decision.ready == decided(records=NO_RECORDS).ready
    text = decision.explain()
    assert "chosen: by the cost model" in text
    assert f"note: an entry of {path} is out of date: " in text
    assert why in text
    assert why in decision.to_dict()["record_notes"][0]


def test_parts_of_k_are_not_split_where_results_must_not_depend_on_tokens() -> None:
    """A tile that serves the problem without the demand must not slip in."""
    problem = replace(PROBLEM, batch_invariant=True)
    split = next(o for o in choices(decided(records=NO_RECORDS)) if o.tile.split_k > 1)
    written(tuned.user_record("h200"), entry(problem, (1, None), split))
    decision = decided(problem=problem)
    assert decision.record is None
    assert "out of date" in decision.record_notes[0]


def test_an_entry_for_a_range_that_no_plan_has_is_told() -> None:
    odd = replace(entry(), m_range=(1, 4), us={1: 2.0})
    written(tuned.user_record("h200"), odd)
    assert "its range of M is [1, 4]" in decided().explain()


def test_explanations_say_who_chose(humming: Shell) -> None:
    words = ("explain", "int4_g128 x bf16", "--device", "h200", "-n", "4096", "-k", "4096")
    assert humming(*words, "-m", "7") == 0
    assert "  chosen: by the cost model\n" in humming.out
    path = written(tuned.user_record("h200"), entry())
    assert humming(*words, "-m", "7") == 0
    assert "  chosen: measured 13.1 us at m = 8 on NVIDIA H200, 2026-12-01\n" in humming.out
    assert humming(*words, "-m", "1") == 0
    assert "measured 12.1 us at m = 1" in humming.out
    told = humming.json(*words, "-m", "1")
    assert told["chosen_by"] == "record"
    assert told["record"]["us"] == {"1": 12.125, "8": 13.125}
    assert told["record"]["path"] == str(path)
    assert told["chosen"] == told["record"]["lowering"]


def test_explain_asks_for_the_very_problem(humming: Shell) -> None:
    problem = replace(PROBLEM, batch_invariant=True)
    written(tuned.user_record("h200"), entry(problem, (1, None)))
    words = ("explain", "int4_g128 x bf16", "--device", "h200", "-n", "4096", "-k", "4096")
    assert humming.json(*words)["chosen_by"] == "cost model"
    assert humming.json(*words, "--fp16-accumulation")["chosen_by"] == "cost model"
    assert humming.json(*words, "--batch-invariant")["chosen_by"] == "record"


def test_explain_takes_records_as_an_argument(humming: Shell, tmp_path: Path) -> None:
    path = written(tmp_path / "mine.json", entry(m_range=(513, 1024)))
    words = ("explain", "int4_g128 x bf16", "--device", "h200", "-n", "4096", "-k", "4096")
    told = humming.json(*words, "-m", "600", "--records", str(path))
    assert told["m_range"] == [513, 1024]
    assert told["record"]["path"] == str(path)
    error = humming.json(*words, "--records", str(tmp_path / "absent.json"), status=2)["error"]
    assert error["why"] == "there is no such file or folder"


def test_prepared_folders_carry_the_entries_that_their_kernels_were_chosen_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = GemmProblem.parse("int4_g128 x bf16", 256, 256)
    ours = entry(problem)
    written(tuned.user_record("h200"), ours, entry(m_range=(1, 8)))
    compiler.compile(problem, "h200", m=1, directory=tmp_path / "fleet")
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path / "fleet"))
    assert list(kept_entries(tuned.user_record("h200"), "h200").values()) == [ours]
    (again,) = compiler.compile(problem, "h200", m=1)
    assert again.from_cache


def test_entries_of_an_earlier_time_leave_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is served by it would choose a kernel that is not in it."""
    problem, other = (GemmProblem.parse("int4_g128 x bf16", n, 256) for n in (256, 512))
    record = tuned.user_record("h200", tmp_path / "fleet")
    parts = [entry(problem, m_range=part) for part in ((1, 8), (9, 16), (513, 1024))]
    others = entry(other)
    written(record, *parts, others)
    compiler.compile(problem, "h200", m=[1, 600], directory=tmp_path / "fleet")
    assert list(kept_entries(record, "h200").values()) == [parts[1], others]
    # The cache in use is another matter: its entries are heeded, or left alone.
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path / "fleet"))
    monkeypatch.setenv("HUMMING_RECORDS", "off")
    compiler.compile(other, "h200", m=1, directory=tmp_path / "fleet")
    assert len(kept_entries(record, "h200")) == 2


def test_doctor_tells_of_records(humming: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    present = plugins.PresentDevice(0, "NVIDIA H200", "h200", plugin="nvidia")
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([present], []))
    from humming.cli import doctor

    def told() -> list[str]:
        return [finding.found for finding in doctor._records()]

    assert told() == ["h200: none; the cost model chooses every kernel"]
    path = written(tuned.user_record("h200"), entry())
    assert told() == [f"h200: 1 entries in {path}"]
    path.write_text("{")
    tuned.forget()
    assert "cannot be read" in told()[0]


def test_shipped_records_are_heeded() -> None:
    folder = Path(tuned.__file__).parent / "records"
    for path in folder.glob("*.json"):
        read = read_record(path)
        assert read.device == path.stem
        assert not read.refused
        caps = plugins.capabilities(read.device)
        for found in read.entries.values():
            demands = dict(found.key.demands)
            problem = GemmProblem.parse(found.key.formats, found.key.n, found.key.k, **demands)
            decision = decide(
                problem, caps, found.m_range, plugins.registry(), records=Records([read])
            )
            assert decision.record, decision.record_notes


def test_processes_that_write_one_record_lose_nothing(tmp_path: Path) -> None:
    """Two cards of a host are tuned at the same time."""
    path = tmp_path / "h200.json"
    script = (
        "import sys, json; from pathlib import Path; from humming import tuned\n"
        "raw = json.loads(sys.argv[2])\n"
        "for n in range(int(sys.argv[3]), int(sys.argv[3]) + 12):\n"
        "    entry = tuned.Entry.from_dict(raw | {'n': n})\n"
        "    tuned.merge_record(Path(sys.argv[1]), 'h200', [entry])\n"
    )
    raw = json.dumps(entry().to_dict())
    runs = [
        subprocess.Popen([sys.executable, "-c", script, str(path), raw, str(first)])
        for first in (1000, 2000)
    ]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    assert len(tuned.read_record(path).entries) == 24
