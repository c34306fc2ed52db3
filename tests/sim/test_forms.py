"""Forms of instructions: what the assembler takes is decoded, what it refuses is refused.

Both tables are checked against the assembler itself where there is one. NVRTC does not check inline
assembly, so the simulator would see every such mistake.
"""

import importlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

errors = importlib.import_module("humming.devices.simulator.errors")
decoder = importlib.import_module("humming.devices.simulator.decoder")
launch_shape = importlib.import_module("humming.devices.simulator.launch_shape")
machine = importlib.import_module("humming.devices.simulator.machine")
program = importlib.import_module("humming.devices.simulator.program")
ptx_parser = importlib.import_module("humming.devices.simulator.ptx_parser")
runtime = importlib.import_module("humming.devices.simulator.runtime")

REGISTERS = """
  .reg .b8 b<4>; .reg .b16 h<24>; .reg .b32 r<40>; .reg .b64 rd<16>;
  .reg .f32 f<40>; .reg .f64 fd<40>; .reg .b128 q<4>; .reg .pred p<4>;
"""


def text_of(line: str, target: str) -> str:
    """A kernel of one instruction; registers are b, h, r, rd, f, fd, q and p with a number."""
    return (
        f".version 9.0\n.target {target}\n.address_size 64\n.visible .entry test()\n{{\n"
        f"{REGISTERS}\n  {line}\n  ret;\n}}\n"
    )


def decode(line: str, target: str = "sm_100a") -> list[Any]:
    """Decodes an instruction, or several, without executing them."""
    linked = program.link(ptx_parser.parse(text_of(line, target)), "test")
    memory = runtime.SimulatorRuntime().memory
    options = launch_shape.Options()
    made = machine.Machine(linked, launch_shape.Shape(1, (32, 1, 1)), memory, options)
    steps = zip(linked.instructions, made.step_of, strict=True)
    return [decoder.Decoder(made, each, pc).decode() for each, pc in steps]


def mma(form: str, d: int, a: int, b: int, c: int = 0) -> str:
    """An `mma.sync` with so many registers of D, A, B and C."""
    types = [part for part in form.split(".") if part[0] in "fbtseu" and part[-1].isdigit()]
    of_d, of_c = types[0], types[-1]
    letters = {"f32": "f", "f64": "fd"}
    first = ("fd" if of_d == "f64" else "r", 8)

    def registers(letter: str, start: int, count: int) -> str:
        return "{" + ", ".join(f"{letter}{start + i}" for i in range(count)) + "}"

    return (
        f"mma.sync.aligned.{form} {registers(letters.get(of_d, 'r'), 0, d)}, "
        f"{registers(*first, a)}, {registers(first[0], 16, b)}, "
        f"{registers(letters.get(of_c, 'r'), 24, c or d)};"
    )


def sparse(form: str, d: int, a: int, b: int, selector: int, suffix: str = "") -> str:
    """An `mma.sp` with so many registers of D, A and B."""
    line = mma(form, d, a, b).replace("mma.sync", f"mma.sp{suffix}.sync")
    return line.replace(";", f", r32, {selector};")


ORDERED = "::ordered_metadata"
LEGAL = [
    # PTX ISA 9.7.14.6.3
    sparse("m16n8k16.row.col.f32.bf16.bf16.f32", 4, 2, 2, 3),
    sparse("m16n8k32.row.col.f16.f16.f16.f16", 2, 4, 4, 1),
    sparse("m16n8k8.row.col.f32.tf32.tf32.f32", 4, 2, 2, 2, ORDERED),
    sparse("m16n8k16.row.col.f32.tf32.tf32.f32", 4, 4, 4, 1),
    sparse("m16n8k64.row.col.f32.e4m3.e5m2.f32", 4, 4, 4, 0),
    sparse("m16n8k64.row.col.kind::f8f6f4.f32.e4m3.e5m2.f32", 4, 4, 4, 0, ORDERED),
    sparse("m16n8k32.row.col.satfinite.s32.s8.u8.s32", 4, 2, 2, 1, ORDERED),
    sparse("m16n8k64.row.col.s32.u8.u8.s32", 4, 4, 4, 0),
    sparse("m16n8k64.row.col.s32.s4.u4.s32", 4, 2, 2, 1),
    sparse("m16n8k128.row.col.satfinite.s32.u4.u4.s32", 4, 4, 4, 0),
    # PTX ISA 9.7.14.5.14
    mma("m16n8k16.row.col.f32.bf16.bf16.f32", 4, 4, 2),
    mma("m16n8k8.row.col.f16.f16.f16.f16", 2, 2, 1),
    mma("m16n8k4.row.col.f32.tf32.tf32.f32", 4, 2, 1),
    mma("m16n8k32.row.col.f32.e4m3.e5m2.f32", 4, 4, 2),
    mma("m16n8k16.row.col.f32.e5m2.e4m3.f32", 4, 2, 1),
    mma("m16n8k16.row.col.satfinite.s32.s8.u8.s32", 4, 2, 1),
    mma("m8n8k16.row.col.s32.u8.u8.s32", 2, 1, 1),
    mma("m8n8k32.row.col.s32.s4.u4.s32", 2, 1, 1),
    mma("m16n8k64.row.col.satfinite.s32.s4.s4.s32", 4, 4, 2),
    mma("m16n8k256.row.col.s32.b1.b1.s32.xor.popc", 4, 4, 2),
    mma("m8n8k128.row.col.s32.b1.b1.s32.and.popc", 2, 1, 1),
    mma("m8n8k4.row.col.f64.f64.f64.f64", 2, 1, 1),
    mma("m8n8k4.col.row.f32.f16.f16.f16", 8, 2, 2, 4),
    mma("m8n8k4.row.row.f16.f16.f16.f16", 4, 2, 2),
    mma("m16n8k4.row.col.f64.f64.f64.f64", 4, 2, 1),
    mma("m16n8k8.row.col.rn.f64.f64.f64.f64", 4, 4, 2),
    mma("m16n8k16.row.col.f64.f64.f64.f64", 4, 8, 4),
    # PTX ISA 9.7.14.4
    "wmma.load.a.sync.aligned.row.m8n32k16.global.bf16 {r0, r1}, [rd0];",
    "wmma.load.c.sync.aligned.col.m16n16k16.global.f16 {r0, r1, r2, r3}, [rd0], r5;",
    "wmma.mma.sync.aligned.row.col.m8n8k4.f64.f64.f64.f64.rn {fd0, fd1}, {fd2}, {fd3}, {fd4, fd5};",
    # PTX ISA 9.7.14.5.15-16
    "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {r0, r1}, [rd0];",
    "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8x16.b6x16_p32 {r0, r1, r2, r3}, [rd0];",
    "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {r0}, [rd0];",
    "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [rd0], {r0};",
    # PTX ISA 9.7.9.21
    "cvt.f64.f32 fd0, f0;",
    "cvt.f32.f16 f0, h0;",
    "cvt.rzi.f32.f32 f0, f1;",
    "cvt.f16.f16 h0, h1;",
    "cvt.f16.bf16 h0, h1;",
    "cvt.rn.bf16.f16 h0, h1;",
    "cvt.rni.bf16.bf16 h0, h1;",
    "cvt.ftz.f64.f32 fd0, f0;",
    "cvt.sat.f32.f16 f0, h1;",
    "cvt.rn.sat.f16.f32 h0, f0;",
    "cvt.rn.ftz.f16.f32 h0, f0;",
    "cvt.rm.bf16.f32 h0, f0;",
    "cvt.rz.relu.satfinite.bf16.f32 h0, f0;",
    "cvt.rz.f16x2.f32 r0, f0, f1;",
    "cvt.rna.satfinite.tf32.f32 r0, f0;",
    "cvt.rz.tf32.f32 r0, f0;",
    "cvt.rz.ue8m0x2.f32 h0, f0, f1;",
    "cvt.rp.satfinite.ue8m0x2.bf16x2 h0, r0;",
    "cvt.rn.bf16x2.ue8m0x2 r0, h0;",
    "cvt.rn.satfinite.e2m1x2.f16x2 b0, r0;",
    "cvt.rn.relu.f16x2.e4m3x2 r0, h0;",
    "cvt.sat.u8.s32 h0, r0;",
    "cvt.rn.ftz.f32.s32 f0, r0;",
    "cvt.rzi.sat.s32.f32 r0, f0;",
    "cvt.rn.f32.s64 f0, rd0;",
    "cvt.rn.f64.s32 fd0, r0;",
    "cvt.pack.sat.u8.s32.b32 r0, r1, r2, r3;",
    # PTX ISA 9.7.13.11-12
    "atom.global.add.noftz.f16 h0, [rd0], h1;",
    "atom.global.v2.max.noftz.f16x2 {r0, r2}, [rd0], {r1, r3};",
    "red.global.max.noftz.v2.f16x2 [rd0], {r1, r3};",
    "atom.global.inc.u32 r0, [rd0], r1;",
    "atom.global.min.s64 rd1, [rd0], rd2;",
    "atom.global.cas.b16 h0, [rd0], h1, h2;",
    "atom.global.v4.add.f32 {f0, f1, f2, f3}, [rd0], {f4, f5, f6, f7};",
    "atom.acq_rel.gpu.global.add.u32 r0, [rd0], r1;",
    "atom.global.acquire.add.u32 r0, [rd0], r1;",
    "atom.release.cluster.shared::cluster.add.u32 r0, [rd0], r1;",
    "red.release.gpu.global.add.u32 [rd0], r1;",
    "atom.global.cas.b128 q0, [rd0], q1, q2;",
    "atom.shared.exch.b128 q0, [rd0], q1;",
    # PTX ISA 9.7.1-5, 9.7.8.6
    "lop3.or.b32 _|p0, r1, r2, r3, 0x3f, !p1;",
    "mad.hi.cc.u32 r0, r1, r2, r3;",
    "madc.lo.u64 rd0, rd1, rd2, rd3;",
    "mad.hi.sat.s32 r0, r1, r2, r3;",
    "mad24.hi.sat.s32 r0, r1, r2, r3;",
    "add.cc.s64 rd0, rd1, rd2;",
    "div.rm.f64 fd0, fd1, fd2;",
    "rcp.rz.f64 fd0, fd1;",
    "sqrt.rp.f32 f0, f1;",
    "ex2.approx.f16x2 r0, r1;",
    "tanh.approx.bf16x2 r0, r1;",
    "fma.rz.f64 fd0, fd1, fd2, fd3;",
    "fma.rn.f32.bf16 f0, h1, h2, f3;",
    "add.f32.f16 f0, h1, f3;",
    "vadd4.s32.u32.s32.sat r0, r1, r2, r3;",
    "vabsdiff4.u32.u32.u32.add r0, r1, r2, r3;",
    "vset2.s32.u32.ge r0, r1, r2, r3;",
    # PTX ISA 9.7.9.8-11
    "ld.shared.b128 q0, [rd0];",
    "st.relaxed.gpu.global.b128 [rd0], q0;",
    "ld.acquire.gpu.global.u32 r0, [rd0];",
    "ld.mmio.relaxed.sys.global.u32 r0, [rd0];",
    "st.mmio.relaxed.sys.global.u32 [rd0], r0;",
    "st.release.cta.shared.u32 [rd0], r0;",
    "ld.weak.global.u32 r0, [rd0];",
    "ld.volatile.global.u32 r0, [rd0];",
]

ILLEGAL = [
    (sparse("m16n8k8.row.col.f32.f16.f16.f32", 4, 1, 1, 0), "the shapes for f16 and f16 are"),
    (sparse("m16n8k32.row.col.f32.e4m3.e4m3.f32", 4, 2, 2, 0), "the shapes for e4m3 and e4m3 are"),
    (sparse("m16n8k32.row.col.f16.bf16.bf16.f16", 2, 4, 4, 0), "C and D are both f32"),
    (sparse("m8n8k4.row.col.f64.f64.f64.f64", 2, 1, 1, 0), "none of"),
    (sparse("m16n8k16.row.col.f64.f64.f64.f64", 4, 4, 4, 0), "no product of f64 and f64"),
    (sparse("m16n8k32.row.col.satfinite.f32.f16.f16.f32", 4, 4, 4, 0), ".satfinite is for"),
    (sparse("m16n8k32.row.col.f32.f16.f16.f32", 4, 4, 2, 0), "(4, 4, 4) registers"),
    (sparse("m16n8k16.row.col.f32.f16.f16.f32", 4, 2, 2, 4), "one of 0, 1, 2, 3"),
    (sparse("m16n8k32.row.col.f16.f16.f16.f16", 2, 4, 4, 2), "one of 0, 1"),
    (sparse("m16n8k64.row.col.s32.s8.s8.s32", 4, 4, 4, 1), "one of 0"),
    (
        sparse("m16n8k64.row.col.kind::f8f6f4.f32.e4m3.e5m2.f32", 4, 4, 4, 0),
        "are for mma.sp::ordered_metadata",
    ),
    (
        sparse("m16n8k32.row.col.f32.f16.f16.f32", 4, 4, 4, 0).replace(" 0;", " r33;"),
        "the sparsity selector is a constant",
    ),
    (
        sparse("m16n8k32.row.col.f32.f16.f16.f32", 4, 4, 4, 0).replace("r32", "5"),
        "metadata is a register",
    ),
    # instruction, what the message says
    (mma("m16n8k16.row.col.f32.f16.bf16.f32", 4, 4, 2), "no product of f16 and bf16"),
    (mma("m16n8k16.row.col.f32.f16.f16.f16", 4, 4, 2, 2), "C and D are both f16 or f32"),
    (mma("m16n8k16.row.col.f16.bf16.bf16.f16", 2, 4, 2), "C and D are both f32"),
    (mma("m16n8k16.row.col.f32.s8.s8.f32", 4, 2, 1), "C and D are both s32"),
    (mma("m16n8k16.row.col.satfinite.f32.f16.f16.f32", 4, 4, 2), "satfinite is for integers"),
    (mma("m16n8k32.row.col.f32.e2m1.e2m1.f32", 4, 4, 2), "needs .kind::f8f6f4"),
    (mma("m16n8k8.row.col.f32.bf16.tf32.f32", 4, 2, 1), "no product of bf16 and tf32"),
    (mma("m16n8k32.row.col.s32.s8.u4.s32", 4, 4, 2), "no product of s8 and u4"),
    (mma("m16n8k32.row.col.f32.f16.f16.f32", 4, 4, 2), "the shapes for f16 and f16 are m16n8k8"),
    (mma("m16n8k256.row.col.s32.b1.b1.s32.xor", 4, 4, 2), "b1, which needs one"),
    (mma("m16n8k32.row.col.s32.s8.s8.s32.xor.popc", 4, 4, 2), "are for b1"),
    (mma("m16n8k8.row.col.rn.f32.f16.f16.f32", 4, 2, 1), "has the types of D, A, B and C"),
    (mma("m16n8k32.row.col.f64.f64.f64.f64", 4, 8, 4), "the shapes for f64 and f64"),
    (mma("m8n8k4.row.col.f16.f16.f16.f32", 4, 2, 2, 8), "of D in f16 and C in f32"),
    ("wmma.load.a.sync.aligned.row.m16n16k8.global.bf16 {r0, r1}, [rd0];", "of m16n16k8 and bf16"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.global.bf16 {r0, r1}, [rd0];", "has 4 registers"),
    ("ldmatrix.sync.aligned.m16n16.x1.shared.b8 {r0, r1}, [rd0];", "m16n16 needs .trans"),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b16 {r0, r1}, [rd0];", "m16n16 has .b8"),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.s8.s4 {r0, r1}, [rd0];", "m16n16 has .b8"),
    (
        "ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b4x16_p64 {r0}, [rd0];",
        "m8n16 has no .trans",
    ),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.s4 {r0}, [rd0];", "m8n16 has .b8x16"),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.s8.b4x16_p64 {r0}, [rd0];", "m8n16 has .b8x16"),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8 {r0}, [rd0];", "m8n16 has .b8x16"),
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b8 {r0}, [rd0];", "m8n8 has .b16"),
    ("stmatrix.sync.aligned.m8n8.x1.trans.shared.b8 [rd0], {r0};", "do not go together"),
    ("stmatrix.sync.aligned.m16n8.x1.shared.b8 [rd0], {r0};", "do not go together"),
    ("cvt.f16.f32 h0, f0;", "needs a rounding: .rn"),
    ("cvt.s32.f32 r0, f0;", "needs a rounding: .rni"),
    ("cvt.f32.s32 f0, r0;", "needs a rounding: .rn"),
    ("cvt.f64.s32 fd0, r0;", "needs a rounding: .rn"),
    ("cvt.f32.f64 f0, fd0;", "needs a rounding: .rn"),
    ("cvt.tf32.f32 r0, f0;", "needs a rounding: .rn"),
    ("cvt.rna.f16.f32 h0, f0;", "cvt.f16.f32 .rna: its roundings are .rn"),
    ("cvt.rz.satfinite.e4m3x2.f32 h0, f0, f1;", "its roundings are .rn"),
    ("cvt.rn.e4m3x2.f32 h0, f0, f1;", "needs .satfinite"),
    ("cvt.rn.e4m3x2.f16x2 h0, r0;", "needs .satfinite"),
    ("cvt.f16x2.e4m3x2 r0, h0;", "without rounding"),
    ("cvt.rz.f16x2.e4m3x2 r0, h0;", "its roundings are .rn"),
    ("cvt.rn.satfinite.f16x2.e4m3x2 r0, h0;", "has no .satfinite"),
    ("cvt.rn.f64.f32 fd0, f0;", "its roundings are none"),
    ("cvt.rn.f32.f16 f0, h0;", "its roundings are none"),
    ("cvt.rn.f32.f32 f0, f1;", "its roundings are none, .rni"),
    ("cvt.rni.f32.f64 f0, fd0;", "its roundings are .rn"),
    ("cvt.rn.s32.f32 r0, f0;", "its roundings are .rni"),
    ("cvt.rzi.f16.f32 h0, f0;", "its roundings are .rn"),
    ("cvt.rn.u8.s32 h0, r0;", "integers has no rounding .rn"),
    ("cvt.rp.f16x2.f32 r0, f0, f1;", "its roundings are .rn, .rz"),
    ("cvt.rp.tf32.f32 r0, f0;", "its roundings are .rn, .rz, .rna"),
    ("cvt.rn.ue8m0x2.f32 h0, f0, f1;", "its roundings are .rz, .rp"),
    ("cvt.rna.relu.tf32.f32 r0, f0;", "do not go with .rna"),
    ("cvt.rp.satfinite.bf16.f32 h0, f0;", "do not go with .rp"),
    ("cvt.rn.relu.f32.f64 f0, fd0;", ".relu and .satfinite are for"),
    ("cvt.rzi.relu.s32.f32 r0, f0;", ".relu and .satfinite are for"),
    ("cvt.rn.satfinite.f16.f64 h0, fd0;", ".relu and .satfinite are for"),
    ("cvt.f32.tf32 f0, r0;", "no conversion from tf32"),
    ("cvt.rn.sat.f16x2.f32 r0, f0, f1;", "has no .sat"),
    ("cvt.rn.sat.bf16.f32 h0, f0;", "there is no .sat to bf16"),
    ("cvt.ftz.s32.s32 r0, r1;", ".ftz is for conversions from or to f32"),
    ("cvt.rn.ftz.f16.f64 h0, fd0;", ".ftz is for conversions from or to f32"),
    ("atom.global.max.f32 f0, [rd0], f1;", ".max is for u32"),
    ("atom.global.min.b32 r0, [rd0], r1;", ".min is for u32"),
    ("atom.global.add.b32 r0, [rd0], r1;", ".add is for u32"),
    ("atom.global.add.s64 rd1, [rd0], rd2;", ".add is for u32"),
    ("atom.global.and.u32 r0, [rd0], r1;", ".and is for b32"),
    ("atom.global.exch.u32 r0, [rd0], r1;", ".exch is for b32"),
    ("atom.global.exch.b16 h0, [rd0], h1;", ".exch is for b32"),
    ("atom.global.cas.u32 r0, [rd0], r1, r2;", ".cas is for b16"),
    ("atom.global.inc.s32 r0, [rd0], r1;", ".inc is for u32"),
    ("red.global.exch.b32 [rd0], r1;", "red has no .exch"),
    ("red.global.cas.b32 [rd0], r1, r2;", "red has no .cas"),
    ("atom.global.add.f16 h0, [rd0], h1;", "needs .noftz"),
    ("atom.global.add.noftz.f32 f0, [rd0], f1;", "has no .noftz"),
    ("atom.global.max.noftz.f16 h0, [rd0], h1;", "is for vectors"),
    ("atom.shared.v2.add.f32 {f0, f1}, [rd0], {f2, f3};", "vectors are in global memory"),
    ("atom.global.v2.add.u32 {r0, r1}, [rd0], {r2, r3};", "no vector of 2"),
    ("atom.global.v2.add.f64 {fd0, fd1}, [rd0], {fd2, fd3};", "no vector of 2"),
    ("atom.local.add.u32 r0, [rd0], r1;", "on local memory"),
    ("red.acq_rel.gpu.global.add.u32 [rd0], r1;", "red has no .acq_rel"),
    ("red.acquire.gpu.global.add.u32 [rd0], r1;", "red has no .acquire"),
    ("lop3.b32 r0|p0, r1, r2, r3, 0x3f, p1;", "lop3 with 6 operands"),
    ("lop3.xor.b32 _|p0, r1, r2, r3, 0x3f, p1;", "lop3 with 6 operands"),
    ("mad.wide.cc.u32 rd0, r1, r2, rd3;", "has no .cc"),
    ("mad.lo.sat.s32 r0, r1, r2, r3;", "has no .sat"),
    ("mad24.lo.sat.s32 r0, r1, r2, r3;", "has no .sat"),
    ("add.cc.u16 h0, h1, h2;", "is for words of 32 and 64 bits"),
    ("div.f32 f0, f1, f2;", "needs a rounding"),
    ("div.approx.f64 fd0, fd1, fd2;", "needs a rounding"),
    ("rsqrt.f32 f0, f1;", "needs .approx"),
    ("sqrt.f32 f0, f1;", "needs .approx or a rounding"),
    ("sqrt.approx.f64 fd0, fd1;", "has not all types"),
    ("sin.f32 f0, f1;", "needs .approx"),
    ("shfl.up.b32 r0|p0, r1, 1, 0;", "does not know this instruction"),
    ("vote.any.pred p0, p1;", "does not know this instruction"),
    ("vadd4.u32.u32.u32.sat.add r0, r1, r2, r3;", "has .sat or .add"),
    ("vadd4.u32.u32.u32 r0, r1, r2;", "with 3 operands"),
    ("ld.release.gpu.global.u32 r0, [rd0];", "ld has no .release"),
    ("st.acquire.gpu.global.u32 [rd0], r0;", "st has no .acquire"),
    ("ld.acquire.global.u32 r0, [rd0];", "needs a scope"),
    ("ld.weak.gpu.global.u32 r0, [rd0];", "a scope needs"),
    ("ld.mmio.sys.global.u32 r0, [rd0];", ".mmio is for"),
]


@pytest.mark.parametrize("line", LEGAL, ids=lambda line: line.split()[0])
def test_legal_forms_are_decoded(line: str) -> None:
    assert decode(line)


@pytest.mark.parametrize(("line", "told"), ILLEGAL, ids=lambda part: part.split()[0])
def test_illegal_forms_are_refused_by_name(line: str, told: str) -> None:
    with pytest.raises(errors.UnknownInstructionError) as caught:
        decode(line)
    assert told in str(caught.value)
    assert line.split()[0] in str(caught.value)


def assembler() -> str | None:
    """The path of `ptxas`, None if it is not installed or does not know PTX 9."""
    found = shutil.which("ptxas")
    if found is None:
        return None
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    return found if ", V13." in done.stdout else None


@pytest.mark.skipif(assembler() is None, reason="no assembler of PTX 9")
@pytest.mark.parametrize("legal", [True, False], ids=["legal", "illegal"])
def test_the_assembler_agrees(legal: bool, tmp_path: Path) -> None:
    """Which lines it takes; all of those that are legal at once."""
    path = assembler()
    assert path is not None

    def takes(lines: str) -> bool:
        source = tmp_path / "test.ptx"
        source.write_text(text_of(lines, "sm_100a"))
        command = [path, "-arch", "sm_100a", "-o", os.devnull, str(source)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if legal:
        assert takes("\n".join(LEGAL)) or not [line for line in LEGAL if not takes(line)]
    else:
        assert not [line for line, _ in ILLEGAL if takes(line)]
