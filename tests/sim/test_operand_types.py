"""Registers of a wrong type are refused as ptxas refuses them, in every place of many instructions.

NVRTC passes inline assembly on as it is, so nobody else would tell (PTX ISA 6.2, 9.4).
"""

import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_forms import REGISTERS, assembler, errors, launch_shape, machine, program, ptx_parser

decoder = importlib.import_module("humming.devices.simulator.decoder")
runtime = importlib.import_module("humming.devices.simulator.runtime")

TYPES = (
    *("b8", "u8", "b16", "u16", "s16", "f16", "b32", "u32", "s32", "f32"),
    *("b64", "u64", "s64", "f64", "b128"),
)
LINES = """
add.u32 r0, r1, r2;
add.s32 r0, r1, r2;
add.u16 h0, h1, h2;
add.s64 rd0, rd1, rd2;
add.cc.u32 r0, r1, r2;
addc.u32 r0, r1, r2;
add.f32 f0, f1, f2;
add.rn.f64 fd0, fd1, fd2;
add.f16 h0, h1, h2;
add.f16x2 r0, r1, r2;
add.bf16 h0, h1, h2;
add.bf16x2 r0, r1, r2;
add.f32x2 rd0, rd1, rd2;
add.u16x2 r0, r1, r2;
sub.s32 r0, r1, r2;
sub.f32 f0, f1, f2;
mul.lo.u32 r0, r1, r2;
mul.hi.s64 rd0, rd1, rd2;
mul.wide.u32 rd0, r1, r2;
mul.wide.s16 r0, h1, h2;
mul.f32 f0, f1, f2;
mul.f16 h0, h1, h2;
mad.lo.s32 r0, r1, r2, r3;
mad.wide.u32 rd0, r1, r2, rd3;
mad.wide.s16 r0, h1, h2, r3;
mul24.lo.u32 r0, r1, r2;
mad24.lo.u32 r0, r1, r2, r3;
sad.u32 r0, r1, r2, r3;
div.u32 r0, r1, r2;
div.rn.f32 f0, f1, f2;
rem.s64 rd0, rd1, rd2;
abs.s32 r0, r1;
abs.f32 f0, f1;
abs.f16 h0, h1;
neg.s32 r0, r1;
neg.f64 fd0, fd1;
neg.bf16x2 r0, r1;
min.u32 r0, r1, r2;
max.f32 f0, f1, f2;
min.f16x2 r0, r1, r2;
min.u16x2 r0, r1, r2;
popc.b32 r0, r1;
popc.b64 r0, rd1;
clz.b32 r0, r1;
clz.b64 r0, rd1;
bfind.u32 r0, r1;
bfind.s64 r0, rd1;
fns.b32 r0, r1, r2, r3;
brev.b64 rd0, rd1;
bfe.u32 r0, r1, r2, r3;
bfe.s64 rd0, rd1, r2, r3;
bfi.b32 r0, r1, r2, r3, r4;
bfi.b64 rd0, rd1, rd2, r3, r4;
bmsk.clamp.b32 r0, r1, r2;
szext.clamp.s32 r0, r1, r2;
dp4a.u32.s32 r0, r1, r2, r3;
dp2a.lo.u32.u32 r0, r1, r2, r3;
fma.rn.f32 f0, f1, f2, f3;
fma.rn.f64 fd0, fd1, fd2, fd3;
fma.rn.f16 h0, h1, h2, h3;
fma.rn.f16x2 r0, r1, r2, r3;
fma.rn.bf16x2 r0, r1, r2, r3;
fma.rn.f32x2 rd0, rd1, rd2, rd3;
rcp.approx.ftz.f32 f0, f1;
sqrt.rn.f64 fd0, fd1;
rsqrt.approx.f32 f0, f1;
sin.approx.f32 f0, f1;
lg2.approx.f32 f0, f1;
ex2.approx.f32 f0, f1;
ex2.approx.f16 h0, h1;
tanh.approx.f32 f0, f1;
tanh.approx.f16x2 r0, r1;
copysign.f32 f0, f1, f2;
testp.finite.f32 p0, f1;
set.lt.u32.f32 r0, f1, f2;
set.eq.f32.s32 f0, r1, r2;
set.eq.f16.f16 h0, h1, h2;
set.eq.u32.f16 r0, h1, h2;
setp.lt.u32 p0, r1, r2;
setp.eq.b16 p0, h1, h2;
setp.eq.f32 p0, f1, f2;
setp.eq.f16 p0, h1, h2;
setp.lt.f16x2 p0|p1, r1, r2;
setp.lt.and.s64 p0|p1, rd1, rd2, p2;
selp.b32 r0, r1, r2, p0;
selp.u64 rd0, rd1, rd2, p0;
selp.f32 f0, f1, f2, p0;
selp.b16 h0, h1, h2, p0;
slct.u32.s32 r0, r1, r2, r3;
slct.f32.f32 f0, f1, f2, f3;
and.b32 r0, r1, r2;
or.b64 rd0, rd1, rd2;
xor.b16 h0, h1, h2;
not.b32 r0, r1;
cnot.b32 r0, r1;
and.pred p0, p1, p2;
not.pred p0, p1;
lop3.b32 r0, r1, r2, r3, 0x80;
shl.b32 r0, r1, r2;
shl.b64 rd0, rd1, r2;
shl.b16 h0, h1, r2;
shr.u32 r0, r1, r2;
shr.s64 rd0, rd1, r2;
shr.b32 r0, r1, r2;
shf.l.wrap.b32 r0, r1, r2, r3;
prmt.b32 r0, r1, r2, r3;
mov.b32 r0, r1;
mov.u32 r0, r1;
mov.f32 f0, f1;
mov.b16 h0, h1;
mov.u16 h0, h1;
mov.b64 rd0, rd1;
mov.f64 fd0, fd1;
mov.pred p0, p1;
mov.b128 q0, q1;
mov.b32 r0, {h0, h1};
mov.b64 {r0, r1}, rd0;
mov.b64 rd0, {r0, r1};
mov.u32 r0, %tid.x;
mov.u64 rd0, %clock64;
mov.u32 r0, %clock;
shfl.sync.idx.b32 r0|p0, r1, r2, r3, r4;
vote.sync.ballot.b32 r0, p0, r1;
vote.sync.all.pred p0, p1, r1;
match.any.sync.b32 r0, r1, r2;
match.any.sync.b64 r0, rd1, r2;
redux.sync.add.u32 r0, r1, r2;
redux.sync.max.f32 f0, f1, r2;
activemask.b32 r0;
elect.sync r0|p0, r1;
bar.warp.sync r0;
bar.sync r0, r1;
bar.red.popc.u32 r0, r1, p0;
nanosleep.u32 r0;
ld.global.u32 r0, [rd0];
ld.global.s8 r0, [rd0];
ld.global.u8 h0, [rd0];
ld.global.b16 h0, [rd0];
ld.global.s16 r0, [rd0];
ld.global.u16 r0, [rd0];
ld.global.f32 f0, [rd0];
ld.global.f64 fd0, [rd0];
ld.global.b32 r0, [rd0];
ld.global.b64 rd0, [rd0];
ld.global.u64 rd0, [rd0];
ld.global.s64 rd0, [rd0];
ld.global.v2.u32 {r0, r1}, [rd0];
ld.global.v4.f32 {f0, f1, f2, f3}, [rd0];
ld.shared.u32 r0, [r1];
st.global.u32 [rd0], r0;
st.global.u8 [rd0], r0;
st.global.s16 [rd0], h0;
st.global.b16 [rd0], h0;
st.global.f32 [rd0], f0;
st.global.f64 [rd0], fd0;
st.global.b64 [rd0], rd0;
st.global.u64 [rd0], rd0;
st.global.v2.f32 [rd0], {f0, f1};
st.shared.b32 [r1], r0;
ldu.global.u32 r0, [rd0];
cvt.u32.u16 r0, h0;
cvt.u16.u32 h0, r0;
cvt.s32.s8 r0, r1;
cvt.s8.s32 r0, r1;
cvt.u64.u32 rd0, r0;
cvt.rn.f32.s32 f0, r0;
cvt.rzi.s32.f32 r0, f0;
cvt.f32.f16 f0, h0;
cvt.rn.f16.f32 h0, f0;
cvt.f64.f32 fd0, f0;
cvt.rn.f32.f64 f0, fd0;
cvt.rn.bf16x2.f32 r0, f0, f1;
cvt.rn.f16x2.f32 r0, f0, f1;
cvt.rn.bf16.f32 h0, f0;
cvt.f32.bf16 f0, h0;
cvt.rna.tf32.f32 r0, f0;
cvt.rn.f32.u64 f0, rd0;
cvta.to.global.u64 rd0, rd1;
cvta.shared.u64 rd0, rd1;
atom.global.add.u32 r0, [rd0], r1;
atom.global.add.s32 r0, [rd0], r1;
atom.global.add.f32 f0, [rd0], f1;
atom.global.add.f64 fd0, [rd0], fd1;
atom.global.add.u64 rd0, [rd1], rd2;
atom.global.exch.b32 r0, [rd0], r1;
atom.global.cas.b32 r0, [rd0], r1, r2;
atom.global.and.b64 rd0, [rd1], rd2;
atom.global.min.s32 r0, [rd0], r1;
atom.global.add.noftz.f16x2 r0, [rd0], r1;
red.global.add.u32 [rd0], r1;
red.global.add.f32 [rd0], f1;
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {r0, r1}, [r2];
stmatrix.sync.aligned.m8n8.x1.shared.b16 [r2], {r0};
movmatrix.sync.aligned.m8n8.trans.b16 r0, r1;
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {f0,f1,f2,f3},{r0,r1,r2,r3},{r4,r5},{f4,f5,f6,f7};
mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {r0,r1}, {r2,r3,r4,r5}, {r6,r7}, {r8,r9};
mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {r0,r1,r2,r3},{r4,r5,r6,r7},{r8,r9},{r0,r1,r2,r3};
mbarrier.init.shared.b64 [r0], r1;
mbarrier.arrive.shared.b64 rd0, [r0];
mbarrier.arrive.expect_tx.shared.b64 rd0, [r0], r1;
mbarrier.expect_tx.relaxed.cta.shared.b64 [r0], r1;
mbarrier.try_wait.parity.shared.b64 p0, [r0], r1;
mbarrier.test_wait.shared.b64 p0, [r0], rd1;
mbarrier.pending_count.b64 r0, rd0;
mapa.shared::cluster.u32 r0, r1, r2;
mapa.u64 rd0, rd1, r2;
getctarank.u64 r0, rd1;
createpolicy.fractional.L2::evict_last.b64 rd0;
vadd4.u32.u32.u32 r0, r1, r2, r3;
""".strip().splitlines()
_NAME = re.compile(r"(?<![.\w])(?:b|h|r|rd|f|fd|q|p)\d+\b(?![^\[]*\])")
"""A register that is no address: for those every assembler takes widths that nobody can mean."""


def text_of(lines: str) -> str:
    declared = "".join(f".reg .{kind} x_{kind}; " for kind in TYPES)
    return (
        f".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry test()\n{{\n"
        f"{REGISTERS.strip()} {declared}\n{lines}\n  ret;\n}}\n"
    )


def variants(line: str) -> Iterator[str]:
    """The instruction with each of its registers replaced by one of each type."""
    for match in _NAME.finditer(line):
        for kind in TYPES:
            yield f"{line[: match.start()]}x_{kind}{line[match.end() :]}"


def refusals(lines: list[str]) -> list[str]:
    """Why the simulator does not take each of some instructions; empty if it does."""
    linked = program.link(ptx_parser.parse(text_of("\n".join(lines))), "test")
    memory = runtime.SimulatorRuntime().memory
    shape = launch_shape.Shape(1, (32, 1, 1))
    made = machine.Machine(linked, shape, memory, launch_shape.Options())
    found = []
    for each, pc in zip(linked.instructions[: len(lines)], made.step_of, strict=False):
        try:
            decoder.Decoder(made, each, pc).decode()
            found.append("")
        except errors.UnknownInstructionError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("add.u32 r0, rd1, 5;", "rd1 does not fit add: it is .b64, and a register of 32 bits"),
        ("add.u32 r0, f1, 5;", "f1 does not fit add: it is .f32, and .u32 is expected"),
        ("add.f32 f0, x_s32, f1;", "it is .s32, and .f32 or .b32 is expected"),
        ("cvt.u64.u32 r0, r1;", "a register of 64 bits, or a wider one, is expected"),
        ("selp.u32 r0, r1, r2, r3;", "it is .b32, and .pred is expected"),
        ("st.global.u32 [rd0], h0;", "a register of 32 bits, or a wider one, is expected"),
    ],
)
def test_what_is_told(line: str, told: str) -> None:
    assert told in refusals([line])[0]


@pytest.mark.skipif(assembler() is None, reason="no assembler of PTX 9")
def test_the_assembler_agrees(tmp_path: Path) -> None:
    path = assembler()
    assert path is not None
    lines = [*LINES, *(variant for line in LINES for variant in variants(line))]
    source = tmp_path / "test.ptx"
    source.write_text(text_of("\n".join(lines)))
    command = [path, "-arch", "sm_100a", "-o", str(tmp_path / "out"), str(source)]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    first = text_of("").splitlines().index("") + 1
    refused = {int(number) - first for number in re.findall(r"line (\d+);\s*error", told)}
    assert refused
    assert not refused & set(range(len(LINES)))
    ours = refusals(lines)
    differ = [line for i, line in enumerate(lines) if bool(ours[i]) != (i in refused)]
    assert not differ
