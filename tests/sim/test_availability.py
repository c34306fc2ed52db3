"""The simulator takes an instruction for the targets for which ptxas does, and for no other.

Every instruction of a kernel is looked at when it is loaded, also where no thread comes.
"""

import importlib

import pytest
from isa_rows import ALL, ROWS

from humming import plugins
from humming.hookspecs import Image

errors = importlib.import_module("humming.devices.simulator.errors")
launch_shape = importlib.import_module("humming.devices.simulator.launch_shape")
runtime = importlib.import_module("humming.devices.simulator.runtime")

REGISTERS = ".reg .b32 r<8>; .reg .f32 f<8>; .reg .b64 d<4>; .reg .b16 h<4>; .reg .pred p;"


def kernel(body: str, functions: str = "", target: str = "sm_80") -> str:
    entry = f".visible .entry test() {{ {body} ret; }}"
    return f".version 9.4\n.target {target}\n.address_size 64\n{functions}\n{entry}\n"


def load(body: str, arch: str, device: str | None = None) -> None:
    caps = None if device is None else plugins.capabilities(device)
    simulator = runtime.SimulatorRuntime(launch_shape.Options(device=caps))
    text = kernel(f"{REGISTERS} bra END; {body} END:", target=f"sm_{arch}")
    simulator.load(Image("ptx", text.encode()), "test", 0)


@pytest.mark.parametrize(("text", "archs"), ROWS, ids=[text.split(" ")[0] for text, _ in ROWS])
def test_targets_of_an_instruction(text: str, archs: tuple[str, ...]) -> None:
    for arch in ALL:
        if arch in archs:
            load(text, arch)
            continue
        with pytest.raises(errors.UnknownInstructionError) as caught:
            load(text, arch)
        assert f"the assembler does not take this for sm_{arch}" in str(caught.value)
        assert caught.value.where.line > 0


def test_an_unknown_instruction_where_no_thread_comes() -> None:
    with pytest.raises(errors.UnknownInstructionError, match="does not know this instruction"):
        load("frobnicate.u32 r0, r1;", "80")
    function = ".func f() { .reg .b32 a; frobnicate.u32 a, a; ret; }"
    text = kernel("bra END; call.uni f; END:", function)
    with pytest.raises(errors.UnknownInstructionError) as caught:
        runtime.SimulatorRuntime().load(Image("ptx", text.encode()), "test", 0)
    assert "frobnicate" in caught.value.where.text


def test_an_unknown_instruction_of_a_function_that_nobody_calls() -> None:
    function = ".func f() { .reg .b32 a; frobnicate.u32 a, a; ret; }"
    runtime.SimulatorRuntime().load(Image("ptx", kernel("", function).encode()), "test", 0)


def test_instructions_of_ppus_on_other_devices() -> None:
    text = next(text for text, _ in ROWS if text.startswith("ppu.mma"))
    load(text, "80", "zw810")
    with pytest.raises(errors.UnknownInstructionError, match="a100_80gb has no"):
        load(text, "80", "a100_80gb")
