"""The assembler accepts every instruction that the device matrix lists, and no other.

Each row becomes one line of inline PTX; undocumented rows have no PTX and are left out.
"""

from functools import cache
from pathlib import Path

import pytest

from humming.capability import DeviceCapabilities, MmaRow
from humming.errors import CompileError
from humming.matrix import Matrix, read_matrix
from humming.plugins import compiler_for
from humming.registry import Contribution, Registry, load_yaml

FILE = Path(__file__).parents[2] / "device_matrix.yaml"


@cache
def matrix() -> Matrix:
    return read_matrix(load_yaml(FILE), FILE.name)


@cache
def registry() -> Registry:
    return Registry([Contribution("bundled", matrix())])


# Family -> a device of it; the others' binaries are not NVIDIA's.
FAMILIES = {caps.family: caps for caps in registry().devices() if caps.arch.startswith("sm_")}
SETS = [name for name in matrix().mma_sets if not name.startswith("ppu")]


def registers(count: int, kind: str, first: int) -> tuple[str, str]:
    """Operands %first ... as PTX, and as a list of C variables of a constraint."""
    names = ", ".join(f"%{first + i}" for i in range(count))
    return "{" + names + "}", ", ".join(f'"{kind}"(x{kind}[{i}])' for i in range(count))


def warp_level(row: MmaRow) -> str:
    """mma.sync, with block scales where the row has them; the C operand is D."""
    m, n, k = row.shape
    mixed = row.k_values[0] == 32 and (row.a.is_float and min(row.a.bits, row.b.bits) < 8)
    bits = 8 if mixed or (row.block_scale and k == 32) else row.a.bits
    d_kind = "f" if row.accumulator == "f32" else "r"
    sizes = (m * n * (16 if row.accumulator == "f16" else 32), m * k * bits, n * k * bits)
    d, a, b = (size // 1024 for size in sizes)
    d_text, d_list = registers(d, f"+{d_kind}", 0)
    a_text, a_list = registers(a, "r", d)
    b_text, b_list = registers(b, "r", d + a)
    c = row.accumulator.ptx
    types = f"{c}.{row.a.ptx}.{row.b.ptx}.{c}"
    kind = ".kind::f8f6f4" if mixed else ""
    scales = ""
    if row.block_scale:
        ((scale, group),) = row.block_scale
        kind = (
            f".kind::{'mxf8f6f4' if k == 32 else 'mxf4nvf4'}.block_scale.scale_vec::{k // group}X"
        )
        types += f".{scale.ptx}"
        scales = f", {{%{d + a + b}}}, {{0, 0}}, {{%{d + a + b}}}, {{0, 0}}"
        b_list += ', "r"(xr[0])'
    name = f"mma.sync.aligned.m{m}n{n}k{k}.row.col{kind}.{types}"
    d_list = d_list.replace("x+", "x")
    text = f"{name} {d_text}, {a_text}, {b_text}, {d_text}{scales};"
    return f'asm volatile("{text}" : {d_list} : {a_list}, {b_list});'


def warpgroup_level(row: MmaRow, site: str) -> str:
    """wgmma with the smallest N, A in registers or in shared memory."""
    m, n, k = row.shape
    d = m * n * (16 if row.accumulator == "f16" else 32) // (4 * 1024)
    d_kind = "f" if row.accumulator == "f32" else "r"
    d_text, d_list = registers(d, f"+{d_kind}", 0)
    a_text, a_list = registers(4, "r", d)
    if site == "shared":
        a_text, a_list = f"%{d}", '"l"(xl[0])'
    b = d + a_list.count("(")
    signs = ", 1, 1" if row.a.is_float else ""
    # Only 16-bit operands can be transposed; those in registers are not.
    signs += (", 0" if site == "register" else ", 0, 0") if row.a.bits == 16 else ""
    types = f"{row.accumulator.ptx}.{row.a.ptx}.{row.b.ptx}"
    name = f"wgmma.mma_async.sync.aligned.m{m}n{n}k{k}.{types}"
    d_list = d_list.replace("x+", "x")
    text = f"{name} {d_text}, {a_text}, %{b}, 1{signs};"
    return f'asm volatile("{text}" : {d_list} : {a_list}, "l"(xl[1]));'


def cta_level(row: MmaRow, site: str) -> str:
    """tcgen05.mma; its types are in a descriptor, so that rows of a kind are the same PTX."""
    kind = {16: "f16", 8: "f8f6f4", 6: "f8f6f4", 4: "f8f6f4"}[row.a.bits]
    scales = ""
    if row.a.is_integer:
        kind = "i8"
    if row.block_scale:
        ((_, group),) = row.block_scale
        kind = f"{'mxf8f6f4' if row.shape[2] == 32 else 'mxf4nvf4'}.block_scale.block{group}"
        scales = ", [%4], [%4]"
    a = "%1" if site == "shared" else "[%4]"
    name = f"tcgen05.mma.cta_group::1.kind::{kind}"
    inputs = '"r"(xr[0]), "l"(xl[0]), "l"(xl[1]), "r"(xr[1]), "r"(xr[2])'
    return f'asm volatile("{name} [%0], {a}, %2, %3{scales}, 1;" :: {inputs});'


def lines(row: MmaRow) -> list[str]:
    if row.instruction == "wgmma":
        return [warpgroup_level(row, site) for site in row.a_sites]
    if row.instruction == "tcgen05":
        return [cta_level(row, site) for site in row.a_sites]
    return [warp_level(row)]


def kernel(statements: list[str]) -> str:
    body = "\n  ".join(dict.fromkeys(statements))
    return f"""extern "C" __global__ void rows(unsigned* r, float* f, unsigned long long* l) {{
  unsigned xr[8]; float xf[8]; unsigned long long xl[2];
  for (int i = 0; i < 8; ++i) {{ xr[i] = r[i]; xf[i] = f[i]; xl[i & 1] = l[i]; }}
  {body}
  for (int i = 0; i < 8; ++i) {{ r[i] = xr[i]; f[i] = xf[i]; }}
}}
"""


def assemble(statements: list[str], caps: DeviceCapabilities) -> bytes:
    return compiler_for(caps).compile(kernel(statements), {}, "rows", caps).data


def require(caps: DeviceCapabilities, *first: tuple[int, int] | None) -> None:
    found = compiler_for(caps).version
    needed = max(v for v in (caps.min_compiler, *first, (0, 0)) if v)
    if found < needed:
        pytest.skip(f"needs compiler {needed}, found {found}")


def documented(set_name: str) -> list[MmaRow]:
    return [row for row in matrix().mma_sets[set_name] if not row.undocumented]


@pytest.mark.parametrize("family", FAMILIES)
def test_listed_instructions_assemble(family: str) -> None:
    caps = FAMILIES[family]
    rows = [row for row in caps.mma if not row.undocumented]
    require(caps, *(row.min_compiler for row in rows))
    assert assemble([line for row in rows for line in lines(row)], caps)


@pytest.mark.parametrize("set_name", [name for name in SETS if documented(name)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sets_that_a_family_does_not_list_are_rejected(family: str, set_name: str) -> None:
    caps = FAMILIES[family]
    if set_name in {use.set_name for use in matrix().families[family].mma}:
        return
    require(caps)
    for line in lines(documented(set_name)[0]):
        with pytest.raises(CompileError):
            assemble([line], caps)


# PTX of a feature or mover, on 32-bit registers %0 (written) and %1, and 64-bit %2.
FEATURES = {
    "ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];",
    "ldmatrix_s4_s8": "ldmatrix.sync.aligned.m8n16.x1.shared.s8.s4 {%0}, [%1];",
    "ldmatrix_b4_b6": "ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {%0}, [%1];",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%1], {%0};",
    "stmatrix_b8": "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%1], {%0};",
    "mbarrier": "mbarrier.init.shared.b64 [%1], 1;",
    "mbarrier_tx": "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%1], 16;",
    "clusters": "barrier.cluster.arrive.aligned;",
    "griddepcontrol": "griddepcontrol.wait;",
    "elect": "{ .reg .pred p; elect.sync %0|p, 0xffffffff; }",
    "setmaxnreg": "setmaxnreg.inc.sync.aligned.u32 64;",
    "tensormap_replace": "tensormap.replace.tile.global_address.global.b1024.b64 [%2], %2;",
    "tensor_memory": "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    "bf16_fma": "fma.rn.bf16x2 %0, %1, %1, %1;",
    "packed_max": "max.NaN.bf16x2 %0, %1, %1;",
    "bf16_arithmetic": "add.bf16x2 %0, %1, %1;",
    "redux_u32": "redux.sync.add.u32 %0, %1, 0xffffffff;",
    "redux_f32": "{ .reg .f32 f; mov.b32 f, %1; redux.sync.min.f32 f, f, -1; mov.b32 %0, f; }",
    "cvt_fp8": "{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h; }",
    "cvt_fp6_fp4": "{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e3m2x2 %0, h; }",
    "cvt_bf16_narrow": "{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.bf16x2.e4m3x2 %0, h; }",
    "cvt_stochastic": (
        "{ .reg .f32 f; mov.b32 f, %1; cvt.rs.satfinite.e4m3x4.f32 %0, {f, f, f, f}, %1; }"
    ),
    "cvt_ue5m3": "{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.ue5m3x2 %0, h; }",
    "cp_async": "cp.async.cg.shared.global [%1], [%2], 16;",
    "bulk": "cp.async.bulk.global.shared::cta.bulk_group [%2], [%1], 16;",
    "tma": "prefetch.tensormap [%2];",
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_listed_where_they_assemble(family: str, feature: str) -> None:
    caps = FAMILIES[family]
    statement = f'asm volatile("{FEATURES[feature]}" : "+r"(xr[0]) : "r"(xr[1]), "l"(xl[0]));'
    require(caps, caps.feature_min_compiler.get(feature))
    if caps.supports(feature):
        assert assemble([statement], caps)
    else:
        with pytest.raises(CompileError):
            assemble([statement], caps)
