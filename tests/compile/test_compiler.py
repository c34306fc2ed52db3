"""Compiling without a GPU: for every NVIDIA architecture, through the cache, with good errors."""

import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import humming
from humming import compiler, plugins
from humming.cache import KernelCache
from humming.capability import DeviceCapabilities
from humming.compiler import compile_many, compile_plan, compile_source
from humming.composer import M_RANGES, compose
from humming.errors import CompileError, UnsupportedError
from humming.problem import GemmProblem

EM_CUDA = 190
PROBE = """#include <humming/params.cuh>
extern "C" __global__ void probe(const __grid_constant__ humming::GemmParams p) {
  static_cast<float*>(p.out)[threadIdx.x] = p.m;
}
"""


def _by_arch() -> dict[str, DeviceCapabilities]:
    """One device of each architecture that the NVRTC found here knows."""
    rows = [row for row in plugins.registry().devices() if row.arch.startswith("sm_")]
    version = plugins.compiler_for(rows[0]).version
    return {row.arch: row for row in rows if (row.min_compiler or (0, 0)) <= version}


ARCHS = _by_arch()


@pytest.fixture
def a100() -> DeviceCapabilities:
    return plugins.capabilities("a100_80gb")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache in the environment of this test alone."""
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("arch", ARCHS)
def test_probe_compiles_to_a_cubin_for(arch: str) -> None:
    kernel = compile_source(PROBE, "probe", ARCHS[arch], cache=False)
    assert kernel.image.kind == "cubin"
    assert kernel.image.data[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", kernel.image.data, 18) == (EM_CUDA,)
    assert b"probe" in kernel.image.data
    assert "registers" in kernel.log


@pytest.mark.parametrize(
    ("arch", "activation"),
    [(a, name) for a in ARCHS for name in ("float16", "bfloat16") if ARCHS[a].supports(name)],
)
def test_plan_compiles_without_spills_for(arch: str, activation: str) -> None:
    problem = GemmProblem.parse(f"int4_g128 x {activation}", 4096, 4096)
    plan = compose(problem, ARCHS[arch], M_RANGES[1])
    kernel = compile_plan(plan, cache=False)
    print(f"{plan.lowering.name}: {kernel.seconds:.2f} s, {len(kernel.image.data)} bytes")
    assert "0 bytes spill stores, 0 bytes spill loads" in kernel.log
    assert "warning" not in kernel.log


def test_error_says_what_the_compiler_said(a100: DeviceCapabilities) -> None:
    broken = PROBE.replace("p.m;", "p.nothing;")
    with pytest.raises(CompileError, match="cannot compile probe for sm_80") as caught:
        compile_source(broken, "probe", a100)
    assert "probe.cu(3): error" in caught.value.log
    assert caught.value.source == broken
    assert "--gpu-architecture=sm_80" in caught.value.options
    assert "probe.cu(3): error" in str(caught.value)


def test_error_shows_the_sentence_of_a_contract(a100: DeviceCapabilities) -> None:
    source = PROBE + "template <class T> concept Big = sizeof(T) > 64;\n"
    source += 'static_assert(Big<int>, "slot x: y");\n'
    with pytest.raises(CompileError, match="slot x: y"):
        compile_source(source, "probe", a100)


def test_files_beside_the_process_do_not_leak_in(
    a100: DeviceCapabilities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "humming").mkdir()
    (tmp_path / "humming" / "params.cuh").write_text("#error leaked\n")
    monkeypatch.chdir(tmp_path)
    compile_source(PROBE, "probe", a100, cache=False)


@pytest.mark.parametrize(
    ("arch", "message"),
    [("sm_20", r"does not know sm_20; it knows .*sm_80"), ("ppu_10", "not ppu_10")],
)
def test_unknown_architecture(arch: str, message: str, a100: DeviceCapabilities) -> None:
    nvrtc = plugins.compiler_for(a100)
    with pytest.raises(CompileError, match=message):
        nvrtc.compile(PROBE, {}, "probe", replace(a100, arch=arch))


@pytest.mark.parametrize("what", ["device", "instruction"])
def test_compiler_that_is_too_old_is_named_with_the_version_needed(
    what: str, a100: DeviceCapabilities
) -> None:
    if what == "device":
        a100 = replace(a100, min_compiler=(99, 1))
    major, minor = plugins.compiler_for(a100).version
    message = rf"needs nvrtc 99\.1 or newer; found {major}\.{minor}"
    with pytest.raises(CompileError, match=message):
        compile_source(PROBE, "probe", a100, needs=(99, 1) if what == "instruction" else (1, 0))


def test_missing_bindings_say_what_to_install(
    a100: DeviceCapabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = plugins.compiler_for(a100)
    sys.modules["humming.devices.nvrtc"].library.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match="pip install cuda-bindings"):
        nvrtc.compile(PROBE, {}, "probe", a100)


def test_missing_library_says_what_to_install(
    a100: DeviceCapabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import nvrtc as bindings

    def not_found() -> None:
        raise RuntimeError("Failed to dlopen libnvrtc.so.13")

    nvrtc = plugins.compiler_for(a100)
    sys.modules["humming.devices.nvrtc"].library.cache_clear()
    monkeypatch.setattr(bindings, "nvrtcVersion", not_found)
    with pytest.raises(CompileError, match=r"libnvrtc was not found .*nvidia-cuda-nvrtc"):
        nvrtc.compile(PROBE, {}, "probe", a100)


def test_second_time_comes_from_the_cache(own_cache: Path, a100: DeviceCapabilities) -> None:
    first = compile_source(PROBE, "probe", a100)
    again = compile_source(PROBE, "probe", a100)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert again.image == first.image
    assert "registers" in again.log


def test_devices_of_one_architecture_share_kernels(own_cache: Path) -> None:
    keys = {
        name: compile_source(PROBE, "probe", plugins.capabilities(name)).key
        for name in ("h100", "h200", "l40s")
    }
    assert keys["h100"] == keys["h200"] != keys["l40s"]


def test_disabled_cache_keeps_nothing(
    own_cache: Path, a100: DeviceCapabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUMMING_DISABLE_CACHE", "1")
    assert not compile_source(PROBE, "probe", a100).from_cache
    assert not compile_source(PROBE, "probe", a100).from_cache
    assert not list(own_cache.iterdir())


def test_broken_entry_is_compiled_again(own_cache: Path, a100: DeviceCapabilities) -> None:
    first = compile_source(PROBE, "probe", a100)
    path = KernelCache().path(first.key)
    path.write_bytes(path.read_bytes()[:-1])
    again = compile_source(PROBE, "probe", a100)
    assert not again.from_cache
    assert again.image.data == first.image.data


def test_prepared_kernel_serves_a_host_without_compiler(
    own_cache: Path, a100: DeviceCapabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = compile_source(PROBE, "probe", a100)

    def absent(self: object) -> tuple[int, int]:
        raise CompileError("libnvrtc was not found. Install it.")

    monkeypatch.setattr(type(plugins.compiler_for(a100)), "version", property(absent))
    served = compile_source(PROBE, "probe", a100)
    assert served.from_cache
    assert (served.image, served.compiler) == (prepared.image, prepared.compiler)
    with pytest.raises(CompileError, match=r"is not in .*libnvrtc was not found.*humming compile"):
        compile_source(PROBE + "// changed", "probe", a100)


def test_prepared_kernel_of_a_newer_compiler_serves_an_older_one(
    own_cache: Path, a100: DeviceCapabilities, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = compile_source(PROBE, "probe", a100)
    kind = type(plugins.compiler_for(a100))
    major, minor = plugins.compiler_for(a100).version
    monkeypatch.setattr(kind, "version", (major, minor - 1))
    served = compile_source(PROBE, "probe", a100)
    assert served.from_cache
    assert served.compiler == prepared.compiler == f"nvrtc {major}.{minor}"
    # One that was updated makes its kernels anew.
    monkeypatch.setattr(kind, "version", (major, minor + 1))
    made = compile_source(PROBE, "probe", a100)
    assert (made.from_cache, made.compiler) == (False, f"nvrtc {major}.{minor + 1}")


def test_many_at_once_keep_their_order(own_cache: Path) -> None:
    problem = GemmProblem.parse("int4_g128 x fp16", 1024, 1024)
    plans = [
        compose(problem, plugins.capabilities(name), m_range)
        for name in ("t4", "a100_80gb")
        for m_range in M_RANGES[:2]
    ]
    kernels = compile_many(plans, jobs=3)
    assert [kernel.key for kernel in kernels] == [compile_plan(plan).key for plan in plans]
    assert compile_many([]) == []


def test_one_failure_among_many_is_raised(own_cache: Path, a100: DeviceCapabilities) -> None:
    plan = compose(GemmProblem.parse("int4_g128 x fp16", 512, 512), a100, M_RANGES[0])
    broken = replace(plan, source=plan.source + "#error planted\n")
    with pytest.raises(CompileError, match="planted"):
        compile_many([plan, broken, plan], jobs=2)


def test_ahead_of_time_for_a_device_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = humming.compile(
        "int4_g128 x bf16", "l40s", n=512, k=512, m=(1, 5, 100), directory=tmp_path
    )
    assert len(ahead) == 2, "1 and 5 tokens share a range"
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path))
    plan = humming.plan("int4_g128 x bf16", "l40s", m=100, n=512, k=512)
    kernel = compile_plan(plan)
    assert kernel.from_cache
    assert kernel.key == ahead[1].key


def test_ahead_of_time_for_any_number_of_tokens(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is compiled is tested above; here it matters that every range is.
    ranges: list[object] = []
    monkeypatch.setattr(
        compiler, "compile_many", lambda plans, **_: ranges.extend(p.m_range for p in plans)
    )
    humming.compile(GemmProblem.parse("int4_g128 x bf16", 512, 512), "l40s")
    assert ranges == list(M_RANGES)


def test_name_without_sizes_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Pass n and k"):
        humming.compile("int4_g128 x bf16", "l40s")
