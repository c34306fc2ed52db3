"""Loads, stores and atomic operations (PTX ISA 9.7.9.8-11, 9.7.13.11-12)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

ADDRESS = """
  .reg .b32 t; .reg .b64 base, at, off;
  mov.u32 t, %tid.x; ld.param.u64 base, [p0];
"""


@pytest.mark.parametrize(
    ("kind", "count"), [("u32", 4), ("u32", 2), ("b64", 2), ("u16", 4), ("b32", 8)]
)
def test_vectors_of_global_memory(
    run_ptx: Callable[..., Any], rng: Any, kind: str, count: int
) -> None:
    """Elements go to registers in the order of their addresses."""
    bits = int(kind[1:])
    size = bits // 8 * count
    regs = ", ".join(f"v{i}" for i in range(count))
    body = f"""{ADDRESS}
      .reg .b{bits} v<{count}>;
      mul.wide.u32 off, t, {size}; add.s64 at, base, off;
      ld.global.nc.L1::no_allocate.L2::128B.v{count}.{kind} {{{regs}}}, [at];
      ld.param.u64 base, [p1];
      add.s64 at, base, off;
      st.global.v{count}.{kind} [at+{size}], {{{regs}}};
    """
    data = rng.integers(0, 256, 64 * size, dtype=np.uint8)
    out = np.zeros(65 * size, np.uint8)
    data, out = (np.ascontiguousarray(aligned(a)) for a in (data, out))
    run_ptx(body, {"in": data, "out": out}, block=64)
    assert (out[size:] == data).all()
    assert not out[:size].any()


def aligned(array: np.ndarray) -> np.ndarray:
    """The same bytes at a multiple of 32."""
    room = np.zeros(array.nbytes + 32, np.uint8)
    start = -room.ctypes.data % 32
    view = room[start : start + array.nbytes]
    view[:] = array
    return view


def test_narrow_loads_extend_to_their_registers(run_ptx: Callable[..., Any]) -> None:
    body = f"""{ADDRESS}
      .reg .b32 a, b, c, d; .reg .b16 e;
      cvt.u64.u32 off, t; add.s64 at, base, off;
      ld.global.u8 a, [at]; ld.global.s8 b, [at]; ld.global.s8 e, [at];
      cvt.s32.s16 c, e;
      mad.wide.u32 at, t, 2, base; ld.global.s16 d, [at];
      ld.param.u64 base, [p1]; mad.wide.u32 at, t, 16, base;
      st.global.v4.b32 [at], {{a, b, c, d}};
    """
    data = np.arange(0, 256, dtype=np.uint8)[::-1].copy()
    out = np.zeros((32, 4), np.int32)
    run_ptx(body, {"in": data, "out": out})
    assert out[:, 0].tolist() == data[:32].tolist()
    assert out[:, 1].tolist() == data[:32].view(np.int8).tolist()
    assert out[:, 2].tolist() == out[:, 1].tolist()
    assert out[:, 3].tolist() == data[:64].view(np.int16).tolist()


@pytest.mark.parametrize("generic", [False, True], ids=["shared", "generic"])
def test_shared_memory_between_threads(run_ptx: Callable[..., Any], generic: bool) -> None:
    space = "" if generic else ".shared"
    body = f"""{ADDRESS}
      .shared .align 16 .b8 tile[512];
      .reg .b64 s; .reg .b32 v, w;
      mov.u64 s, tile;
      {"cvta.shared.u64 s, s;" if generic else ""}
      mad.wide.u32 at, t, 4, s;
      mul.lo.u32 v, t, 3;
      st{space}.u32 [at], v;
      bar.sync 0;
      sub.u32 w, 127, t; mad.wide.u32 at, w, 4, s;
      ld{space}.u32 v, [at];
      mad.wide.u32 at, t, 4, base; st.global.u32 [at], v;
    """
    out = np.zeros(128, np.uint32)
    run_ptx(body, {"out": out}, block=128)
    assert out.tolist() == [3 * (127 - t) for t in range(128)]


def test_dynamic_shared_memory_is_aligned_as_declared_and_no_better(
    run_ptx: Callable[..., Any],
) -> None:
    body = f"""{ADDRESS}
      .reg .b32 s, u;
      mov.u32 s, dynamic;
      mov.u32 u, %dynamic_smem_size;
      st.global.v2.u32 [base], {{s, u}};
    """
    declaration = ".extern .shared .align 128 .b8 dynamic[];"
    out = np.zeros(2, np.uint32)
    run_ptx(body, {"out": out}, declarations=declaration, smem_bytes=4096)
    assert out[0] % 128 == 0
    assert out[0] % 256 == 128
    assert out[1] == 4096


def test_local_memory_is_private(run_ptx: Callable[..., Any]) -> None:
    body = f"""{ADDRESS}
      .local .align 8 .b8 depot[16];
      .reg .b64 sp, spl; .reg .b32 v;
      mov.u64 spl, depot; cvta.local.u64 sp, spl;
      st.local.u32 [spl+4], t;
      st.u32 [sp+8], 5;
      ld.u32 v, [sp+4];
      mad.wide.u32 at, t, 4, base; st.global.u32 [at], v;
    """
    out = np.zeros(64, np.uint32)
    run_ptx(body, {"out": out}, block=64)
    assert out.tolist() == list(range(64))


def test_variables_of_the_module_have_their_values(run_ptx: Callable[..., Any]) -> None:
    declarations = """
      .global .align 4 .u32 table[4] = {10, -1, 0x20};
      .const .align 4 .f32 half = 0f3F000000;
      .global .align 8 .u64 pointer = generic(table)+4;
      .global .align 1 .b8 bytes[5] = {1, 2, 3};
    """
    body = f"""{ADDRESS}
      .reg .b32 a, b, c, d; .reg .b64 p; .reg .f32 f;
      ld.global.u32 a, [table+8];
      ld.global.u64 p, [pointer]; ld.u32 b, [p];
      ld.const.f32 f, [half]; mov.b32 c, f;
      ld.global.u8 d, [bytes+2];
      st.global.v4.u32 [base], {{a, b, c, d}};
    """
    out = np.zeros(4, np.uint32)
    run_ptx(body, {"out": out}, declarations=declarations)
    assert out.tolist() == [0x20, 0xFFFFFFFF, 0x3F000000, 3]


def test_generic_loads_from_several_spaces_at_once(run_ptx: Callable[..., Any]) -> None:
    body = f"""{ADDRESS}
      .shared .align 4 .b8 tile[128];
      .reg .b64 s, g; .reg .b32 v; .reg .pred p;
      mov.u64 s, tile; cvta.shared.u64 s, s;
      mad.wide.u32 at, t, 4, s; add.u32 v, t, 1000; st.u32 [at], v;
      ld.param.u64 g, [p1]; mad.wide.u32 g, t, 4, g;
      and.b32 v, t, 1; setp.eq.u32 p, v, 0;
      selp.b64 at, at, g, p;
      ld.u32 v, [at];
      mad.wide.u32 at, t, 4, base; st.global.u32 [at], v;
    """
    out, data = np.zeros(32, np.uint32), np.arange(32, dtype=np.uint32)
    run_ptx(body, {"out": out, "in": data})
    assert out.tolist() == [t if t & 1 else t + 1000 for t in range(32)]


def scalar_rounds(operation: str, start: int, values: list[int], compare: list[int]) -> int:
    for value, other in zip(values, compare, strict=True):
        start = {
            "add": lambda o, v, c: (o + v) % 2**32,
            "min": lambda o, v, c: min(o, v),
            "max": lambda o, v, c: max(o, v),
            "and": lambda o, v, c: o & v,
            "or": lambda o, v, c: o | v,
            "xor": lambda o, v, c: o ^ v,
            "exch": lambda o, v, c: v,
            "inc": lambda o, v, c: 0 if o >= v else o + 1,
            "dec": lambda o, v, c: v if o == 0 or o > v else o - 1,
            "cas": lambda o, v, c: c if o == v else o,
        }[operation](start, value, other)
    return start


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(
    "operation", ["add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas"]
)
def test_atomic_operations(
    run_ptx: Callable[..., Any], rng: Any, operation: str, space: str
) -> None:
    """Threads take turns; each gets the value that was there before it."""
    kind = "b32" if operation in ("and", "or", "xor", "exch", "cas") else "u32"
    third = ", w" if operation == "cas" else ""
    body = f"""{ADDRESS}
      .shared .align 4 .b8 cell[4];
      .reg .b32 v, w, o; .reg .b64 g, s; .reg .pred p;
      ld.param.u64 g, [p1]; mad.wide.u32 at, t, 8, base;
      ld.global.v2.u32 {{v, w}}, [at];
      mov.u64 s, cell;
      setp.ne.u32 p, t, 0;
      @p bra GO;
      ld.global.u32 o, [g]; st.shared.u32 [s], o;
    GO:
      bar.sync 0;
      atom.{space}.{operation}.{kind} o, [{"g" if space == "global" else "s"}], v{third};
      st.global.u32 [at], o;
      bar.sync 0;
      @p exit;
      ld.shared.u32 o, [s];
      {"st.global.u32 [g], o;" if space == "shared" else ""}
    """
    data = rng.integers(0, 40, (64, 2), dtype=np.uint32)
    before = data.copy()
    cell = np.array([7], np.uint32)
    run_ptx(body, {"data": data, "cell": cell}, block=64)
    values = before.tolist()
    expected = scalar_rounds(operation, 7, [v for v, _ in values], [c for _, c in values])
    assert cell[0] == expected
    assert data[0, 0] == 7
    partial = scalar_rounds(operation, 7, [v for v, _ in values[:63]], [c for _, c in values[:63]])
    assert data[63, 0] == partial


@pytest.mark.parametrize("kind", ["f32", "f16x2", "bf16x2", "f64"])
def test_reductions_of_floats(run_ptx: Callable[..., Any], rng: Any, kind: str) -> None:
    dtype = {"f32": np.float32, "f64": np.float64}.get(kind, np.uint32)
    bits = np.dtype(dtype).itemsize * 8
    noftz = ".noftz" if "x2" in kind else ""
    body = f"""{ADDRESS}
      .reg .b{bits} v; .reg .b64 g;
      mad.wide.u32 at, t, {bits // 8}, base; ld.global.b{bits} v, [at];
      ld.param.u64 g, [p1];
      red.relaxed.gpu.global.add{noftz}.{kind} [g], v;
    """
    if "x2" in kind:
        small = rng.integers(-8, 8, 64).astype(np.float32)
        half = small.astype(np.float16).view(np.uint16)
        data = (half if kind[0] == "f" else (small.view(np.uint32) >> 16).astype(np.uint16)).view(
            np.uint32
        )
        cell = np.zeros(1, np.uint32)
        run_ptx(body, {"in": data, "cell": cell})
        parts = cell.view(np.uint16)
        wide = parts.astype(np.uint32) << 16
        found = parts.view(np.float16) if kind[0] == "f" else wide.view(np.float32)
        assert found.tolist() == small.reshape(-1, 2).sum(axis=0).tolist()
    else:
        data = rng.integers(-8, 8, 32).astype(dtype)
        cell = np.zeros(1, dtype)
        run_ptx(body, {"in": data, "cell": cell})
        assert cell[0] == data.sum()


@pytest.mark.parametrize("opcode", ["atom", "red"])
@pytest.mark.parametrize("space", ["global", "shared", "generic"])
def test_sums_of_subnormal_numbers(run_ptx: Callable[..., Any], opcode: str, space: str) -> None:
    """PTX ISA 9.7.13.11-12: float32 sums flush in global memory and do not in shared memory."""
    named = "" if space == "generic" else f".{space}"
    where = {"global": "g", "shared": "s", "generic": "x"}[space]
    result = "o, " if opcode == "atom" else ""
    body = f"""{ADDRESS}
      .shared .align 4 .b8 cell[8];
      .reg .b32 v, o; .reg .b64 g, s, x; .reg .pred p;
      mov.u64 s, cell; cvta.shared.u64 x, s;
      ld.param.u64 g, [p1];
      ld.global.u32 v, [g]; st.shared.u32 [s], v;
      ld.global.u32 v, [g+4]; st.shared.u32 [s+4], v;
      ld.global.u32 v, [base];
      {opcode}{named}.add.f32 {result}[{where}], v;
      ld.global.u32 v, [base+4];
      {opcode}{named}.add.f32 {result}[{where}+4], v;
      {"bra DONE;" if space == "global" else ""}
      ld.shared.u32 v, [s]; st.global.u32 [g], v;
      ld.shared.u32 v, [s+4]; st.global.u32 [g+4], v;
    DONE:
    """
    # A subnormal and a subnormal; the least normal number and minus its three quarters.
    data = np.array([2, 0x80600000], np.uint32)
    cell = np.array([1, 0x00800000], np.uint32)
    run_ptx(body, {"in": data, "cell": cell}, block=1)
    kept = [3, 0x00200000]
    assert cell.tolist() == ([0, 0x00800000] if space == "global" else kept)


def test_windows_of_generic_addresses(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.9.19, 6.4.1: constants are not global; parameters of kernels are."""
    spaces = ("global", "const", "shared", "shared::cluster", "local", "param")
    places = ("of_global", "of_const", "of_shared", "of_local", "of_param")
    tests = "".join(
        f"isspacep.{space} p, {place}; selp.u32 v, 1, 0, p;"
        f"st.global.u32 [base+{4 * (row * len(spaces) + column)}], v;\n"
        for row, place in enumerate(places)
        for column, space in enumerate(spaces)
    )
    body = f"""{ADDRESS}
      .shared .align 4 .b8 cell[8]; .local .align 4 .b8 depot[8];
      .reg .b32 v; .reg .pred p; .reg .b64 {", ".join(places)};
      mov.u64 of_global, variable; cvta.global.u64 of_global, of_global;
      mov.u64 of_const, constant; cvta.const.u64 of_const, of_const; add.u64 of_const, of_const, 7;
      mov.u64 of_shared, cell; cvta.shared.u64 of_shared, of_shared;
      mov.u64 of_local, depot; cvta.local.u64 of_local, of_local;
      mov.b64 of_param, p0; cvta.param.u64 of_param, of_param;
      {tests}
    """
    out = np.zeros((len(places), len(spaces)), np.uint32)
    declarations = ".global .align 8 .b8 variable[8];\n.const .align 8 .b8 constant[8];"
    run_ptx(body, {"out": out}, declarations=declarations, block=1)
    assert out.tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]


def test_shared_memory_of_another_cta_is_only_the_clusters(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.9.19: without a qualifier, .shared is .shared::cta."""
    body = f"""{ADDRESS}
      .shared .align 4 .b8 cell[8];
      .reg .b64 s; .reg .b32 v, r; .reg .pred p;
      mov.u64 s, cell; cvta.shared.u64 s, s; mapa.u64 s, s, 1;
      mov.u32 r, %cluster_ctarank; mad.wide.u32 at, r, 8, base;
      isspacep.shared p, s; selp.u32 v, 1, 0, p; st.global.u32 [at], v;
      isspacep.shared::cluster p, s; selp.u32 v, 1, 0, p; st.global.u32 [at+4], v;
    """
    out = np.zeros((2, 2), np.uint32)
    run_ptx(body, {"out": out}, block=1, grid=2, cluster=(2, 1, 1))
    assert out.tolist() == [[0, 1], [1, 1]]


def test_param_addresses_in_registers(run_ptx: Callable[..., Any]) -> None:
    body = f"""{ADDRESS}
      .reg .b64 p, g, v;
      mov.b64 p, p1; ld.param.u64 v, [p+8];
      cvta.param.u64 g, p; ld.u64 off, [g];
      st.global.v2.u64 [base], {{v, off}};
    """
    out = np.zeros(2, np.uint64)
    run_ptx(body, {"out": out}, scalars=(77, 99))
    assert out.tolist() == [99, 77]


def test_bytes_of_addresses(run_ptx: Any) -> None:
    """5.4.4: masks select bytes of an address in an initial value."""
    masks = ", ".join(f"{0xFF << 8 * byte:#x}(target)" for byte in range(8))
    declarations = f".global .align 4 .u32 target = 77; .global .align 8 .b8 place[] = {{{masks}}};"
    body = """
      .reg .b64 at, base; .reg .b32 v; ld.param.u64 base, [p0];
      ld.global.u64 at, [place]; ld.global.u32 v, [at]; st.global.u32 [base], v;
    """
    out = np.zeros(1, np.uint32)
    run_ptx(body, {"out": out}, declarations=declarations, block=1)
    assert out[0] == 77
