"""The conformance kit holds components to the contracts of their slots, shared and foreign ones."""

from pathlib import Path
from typing import Any

import pytest

from humming.cache import include_closure
from humming.components import SHARED, Component
from humming.errors import CompileError
from humming.hookspecs import hookimpl
from humming.plugins import PluginSet
from humming.testing import conformance

# A mover of nobody's, with or without parts of what the contract asks for.
MOVER = """#pragma once
#include <humming/types.cuh>
namespace acme {
struct Mover {
  template <int kPieces>
  struct Fetch {
    __device__ void issue(int, humming::u32, const humming::u8*, bool) {}
    __device__ void skip(int) {}
    __device__ void land() {}
  };
  %s
  template <int kLeft>
  __device__ static void wait() {}
};
}  // namespace acme
"""
COMMIT = "__device__ static void commit() {}"
NATURE = "static constexpr bool kAsynchronous = false;"
SOUND = f"{COMMIT}\n  {NATURE}"


class Guest:
    """A plugin with one component, which serves the mover of every device."""

    def __init__(self, folder: Path, serves: str = "a_mover_of_nobody") -> None:
        self.folder, self.serves = folder, serves

    @hookimpl
    def humming_components(self) -> Any:
        return [Component("epilogue", self.serves, "humming/acme/mover.cuh", "acme::Mover")]

    @hookimpl
    def humming_include_dirs(self) -> Any:
        return [self.folder]


@pytest.fixture(scope="module")
def environment() -> PluginSet:
    return PluginSet.of_environment()


@pytest.mark.parametrize("component", SHARED, ids=lambda c: f"{c.slot}-{c.serves}")
def test_shared_component_meets_its_contract(component: Component, environment: PluginSet) -> None:
    users = [c for c in environment.registry.devices() if conformance.serves(component, c)]
    assert users, "no device has what it serves"
    caps = next(caps for caps in users if environment.compiler_for(caps).name == "nvrtc")
    source = conformance.contract_source(component)
    headers = include_closure(source, environment.registry.headers)
    assert environment.compiler_for(caps).compile(source, headers, "humming_contract", caps).data


def _write(folder: Path, text: str) -> None:
    (folder / "acme").mkdir()
    (folder / "acme" / "mover.cuh").write_text(text)


@pytest.mark.parametrize(
    ("members", "sound"),
    [(SOUND, True), (NATURE, False), (COMMIT, False)],
    ids=["good", "never-commits", "does-not-say-when-copies-end"],
)
def test_contract_is_asserted(
    members: str, sound: bool, tmp_path: Path, environment: PluginSet
) -> None:
    _write(tmp_path, MOVER % members)
    mover = Component("mover", "plain", "humming/acme/mover.cuh", "acme::Mover")
    source = conformance.contract_source(mover)
    known = {**environment.registry.headers, mover.header: tmp_path / "acme/mover.cuh"}
    headers = include_closure(source, known)
    caps = environment.capabilities("a100")
    compiler = environment.compiler_for(caps)
    if sound:
        assert compiler.compile(source, headers, "humming_contract", caps).data
        return
    with pytest.raises(CompileError, match="slot mover: acme::Mover is no Mover"):
        compiler.compile(source, headers, "humming_contract", caps)


# A mainloop of nobody's, which does not say that it waits for the grids ahead.
MAINLOOP = """
struct Mainloop {
  using Params = humming::GemmParams;
  using Accumulators = float[1];
  static constexpr int kThreads = 32, kSharedBytes = 0, kReservedBytes = 0;
  %s
  __device__ static void sync() {}
};
static_assert(humming::Mainloop<Mainloop>, "slot mainloop: contract broken");
extern "C" __global__ void humming_contract() {}
"""


@pytest.mark.parametrize("waits", ["true", "false", None])
def test_mainloops_must_say_that_they_wait(waits: str | None, environment: PluginSet) -> None:
    """One that would read activations before they are written does not compile."""
    member = f"static constexpr bool kWaitsForGrids = {waits};" if waits else ""
    source = "#include <humming/contracts.cuh>\n" + MAINLOOP % member
    caps = environment.capabilities("a100")
    headers = include_closure(source, environment.registry.headers)
    compiler = environment.compiler_for(caps)
    if waits == "true":
        assert compiler.compile(source, headers, "humming_contract", caps).data
        return
    with pytest.raises(CompileError, match="slot mainloop: contract broken"):
        compiler.compile(source, headers, "humming_contract", caps)


@pytest.mark.parametrize(
    ("text", "told"),
    [(MOVER % SOUND, None), ("#include <vector>\n", "vector"), ("not C++\n", "not")],
    ids=["sound", "toolkit-header", "no-code"],
)
def test_kit_compiles_the_components_of_a_plugin(
    text: str, told: str | None, tmp_path: Path
) -> None:
    _write(tmp_path, text)
    guest: Any = Guest(tmp_path)
    plugins = PluginSet.of_environment(guest=guest)
    if told is None:
        conformance.test_components_meet_their_contracts(guest, plugins)
        return
    with pytest.raises(CompileError, match=told):
        conformance.test_components_meet_their_contracts(guest, plugins)
