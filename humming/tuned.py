"""Tuned records: which kernel was measured as the fastest for a problem on a device.

A record is one JSON file per device, an entry a line, so that people read it and version control
merges it. Entries are looked up by the problem and the range of M; what they name must still be
possible, and the composer says so where it is not. Files are read once, in this order, and the
first that has an entry counts:

1. what the caller names;
2. what `HUMMING_RECORDS` names;
3. the user's, in the folder `records` of `HUMMING_CACHE_DIR`;
4. the shipped ones, `humming/records`.

Packed weights do not depend on records: whatever is chosen reads the same bytes.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from humming import env
from humming.errors import UnsupportedError, warn_once
from humming.formats import ActivationSpec, WeightSpec
from humming.problem import GemmProblem
from humming.tiles import TileConfig

_LOG = logging.getLogger(__name__)

SCHEMA = 1
"""Number of the files' form; a file of another one is refused."""
SHIPPED = Path(__file__).parent / "records"
"""The folder of records that come with humming."""

# Properties of a problem that change which kernels may serve it, with the values that need not be
# told. Output type and bias change no choice: they are what an epilogue does at the end.
_DEMANDS = {
    "batch_invariant": False,
    "deterministic": True,
    "experts": 0,
    "fp16_accumulation": False,
    "allow_undocumented": False,
}
# A day; what takes longer was not measured.
_LONGEST_US = 86400e6
_REQUIRED = {"problem", "n", "k", "m", "lowering", "tile", "us", "card", "date", "versions"}
_TILE_FIELDS = {known.name: known.default for known in fields(TileConfig)}


@dataclass(frozen=True, slots=True, order=True)
class ProblemKey:
    """What identifies a problem in a record.

    Attributes:
        formats: names of weights and activations, `int4_g128 x bfloat16`.
        n, k: sizes of the weight.
        demands: other properties that differ from their defaults, by name.
    """

    formats: str
    n: int
    k: int
    demands: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, problem: GemmProblem) -> "ProblemKey":
        """The key of a problem."""
        demands = ((name, getattr(problem, name)) for name in _DEMANDS)
        told = tuple(sorted((n, value) for n, value in demands if value != _DEMANDS[n]))
        formats = f"{problem.weight.name} x {problem.activation.name}"
        return cls(formats, problem.n, problem.k, told)


@dataclass(frozen=True, slots=True)
class Entry:
    """The fastest kernel of a problem in a range of M, and how that was found.

    Attributes:
        key: the problem.
        m_range: tokens that it serves, (low, high); high None is without end.
        lowering: name of the lowering.
        tile: how the product is cut.
        us: measured microseconds by number of tokens.
        card: what it was measured on, as its driver calls it.
        date: of the measurement, as 2026-12-31.
        versions: of what made and ran the kernel, by name.
    """

    key: ProblemKey
    m_range: tuple[int, int | None]
    lowering: str
    tile: TileConfig
    us: Mapping[int, float] = field(hash=False)
    card: str
    date: str
    versions: Mapping[str, str] = field(hash=False)

    def told(self, m: int) -> str:
        """For people: what was measured nearest to `m` tokens, on what and when."""
        nearest = min(self.us, key=lambda tokens: (abs(tokens - m), tokens))
        return f"measured {self.us[nearest]:.1f} us at m = {nearest} on {self.card}, {self.date}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        demands = {"demands": dict(self.key.demands)} if self.key.demands else {}
        return {
            "problem": self.key.formats,
            "n": self.key.n,
            "k": self.key.k,
            **demands,
            "m": list(self.m_range),
            "lowering": self.lowering,
            "tile": _told_tile(self.tile),
            "us": {str(m): us for m, us in sorted(self.us.items())},
            "card": self.card,
            "date": self.date,
            "versions": dict(sorted(self.versions.items())),
        }

    @classmethod
    def from_dict(cls, raw: Any) -> "Entry":
        """An entry from JSON.

        Raises:
            ValueError: something is missing, unknown or of another kind; the text says what.
        """
        if not isinstance(raw, dict):
            raise ValueError("it is no object")
        _check_keys("an entry", raw, _REQUIRED, {"demands"})
        m_range, us, versions = raw["m"], raw["us"], raw["versions"]
        if not (isinstance(m_range, list) and len(m_range) == 2):
            raise ValueError(f"m = {m_range!r} is no [low, high]")
        low, high = _whole("m", m_range[0]), m_range[1]
        if high is not None and _whole("m", high) < low:
            raise ValueError(f"m = {m_range!r} ends before it begins")
        if not isinstance(us, dict) or not us:
            raise ValueError(f"us = {us!r} is no object of times by tokens")
        times = {_tokens(m): _time(time) for m, time in us.items()}
        if any(m < low or (high is not None and m > high) for m in times):
            raise ValueError(f"us has tokens outside of m = {m_range!r}")
        if not isinstance(versions, dict):
            raise ValueError(f"versions = {versions!r} is no object")
        texts = {name: raw[name] for name in ("lowering", "card", "date")} | versions
        if strange := [name for name, text in texts.items() if not isinstance(text, str)]:
            raise ValueError(f"{', '.join(strange)}: no text")
        return cls(
            key=_key(raw),
            m_range=(low, high),
            lowering=raw["lowering"],
            tile=_tile(raw["tile"]),
            us=times,
            card=raw["card"],
            date=raw["date"],
            versions=versions,
        )


def _key(raw: Mapping[str, Any]) -> ProblemKey:
    demands = raw.get("demands", {})
    if not isinstance(demands, dict):
        raise ValueError(f"demands = {demands!r} is no object")
    if unknown := set(demands) - set(_DEMANDS):
        raise ValueError(f"unknown demands {', '.join(sorted(unknown))}")
    for name, value in demands.items():
        if type(value) is not type(_DEMANDS[name]):
            raise ValueError(f"{name} = {value!r} is of another type")
    told = tuple(sorted((n, value) for n, value in demands.items() if value != _DEMANDS[n]))
    if not isinstance(raw["problem"], str):
        raise ValueError(f"problem = {raw['problem']!r} is no 'WEIGHT x ACTIVATION'")
    formats = _canonical(raw["problem"])
    return ProblemKey(formats, _whole("n", raw["n"]), _whole("k", raw["k"]), told)


# Files name few formats many times.
@cache
def _canonical(formats: str) -> str:
    weight, separator, activation = formats.partition(" x ")
    if not separator:
        raise ValueError(f"problem = {formats!r} is no 'WEIGHT x ACTIVATION'")
    return f"{WeightSpec.parse(weight).name} x {ActivationSpec.parse(activation).name}"


# What a tile has by default it need not be told, so that files outlive new ways to cut products.
def _told_tile(tile: TileConfig) -> dict[str, int]:
    return {n: v for n, v in asdict(tile).items() if v != _TILE_FIELDS[n]}


def _tile(raw: Any) -> TileConfig:
    if not isinstance(raw, dict):
        raise ValueError(f"tile = {raw!r} is no object")
    required = {name for name, default in _TILE_FIELDS.items() if default is MISSING}
    _check_keys("a tile", raw, required, set(_TILE_FIELDS))
    least = {"producer_warps": 0}
    return TileConfig(
        **{name: _whole(f"tile {name}", size, least.get(name, 1)) for name, size in raw.items()}
    )


def _check_keys(what: str, raw: Mapping[str, Any], required: set[str], more: set[str]) -> None:
    if missing := sorted(required - set(raw)):
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    if unknown := sorted(set(raw) - required - more):
        raise ValueError(f"{what} has the unknown keys {', '.join(unknown)}")


def _whole(name: str, value: Any, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} = {value!r} is no whole number of at least {least}")
    return value


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"us has {text!r}, which is no number of tokens")
    return int(text)


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < _LONGEST_US:
        raise ValueError(f"us = {value!r} is no time")
    return float(value)


# -- files ----------------------------------------------------------------------------------------


Place = tuple[ProblemKey, tuple[int, int | None]]
"""What an entry is for: the problem and the range of M."""


@dataclass(frozen=True)
class RecordFile:
    """One record as it was read.

    Attributes:
        path: where it lies.
        device: the row that it is for; empty where the file is absent or refused.
        entries: those that can be read, by problem and range.
        refused: why each other entry, or the whole file, counts for nothing.
    """

    path: Path
    device: str = ""
    entries: Mapping[Place, Entry] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


def read_record(path: Path) -> RecordFile:
    """Reads a record; single entries that cannot be read are left out and told in `refused`.

    Raises:
        UnsupportedError: there is no such file, it is no record, or one of another schema.
    """
    asked = f"the tuned record {path}"
    how = "Name a file that `humming tune` wrote, or tune again into a new one."
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedError(asked, f"it cannot be read as JSON ({error})", how) from error
    if not isinstance(raw, dict) or "schema" not in raw:
        raise UnsupportedError(asked, "it is no record: it has no schema", how)
    if raw["schema"] != SCHEMA:
        why = f"its schema is {raw['schema']!r}, and this version of humming reads {SCHEMA}"
        raise UnsupportedError(asked, why, "Use the humming that wrote it, or tune again.")
    listed, device = raw.get("entries"), raw.get("device")
    if set(raw) != {"schema", "device", "entries"} or not (
        isinstance(listed, list) and isinstance(device, str) and device
    ):
        raise UnsupportedError(asked, "it has not the keys schema, device and entries alone", how)
    found: dict[Place, Entry] = {}
    refused: list[str] = []
    for place, item in enumerate(listed):
        try:
            entry = Entry.from_dict(item)
        except (ValueError, UnsupportedError) as error:
            refused.append(f"entry {place} of {path} is ignored: {error}")
            continue
        if (entry.key, entry.m_range) in found:
            refused.append(f"entry {place} of {path} is ignored: an earlier one is for the same")
        found.setdefault((entry.key, entry.m_range), entry)
    return RecordFile(path, device, found, tuple(refused))


def kept_entries(path: Path, device: str) -> dict[Place, Entry]:
    """What `merge_record` keeps of a file, none of one that is absent.

    Raises:
        UnsupportedError: it is no record of this device, or has entries that cannot be read.
    """
    if not path.exists():
        return {}
    asked, old = f"the tuned record {path}", read_record(path)
    if old.device != device:
        raise UnsupportedError(asked, _foreign(old, device), "Give each device a file of its own.")
    if old.refused:
        how = "Correct or remove them, or write into a new file."
        raise UnsupportedError(asked, f"entries would be lost: {old.refused[0]}", how)
    return dict(old.entries)


def merge_record(
    path: Path, device: str, entries: Iterable[Entry], dropped: Iterable[Place] = ()
) -> None:
    """Writes entries into a record, in place of those for the same problem and range.

    The file is written whole or not at all. Entries for `dropped` go, unless they are written.

    Raises:
        UnsupportedError: as `kept_entries`, or the file cannot be written.
    """
    asked = f"the tuned record {path}"
    added = {(entry.key, entry.m_range): entry for entry in entries}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may be writing what it has measured on another card.
        with FileLock(_lock_of(path)):
            gone = set(dropped)
            kept = {
                place: entry
                for place, entry in kept_entries(path, device).items()
                if place not in gone
            }
            _replace(path, device, kept | added)
    except OSError as error:
        raise UnsupportedError(asked, f"it cannot be written ({error})", "Name another.") from error
    forget()


def _lock_of(path: Path) -> Path:
    """Where those who write a record meet: beside it a lock would be shipped with it."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"humming-record-{name}.lock"


def _replace(path: Path, device: str, entries: Mapping[Place, Entry]) -> None:
    text = "".join(_lines(device, sorted(entries.values(), key=_order)))
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        # Others may read it, as they may any file that is no secret.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _order(entry: Entry) -> tuple[ProblemKey, int]:
    return entry.key, entry.m_range[0]


def _lines(device: str, entries: list[Entry]) -> Iterator[str]:
    yield f'{{\n"schema": {SCHEMA},\n"device": {json.dumps(device)},\n"entries": [\n'
    lines = [json.dumps(entry.to_dict()) for entry in entries]
    yield ",\n".join(lines)
    yield "\n]\n}\n" if lines else "]\n}\n"


# -- look-up --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """An entry and the file that it is of."""

    entry: Entry
    path: Path


class Records:
    """The records of one device, the ones that come first in precedence first."""

    def __init__(self, files: Iterable[RecordFile]) -> None:
        self.files = tuple(files)
        self._found: dict[ProblemKey, dict[tuple[int, int | None], Found]] = {}
        for file in self.files:
            for (key, m_range), entry in file.entries.items():
                self._found.setdefault(key, {}).setdefault(m_range, Found(entry, file.path))

    def of(self, problem: GemmProblem) -> Mapping[tuple[int, int | None], Found]:
        """The entries of a problem by range of M."""
        # Most devices have no record at all, and naming a format takes a while.
        return self._found.get(ProblemKey.of(problem), {}) if self._found else {}


NO_RECORDS = Records(())
"""Everything is chosen by the cost model."""


def user_record(device: str, folder: Path | None = None) -> Path:
    """Where the user's record of a device lies, or would lie: in a folder as `HUMMING_CACHE_DIR`
    names one, by default that of the environment."""
    return (folder or env.cache_dir()) / "records" / f"{row_of(device)}.json"


def row_of(device: str) -> str:
    """The row that a device is, or is a variant of: what is chosen for it suits both."""
    return device.rpartition(":")[2]


def records_for(device: str, named: Path | str | None = None) -> Records:
    """The records of a device.

    Args:
        device: name of the row, or of a variant.
        named: a file, or a folder with a file per device, that goes before all others.

    Raises:
        UnsupportedError: what is named here or by `HUMMING_RECORDS` is absent or no record, or is
            named here and another device's. Another device's elsewhere, or a broken file of the
            user's or of humming's own, counts for nothing, with a warning.
    """
    argument = None if named is None else Path(named)
    by_environment = env.records()
    if by_environment is None:
        return NO_RECORDS if argument is None else _records(row_of(device), argument, (), ())
    return _records(row_of(device), argument, by_environment, (user_record(device), SHIPPED))


def forget() -> None:
    """Has files read again that have changed."""
    _records.cache_clear()


@cache
def _records(
    row: str, argument: Path | None, environment: tuple[Path, ...], places: tuple[Path, ...]
) -> Records:
    files: list[RecordFile] = []
    for place in (argument, *environment) if argument else environment:
        if not place.exists():
            raise UnsupportedError(
                f"the tuned records {place}",
                "there is no such file or folder",
                "Name what `humming tune` wrote; HUMMING_RECORDS=off goes without records.",
            )
        files += _read(row, place, strict=True)
        # One process may plan for several devices by one environment, but asks for one at a time.
        if place == argument and files and files[0].device != row:
            how = f"Name one of {row}, or a folder with a file per device."
            raise UnsupportedError(
                f"the tuned record {files[0].path}", _foreign(files[0], row), how
            )
    for place in places:
        files += _read(row, place, strict=False)
    files = [_heeded(file, row) for file in files]
    for file in files:
        for why in file.refused:
            warn_once(_LOG, why)
    return Records(files)


def _read(row: str, place: Path, *, strict: bool) -> Iterator[RecordFile]:
    path = place
    try:
        path = place / f"{row}.json" if place.is_dir() else place
        if not path.is_file():
            return
        file = read_record(path)
    except (UnsupportedError, OSError) as error:
        if strict and isinstance(error, OSError):
            how = "Name a file that this user may read."
            raise UnsupportedError(f"the tuned record {path}", str(error), how) from error
        if strict:
            raise
        file = RecordFile(path, row, {}, (f"the tuned record {path} is ignored: {error}",))
    yield file


def _heeded(file: RecordFile, row: str) -> RecordFile:
    """A file as it counts for a row: for nothing if it is another's."""
    if file.device == row:
        return file
    return RecordFile(file.path, row, {}, (f"{file.path} is ignored: {_foreign(file, row)}",))


def _foreign(file: RecordFile, row: str) -> str:
    return f"it is one of {file.device}, not of {row}"
