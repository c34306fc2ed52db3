"""Text that is no PTX, and instructions changed at random: no other errors than the project's."""

import importlib
from typing import Any

import numpy as np
import pytest
from conftest import kernel, launch_shape, runtime
from isa_rows import ROWS

from humming.errors import HummingError
from humming.hookspecs import Image

errors = importlib.import_module("humming.devices.simulator.errors")

DECLARATIONS = """
  .reg .b16 h<4>; .reg .b32 r<140>; .reg .b64 d<8>; .reg .f32 f<140>; .reg .f64 g<4>;
  .reg .pred p, q; .reg .b128 o<3>; .shared .align 128 .b8 buf[1024]; .local .b8 loc[64];
"""
OPERANDS = [
    *("r0", "f0", "d0", "h0", "p", "q", "g0", "o0", "3", "-1", "1.5", "0f3f800000", "1e400", "09"),
    *("[r0]", "[d0]", "[d0+4]", "[5]", "{r0, r1}", "{r0}", "{}", "buf", "loc", "HERE", "%tid.x"),
    *("%tid", "%clock64", "%nosuch", "_", "r0|p", "!p", "[d0, {r1, r2}]", "[d0, {}]", "{h0, h1}"),
    *("-r0", "nosuch", "[buf+8]", '"s"', "99999999999999999999999", "{r0, {r1, r2}}", "5/0", "p0"),
]
MODIFIERS = [
    *("u32", "f32", "f16x2", "u16x2", "b128", "v2", "v4", "v8", "global", "shared", "sync", "sat"),
    *("ftz", "rn", "x4", "trans", "m8n8", "1d", "5d", "im2col", "cc", "shared::cluster", "wide"),
    *("L2::cache_hint", "b8", "e4m3x2", "satfinite", "relu", "approx", "aligned"),
]
MORE = [
    "add.cc.u32 r0, r1, r2;",
    "atom.global.cas.b32 r0, [d0], r1, r2;",
    "red.shared.add.u32 [r0], r1;",
    "mov.b64 {r0, r1}, d0;",
    "mov.u32 r0, r1;",
    "cvt.rn.f16.f32 h0, f0;",
    "bar.sync 0, 32;",
    "bar.red.popc.u32 r0, 1, p;",
    "ld.global.v4.u32 {r0, r1, r2, r3}, [d0+16];",
    "st.shared.v2.f32 [r0], {f0, f1};",
    "shfl.sync.idx.b32 r0|p, r1, r2, r3, r4;",
    "prefetch.global.L2 [d0];",
]
MUTATIONS = 600


def load(text: str) -> None:
    """Loads a kernel."""
    simulator = runtime.SimulatorRuntime(launch_shape.Options())
    simulator.load(Image("ptx", text.encode()), "test", 0)


def split(text: str) -> list[str]:
    """Operands, by the commas outside of brackets."""
    found, depth = [""], 0
    for letter in text:
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [each.strip() for each in found if each.strip()]


def mutated(rng: np.random.Generator, text: str) -> str:
    """An instruction with one or two of its parts replaced, left out, doubled or added."""
    opcode, _, rest = text.rstrip("; ").partition(" ")
    parts, operands = opcode.split("."), split(rest)
    for _ in range(int(rng.integers(1, 3))):
        on_operands = rng.random() < 0.65
        items, pool = (operands, OPERANDS) if on_operands else (parts, MODIFIERS)
        first = 0 if on_operands else 1  # of an opcode the name stays
        places = range(first, len(items))
        kind = rng.choice(["replace", "replace", "leave out", "add", "double"])
        place = int(rng.choice(places)) if len(places) else len(items)
        if kind == "add" or not len(places):
            items.insert(place, str(rng.choice(pool)))
        elif kind == "replace":
            items[place] = str(rng.choice(pool))
        elif kind == "double":
            items.insert(place, items[place])
        else:
            del items[place]
    return f"{'.'.join(parts)} {', '.join(operands)};"


def test_mutated_instructions(rng: np.random.Generator) -> None:
    texts = [text for text, _ in ROWS if text.count(";") == 1 and "//" not in text] + MORE
    targets = ["sm_75", "sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
    accepted = 0
    for _ in range(MUTATIONS):
        line, target = mutated(rng, str(rng.choice(texts))), str(rng.choice(targets))
        print(target, line)  # pytest shows the last one, which is the one that failed
        try:
            load(kernel(f"{DECLARATIONS}HERE:\n{line}\n", 1, target=target))
            accepted += 1
        except HummingError:
            pass
    assert 0 < accepted < MUTATIONS


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (".version 9.4", ".version x.y", "'x' is no version|no version"),
        (".version 9.4", ".version", "no version"),
        (".address_size 64", ".address_size x", "expected an integer, found 'x'"),
        ("ret;", ".shared .align x .b8 q[4]; ret;", "expected an integer, found 'x'"),
        ("ret;", ".shared .align 8. .b8 q[4]; ret;", "expected an integer"),
        ("ret;", ".shared .b8 q[4 / 0]; ret;", "constant expression 4 / 0"),
        ("ret;", ".shared .b8 q[1 << 99999999999]; ret;", "constant expression 1 << 99999999999"),
        ("ret;", ".reg .b32 r<99999999999>; ret;", "99999999999 registers of one name"),
        ("ret;", ".reg .b32 r; mov.u32 r, 09; ret;", "'09' is no number"),
        ("ret;", ".reg .b32 r; mov.u32 r, {}; ret;", "a vector without elements"),
        (".visible", ".global .b8 q[] = {0x0FF0(q)};\n.visible", "selects no byte of an address"),
    ],
)
def test_text_that_means_nothing(old: str, new: str, what: str) -> None:
    text = kernel("", 0)
    assert old in text
    with pytest.raises(errors.PtxSyntaxError, match=what) as caught:
        load(text.replace(old, new, 1))
    assert caught.value.where.line > 0


def test_bytes_that_are_no_text() -> None:
    simulator: Any = runtime.SimulatorRuntime(launch_shape.Options())
    with pytest.raises(HummingError):
        simulator.load(Image("ptx", b"\xff\xfe\x00.version 9.4"), "test", 0)
