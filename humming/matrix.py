"""Reads a device matrix: checks every field, and names file, row and value in each error.

The format is described at the head of `device_matrix.yaml` and in `docs/plugins.md`. This module
checks one matrix by itself; `humming.registry` puts several together and resolves references.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NoReturn, TypeVar

from humming.capability import A_SITES, INT32, MOVERS, Absence, MmaRow
from humming.dtypes import DataType, suggest
from humming.errors import HummingError, PluginError

VERSION = 1
"""The version of the format, the value of `schema` in a matrix."""

ANY = "*"
T = TypeVar("T")
Compiler = tuple[int, int]

# Key in a matrix -> (field of DeviceCapabilities, factor). Each field may have several units.
_UNITS = {
    "smem_per_sm_kib": ("smem_per_sm_bytes", 1024),
    "smem_per_block_kib": ("smem_per_block_bytes", 1024),
    "registers_per_sm": ("registers_per_sm", 1),
    "max_threads_per_sm": ("max_threads_per_sm", 1),
    "max_blocks_per_sm": ("max_blocks_per_sm", 1),
    "sms": ("sms", 1),
    "l2_mib": ("l2_bytes", 2**20),
    "memory_gb": ("memory_bytes", 10**9),
    "memory_mib": ("memory_bytes", 2**20),
    "bandwidth_gbs": ("bandwidth_gbs", 1),
    "clock_mhz": ("clock_mhz", 1),
}
_FRACTIONAL = {"bandwidth_gbs", "clock_mhz"}
_LIMITS = tuple(key for key in _UNITS if "_per_sm" in key or "_per_block" in key)
_FIGURES = tuple(key for key in _UNITS if key not in _LIMITS)
_FLAGS = ("legacy", "emulated", "undocumented")
_SECTIONS = ("schema", "origin", "sources", "features", "mma_sets", "families", "devices")
# What a set of MMA rows, a row of it, and a family's use of the set may say.
_SHARED_MMA_KEYS = ("a_sites", "m", "n", "k", "block_scale", "min_compiler", "note", "source")
ROW_KEYS = ("shape", "a", "b", "accumulator", "sum_bits", "rate", *_SHARED_MMA_KEYS, *_FLAGS)
USE_KEYS = ("set", "k", "min_compiler", "note", "source", *_FLAGS)
FAMILY_KEYS = (
    *("title", "vendor", "arch", "movers", "features", "rates", "mma", "absent"),
    *("min_compiler", "quirks", "source", *_LIMITS),
)
DEVICE_KEYS = (
    *("title", "vendor", "family", "like", "aliases", "driver_names", "driver_patterns"),
    *("rates", "peak_tops", "quirks", "source", *_LIMITS, *_FIGURES),
)


@dataclass(frozen=True, slots=True)
class MmaUse:
    """A family's use of a set of MMA rows, with what it says differently."""

    set_name: str
    changes: Mapping[str, Any]

    def apply(self, rows: tuple[MmaRow, ...]) -> tuple[MmaRow, ...]:
        """The rows of the set as the family has them."""
        return tuple(replace(row, **self.changes) for row in rows)


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """What devices of one architecture share; references to sets and features are names."""

    name: str
    title: str
    vendor: str
    arch: str
    movers: tuple[str, ...]
    features: tuple[str, ...]
    figures: Mapping[str, float | None]
    rates: Mapping[str, float | None]
    mma: tuple[MmaUse, ...]
    absent: tuple[Absence, ...]
    min_compiler: Compiler | None
    quirks: tuple[str, ...]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device; `family` or `like` says where everything comes from that it does not say."""

    name: str
    title: str
    vendor: str | None
    family: str | None
    like: str | None
    aliases: tuple[str, ...]
    driver_names: tuple[str, ...]
    driver_patterns: tuple[str, ...]
    figures: Mapping[str, float | None]
    rates: Mapping[str, float | None]
    peak_tops: Mapping[str, float | None]
    quirks: tuple[str, ...]
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A checked matrix.

    Attributes:
        origin: the file, or what else the matrix came from, for messages.
        features: name -> first compiler that accepts it, None if any does.
        mma_sets: name -> rows without rates.
    """

    origin: str
    features: Mapping[str, Compiler | None]
    mma_sets: Mapping[str, tuple[MmaRow, ...]]
    families: Mapping[str, FamilyRow]
    devices: Mapping[str, DeviceRow]


def read_matrix(data: Any, origin: str) -> Matrix:
    """Check a device matrix as loaded from YAML.

    Raises:
        PluginError: a field is missing, unknown, of the wrong type or out of range; the message
            names origin, row, field and value, and the nearest known name.
    """
    top = Row(origin, data, _SECTIONS)
    top.where = top.text("origin", origin)
    if top.get("schema", VERSION) != VERSION:
        top.fail("schema", f"is not {VERSION}, the version that this humming reads")
    citing = _Sources(top)
    features = {
        row.name: row.compiler("min_compiler")
        for row in top.rows("features", ("means", "min_compiler", "source"))
        if row.text("means") and citing.read(row)
    }
    sets = {
        row.name: tuple(_set_rows(row, citing))
        for row in top.rows("mma_sets", ("instruction", "rows", *_SHARED_MMA_KEYS, *_FLAGS))
    }
    families = {row.name: _family(row, citing) for row in top.rows("families", FAMILY_KEYS)}
    devices = {row.name: _device(row, citing) for row in top.rows("devices", DEVICE_KEYS)}
    _check_names(top.where, devices)
    return Matrix(top.where, features, sets, families, devices)


class Row:
    """A mapping of a matrix with its place, for messages."""

    def __init__(self, where: str, data: Any, keys: Collection[str], name: str = "") -> None:
        self.where, self.name, self.keys = where, name, keys
        if not isinstance(data, Mapping):
            raise PluginError(f"{where}: expected a mapping of fields, got {data!r}")
        self.data: Mapping[str, Any] = data
        for key in data:
            if key not in keys:
                raise PluginError(f"{where}: unknown field {key!r}. {suggest(str(key), keys)}")

    def fail(self, key: str, rule: str, hint: str = "") -> NoReturn:
        """Raise the error for a field."""
        value = repr(self.data[key]) if key in self.data else "missing"
        raise PluginError(f"{self.where}: {key} = {value} {rule}" + (f". {hint}" if hint else ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value."""
        return self.data.get(key, default)

    def rows(self, key: str, keys: Collection[str]) -> Iterator["Row"]:
        """The rows of a section: a mapping from names to mappings."""
        section = self.get(key) or {}
        if not isinstance(section, Mapping):
            self.fail(key, "is not a mapping from names to rows")
        for name, data in section.items():
            if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise PluginError(
                    f"{self.where}: {key}: the name {name!r} is not made of lower-case letters, "
                    "digits and underscores, starting with a letter"
                )
            yield Row(f"{self.where}: {key}.{name}", data, keys, name)

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty."""
        value = self.get(key, default)
        if not isinstance(value, str) or not (value or default == ""):
            self.fail(key, "is not a text")
        return value

    def flag(self, key: str) -> bool:
        """A truth value, false where left out."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            self.fail(key, "is neither true nor false")
        return value

    def number(self, key: str, whole: bool) -> float | None:
        """A positive number or null."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            self.fail(key, "is not a positive number or null")
        if whole and value != int(value):
            self.fail(key, "is not a whole number")
        return int(value) if whole else value

    def texts(self, key: str, allowed: Collection[str] | None = None) -> tuple[str, ...]:
        """A list of different texts, empty where left out."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            self.fail(key, "is not a list of texts")
        for text in value:
            if allowed is not None and text not in allowed:
                self.fail(key, f"holds the unknown name {text!r}", suggest(text, allowed))
            if value.count(text) > 1:
                self.fail(key, f"holds {text!r} twice")
        return tuple(value)

    def compiler(self, key: str) -> Compiler | None:
        """A compiler version [major, minor] or null."""
        value = self.get(key)
        if value is None:
            return None
        if not (isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))):
            self.fail(key, "is not a version such as [13, 1]")
        return (value[0], value[1])

    def dtypes(self, key: str, parse: Callable[[Any], DataType] = DataType.parse) -> list[DataType]:
        """A type name or a list of them."""
        value = self.get(key)
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) for name in names):
            self.fail(key, "is not the name of a type, or a list of names")
        try:
            return [parse(name) for name in names]
        except HummingError as error:
            self.fail(key, "is not a known type", str(error))

    def per_class(self, key: str) -> dict[str, float | None]:
        """Numbers by instruction and rate class, flattened to `instruction.class`."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping) or not all(
            isinstance(v, Mapping) for v in value.values()
        ):
            self.fail(key, "is not a mapping {instruction: {rate class: number}}")
        flat: dict[str, float | None] = {}
        for instruction, classes in value.items():
            row = Row(f"{self.where}: {key}.{instruction}", classes, classes)
            flat |= {f"{instruction}.{name}": row.number(name, whole=False) for name in classes}
        return flat

    def figures(self, keys: Collection[str]) -> dict[str, float | None]:
        """The numbers that the row gives, by field of DeviceCapabilities, in its units."""
        found: dict[str, float | None] = {}
        for key in keys:
            if key not in self.data:
                continue
            field, factor = _UNITS[key]
            if field in found:
                self.fail(key, f"gives {field} a second time, in another unit")
            value = self.number(key, whole=factor == 1 and key not in _FRACTIONAL)
            found[field] = None if value is None else value if factor == 1 else int(value * factor)
        return found


class _Sources:
    """The bibliography of a matrix."""

    # A word, or a word with a remark in brackets, must be a name; anything else is text itself.
    _NAMED = re.compile(r"(\w+)(?: \((.*)\))?", re.DOTALL)

    def __init__(self, top: Row) -> None:
        listed = top.get("sources") or {}
        self._row = Row(f"{top.where}: sources", listed, listed)
        self.texts = {name: self._row.text(name) for name in listed}

    def read(self, row: Row, numbers: Collection[str] = ()) -> dict[str, str]:
        """Field -> source of a row; every number that the row gives must have one."""
        value = row.get("source")
        by_field = value if isinstance(value, Mapping) else {ANY: value}
        if value is None:
            row.fail("source", "must say where the row comes from")
        for field in by_field:
            if field != ANY and field not in row.keys:
                row.fail("source", f"names the unknown field {field!r}", suggest(field, row.keys))
        for number in numbers:
            if row.get(number) is not None and not {ANY, number} & set(by_field):
                row.fail(number, "has no source", f"Give {number} or '*' under source.")
        return {field: self._resolve(row, cited) for field, cited in by_field.items()}

    def _resolve(self, row: Row, cited: Any) -> str:
        parts = cited if isinstance(cited, list) else [cited]
        texts = []
        for part in parts:
            if not isinstance(part, str) or not part.strip():
                row.fail("source", "is not a text, a list of texts, or a mapping from fields")
            named = self._NAMED.fullmatch(part)
            if named and named[1] not in self.texts:
                hint = suggest(named[1], self.texts) if self.texts else "List it under sources."
                row.fail("source", f"names the unknown source {named[1]!r}", hint)
            remark = f" ({named[2]})" if named and named[2] else ""
            texts.append(self.texts[named[1]] + remark if named else part)
        return "; ".join(texts)


def _set_rows(row: Row, citing: _Sources) -> Iterator[MmaRow]:
    entries = row.get("rows")
    if not isinstance(entries, list) or not entries:
        row.fail("rows", "is not a list of rows")
    shared = {key: value for key, value in row.data.items() if key != "rows"}
    for index, entry in enumerate(entries):
        own = Row(f"{row.where}: rows[{index}]", entry, ROW_KEYS)
        merged = Row(own.where, {**shared, **own.data}, ("instruction", *ROW_KEYS))
        for a, b in product(merged.dtypes("a"), merged.dtypes("b")):
            yield _mma_row(merged, a, b, citing)


def _mma_row(row: Row, a: DataType, b: DataType, citing: _Sources) -> MmaRow:
    shape = row.get("shape")
    if not (isinstance(shape, list) and len(shape) == 3 and all(map(_is_count, shape))):
        row.fail("shape", "is not a shape [M, N, K]")
    sum_bits = row.get("sum_bits")
    if not (sum_bits is None or _is_count(sum_bits)):
        row.fail("sum_bits", "is not a number of bits")
    accumulators = row.dtypes("accumulator", _accumulator)
    if len(accumulators) != 1:
        row.fail("accumulator", "is not one type")
    try:
        return MmaRow(
            instruction=row.text("instruction"),
            shape=(shape[0], shape[1], shape[2]),
            a=a,
            b=b,
            accumulator=accumulators[0],
            a_sites=row.texts("a_sites", A_SITES),
            rate_class=row.text("rate"),
            block_scale=_block_scale(row),
            m_values=_sizes(row, "m"),
            n_values=_sizes(row, "n"),
            k_values=_sizes(row, "k"),
            sum_bits=sum_bits,
            min_compiler=row.compiler("min_compiler"),
            note=row.text("note", ""),
            source=citing.read(row)[ANY],
            **{flag: row.flag(flag) for flag in _FLAGS},
        )
    except PluginError as error:
        if str(error).startswith(row.where):
            raise
        raise PluginError(f"{row.where}: {error}") from None


def _accumulator(name: str) -> DataType:
    return INT32 if name == INT32 else DataType.parse(name)


def _block_scale(row: Row) -> tuple[tuple[DataType, int], ...]:
    pairs = row.get("block_scale", [])
    rule = "is not a list of pairs [scale type, K values per scale]"
    if not isinstance(pairs, list):
        row.fail("block_scale", rule)
    scales = []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and _is_count(pair[1])):
            row.fail("block_scale", rule)
        scale = Row(row.where, {"block_scale": pair[0]}, ("block_scale",))
        scales.append((scale.dtypes("block_scale")[0], pair[1]))
    return tuple(scales)


def _sizes(row: Row, key: str) -> tuple[int, ...]:
    """Sizes of a dimension: whole numbers, and ranges such as '8:256:8' with both ends."""
    entries = row.get(key, [])
    if not isinstance(entries, list):
        row.fail(key, "is not a list of sizes")
    sizes: list[int] = []
    for entry in entries:
        span = re.fullmatch(r"(\d+):(\d+):([1-9]\d*)", entry) if isinstance(entry, str) else None
        if span:
            first, last, step = map(int, span.groups())
            sizes += range(first, last + 1, step)
        elif _is_count(entry):
            sizes.append(entry)
        else:
            row.fail(key, f"holds {entry!r}, which is neither a size nor a range like '8:256:8'")
    return tuple(sizes)


def _family(row: Row, citing: _Sources) -> FamilyRow:
    sources = citing.read(row, (*_LIMITS, "rates", "min_compiler"))
    movers = row.texts("movers", MOVERS)
    if list(movers) != [mover for mover in MOVERS if mover in movers] or not movers:
        row.fail("movers", f"must be some of {', '.join(MOVERS)}, in this order")
    uses = row.get("mma")
    if not isinstance(uses, list) or not uses:
        row.fail("mma", "is not a list of names of mma_sets, or of mappings with `set`")
    return FamilyRow(
        name=row.name,
        title=row.text("title"),
        vendor=row.text("vendor"),
        arch=row.text("arch"),
        movers=movers,
        features=row.texts("features"),
        figures=row.figures(_LIMITS),
        rates=row.per_class("rates"),
        mma=tuple(_use(row, use, citing) for use in uses),
        absent=_absences(row, citing),
        min_compiler=row.compiler("min_compiler"),
        quirks=row.texts("quirks"),
        sources=_by_field(sources),
    )


def _use(family: Row, use: Any, citing: _Sources) -> MmaUse:
    if isinstance(use, str):
        return MmaUse(use, {})
    row = Row(f"{family.where}: mma", use, USE_KEYS)
    readers: dict[str, Callable[[], Any]] = {
        "k": lambda: _sizes(row, "k"),
        "min_compiler": lambda: row.compiler("min_compiler"),
        "note": lambda: row.text("note"),
        "source": lambda: citing.read(row)[ANY],
    } | {flag: (lambda flag=flag: row.flag(flag)) for flag in _FLAGS}
    fields = {"k": "k_values"}
    changes = {fields.get(key, key): read() for key, read in readers.items() if key in row.data}
    return MmaUse(row.text("set"), changes)


def _absences(family: Row, citing: _Sources) -> tuple[Absence, ...]:
    entries = family.get("absent", [])
    if not isinstance(entries, list):
        family.fail("absent", "is not a list")
    keys = ("instruction", "operands", "why", "source")
    rows = [Row(f"{family.where}: absent", entry, keys) for entry in entries]
    return tuple(
        Absence(
            row.text("instruction"),
            tuple(row.dtypes("operands")),
            row.text("why"),
            citing.read(row)[ANY],
        )
        for row in rows
    )


def _device(row: Row, citing: _Sources) -> DeviceRow:
    sources = citing.read(row, (*_LIMITS, *_FIGURES, "rates", "peak_tops"))
    if ("family" in row.data) == ("like" in row.data):
        row.fail("family", "must be given, or `like` instead of it")
    patterns = row.texts("driver_patterns")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            row.fail("driver_patterns", f"holds {pattern!r}, no regular expression: {error}")
    return DeviceRow(
        name=row.name,
        title=row.text("title"),
        vendor=row.text("vendor") if "vendor" in row.data else None,
        family=row.text("family") if "family" in row.data else None,
        like=row.text("like") if "like" in row.data else None,
        aliases=row.texts("aliases"),
        driver_names=row.texts("driver_names"),
        driver_patterns=patterns,
        figures=row.figures((*_LIMITS, *_FIGURES)),
        rates=row.per_class("rates"),
        peak_tops=row.per_class("peak_tops"),
        quirks=row.texts("quirks"),
        sources=_by_field(sources),
    )


def _by_field(sources: Mapping[str, str]) -> dict[str, str]:
    """Sources keyed by field of DeviceCapabilities instead of by key of the matrix."""
    return {_UNITS.get(key, (key,))[0]: text for key, text in sources.items()}


def _check_names(origin: str, devices: Mapping[str, DeviceRow]) -> None:
    """No two rows of a matrix answer to one name or driver name."""
    for kind, names_of in (
        ("name", lambda row: (row.name, *row.aliases)),
        ("driver name", lambda row: row.driver_names),
    ):
        owners: dict[str, str] = {}
        for row in devices.values():
            for name in names_of(row):
                if name in owners:
                    raise PluginError(
                        f"{origin}: devices.{row.name} and devices.{owners[name]} "
                        f"have the same {kind} {name!r}"
                    )
                owners[name] = row.name


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
