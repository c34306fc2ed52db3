"""Loads the device plugins and asks them: what there is, what is present, who compiles and runs.

Plugins come through the entry-point group `humming.devices`, the bundled ones like anyone's. Each
is loaded and called by itself and every result is checked, so that a broken plugin is reported by
name and leaves the others usable.
"""

import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from humming import env, hookspecs
from humming.capability import DeviceCapabilities
from humming.components import Component
from humming.dtypes import suggest
from humming.errors import HummingError, PluginError, UnsupportedError, check_type
from humming.hookspecs import ENTRY_POINT_GROUP, PROJECT, Compiler, PresentDevice, Runtime
from humming.matrix import Matrix, read_matrix
from humming.registry import Contribution, Registry, load_yaml

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
# A driver counts memory that it keeps for itself, and data sheets round; more than this is news.
_TOLERANCE = 0.1
_COMPARED = ("sms", "l2_bytes", "memory_bytes")
# Whatever a stranger's code does wrong must not reach the user of another device.
_FAULTS = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a plugin, as `humming devices` shows it."""

    plugin: str
    distribution: str
    hook: str
    error: PluginError

    def __str__(self) -> str:
        return str(self.error)


class PresentDevices(list[PresentDevice]):
    """The devices that are present, and what went wrong while looking for them.

    Attributes:
        problems: one per plugin that is broken, or failed to look.
    """

    def __init__(self, present: Iterable[PresentDevice], problems: Iterable[Problem]) -> None:
        super().__init__(present)
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class _Plugin:
    name: str
    distribution: str
    module: Any

    def __str__(self) -> str:
        return f"plugin {self.name}" + (f" ({self.distribution})" if self.distribution else "")


class PluginSet:
    """Some plugins, loaded: usually those of the environment, in tests any modules.

    Attributes:
        manager: pluggy's manager with the plugins that could be registered.
    """

    def __init__(self, loaders: Mapping[str, tuple[str, Callable[[], Any]]]) -> None:
        """Load plugins.

        Args:
            loaders: plugin name -> distribution with version (may be empty), and what imports it.

        Raises:
            PluginError: a plugin is broken, and HUMMING_STRICT_PLUGINS is set.
        """
        self._problems: dict[str, Problem] = {}
        self._plugins: list[_Plugin] = []
        self._seen: PresentDevices | None = None
        # (hook, device) -> the plugin whose compiler or runtime serves the device.
        self._answered: dict[tuple[str, str], _Plugin] = {}
        self.manager = _new_manager()
        if env.trace_plugins():
            _trace(self.manager)
        for name, (distribution, load) in sorted(loaders.items()):
            self._load(_Plugin(name, distribution, None), load)

    @classmethod
    def of_environment(cls, **modules: Any) -> "PluginSet":
        """The plugins of the installed distributions, and modules that are not installed."""
        loaders: dict[str, tuple[str, Callable[[], Any]]] = {}
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            told = f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""
            if entry.name in loaders and loaders[entry.name][0] != told:
                message = f"{loaders[entry.name][0]} and {told} both have a plugin {entry.name!r}"
                loaders[entry.name] = (f"{loaders[entry.name][0]}, {told}", _raiser(message))
            else:
                loaders.setdefault(entry.name, (told, entry.load))
        return cls(loaders | {name: ("", partial(_same, m)) for name, m in modules.items()})

    @classmethod
    def of_modules(cls, **modules: Any) -> "PluginSet":
        """Plugins that are modules, or objects with hook methods, by name; for tests."""
        return cls({name: ("", partial(_same, module)) for name, module in modules.items()})

    def name_of(self, module: Any) -> str | None:
        """The name under which a module is registered."""
        return next((p.name for p in self._plugins if p.module is module), None)

    # -- loading --------------------------------------------------------------------------------

    def _load(self, plugin: _Plugin, load: Callable[[], Any]) -> None:
        try:
            plugin = replace(plugin, module=load())
            _check_hooks(plugin)
            self.manager.register(plugin.module, plugin.name)
            self._plugins.append(plugin)
        except _FAULTS as error:
            self._report(plugin, "loading", error)

    def _report(self, plugin: _Plugin, hook: str, error: BaseException) -> None:
        """Keep a problem, the first one of each plugin, or raise it under strict plugins."""
        problem = _named(plugin, hook, error)
        if env.strict_plugins():
            raise problem
        self._problems.setdefault(
            plugin.name, Problem(plugin.name, plugin.distribution, hook, problem)
        )

    def _call(self, plugin: _Plugin, hook: str, **arguments: Any) -> Any:
        """The result of a plugin's hook, None if it does not implement it."""
        others = [other.module for other in self._plugins if other.module is not plugin.module]
        caller = self.manager.subset_hook_caller(hook, others)
        result = caller(**arguments)
        # A plugin has at most one implementation, but hooks that ask everybody answer with a list.
        if not getattr(hookspecs, hook).humming_spec["firstresult"]:
            return result[0] if result else None
        return result

    @cached_property
    def registry(self) -> Registry:
        """The rows, components and include folders of the plugins."""
        parts: list[Contribution] = []
        lost: dict[str, str] = {}
        for plugin in self._plugins:
            hook = ""
            try:
                hook = "humming_matrix"
                raw = self._matrix_source(plugin)
                lost |= dict.fromkeys(_device_names(raw), plugin.name)
                matrix = self._matrix(plugin, raw)
                hook = "humming_components"
                components = self._listed(plugin, hook, Component)
                hook = "humming_include_dirs"
                folders = tuple(self._folders(plugin, hook))
                parts.append(Contribution(plugin.name, matrix, components, folders))
            except _FAULTS as error:
                self._report(plugin, hook, error)
        known = {name: problem.error for name, problem in self._problems.items()}
        registry = Registry(parts, known, lost)
        self._add_variants(registry)
        for plugin in self._plugins:
            if plugin.name in registry.problems and plugin.name not in known:
                self._report(plugin, "registry", registry.problems[plugin.name])
        if env.strict_plugins() and registry.errors():
            raise registry.errors()[0]
        return registry

    def _add_variants(self, registry: Registry) -> None:
        hook, rows = "humming_variants", tuple(registry.devices())
        for plugin in self._plugins:
            try:
                registry.add_variants(
                    plugin.name, self._listed(plugin, hook, DeviceCapabilities, devices=rows)
                )
            except _FAULTS as error:
                self._report(plugin, hook, error)

    def _matrix_source(self, plugin: _Plugin) -> Any:
        result = self._call(plugin, "humming_matrix")
        if result is None or isinstance(result, Mapping):
            return result
        if isinstance(result, (str, Path)):
            content = load_yaml(result)
            if not isinstance(content, Mapping):
                raise PluginError(f"{result}: expected a mapping of sections, got {content!r}")
            return {"origin": str(result), **content}
        raise PluginError(f"returned {_told(result)}, expected a path, a mapping or None")

    def _matrix(self, plugin: _Plugin, raw: Any) -> Matrix | None:
        return None if raw is None else read_matrix(raw, f"the matrix of plugin {plugin.name}")

    def _listed(self, plugin: _Plugin, hook: str, kind: type[T], **arguments: Any) -> tuple[T, ...]:
        """What a hook returns, checked to be a collection of one type."""
        if hook not in _implemented(plugin.module):
            return ()
        result = self._call(plugin, hook, **arguments)
        wanted = f"expected an iterable of {kind.__name__}"
        if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
            raise PluginError(f"returned {_told(result)}, {wanted}")
        items = tuple(result)
        for item in items:
            if not isinstance(item, kind):
                raise PluginError(f"returned an iterable with {_told(item)}, {wanted}")
        return items

    def _folders(self, plugin: _Plugin, hook: str) -> Iterator[Path]:
        for folder in self._listed(plugin, hook, object):
            if not isinstance(folder, (str, Path)):
                raise PluginError(f"returned {_told(folder)}, expected paths of folders")
            if not Path(folder).is_dir():
                raise PluginError(f"returned {str(folder)!r}, which is no folder")
            yield Path(folder)

    # -- asking ---------------------------------------------------------------------------------

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with plugins and with single rows, by plugin name."""
        registry = self.registry
        listed = {id(problem.error) for problem in self._problems.values()}
        rows = [
            Problem("", "", "registry", error)
            for error in registry.errors()
            if id(error) not in listed and error not in registry.problems.values()
        ]
        return (*(self._problems[name] for name in sorted(self._problems)), *rows)

    def devices(self) -> PresentDevices:
        """The devices that are present on this machine; asks every plugin anew."""
        registry = self.registry
        found: list[PresentDevice] = []
        failed: dict[str, Problem] = {}
        for plugin in self._plugins:
            try:
                probed = self._listed(plugin, "humming_probe", PresentDevice)
            except _FAULTS as error:
                before = dict(self._problems)
                self._report(plugin, "humming_probe", error)
                failed[plugin.name] = self._problems[plugin.name]
                # A later look may succeed: the driver was busy, say. Rows are sound all the same.
                self._problems = before
                continue
            found += (_identified(device, plugin.name, registry) for device in probed)
        problems = {problem.plugin or str(problem): problem for problem in self.problems}
        found.sort(key=lambda device: (device.index, device.plugin))
        return PresentDevices(found, {**failed, **problems}.values())

    def _present(self) -> PresentDevices:
        """The present devices, remembered once there are any: devices do not come and go."""
        if self._seen is None or not self._seen:
            self._seen = self.devices()
        return self._seen

    def capabilities(
        self, device: str | int | PresentDevice | DeviceCapabilities | None = None
    ) -> DeviceCapabilities:
        """See `humming.capabilities`."""
        if isinstance(device, DeviceCapabilities):
            return device
        if isinstance(device, str):
            return self.registry.device(device)
        if device is None or isinstance(device, int):
            device = self._accelerator(device)
        how = "Name a row such as 'h200', or give an index or entry of a present device."
        check_type("capabilities", "the device", device, PresentDevice, how)
        if not device.row:
            notes = " ".join(device.notes)
            if device.index < 0:
                asked = f"HUMMING_SIMULATE={env.simulated_device()}"
                how = "It names the row that the CPU simulates; `humming devices --all` lists them."
                why, _, hint = notes.partition(". ")
                raise UnsupportedError(asked, why, f"{hint} {how}".strip())
            raise UnsupportedError(
                f"capabilities of {device.driver_name!r}", "it is present but has no row", notes
            )
        return self.registry.device(device.row)

    def _accelerator(self, index: int | None) -> PresentDevice:
        """The present device of an index, or the one to use when nobody says which."""
        present = self._present()
        # The host itself has a negative index, and serves where there is nothing else.
        indices = [d.index for d in present if d.index >= 0] or [d.index for d in present]
        wanted = index if index is not None else min(indices, default=None)
        chosen = [d for d in present if d.index == wanted]
        if len(chosen) == 1:
            return chosen[0]
        asked = "capabilities of the present accelerator"
        if chosen:
            names = ", ".join(f"{d.row or d.driver_name} (plugin {d.plugin})" for d in chosen)
            raise UnsupportedError(asked, f"several fit: {names}", "Name one with --device.")
        if index is not None and present:
            known = f"Present are {', '.join(map(str, indices))}."
            if max(indices) < 0:
                known = "None is present; name a row, or 'sim:ROW' for tensors on the CPU."
            raise UnsupportedError(f"accelerator {index}", "there is none of this index", known)
        names = ", ".join(row.name for row in self.registry.devices())
        broken = "".join(f" {problem}." for problem in present.problems)
        raise UnsupportedError(
            asked,
            "no accelerator is present",
            f"Name a device, e.g. with --device h200. Known are {names}.{broken}",
        )

    def compiler_for(self, caps: DeviceCapabilities) -> Compiler:
        """The compiler of a device; see `humming.plugins.compiler_for`."""
        wanted = ("name", "version", "options", "compile")
        compiler: Compiler = self._first("humming_compiler", caps, wanted)
        return compiler

    def runtime_for(self, caps: DeviceCapabilities) -> Runtime:
        """The runtime of a device; see `humming.plugins.runtime_for`."""
        runtime: Runtime = self._first("humming_runtime", caps, ("load", "allocate"))
        return runtime

    def _first(self, hook: str, caps: DeviceCapabilities, wanted: tuple[str, ...]) -> Any:
        owner = self.registry.owner(caps.name)
        answers: dict[str, Any] = {}
        failed: list[str] = []
        # The owner first; of the others several could answer, and their order must not decide.
        for plugin in sorted(self._plugins, key=lambda plugin: plugin.name != owner):
            if owner in answers:
                break
            try:
                result = self._call(plugin, hook, device=caps)
                lacking = [name for name in wanted if not _has(result, name)]
                if result is not None and lacking:
                    raise PluginError(f"returned {_told(result)}, which lacks {', '.join(lacking)}")
            except _FAULTS as error:
                if plugin.name != owner:
                    self._report(plugin, hook, error)
                    failed.append(str(_named(plugin, hook, error)))
                elif _speaks_for_itself(error):
                    raise
                else:
                    raise _named(plugin, hook, error) from error
                continue
            if result is not None:
                answers[plugin.name] = result
                self._answered[hook, caps.name] = plugin
        if len(answers) > 1:
            names = " and ".join(sorted(answers))
            raise PluginError(f"{hook}: the plugins {names} both answer for {caps.name}")
        if not answers:
            told = f"{hook}: no plugin answers for {caps.name} of plugin {owner}"
            raise PluginError(". ".join([told, *failed]))
        return next(iter(answers.values()))

    def fault(self, hook: str, caps: DeviceCapabilities, error: BaseException) -> PluginError:
        """See `humming.plugins.fault`."""
        answered = self._answered.get((hook, caps.name))
        who = answered or _Plugin(self.registry.owner(caps.name) or f"of {caps.name}", "", None)
        return _named(who, hook, error)


@cache
def installed() -> PluginSet:
    """The plugins of the environment, loaded once per process."""
    return PluginSet.of_environment()


def manager() -> pluggy.PluginManager:
    """pluggy's manager with the plugins of the environment."""
    return installed().manager


def registry() -> Registry:
    """The rows, components and include folders of the plugins of the environment."""
    return installed().registry


def capabilities(
    device: str | int | PresentDevice | DeviceCapabilities | None = None,
) -> DeviceCapabilities:
    """What a device can do.

    Args:
        device: name or alias of a row, index or entry of a present device, or None for the
            accelerator that is present, else the device that the CPU simulates.

    >>> capabilities("h200").supports("wgmma")
    True

    Raises:
        UnsupportedError: no such row; or no accelerator is present and none was named.
        PluginError: the plugin that has the row is broken.
    """
    return installed().capabilities(device)


def devices() -> PresentDevices:
    """The devices that are present; its `problems` tell which plugins are broken, and why.

    Raises:
        PluginError: a plugin is broken, and HUMMING_STRICT_PLUGINS is set.
    """
    return installed().devices()


def compiler_for(caps: DeviceCapabilities) -> Compiler:
    """The compiler that makes kernels for a device.

    Raises:
        PluginError: no plugin or several plugins answer, or one returned no compiler.
    """
    return installed().compiler_for(caps)


def runtime_for(caps: DeviceCapabilities) -> Runtime:
    """What loads and launches kernels on a device.

    Raises:
        PluginError: no plugin or several plugins answer, or one returned no runtime.
    """
    return installed().runtime_for(caps)


@contextmanager
def calling(hook: str, caps: DeviceCapabilities) -> Iterator[None]:
    """Runs code of the compiler or runtime that a plugin returned for a device.

    Raises:
        PluginError: what the code raised, with plugin, distribution and hook; errors of humming
            and a lack of memory pass as they are.
    """
    try:
        yield
    except _FAULTS as error:
        if isinstance(error, MemoryError) or _speaks_for_itself(error):
            raise
        raise fault(hook, caps, error) from error


def fault(hook: str, caps: DeviceCapabilities, error: BaseException) -> PluginError:
    """What went wrong in the compiler or runtime of a device, with plugin, distribution and hook.

    Args:
        hook: the hook that returned it.
        caps: the device.
        error: what it raised.
    """
    return installed().fault(hook, caps, error)


def _new_manager() -> pluggy.PluginManager:
    made = pluggy.PluginManager(PROJECT)
    made.add_hookspecs(hookspecs)
    return made


def _implemented(module: Any) -> set[str]:
    """Names of the marked hooks of a plugin."""
    return {name for name in dir(module) if hasattr(getattr(module, name), f"{PROJECT}_impl")}


def _check_hooks(plugin: _Plugin) -> None:
    """Refuse misspelt, unmarked and wrongly typed hooks before they can be silently ignored.

    Raises:
        PluginError: with the hook's name.
    """
    marked, known = _implemented(plugin.module), _hook_names()
    for name in sorted(marked - known):
        raise PluginError(f"{name} is no hook. {suggest(name, known)}")
    for name in dir(plugin.module):
        named_so = name.startswith(f"{PROJECT}_") and name not in marked
        if named_so and inspect.isroutine(getattr(plugin.module, name)):
            raise PluginError(f"{name} is not marked with @hookimpl")
    if not marked:
        raise PluginError(f"{_told(plugin.module)} implements no hook")
    alone = _new_manager()
    try:
        alone.register(plugin.module)
        alone.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(str(error)) from error


def _hook_names() -> set[str]:
    return {name for name in dir(hookspecs) if name.startswith(f"{PROJECT}_")}


def _identified(device: PresentDevice, plugin: str, registry: Registry) -> PresentDevice:
    """A present device with its row, and with what the driver and the row disagree about."""
    try:
        caps = registry.device(device.row) if device.row else registry.match(device.driver_name)
    except HummingError as error:
        return replace(device, plugin=plugin, row="", notes=(str(error),))
    notes = tuple(
        f"the driver reports {name} = {seen}, the row {caps.name} says {listed}"
        for name in _COMPARED
        if (seen := getattr(device, name)) and (listed := getattr(caps, name))
        if abs(seen - listed) > (0 if name == "sms" else _TOLERANCE * listed)
    )
    return replace(device, plugin=plugin, row=caps.name, notes=notes)


def _device_names(raw: Any) -> Iterator[str]:
    """Names that an unchecked matrix gives to devices, to know whose they are if it is broken."""
    section = raw.get("devices") if isinstance(raw, Mapping) else None
    for name, row in section.items() if isinstance(section, Mapping) else ():
        aliases = row.get("aliases") if isinstance(row, Mapping) else None
        yield from (n for n in (name, *(aliases or ())) if isinstance(n, str))


def _named(plugin: _Plugin, hook: str, error: BaseException) -> PluginError:
    """An error with the plugin, distribution and hook that it comes from."""
    named = f"{plugin}: {hook}: "
    told = str(error) if isinstance(error, HummingError) else f"{type(error).__name__}: {error}"
    problem = PluginError(told if told.startswith(named) else named + told)
    problem.__cause__ = error
    return problem


def _speaks_for_itself(error: BaseException) -> bool:
    """Whether an error of a plugin says what to do; a PluginError says what the plugin did."""
    return isinstance(error, HummingError) and not isinstance(error, PluginError)


def _has(thing: Any, name: str) -> bool:
    # Without running properties: a compiler's version may look for the compiler.
    return inspect.getattr_static(thing, name, None) is not None


def _told(value: Any) -> str:
    return f"{value!r} of type {type(value).__name__}"


def _same(thing: T) -> T:
    return thing


def _raiser(message: str) -> Callable[[], Any]:
    def load() -> Any:
        raise PluginError(message)

    return load


def _trace(manager: pluggy.PluginManager) -> None:
    """Log every hook call and its result to standard error."""
    if not _LOG.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("humming plugins: %(message)s"))
        _LOG.addHandler(handler)
        _LOG.setLevel(logging.DEBUG)

    def before(name: str, impls: Any, arguments: Mapping[str, Any]) -> None:
        asked = ", ".join(impl.plugin_name for impl in impls)
        _LOG.debug("%s(%s) of %s", name, ", ".join(map(repr, arguments.values())), asked)

    def after(outcome: Any, name: str, impls: Any, arguments: Mapping[str, Any]) -> None:
        if outcome.exception:
            _LOG.debug("%s raised %r", name, outcome.exception)
        else:
            _LOG.debug("%s -> %.200r", name, outcome.get_result())

    manager.add_hookcall_monitoring(before, after)
