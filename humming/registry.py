"""All rows of all plugins, put together: devices by name, components by key, headers by include."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

from humming.capability import MOVERS, DeviceCapabilities, MmaRow
from humming.components import SHARED, Component
from humming.dtypes import suggest
from humming.errors import PluginError, UnsupportedError
from humming.matrix import ANY, DeviceRow, FamilyRow, Matrix

T = TypeVar("T")
HOST = "humming itself"


def kernels_dir() -> Path:
    """The include root of the shared device code; `<humming/P>` is the file P in it."""
    return Path(str(files("humming.kernels")))


# What torch calls places of tensors, and newcomers devices.
_TORCH_DEVICES = ("cuda", "cpu", "gpu")
# The loader in C is ten times as fast, and every process that plans reads the matrix once.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeys(_Loader):  # type: ignore[misc]
    """YAML in which a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                place = f"line {node.start_mark.line + 1}"
                raise PluginError(f"the mapping at {place} has {key!r} twice")
        return super().construct_mapping(node, deep)


def load_yaml(path: Path | str) -> Any:
    """The content of a matrix file; not to be changed, since it is read once per process.

    Raises:
        PluginError: the file cannot be read, is no YAML, or has a key twice in one mapping.
    """
    return _load_yaml(Path(path).absolute())


@lru_cache(maxsize=16)
def _load_yaml(path: Path) -> Any:
    try:
        return _UniqueKeys(path.read_text(encoding="utf-8")).get_single_data()
    except (OSError, UnicodeDecodeError, yaml.YAMLError, PluginError) as error:
        raise PluginError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one plugin adds to the registry: checked rows, components and include folders."""

    plugin: str
    matrix: Matrix | None = None
    components: tuple[Component, ...] = ()
    include_dirs: tuple[Path, ...] = ()


class Registry:
    """The rows and components of several plugins.

    What is wrong with one plugin, or between two, is kept and raised when a device that it
    concerns is asked for; all other devices stay usable. The order of the plugins decides nothing.

    Attributes:
        problems: plugin -> what is wrong with all of it.
        include_dirs: include folders, the host's first.
        headers: include name (`humming/mma/sync_m16n8k16.cuh`) -> file.
    """

    def __init__(
        self,
        contributions: Iterable[Contribution],
        problems: Mapping[str, PluginError] = MappingProxyType({}),
        lost: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Put contributions together.

        Args:
            contributions: one of each plugin.
            problems: plugins that are already known to be broken.
            lost: device name -> plugin, for rows of plugins whose matrix could not be read.
        """
        self.problems = dict(problems)
        self._parts = sorted(contributions, key=lambda part: part.plugin)
        self._lost = dict(lost)
        self._owners: dict[str, str] = {}
        self._broken: dict[str, PluginError] = {}
        self._names: dict[str, str] = {}
        self._devices: dict[str, DeviceCapabilities] = {}
        self._rows: dict[str, DeviceRow] = {}
        self._variants: dict[str, DeviceCapabilities] = {}
        self._collect_headers()
        self._collect_components()
        self._collect_devices()

    # -- asking ---------------------------------------------------------------------------------

    def devices(self) -> list[DeviceCapabilities]:
        """Every usable device, by name; those of broken plugins are left out."""
        return [
            caps
            for name, caps in sorted(self._devices.items())
            if self._owners[name] not in self.problems
        ]

    def errors(self) -> list[PluginError]:
        """Everything that is wrong, with plugins and with single rows."""
        return [*self.problems.values(), *dict.fromkeys(self._broken.values())]

    def device(self, name: str) -> DeviceCapabilities:
        """The device of a name or alias.

        Raises:
            UnsupportedError: no row has this name; the message suggests the nearest.
            PluginError: the row, or the plugin that has it, is broken.
        """
        asked = name.strip().lower()
        prefix, colon, row = asked.rpartition(":")
        canonical = prefix + colon + self._names.get(row, row)
        if canonical in self._broken:
            raise self._broken[canonical]
        owner = self.owner(canonical)
        if owner in self.problems:
            raise self.problems[owner]
        if canonical in self._devices:
            return self._devices[canonical]
        if canonical in self._variants:
            return self._variants[canonical]
        for plugin, problem in self.problems.items():
            # A plugin that could not even be imported has no rows; its devices bear its name.
            if asked.startswith(plugin):
                raise problem
        broken = f" Broken plugins: {', '.join(sorted(self.problems))}." if self.problems else ""
        if asked.partition(":")[0] in _TORCH_DEVICES:
            possible = "Leave the device out for the one that is present, or name a row."
        else:
            known = sorted([*self._names, *self._variants] if colon else self._names)
            possible = suggest(asked, known)
        raise UnsupportedError(
            f"device {name!r}",
            "no row has this name",
            f"{possible}{broken} `humming devices --all` lists the rows.",
        )

    def variants(self) -> list[DeviceCapabilities]:
        """Every usable variant of a row, by name."""
        return [
            caps
            for name, caps in sorted(self._variants.items())
            if self._owners[name] not in self.problems
        ]

    def add_variants(self, plugin: str, variants: Iterable[DeviceCapabilities]) -> None:
        """Take in what a plugin makes of the rows of all.

        Raises:
            PluginError: a variant is not named after a row, or another one has its name.
        """
        found: dict[str, DeviceCapabilities] = {}
        for caps in variants:
            prefix, _, row = caps.name.rpartition(":")
            if not prefix or row not in self._devices:
                raise PluginError(f"the variant {caps.name!r} is not named PREFIX:ROW after a row")
            if caps.name in self._variants or caps.name in found:
                other = self._owners.get(caps.name, plugin)
                raise PluginError(f"the variant {caps.name!r} is claimed by {other} and {plugin}")
            found[caps.name] = caps
        self._variants |= found
        self._owners |= dict.fromkeys(found, plugin)

    def owner(self, name: str) -> str | None:
        """The plugin that has the row of a device, None if no plugin has."""
        return self._owners.get(name) or self._lost.get(name)

    def contribution(self, plugin: str) -> Contribution | None:
        """What a plugin adds, None for a plugin that could not be asked."""
        return next((part for part in self._parts if part.plugin == plugin), None)

    def match(self, driver_name: str) -> DeviceCapabilities:
        """The device that a driver calls by a name: exactly, or by a pattern of the row.

        Raises:
            UnsupportedError: no row fits; the message says which row could be added.
            PluginError: several rows fit, or the one that does is broken.
        """
        rows = self._rows.values()
        found = [row.name for row in rows if driver_name in row.driver_names] or [
            row.name
            for row in rows
            if any(re.fullmatch(pattern, driver_name) for pattern in row.driver_patterns)
        ]
        if len(found) > 1:
            owners = " and ".join(f"{name} of plugin {self._owners[name]}" for name in found)
            raise PluginError(f"the driver name {driver_name!r} fits the rows {owners}")
        if found:
            return self.device(found[0])
        known = {name: row.name for row in rows for name in row.driver_names}
        close = difflib.get_close_matches(driver_name, known, n=2)
        nearest = " and ".join(f"{name!r} ({known[name]})" for name in close)
        raise UnsupportedError(
            f"device with the driver name {driver_name!r}",
            "no row of a device matrix has this driver name, and nothing is guessed from others",
            f"Add a row with `driver_names: [{driver_name}]` to device_matrix.yaml, or in a plugin "
            "of yours, with `like:` if it equals a device of another name."
            + (f" The nearest known names are {nearest}." if nearest else ""),
        )

    def components(self, slot: str, serves: str) -> tuple[Component, ...]:
        """The components that fill a slot for a key: one, or none if nobody has written it."""
        component = self._components.get((slot, serves))
        return (component,) if component else ()

    def serving(
        self, slot: str, serves: str, typed: str, caps: DeviceCapabilities
    ) -> tuple[Component, ...]:
        """The components that a device can use, best first: by a feature of it, then the plain one.

        Args:
            slot: what is to be filled.
            serves: key of the component that needs no feature.
            typed: key, without the feature, of those that need one; may be empty.
            caps: the device.
        """
        keys = [f"{typed}:{feature}" for feature in sorted(caps.features)] if typed else []
        return tuple(found for key in (*keys, serves) for found in self.components(slot, key))

    # -- putting together -----------------------------------------------------------------------

    def _report(self, plugin: str, message: str) -> None:
        """Note a problem of a plugin; the first one stands."""
        self.problems.setdefault(plugin, PluginError(f"plugin {plugin}: {message}"))

    def _collect_headers(self) -> None:
        owners: dict[str, tuple[str, Path]] = {}
        folders = [(HOST, kernels_dir())]
        folders += [(part.plugin, folder) for part in self._parts for folder in part.include_dirs]
        for plugin, folder in folders:
            for file in sorted(folder.rglob("*.cuh")):
                name = f"humming/{file.relative_to(folder).as_posix()}"
                other, other_file = owners.setdefault(name, (plugin, file))
                if other_file != file:
                    message = f"<{name}> is {file} of {plugin} and {other_file} of {other}"
                    for offender in {plugin, other} - {HOST}:
                        self._report(offender, message)
        sound = [(p, folder) for p, folder in folders if p not in self.problems]
        self.include_dirs = tuple(folder for _, folder in sound)
        self.headers: Mapping[str, Path] = {
            f"humming/{file.relative_to(folder).as_posix()}": file
            for folder in self.include_dirs
            for file in sorted(folder.rglob("*.cuh"))
        }

    def _collect_components(self) -> None:
        self._components: dict[tuple[str, str], Component] = {}
        owners: dict[tuple[str, str], str] = {}
        for plugin, component in self._all_components():
            key = (component.slot, component.serves)
            other = owners.setdefault(key, plugin)
            if plugin != HOST and component.header not in self.headers:
                self._report(plugin, f"component {key}: no include folder has {component.header}")
            elif key in self._components:
                for offender in {plugin, other} - {HOST}:
                    self._report(offender, f"{plugin} and {other} both have a component for {key}")
            else:
                self._components[key] = component
        for key, plugin in owners.items():
            if plugin in self.problems:
                self._components.pop(key, None)

    def _all_components(self) -> Iterator[tuple[str, Component]]:
        yield from ((HOST, component) for component in SHARED)
        for part in self._parts:
            yield from ((part.plugin, component) for component in part.components)

    def _collect_devices(self) -> None:
        for part in self._parts:
            for row in part.matrix.devices.values() if part.matrix else ():
                for name in (row.name, *row.aliases):
                    self._claim(name, row.name, part.plugin)
        self._vocabulary = frozenset(MOVERS) | {
            name
            for part in self._parts
            if part.matrix
            for names in (
                part.matrix.features,
                (row.instruction for rows in part.matrix.mma_sets.values() for row in rows),
            )
            for name in names
        }
        for part in self._parts:
            for row in part.matrix.devices.values() if part.matrix else ():
                if row.name in self._broken:
                    continue
                try:
                    self._devices[row.name] = self._resolve(row, part)
                    self._rows[row.name] = row
                except PluginError as error:
                    self._broken[row.name] = error

    def _claim(self, name: str, device: str, plugin: str) -> None:
        """Let a row have a name or alias, unless another row has it."""
        if name not in self._names:
            self._names[name] = device
            self._owners.setdefault(device, plugin)
            return
        other = self._owners[self._names[name]]
        message = f"the device name {name!r} is claimed by the plugins {other} and {plugin}"
        self._broken[name] = PluginError(message)
        self._names[name] = name

    def _resolve(self, row: DeviceRow, part: Contribution) -> DeviceCapabilities:
        where = f"{part.matrix.origin if part.matrix else part.plugin}: devices.{row.name}"
        row = self._with_like(row, part, where, ())
        home, family = self._find("families", row.family or "", part, f"{where}: family")
        rates = {**family.rates, **row.rates}
        mma = tuple(self._mma(family, home, where))
        self._check_classes(mma, {**rates, **row.peak_tops}, where)
        figures = {**family.figures, **row.figures}
        features = {
            name: self._find("features", name, home, f"{where}: features")[1]
            for name in family.features
        }
        return DeviceCapabilities(
            name=row.name,
            vendor=row.vendor or family.vendor,
            family=family.name,
            arch=family.arch,
            title=row.title,
            driver_names=row.driver_names,
            movers=family.movers,
            features=frozenset(features),
            feature_min_compiler={name: first for name, first in features.items() if first},
            mma=tuple(_with_rate(entry, rates, row.peak_tops, figures) for entry in mma),
            absent=family.absent,
            peak_tops_by_class={k: v for k, v in row.peak_tops.items() if v is not None},
            min_compiler=family.min_compiler,
            sources=_sources(family, row),
            quirks=(*family.quirks, *row.quirks),
            vocabulary=self._vocabulary,
            **figures,
        )

    def _with_like(
        self, row: DeviceRow, part: Contribution, where: str, seen: tuple[str, ...]
    ) -> DeviceRow:
        """The row with everything that the device it is like says and it does not."""
        if row.like is None:
            return row
        if row.like in seen or row.like == row.name:
            raise PluginError(f"{where}: like = {row.like!r} leads in a circle")
        home, other = self._find("devices", row.like, part, f"{where}: like")
        other = self._with_like(other, home, where, (*seen, row.like))
        return replace(
            row,
            vendor=row.vendor or other.vendor,
            family=other.family,
            like=None,
            figures={**other.figures, **row.figures},
            rates={**other.rates, **row.rates},
            peak_tops={**other.peak_tops, **row.peak_tops},
            quirks=tuple(dict.fromkeys((*other.quirks, *row.quirks))),
            sources={**_cited(other), **_cited(row)},
        )

    def _mma(self, family: FamilyRow, home: Contribution, where: str) -> Iterator[MmaRow]:
        seen: set[tuple[Any, ...]] = set()
        for use in family.mma:
            _, rows = self._find("mma_sets", use.set_name, home, f"{where}: mma")
            for row in use.apply(rows):
                identity = (row.key, row.block_scale)
                if identity in seen:
                    raise PluginError(f"{where}: the family {family.name} has {row.name} twice")
                seen.add(identity)
                yield row

    def _check_classes(
        self, mma: tuple[MmaRow, ...], figures: Mapping[str, float | None], where: str
    ) -> None:
        classes = {_class(row) for row in mma}
        for name in figures:
            if name not in classes:
                raise PluginError(
                    f"{where}: rates or peak_tops name {name!r}, which is no instruction and rate "
                    f"class of the family's rows. {suggest(name, classes)}"
                )

    def _find(
        self, section: str, name: str, home: Contribution, where: str
    ) -> tuple[Contribution, Any]:
        """An entry of a section: the plugin's own, else the one that another plugin has."""
        own = [home] if home.matrix and name in getattr(home.matrix, section) else []
        others = [p for p in self._parts if p.matrix and name in getattr(p.matrix, section)]
        found = own or others
        if len(found) == 1:
            return found[0], getattr(found[0].matrix, section)[name]
        if found:
            plugins = " and ".join(part.plugin for part in found)
            raise PluginError(f"{where} = {name!r} is ambiguous: the plugins {plugins} have it")
        known = {key for p in self._parts if p.matrix for key in getattr(p.matrix, section)}
        raise PluginError(f"{where} = {name!r} is not among {section}. {suggest(name, known)}")


def _class(row: MmaRow) -> str:
    return f"{row.instruction}.{row.rate_class}"


def _with_rate(
    row: MmaRow,
    rates: Mapping[str, float | None],
    peaks: Mapping[str, float | None],
    figures: Mapping[str, float | None],
) -> MmaRow:
    """The row with its rate; a whole-device figure is divided by the SMs and the clock."""
    # What the assembler emulates does not run at the rate of the instruction it imitates.
    if row.emulated:
        return row
    rate, peak = rates.get(_class(row)), peaks.get(_class(row))
    sms, clock_mhz = figures.get("sms"), figures.get("clock_mhz")
    if peak is not None:
        rate = peak * 1e6 / (sms * clock_mhz) if sms and clock_mhz else None
    return replace(row, rate=rate)


def _cited(row: DeviceRow) -> dict[str, str]:
    """Field -> source for what a row says itself, so that `*` speaks for nothing inherited."""
    told = [*row.figures, *(name for name in ("rates", "peak_tops") if getattr(row, name))]
    return {name: row.sources.get(name, row.sources.get(ANY, "")) for name in told}


def _sources(family: FamilyRow, row: DeviceRow) -> dict[str, str]:
    """Field of DeviceCapabilities -> source, for every field that has a value."""
    told = (*family.figures, "movers", "features", "min_compiler", "rates")
    found = {name: family.sources.get(name, family.sources.get(ANY, "")) for name in told}
    if not family.rates:
        del found["rates"]
    if family.min_compiler is None:
        del found["min_compiler"]
    found |= _cited(row)
    if "peak_tops" in found:
        found["peak_tops_by_class"] = found.pop("peak_tops")
    values = {**family.figures, **row.figures}
    return {name: text for name, text in sorted(found.items()) if values.get(name, 0) is not None}
