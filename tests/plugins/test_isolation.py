"""A plugin that is broken is named, with its distribution and hook; the others stay usable."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from humming import composer, plugins, runtime
from humming.capability import DeviceCapabilities
from humming.compiler import CompiledKernel, compile_source
from humming.components import Component
from humming.errors import CompileError, HummingError, PluginError, UnsupportedError
from humming.hookspecs import Image, PresentDevice, hookimpl
from humming.plugins import PluginSet
from humming.problem import GemmProblem

ROW = {
    "title": "Card",
    "family": "kind",
    "sms": 10,
    "driver_names": ["Card"],
    "source": "a sheet",
}
MATRIX: dict[str, Any] = {
    "mma_sets": {
        "sync": {
            "instruction": "mma_sync",
            "a_sites": ["register"],
            "source": "a sheet",
            "rows": [
                {"shape": [16, 8, 16], "a": "f16", "b": "f16", "accumulator": "f32", "rate": "f16"}
            ],
        }
    },
    "families": {
        "kind": {
            "title": "Kind",
            "vendor": "someone",
            "arch": "sm_80",
            "movers": ["plain"],
            "mma": ["sync"],
            "source": "a sheet",
        }
    },
    "devices": {"card": ROW},
}


class Sound:
    """A plugin in order, with one device that is always present."""

    @hookimpl
    def humming_matrix(self) -> Any:
        return MATRIX

    @hookimpl
    def humming_probe(self) -> Any:
        return [PresentDevice(0, "Card", sms=10)]

    @hookimpl
    def humming_compiler(self, device: Any) -> Any:
        return TOOL

    @hookimpl
    def humming_runtime(self, device: Any) -> Any:
        return TOOL


TOOL = SimpleNamespace(name="t", version=(1, 0), options=lambda c: ())
TOOL.compile = TOOL.load = TOOL.allocate = lambda *args: None


def plugin_with(hook: str, result: Any) -> Any:
    """A plugin with one hook, which returns a value or raises it."""

    def implementation(self: Any) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    return type("Guest", (), {hook: hookimpl(implementation)})()


def beside(guest: Any) -> PluginSet:
    return PluginSet.of_modules(sound=Sound(), guest=guest)


def problem_of(plugins: PluginSet, plugin: str = "guest") -> str:
    (problem,) = (p for p in plugins.devices().problems if p.plugin == plugin)
    return str(problem)


def assert_sound_one_works(plugins: PluginSet) -> None:
    assert plugins.capabilities("card").sms == 10
    assert [device.row for device in plugins.devices() if device.plugin == "sound"] == ["card"]
    assert plugins.compiler_for(plugins.capabilities("card")) is TOOL


# -- loading ---------------------------------------------------------------------------------------


def fails_to_import() -> Any:
    raise ImportError("No module named 'libacme'")


def test_import_error_is_reported_with_plugin_distribution_and_hook() -> None:
    plugins = PluginSet(
        {
            "acme": ("humming-acme 0.3", fails_to_import),
            "sound": ("humming-sound 1.0", Sound),
        }
    )
    assert problem_of(plugins, "acme") == (
        "plugin acme (humming-acme 0.3): loading: ImportError: No module named 'libacme'"
    )
    assert_sound_one_works(plugins)


def test_devices_of_a_plugin_that_did_not_load_raise_its_error() -> None:
    plugins = PluginSet({"acme": ("humming-acme 0.3", fails_to_import), "sound": ("", Sound)})
    with pytest.raises(PluginError, match="libacme"):
        plugins.capabilities("acme_x1")
    with pytest.raises(UnsupportedError, match="Broken plugins: acme"):
        plugins.capabilities("elsewhere")


def test_plugin_that_exits_is_reported() -> None:
    def leaves() -> Any:
        raise SystemExit(3)

    plugins = PluginSet({"acme": ("", leaves), "sound": ("", Sound)})
    assert "SystemExit: 3" in problem_of(plugins, "acme")


def test_interruption_by_the_user_is_not_swallowed() -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PluginSet({"acme": ("", interrupted)})


def test_misspelt_hook_is_reported() -> None:
    plugins = beside(plugin_with("humming_matrx", None))
    told = "plugin guest: loading: humming_matrx is no hook. Did you mean 'humming_matrix'"
    assert problem_of(plugins).startswith(told)
    assert_sound_one_works(plugins)


def test_unmarked_hook_is_reported() -> None:
    guest = SimpleNamespace(humming_matrix=lambda: {}, humming_probe=hookimpl(lambda: []))
    plugins = beside(guest)
    assert "humming_matrix is not marked with @hookimpl" in problem_of(plugins)
    assert_sound_one_works(plugins)


def test_plugin_without_hooks_is_reported() -> None:
    assert "implements no hook" in problem_of(beside(SimpleNamespace()))


def test_unknown_argument_is_reported() -> None:
    class Guest:
        @hookimpl
        def humming_compiler(self, gadget: Any) -> None:
            return None

    plugins = beside(Guest())
    assert "gadget" in problem_of(plugins)
    assert_sound_one_works(plugins)


def test_hook_may_take_fewer_arguments() -> None:
    class Guest:
        @hookimpl
        def humming_compiler(self) -> None:
            return None

    assert beside(Guest()).devices().problems == ()


# -- results ---------------------------------------------------------------------------------------

WRONG = {
    "matrix-number": ("humming_matrix", 42, "returned 42 of type int, expected a path"),
    "matrix-missing": ("humming_matrix", "/nowhere/m.yaml", "No such file"),
    "components-number": ("humming_components", 42, "expected an iterable of Component"),
    "components-none": ("humming_components", None, "returned None of type NoneType"),
    "components-dict": ("humming_components", {}, "expected an iterable of Component"),
    "components-texts": ("humming_components", ["a"], "an iterable with 'a' of type str"),
    "folders-text": ("humming_include_dirs", "/usr", "returned '/usr' of type str"),
    "folders-number": ("humming_include_dirs", [42], "returned 42 of type int, expected paths"),
    "folders-missing": ("humming_include_dirs", ["/nowhere"], "'/nowhere', which is no folder"),
    "probe-number": ("humming_probe", 42, "expected an iterable of PresentDevice"),
    "probe-none": ("humming_probe", None, "returned None of type NoneType"),
    "probe-texts": ("humming_probe", ["card"], "with 'card' of type str"),
}

MISTYPED = [
    {"index": "0"},
    {"index": None},
    {"index": -2},
    {"driver_name": b"Card"},
    {"driver_name": None},
    {"row": None},
    {"sms": "10"},
    {"sms": 10.5},
    {"l2_bytes": "1 MiB"},
    {"memory_bytes": 8e9},
    {"plugin": 7},
    {"notes": "a note"},
    {"notes": (1, 2)},
]


@pytest.mark.parametrize("case", WRONG)
def test_wrong_result_is_reported(case: str) -> None:
    hook, result, told = WRONG[case]
    plugins = beside(plugin_with(hook, result))
    message = problem_of(plugins)
    assert message.startswith(f"plugin guest: {hook}: ")
    assert told in message
    assert_sound_one_works(plugins)


@pytest.mark.parametrize("field", MISTYPED, ids=str)
def test_present_device_with_a_field_of_another_type_is_reported(field: dict[str, Any]) -> None:
    class Guest:
        @hookimpl
        def humming_probe(self) -> Any:
            return [PresentDevice(**{"index": 3, "driver_name": "Card"} | field)]

    plugins = beside(Guest())
    (name,) = field
    told = f"plugin guest: humming_probe: PresentDevice: {name} = {field[name]!r} is "
    assert problem_of(plugins).startswith(told)
    assert_sound_one_works(plugins)


def test_numbers_of_a_driver_need_not_be_pythons_own() -> None:
    device = PresentDevice(np.int32(1), "Card", sms=np.int64(10))  # type: ignore[arg-type]
    assert (type(device.index), type(device.sms)) == (int, int)


@pytest.mark.parametrize("field", ["slot", "serves", "header", "struct"])
@pytest.mark.parametrize("value", [7, ["mma"], None], ids=str)
def test_component_with_a_field_of_another_type_is_reported(field: str, value: Any) -> None:
    class Guest:
        @hookimpl
        def humming_components(self) -> Any:
            sound = ("mover", "plain", "humming/acme/mover.cuh", "acme::Mover")
            named = dict(zip(("slot", "serves", "header", "struct"), sound, strict=True))
            return [Component(**named | {field: value})]

    plugins = beside(Guest())
    assert f"humming_components: component: {field} = {value!r} is no text" in problem_of(plugins)
    assert_sound_one_works(plugins)


@pytest.mark.parametrize(
    "hook",
    ["humming_matrix", "humming_components", "humming_include_dirs", "humming_probe"],
)
@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
def test_hook_that_raises_is_reported(hook: str, kind: type[BaseException]) -> None:
    plugins = beside(plugin_with(hook, kind("by zero")))
    assert problem_of(plugins) == f"plugin guest: {hook}: {kind.__name__}: by zero"
    assert_sound_one_works(plugins)


def test_generator_that_raises_is_reported() -> None:
    class Guest:
        @hookimpl
        def humming_probe(self) -> Any:
            yield PresentDevice(0, "Card")
            raise RuntimeError("the bus fell silent")

    plugins = beside(Guest())
    assert "the bus fell silent" in problem_of(plugins)
    assert_sound_one_works(plugins)


def test_probe_that_recovers_is_no_problem_any_more() -> None:
    answers: list[Any] = [RuntimeError("busy"), []]

    class Guest:
        @hookimpl
        def humming_probe(self) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    plugins = beside(Guest())
    assert "busy" in problem_of(plugins)
    assert plugins.devices().problems == ()


@pytest.mark.parametrize(
    ("hook", "ask", "lacking"),
    [
        ("humming_compiler", PluginSet.compiler_for, "name, version, options, compile"),
        ("humming_runtime", PluginSet.runtime_for, "load, allocate"),
    ],
)
def test_tool_of_a_wrong_type_is_refused(
    hook: str, ask: Callable[[PluginSet, Any], Any], lacking: str
) -> None:
    plugins = PluginSet.of_modules(guest=_owner(hook, 42))
    with pytest.raises(PluginError) as error:
        ask(plugins, plugins.capabilities("card"))
    told = f"plugin guest: {hook}: returned 42 of type int, which lacks {lacking}"
    assert str(error.value) == told


def _owner(hook: str, result: Any) -> Any:
    """A plugin that has the row of the card, and one more hook."""
    guest = plugin_with(hook, result)
    type(guest).humming_matrix = Sound.humming_matrix
    return guest


@pytest.mark.parametrize("hook", ["humming_compiler", "humming_runtime"])
def test_owner_is_asked_first(hook: str) -> None:
    mine = SimpleNamespace(**vars(TOOL))
    plugins = PluginSet.of_modules(zzz=_owner(hook, mine), aaa=plugin_with(hook, TOOL))
    ask = plugins.compiler_for if hook == "humming_compiler" else plugins.runtime_for
    assert ask(plugins.capabilities("card")) is mine


def test_tool_of_another_plugin_serves_a_row_without_one() -> None:
    plugins = PluginSet.of_modules(
        rows=plugin_with("humming_matrix", MATRIX), tools=plugin_with("humming_compiler", TOOL)
    )
    assert plugins.compiler_for(plugins.capabilities("card")) is TOOL
    with pytest.raises(PluginError, match="humming_runtime: no plugin answers for card"):
        plugins.runtime_for(plugins.capabilities("card"))


def test_two_answers_for_the_row_of_a_third_are_refused() -> None:
    plugins = PluginSet.of_modules(
        rows=plugin_with("humming_matrix", MATRIX),
        one=plugin_with("humming_compiler", TOOL),
        two=plugin_with("humming_compiler", TOOL),
    )
    with pytest.raises(PluginError, match="plugins one and two both answer for card"):
        plugins.compiler_for(plugins.capabilities("card"))


# -- variants of rows ------------------------------------------------------------------------------


def twin(name: str) -> Any:
    return plugin_with_variants(lambda devices: [replace(devices[0], name=name)])


def plugin_with_variants(make: Any) -> Any:
    def implementation(self: Any, devices: Any) -> Any:
        return make(devices)

    return type("Guest", (), {"humming_variants": hookimpl(implementation)})()


def test_variant_is_found_under_its_name_and_is_no_row() -> None:
    plugins = beside(twin("toy:card"))
    assert plugins.capabilities("toy:card").sms == plugins.capabilities("card").sms
    assert plugins.capabilities(" Toy:CARD ").name == "toy:card"
    assert [caps.name for caps in plugins.registry.variants()] == ["toy:card"]
    assert [caps.name for caps in plugins.registry.devices()] == ["card"]
    assert plugins.registry.owner("toy:card") == "guest"
    with pytest.raises(UnsupportedError, match="toy:card"):
        plugins.capabilities("toy:cart")


@pytest.mark.parametrize("name", ["card", "toy:other", ":card"])
def test_variant_must_be_named_after_a_row(name: str) -> None:
    plugins = beside(twin(name))
    assert "not named PREFIX:ROW" in problem_of(plugins)
    assert "humming_variants" in problem_of(plugins)
    assert_sound_one_works(plugins)


def test_variants_of_one_name_are_refused() -> None:
    plugins = PluginSet.of_modules(sound=Sound(), one=twin("toy:card"), two=twin("toy:card"))
    assert "claimed by one and two" in problem_of(plugins, "two")


def test_variants_that_are_none_are_refused() -> None:
    plugins = beside(plugin_with_variants(lambda devices: [42]))
    assert "DeviceCapabilities" in problem_of(plugins)


def test_the_host_is_used_only_where_nothing_else_is() -> None:
    host = plugin_with("humming_probe", [PresentDevice(-1, "CPU", "card")])
    alone = PluginSet.of_modules(rows=plugin_with("humming_matrix", MATRIX), host=host)
    assert alone.capabilities().name == "card"
    assert alone.capabilities(-1).name == "card"
    with pytest.raises(UnsupportedError, match="None is present"):
        alone.capabilities(0)


def test_failing_stranger_does_not_hinder_the_owner() -> None:
    plugins = PluginSet.of_modules(
        sound=Sound(), guest=plugin_with("humming_compiler", ZeroDivisionError("by zero"))
    )
    assert plugins.compiler_for(plugins.capabilities("card")) is TOOL


def test_failing_owner_is_named() -> None:
    plugins = PluginSet.of_modules(guest=_owner("humming_compiler", ZeroDivisionError("by zero")))
    with pytest.raises(PluginError, match="guest: humming_compiler: ZeroDivisionError: by zero"):
        plugins.compiler_for(plugins.capabilities("card"))


def test_errors_that_speak_for_themselves_are_passed_on() -> None:
    plugins = PluginSet.of_modules(guest=_owner("humming_compiler", CompileError("no SDK")))
    with pytest.raises(CompileError, match="no SDK"):
        plugins.compiler_for(plugins.capabilities("card"))


@pytest.mark.parametrize(
    "answer",
    [42, CompileError("no SDK"), UnsupportedError("a", "b", "C."), SystemExit(3)],
    ids=repr,
)
@pytest.mark.parametrize("hook", ["humming_compiler", "humming_runtime"])
def test_stranger_that_answers_wrongly_does_not_hinder_another(hook: str, answer: Any) -> None:
    plugins = PluginSet.of_modules(
        rows=plugin_with("humming_matrix", MATRIX),
        aaa=plugin_with(hook, answer),
        tools=plugin_with(hook, TOOL),
    )
    ask = plugins.compiler_for if hook == "humming_compiler" else plugins.runtime_for
    assert ask(plugins.capabilities("card")) is TOOL
    assert problem_of(plugins, "aaa").startswith(f"plugin aaa: {hook}: ")


def test_failure_of_the_only_one_to_answer_is_told() -> None:
    plugins = PluginSet.of_modules(
        rows=plugin_with("humming_matrix", MATRIX), aaa=plugin_with("humming_runtime", 42)
    )
    with pytest.raises(PluginError, match=r"no plugin answers for card.*plugin aaa:.*returned 42"):
        plugins.runtime_for(plugins.capabilities("card"))


# -- compilers and runtimes at work ----------------------------------------------------------------

SOURCE = 'extern "C" __global__ void kernel() {}\n'
IMAGE = Image("cubin", b"\x7fELF")


def raises(error: BaseException) -> Callable[..., Any]:
    def method(*_: Any, **__: Any) -> Any:
        raise error

    return method


def tool(**parts: Any) -> Any:
    """A compiler and runtime in order but for some parts; an exception stands for raising it."""

    class Tool:
        name, version = "t", (1, 0)

        def options(self, caps: Any) -> Any:
            return ()

        def compile(self, *_: Any) -> Any:
            return IMAGE

        def load(self, *_: Any) -> Any:
            return self

        def launch(self, *_: Any, **__: Any) -> None:
            return None

        def allocate(self, *_: Any) -> int:
            return 1 << 20

    for name, part in parts.items():
        wrong = part if not isinstance(part, BaseException) else raises(part)
        if isinstance(part, BaseException) and name in ("name", "version"):
            wrong = property(raises(part))
        setattr(Tool, name, wrong)
    return Tool()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], DeviceCapabilities]:
    """Puts a compiler and runtime of a plugin in place, and the card that they are for."""

    def put(made: Any) -> DeviceCapabilities:
        class Guest(Sound):
            @hookimpl
            def humming_compiler(self, device: Any) -> Any:
                return made

            @hookimpl
            def humming_runtime(self, device: Any) -> Any:
                return made

        found = PluginSet({"acme": ("humming-acme 0.3", Guest)})
        monkeypatch.setattr(plugins, "installed", lambda: found)
        return found.capabilities("card")

    return put


BROKEN_COMPILERS = {
    "name-raises": ({"name": OSError("gone")}, "OSError: gone"),
    "name-number": ({"name": 7}, "the compiler's name = 7 is no text"),
    "version-raises": ({"version": KeyError("v")}, "KeyError: 'v'"),
    "version-text": ({"version": "13.0"}, "version = '13.0' is no (major, minor)"),
    "version-texts": ({"version": ("13", "0")}, "is no (major, minor)"),
    "options-raises": ({"options": SystemExit(2)}, "SystemExit: 2"),
    "options-text": ({"options": lambda self, caps: "-O3"}, "options are '-O3', no tuple"),
    "compile-raises": ({"compile": ZeroDivisionError("by zero")}, "ZeroDivisionError: by zero"),
    "compile-bytes": ({"compile": lambda *_: b"ELF"}, "compile returned b'ELF' of type bytes"),
    "image-text": ({"compile": lambda *_: Image("ptx", "text")}, "its data is of type str, not"),
    "image-log": ({"compile": lambda *_: Image("ptx", b"", None)}, "its log is of type NoneType"),
}


@pytest.mark.parametrize("case", BROKEN_COMPILERS)
def test_compiler_that_breaks_is_named(case: str, install: Any) -> None:
    parts, told = BROKEN_COMPILERS[case]
    caps = install(tool(**parts))
    with pytest.raises(PluginError) as error:
        compile_source(SOURCE, "kernel", caps, cache=False)
    assert str(error.value).startswith("plugin acme (humming-acme 0.3): humming_compiler: ")
    assert told in str(error.value)


def test_compiler_in_order_compiles(install: Any) -> None:
    assert compile_source(SOURCE, "kernel", install(tool()), cache=False).image == IMAGE


def test_compile_error_of_a_plugin_is_passed_on(install: Any) -> None:
    mistake = CompileError("no such thing", SOURCE, ("-O3",), "line 1: told so")
    caps = install(tool(compile=mistake))
    with pytest.raises(CompileError) as error:
        compile_source(SOURCE, "kernel", caps, cache=False)
    assert error.value is mistake


BROKEN_RUNTIMES = {
    "load-raises": ({"load": ZeroDivisionError("by zero")}, "ZeroDivisionError: by zero"),
    "load-exits": ({"load": SystemExit(2)}, "SystemExit: 2"),
    "load-number": ({"load": lambda *_: 42}, "load returned 42, which has no launch"),
    "launch-raises": ({"launch": KeyError("grid")}, "KeyError: 'grid'"),
    "allocate-raises": ({"allocate": OSError("bus")}, "OSError: bus"),
    "allocate-text": ({"allocate": lambda *_: "here"}, "ValueError: invalid literal for int"),
}


def launched(caps: DeviceCapabilities) -> None:
    """A product of one token by a kernel with split K, so that every part of a runtime is used."""
    plan = composer.compose(GemmProblem.parse("int4_g64 x fp16", 64, 64), caps, (1, 8))
    plan = replace(plan, tile=replace(plan.tile, split_k=2))
    operands = runtime.Operands(*(torch.zeros(16) for _ in range(5)))
    x, out = torch.zeros(1, 64, dtype=torch.float16), torch.zeros(1, 64, dtype=torch.float16)
    compiled = CompiledKernel(IMAGE, "kernel", "0" * 64, "acme 1.0", 0.0, False)
    runtime.Kernel(plan, -1, compiled).launch(x, operands, out, 0)


@pytest.mark.parametrize("case", BROKEN_RUNTIMES)
def test_runtime_that_breaks_is_named(
    case: str, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_devices", {})
    parts, told = BROKEN_RUNTIMES[case]
    caps = install(tool(**parts))
    with pytest.raises(PluginError) as error:
        launched(caps)
    assert str(error.value).startswith("plugin acme (humming-acme 0.3): humming_runtime: ")
    assert told in str(error.value)


@pytest.mark.parametrize("error", [MemoryError("none left"), HummingError("refused")], ids=repr)
def test_errors_of_a_runtime_that_say_what_they_are_pass(
    error: Exception, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("load", "launch"):
        monkeypatch.setattr(runtime, "_devices", {})
        with pytest.raises(type(error)) as raised:
            launched(install(tool(**{part: error})))
        assert raised.value is error


# -- rows ------------------------------------------------------------------------------------------


def test_bad_row_is_reported_and_raised_for_its_device() -> None:
    matrix = {"devices": {"theirs": ROW | {"sms": -1}, "other": ROW}}
    plugins = beside(plugin_with("humming_matrix", matrix))
    told = (
        "plugin guest: humming_matrix: the matrix of plugin guest: devices.theirs: sms = -1 "
        "is not a positive number or null"
    )
    assert problem_of(plugins) == told
    for name in ("theirs", "other"):
        with pytest.raises(PluginError, match="sms = -1"):
            plugins.capabilities(name)
    assert_sound_one_works(plugins)


def test_bad_row_of_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cards.yaml"
    file.write_text("devices: {theirs: {titles: Card}}\n")
    message = problem_of(beside(plugin_with("humming_matrix", file)))
    assert f"{file}: devices.theirs: unknown field 'titles'. Did you mean 'title'" in message


@pytest.mark.parametrize("names", [("one", "two"), ("two", "one")])
def test_duplicate_device_names_both_plugins(names: tuple[str, str]) -> None:
    first, second = names
    card = plugin_with("humming_matrix", {"devices": {"card": ROW | {"family": "kind"}}})
    plugins = PluginSet.of_modules(**{first: Sound(), second: card})
    with pytest.raises(PluginError, match="'card' is claimed by the plugins one and two"):
        plugins.capabilities("card")
    assert ["one and two" in str(problem) for problem in plugins.devices().problems] == [True]


def test_duplicate_header_names_both_plugins(tmp_path: Path) -> None:
    guests = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "acme.cuh").write_text("#pragma once\n")
        guests[name] = plugin_with("humming_include_dirs", [tmp_path / name])
    plugins = PluginSet.of_modules(sound=Sound(), **guests)
    for name in guests:
        message = problem_of(plugins, name)
        assert "<humming/acme.cuh>" in message
        assert "of one" in message
        assert "of two" in message
    assert_sound_one_works(plugins)


# -- strictness and tracing ------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["import", "misspelt", "matrix", "row", "probe"])
def test_strict_plugins_raise_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_STRICT_PLUGINS", "1")
    guests: dict[str, Callable[[], Any]] = {
        "import": fails_to_import,
        "misspelt": lambda: plugin_with("humming_matrx", None),
        "matrix": lambda: plugin_with("humming_matrix", 42),
        "row": lambda: plugin_with("humming_matrix", {"devices": {"card": ROW}}),
        "probe": lambda: plugin_with("humming_probe", 42),
    }
    with pytest.raises(PluginError):
        PluginSet({"guest": ("", guests[case]), "sound": ("", Sound)}).devices()


def test_strict_plugins_accept_sound_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_STRICT_PLUGINS", "1")
    assert_sound_one_works(PluginSet.of_modules(sound=Sound()))


def test_trace_logs_calls_and_results(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HUMMING_TRACE_PLUGINS", "1")
    plugins = PluginSet.of_modules(
        sound=Sound(), guest=plugin_with("humming_probe", ValueError("no"))
    )
    with caplog.at_level("DEBUG", logger="humming.plugins"):
        plugins.devices()
    assert "humming_probe() of sound" in caplog.text
    assert "humming_probe -> [[PresentDevice(index=0, driver_name='Card'" in caplog.text
    assert "humming_probe raised ValueError('no')" in caplog.text


def test_without_trace_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="humming.plugins"):
        PluginSet.of_modules(sound=Sound()).devices()
    assert caplog.text == ""
