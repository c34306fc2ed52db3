"""Every registered opcode is launched by a test; here those that no other file launches."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact_formats import FORMATS, magnitude_of

decoder = importlib.import_module("humming.devices.simulator.decoder")
errors = importlib.import_module("humming.devices.simulator.errors")
importlib.import_module("humming.devices.simulator.instructions")

FOLDER = Path(__file__).parent

# Opcode -> (file, what of it shows that it is launched there): names that a test puts together.
PUT_TOGETHER = {
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4": ("test_block_scale.py", '"mxf4.block_scale'),
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4": ("test_block_scale.py", '"mxf4nvf4.block'),
    "mma.sync.aligned.kind::mxf4": ("test_opcodes.py", '("mxf4.block_scale", 64'),
    "mma.sync.aligned.kind::mxf4nvf4": ("test_opcodes.py", '("mxf4nvf4.block_scale.scale_vec::4X"'),
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4": (
        "test_opcodes.py",
        '("mxf8f6f4.block_scale", 32',
    ),
    **{
        f"mma.sp::ordered_metadata.sync.aligned.{form}": (
            "test_sparse_mma.py",
            f"{{SPARSE}}.{form}",
        )
        for form in (
            *(f"kind::{kind}" for kind in ("mxf8f6f4", "mxf4", "mxf4nvf4")),
            "m16n8k64.row.col.kind::mxf8f6f4",
            *(f"m16n8k128.row.col.kind::{kind}" for kind in ("mxf4", "mxf4nvf4")),
        )
    },
    "tcgen05.mma.ws": ("test_tcgen05.py", 'op=".ws"'),
    **{
        f"{name}{count}": ("test_integer.py", f'"{name}"')
        for name in ("vadd", "vsub", "vabsdiff", "vmin", "vmax")
        for count in (2, 4)
    },
    **{f"vset{count}": ("test_integer.py", "vset{count}.s32.s32.ge") for count in (2, 4)},
    **{
        f"{barrier}.{what}": ("test_opcodes.py", f"{{opcode}}.{what}")
        for barrier in ("bar", "bar.cta", "barrier", "barrier.cta")
        for what in ("sync", "arrive", "red")
    },
}
# Opcodes that are registered to say why they are not executed.
REFUSED = {
    "ppu.cp.async.aiu": "not known",
    "ppu.ldmatrix": "not known",
    "tcgen05.mma.sp": "",
    "tcgen05.mma.ws.sp": "",
}
# These only say what a test shows; they launch nothing.
_NO_LAUNCHES = ("test_forms.py", "test_conformance.py", "conformance.py", "test_opcodes.py")


def launched_in(text: str) -> set[str]:
    """The opcodes that stand in a text."""
    return {
        opcode
        for opcode in decoder.known_opcodes()
        if re.search(rf'(?<![\w.:]){re.escape(opcode)}(?=[.:\s;{{}}\\"]|$)', text, re.M)
    }


def test_every_opcode_is_launched() -> None:
    files = [path for path in FOLDER.glob("*.py") if path.name not in _NO_LAUNCHES]
    found = launched_in("\n".join(path.read_text() for path in files))
    found |= launched_in(Path(__file__).read_text().partition("# -- floating point")[2])
    for opcode, (name, shows) in PUT_TOGETHER.items():
        if shows in (FOLDER / name).read_text():
            found.add(opcode)
    missing = set(decoder.known_opcodes()) - found - set(REFUSED)
    assert not missing, f"no test launches {sorted(missing)}"


@pytest.mark.parametrize("opcode", REFUSED)
def test_what_is_not_executed_says_why(run_ptx: Callable[..., Any], opcode: str) -> None:
    with pytest.raises(errors.UnknownInstructionError) as caught:
        run_ptx(f".reg .b32 r; {opcode} r;", {"out": np.zeros(1, np.uint32)})
    assert "does not know this instruction" not in str(caught.value)
    assert REFUSED[opcode] in str(caught.value)


# -- floating point -------------------------------------------------------------------------------

ONE_OPERAND = {
    # opcode: (body, function, relative error that its approximation may have)
    "sin": ("sin.approx.f32 %d0, %a0;", np.sin, 2**-20),
    "cos": ("cos.approx.f32 %d0, %a0;", np.cos, 2**-20),
    "ex2": ("ex2.approx.ftz.f32 %d0, %a0;", np.exp2, 2**-22),
    "lg2": ("lg2.approx.f32 %d0, %a0;", np.log2, 2**-22),
    "rsqrt": ("rsqrt.approx.f32 %d0, %a0;", lambda a: 1 / np.sqrt(a), 2**-22),
    "tanh": ("tanh.approx.f32 %d0, %a0;", np.tanh, 2**-10),
    "rcp": ("rcp.approx.ftz.f32 %d0, %a0;", lambda a: 1 / a, 2**-22),
    "sqrt": ("sqrt.approx.f32 %d0, %a0;", np.sqrt, 2**-22),
}


@pytest.mark.parametrize("name", ONE_OPERAND)
def test_functions_of_one_operand(evaluate: Callable[..., Any], rng: Any, name: str) -> None:
    """PTX ISA 9.7.3.13-22."""
    body, function, error = ONE_OPERAND[name]
    a = rng.uniform(0.01, 3, 128).astype(np.float32)
    (found,) = evaluate(body, [a], [np.float32])
    with np.errstate(divide="ignore"):
        exact = function(a.astype(np.float64))
    assert (np.abs(found - exact) <= error * np.abs(exact) + 2**-20).all()


def test_functions_at_their_ends(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.3.13-22, the tables of special values."""
    a = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 1.0, 128.0] * 4, np.float32)
    body = "ex2.approx.f32 %d0, %a0; lg2.approx.f32 %d1, %a0; rsqrt.approx.f32 %d2, %a0;"
    body += "rcp.rn.f32 %d3, %a0; sqrt.rn.f32 %d4, %a0; sin.approx.f32 %d5, %a1;"
    # Beyond a turn, sin.approx has no bound on its error.
    found = evaluate(body, [a, np.where(a == 128, np.float32(6), a)], [np.float32] * 6)
    nan = float("nan")
    expected = [
        [1, 1, np.inf, 0, nan, 0.5, 2, np.inf],
        [-np.inf, -np.inf, np.inf, nan, nan, nan, 0, 7],
        [np.inf, -np.inf, 0, nan, nan, nan, 1, 128**-0.5],
        [np.inf, -np.inf, 0, -0.0, nan, -1, 1, 1 / 128],
        [0, -0.0, np.inf, nan, nan, nan, 1, np.float32(128**0.5)],
    ]
    for values, wanted in zip(found, expected, strict=False):
        np.testing.assert_array_equal(values[:8], np.array(wanted, np.float32))
    assert np.isnan(found[5][2:5]).all()


def test_signs_and_properties(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.3.1-2."""
    a = np.array([1.5, -2.0, 0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40] * 4, np.float32)
    b = np.roll(a, 1)
    body = "copysign.f32 %d0, %a1, %a0; .reg .pred p;"
    tests = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    for place, name in enumerate(tests):
        body += f"testp.{name}.f32 p, %a0; selp.u32 %d{place + 1}, 1, 0, p;"
    sign, *flags = evaluate(body, [a, b], [np.float32] + [np.uint32] * 6)
    np.testing.assert_array_equal(sign, np.copysign(a, b))
    assert (np.signbit(sign) == np.signbit(b)).all()
    tiny = np.abs(a) < 2.0**-126
    expected = [
        np.isfinite(a),
        np.isinf(a),
        ~np.isnan(a),
        np.isnan(a),
        np.isfinite(a) & (~tiny | (a == 0)),  # zeros count as normal, as cards say too
        tiny & (a != 0),
    ]
    for found, wanted in zip(flags, expected, strict=True):
        assert (found.astype(bool) == wanted).all()


def test_extremes_with_the_product_of_signs(evaluate: Callable[..., Any], rng: Any) -> None:
    """PTX ISA 9.7.3.11-12: min.xorsign.abs."""
    a, b = rng.normal(size=(2, 64)).astype(np.float32)
    body = "min.xorsign.abs.f32 %d0, %a0, %a1; max.xorsign.abs.f32 %d1, %a0, %a1;"
    least, most = evaluate(body, [a, b], [np.float32] * 2)
    sign = np.where(np.signbit(a) ^ np.signbit(b), -1, 1)
    assert (least == sign * np.minimum(np.abs(a), np.abs(b))).all()
    assert (most == sign * np.maximum(np.abs(a), np.abs(b))).all()


# -- selection and integers -----------------------------------------------------------------------


def test_selection_by_a_sign(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.6.4: -0 is not negative, NaN selects b."""
    c = np.array([1.0, -1.0, 0.0, -0.0, np.nan, -1e-40, np.inf, -np.inf] * 4, np.float32)
    i = np.array([0, -1, 5, -(2**31)] * 8, np.int32)
    body = (
        "slct.u32.f32 %d0, 1, 2, %a0; slct.ftz.u32.f32 %d1, 1, 2, %a0; slct.s32.s32 %d2, 1, 2, %a1;"
    )
    plain, flushed, whole = evaluate(body, [c, i], [np.uint32] * 3)
    assert plain[:8].tolist() == [1, 2, 1, 1, 2, 2, 1, 2]
    assert flushed[:8].tolist() == [1, 2, 1, 1, 2, 1, 1, 2]
    assert whole[:4].tolist() == [1, 2, 1, 2]


def test_set_gives_masks_or_ones(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.6.1."""
    a = np.array([1.0, 2.0, np.nan, -0.0] * 8, np.float32)
    body = """
      .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;
      set.lt.u32.f32 %d0, %a0, 0f3FC00000; set.gtu.f32.f32 %d1, %a0, 0f3FC00000;
      set.eq.and.u32.f32 %d2, %a0, %a0, p;
    """
    mask, ones, both = evaluate(body, [a], [np.uint32, np.float32, np.uint32])
    assert mask[:4].tolist() == [0xFFFFFFFF, 0, 0, 0xFFFFFFFF]
    assert ones[:4].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert both.tolist() == [0xFFFFFFFF] + [0] * 31


@pytest.mark.parametrize("kinds", ["s32.s32", "u32.s32", "s32.u32", "u32.u32"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_dot_products_of_two(evaluate: Callable[..., Any], rng: Any, kinds: str, half: str) -> None:
    """PTX ISA 9.7.1.26."""
    a, b, c = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(3))
    (found,) = evaluate(f"dp2a.{half}.{kinds} %d0, %a0, %a1, %a2;", [a, b, c], [np.uint32])
    first, second = kinds.split(".")
    wide = a.view(np.int16 if first == "s32" else np.uint16).reshape(-1, 2).astype(np.int64)
    narrow = b.view(np.int8 if second == "s32" else np.uint8).reshape(-1, 4).astype(np.int64)
    part = narrow[:, 2:] if half == "hi" else narrow[:, :2]
    assert (found == ((wide * part).sum(axis=1) + c) % 2**32).all()


# -- narrow conversions ---------------------------------------------------------------------------


def bf16(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def test_powers_of_two_to_bfloat16(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.9.21: cvt.rn.bf16x2.ue8m0x2; 255 is NaN."""
    codes = np.arange(256, dtype=np.uint16)
    body = "cvt.rn.bf16x2.ue8m0x2 %d0, %a0;"
    (found,) = evaluate(body, [codes << 8 | codes[::-1]], [np.uint32])
    upper, lower = bf16(found >> 16), bf16(found & 0xFFFF)
    expected = np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(int) - 127))
    np.testing.assert_array_equal(upper, expected.astype(np.float32))
    np.testing.assert_array_equal(lower, expected[::-1].astype(np.float32))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3"])
def test_scaled_conversions_to_bfloat16(evaluate: Callable[..., Any], rng: Any, name: str) -> None:
    """PTX ISA 9.7.9.21, .scaled::n2::ue8m0: products with two powers of two."""
    form = FORMATS[name]
    top = min(form.top, (1 << form.bits - 1) - 1)
    code = rng.integers(0, top + 1, (64, 2)).astype(np.uint16)
    scale = rng.integers(120, 134, (64, 2)).astype(np.uint16)
    body = f"cvt.rn.scaled::n2::ue8m0.bf16x2.{name}x2 %d0, %a0, %a1;"
    operands = [code[:, 1] << 8 | code[:, 0], scale[:, 1] << 8 | scale[:, 0]]
    (found,) = evaluate(body, operands, [np.uint32])
    for place, part in enumerate((found & 0xFFFF, found >> 16)):
        size = [float(magnitude_of(int(c), name)) for c in code[:, place]]
        exact = np.array(size) * np.ldexp(1.0, scale[:, place].astype(int) - 127)
        np.testing.assert_array_equal(bf16(part), exact.astype(np.float32))


def test_unsigned_floats_with_five_exponent_bits(evaluate: Callable[..., Any]) -> None:
    """PTX ISA 9.7.9.21: cvt.rn.f16x2.ue5m3x2 is exact, and its reverse takes it back."""
    codes = np.arange(0, 255, dtype=np.uint16)
    codes = np.concatenate([codes, [0]]).astype(np.uint16)
    body = "cvt.rn.f16x2.ue5m3x2 %d0, %a0; cvt.rn.ue5m3x2.f32 %d1, %a1, %a1;"
    exponent, mantissa = (codes >> 3).astype(int), (codes & 7) / 8
    size = np.where(exponent, np.ldexp(1 + mantissa, exponent - 15), np.ldexp(mantissa, -14))
    finite = size <= 65504
    half, back = evaluate(
        body,
        [codes << 8 | codes, size.astype(np.float32)],
        [np.uint32, np.uint16],
        target="sm_107a",
    )
    lower = (half & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    np.testing.assert_array_equal(lower[finite], size[finite])
    assert (back[finite] == (codes << 8 | codes)[finite]).all()


# -- matrices -------------------------------------------------------------------------------------


def test_one_matrix_of_packed_nibbles(run_ptx: Callable[..., Any], rng: Any) -> None:
    """PTX ISA 9.7.14.5.15: ldmatrix.m8n16.x1 takes its rows from the first eight lanes."""
    body = """
      .shared .align 16 .b8 tile[512];
      .reg .b32 t, r; .reg .b64 base, at, s, v;
      mov.u32 t, %laneid; mov.u64 s, tile;
      ld.param.u64 base, [p0]; mad.wide.u32 at, t, 8, base; ld.global.u64 v, [at];
      mad.wide.u32 at, t, 16, s; st.shared.u64 [at], v;
      bar.warp.sync -1;
      ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {r}, [at];
      ld.param.u64 base, [p1]; mad.wide.u32 at, t, 4, base; st.global.u32 [at], r;
    """
    rows = rng.integers(0, 256, (32, 8), dtype=np.uint8)
    out = np.zeros(32, np.uint32)
    body = body.replace("st.shared.u64 [at], v;", "st.shared.u64 [at], v; st.shared.u64 [at+8], v;")
    run_ptx(body, {"rows": rows, "out": out})
    lanes = np.arange(32)
    nibbles = np.stack([rows & 15, rows >> 4], axis=-1).reshape(32, 16)
    for place in range(4):
        wanted = nibbles[lanes >> 2, 4 * (lanes & 3) + place]
        assert (out.view(np.uint8).reshape(32, 4)[:, place] == wanted).all()


@pytest.mark.parametrize("operation", ["xor", "and"])
@pytest.mark.parametrize("shape", ["m8n8k128", "m16n8k128", "m16n8k256"])
def test_products_of_bits(
    evaluate: Callable[..., Any], rng: Any, shape: str, operation: str
) -> None:
    """PTX ISA 9.7.14.5.14: counts of ones."""
    m, k = (16 if shape.startswith("m16") else 8), int(shape.partition("k")[2])
    bits_a = rng.integers(0, 2, (m, k), dtype=np.uint8)
    bits_b = rng.integers(0, 2, (8, k), dtype=np.uint8)
    words_a = np.packbits(bits_a, axis=1, bitorder="little").view(np.uint32)
    words_b = np.packbits(bits_b, axis=1, bitorder="little").view(np.uint32)
    g, t = np.arange(32) >> 2, np.arange(32) & 3
    if m == 8:
        a = [words_a[g, t]]
    else:
        a = [words_a[g + 8 * (r & 1), t + 4 * (r >> 1)] for r in range(m * k // 1024)]
    b = [words_b[g, t + 4 * r] for r in range(k // 128)]
    count = m // 4
    c = rng.integers(-1000, 1000, (m, 8), dtype=np.int32)
    places = [(g + 8 * (i >> 1), 2 * t + (i & 1)) for i in range(count)]
    inputs = [*a, *b, *(c[place].view(np.uint32) for place in places)]
    names = iter(f"%a{i}" for i in range(len(inputs)))
    operands = ["{" + ", ".join(next(names) for _ in part) + "}" for part in (a, b, places)]
    outputs = ", ".join(f"%d{i}" for i in range(count))
    opcode = f"mma.sync.aligned.{shape}.row.col.s32.b1.b1.s32.{operation}.popc"
    found = evaluate(f"{opcode} {{{outputs}}}, {', '.join(operands)};", inputs, [np.int32] * count)
    joined = bits_a[:, None] ^ bits_b if operation == "xor" else bits_a[:, None] & bits_b
    exact = joined.sum(axis=2, dtype=np.int32) + c
    for values, place in zip(found, places, strict=True):
        assert (values == exact[place]).all()


@pytest.mark.parametrize("kinds", ["e4m3.e2m1", "e2m3.e3m2", "e5m2.e4m3"])
def test_narrow_floats_with_half_results(
    evaluate: Callable[..., Any], rng: Any, kinds: str
) -> None:
    """PTX ISA 9.7.14.5.14, .kind::f8f6f4 with f16: ones in A pick the columns of B."""
    a_kind, b_kind = kinds.split(".")
    one = {"e4m3": 0x38, "e5m2": 0x3C, "e3m2": 0x0C, "e2m3": 0x08, "e2m1": 0x02 << 2}
    g, t = np.arange(32) >> 2, np.arange(32) & 3
    a_codes = np.zeros((16, 32), np.uint8)
    a_codes[np.arange(16), 2 * np.arange(16)] = one[a_kind]
    form = FORMATS[b_kind]
    b_codes = rng.integers(0, min(form.top, (1 << form.bits - 1) - 1), (8, 32), dtype=np.uint8)
    stored = b_codes << 2 if b_kind == "e2m1" else b_codes
    words_a, words_b = a_codes.view(np.uint32), np.ascontiguousarray(stored).view(np.uint32)
    a = [words_a[g + 8 * (r & 1), t + 4 * (r >> 1)] for r in range(4)]
    b = [words_b[g, t + 4 * r] for r in range(2)]
    zero = np.zeros(32, np.uint32)
    body = (
        f"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f16.{kinds}.f16"
        " {%d0, %d1}, {%a0, %a1, %a2, %a3}, {%a4, %a5}, {%a6, %a6};"
    )
    found = evaluate(body, [*a, *b, zero], [np.uint32] * 2, target="sm_120a")
    for i in range(4):
        half = (found[i >> 1] >> 16 * (i & 1)).astype(np.uint16).view(np.float16)
        row, column = g + 8 * (i >> 1), 2 * t + (i & 1)
        codes = b_codes[column, 2 * row]
        wanted = [float(magnitude_of(int(code), b_kind)) for code in codes]
        np.testing.assert_array_equal(half, np.array(wanted, np.float16))


ORDERS = [
    ("mxf8f6f4.block_scale", 32, "e4m3.e5m2", "ue8m0"),
    ("mxf4.block_scale", 64, "e2m1.e2m1", "ue8m0"),
    ("mxf4nvf4.block_scale.scale_vec::4X", 64, "e2m1.e2m1", "ue4m3"),
]


@pytest.mark.parametrize(("kind", "k", "types", "scale"), ORDERS)
def test_the_kind_may_stand_behind_the_shape(
    evaluate: Callable[..., Any], rng: Any, kind: str, k: int, types: str, scale: str
) -> None:
    """PTX ISA 9.7.14.5.14: both orders are the same product."""
    "mma.sync.aligned.kind::mxf4. mma.sync.aligned.kind::mxf4nvf4."
    "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4."
    codes = [rng.integers(0, 2**32, 32, dtype=np.uint32) & 0x3B3B3B3B for _ in range(6)]
    codes.append(np.full(32, 0x38383838 if scale == "ue4m3" else 0x7F7F7F7F, np.uint32))  # 1
    operands = "{%a0, %a1, %a2, %a3}, {%a4, %a5}, {0f00000000, 0f00000000, 0f00000000, 0f00000000}"
    scales = "%a6, {0, 0}, %a6, {0, 0};"
    bodies = [
        f"mma.sync.aligned.kind::{kind}.m16n8k{k}.row.col.f32.{types}.f32.{scale} ",
        f"mma.sync.aligned.m16n8k{k}.row.col.kind::{kind}.f32.{types}.f32.{scale} ",
    ]
    body = "".join(
        f"{opcode} {{%d{4 * i}, %d{4 * i + 1}, %d{4 * i + 2}, %d{4 * i + 3}}}, {operands}, {scales}"
        for i, opcode in enumerate(bodies)
    )
    found = evaluate(body, codes, [np.uint32] * 8, target="sm_120a")
    assert np.stack(found[:4]).any()
    np.testing.assert_array_equal(np.stack(found[:4]), np.stack(found[4:]))


# -- memory ---------------------------------------------------------------------------------------

START = """
  .reg .b32 t, v, w<4>; .reg .b64 base, at, g, x, y; .reg .pred p, q;
  mov.u32 t, %tid.x; ld.param.u64 base, [p0]; mad.wide.u32 at, t, 4, base;
"""


def test_atomics_of_64_bits_and_of_pairs(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.13.11: exch and cas of b64, add of f16x2."""
    body = (
        START
        + """
      atom.global.exch.b64 x, [base], 0x1122334455667788;
      atom.global.cas.b64 y, [base], 0x1122334455667788, 5;
      st.global.u64 [base+8], x; st.global.u64 [base+16], y;
      atom.global.add.noftz.f16x2 v, [base+24], 0x40003C00;
      st.global.u32 [base+28], v;
      ld.acquire.gpu.global.u32 w0, [base+24]; st.release.gpu.global.u32 [base+32], w0;
    """
    )
    out = np.array([7, 0, 0, 0x3C003C00, 0], np.uint64)
    run_ptx(body, {"out": out}, block=1)
    assert out[:3].tolist() == [5, 7, 0x1122334455667788]
    assert out[3] == 0x3C003C00 << 32 | 0x42004000
    assert out[4] == 0x42004000


def test_reductions_of_vectors(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.13.12: red.v4."""
    body = (
        START
        + """
      red.relaxed.gpu.global.v4.f32.add [base], {0f3F800000, 0f40000000, 0f40400000, 0f40800000};
    """
    )
    out = np.zeros(8, np.float32)
    start = (-out.ctypes.data % 16) // 4
    run_ptx(body, {"out": out[start : start + 4]}, block=8)
    assert out[start : start + 4].tolist() == [8.0, 16.0, 24.0, 32.0]


def test_hints_change_nothing(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.9.14-18, 9.7.12, 9.7.13.13, 9.7.19."""
    body = (
        START
        + """
      createpolicy.fractional.L2::evict_last.b64 x, 0f3F800000;
      prefetch.global.L2 [base]; prefetchu.L1 [base];
      applypriority.global.L2::evict_normal [base], 128;
      griddepcontrol.wait; griddepcontrol.launch_dependents;
      nanosleep.u32 20; pmevent 3;
      fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;
      ldu.global.u32 v, [at];
      ld.global.L2::cache_hint.u32 w0, [at], x;
      add.u32 v, v, w0; st.global.u32 [at], v;
    """
    )
    out = np.arange(32, dtype=np.uint32)
    run_ptx(body, {"out": out})
    assert out.tolist() == [2 * i for i in range(32)]


def test_discarded_memory_is_undefined(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.9.17: until something is written there; of whole lines."""
    body = (
        START
        + """
      setp.eq.u32 p, t, 0; @p discard.global.L2 [base+128], 128;
      st.global.u32 [at+128], t;
      ld.global.u32 v, [at+128]; st.global.u32 [at], v;
    """
    )
    room = np.zeros(128, np.uint32)
    start = (-room.ctypes.data % 128) // 4
    out = room[start : start + 64]
    run_ptx(body, {"out": out})
    assert out[:32].tolist() == list(range(32))
    early = body.replace("st.global.u32 [at+128], t;", "")
    with pytest.raises(errors.PoisonError):
        run_ptx(early, {"out": out})
    with pytest.raises(errors.AlignmentError):
        run_ptx(body.replace("base+128]", "base+64]"), {"out": out})


def test_breakpoints_stop(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.19.1."""
    with pytest.raises(errors.TrapError, match="brkpt"):
        run_ptx("brkpt;", {"out": np.zeros(1, np.uint32)})


def test_where_a_failed_request_would_have_led_is_undefined(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.13.20: all requests for other clusters fail here."""
    query = "clusterlaunchcontrol.query_cancel"
    body = f"""{START}
      .reg .b128 r; mov.u64 x, 0; mov.b128 r, {{x, x}};
      {query}.is_canceled.pred.b128 p, r; selp.u32 v, 1, 0, p; st.global.u32 [at], v;
      clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{w0, w1, w2, w3}}, r;
      clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 w0, r;
      clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 w1, r;
      clusterlaunchcontrol.query_cancel.get_first_ctaid::z.b32.b128 w2, r;
    """
    out = np.full(32, 9, np.uint32)
    run_ptx(body, {"out": out})
    assert not out.any()
    with pytest.raises(errors.PoisonError):
        run_ptx(body + "st.global.u32 [at], w1;", {"out": out})


# -- barriers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("opcode", ["bar", "bar.cta", "barrier", "barrier.cta"])
@pytest.mark.parametrize("seed", [None, 3])
def test_reductions_at_barriers(run_ptx: Callable[..., Any], opcode: str, seed: Any) -> None:
    """PTX ISA 9.7.13.1: over all threads of the CTA, of their predicates."""
    f"{opcode}.red."
    body = (
        START
        + f"""
      setp.lt.u32 p, t, 40; .reg .pred any, all;
      {opcode}.red.popc.u32 v, 0, p;
      {opcode}.red.and.pred all, 0, p;
      {opcode}.red.or.pred any, 1, 96, p;
      @all add.u32 v, v, 1000; @any add.u32 v, v, 100;
      st.global.u32 [at], v;
    """
    )
    out = np.zeros(96, np.uint32)
    run_ptx(body, {"out": out}, block=96, seed=seed)
    assert out.tolist() == [140] * 96


@pytest.mark.parametrize("opcode", ["bar", "bar.cta", "barrier", "barrier.cta"])
def test_arrivals_at_barriers(run_ptx: Callable[..., Any], opcode: str) -> None:
    """PTX ISA 9.7.13.1: half of the threads write and arrive, the others wait and read."""
    f"{opcode}.sync. {opcode}.arrive."
    body = (
        START
        + f"""
      .shared .align 4 .b8 tile[128]; mov.u64 y, tile;
      setp.ge.u32 p, t, 32; @p bra READ;
      mad.wide.u32 x, t, 4, y; st.shared.u32 [x], t;
      {opcode}.arrive 1, 64;
      exit;
    READ:
      {opcode}.sync 1, 64;
      sub.u32 v, 63, t; mad.wide.u32 x, v, 4, y; ld.shared.u32 v, [x];
      st.global.u32 [at], v;
    """
    )
    out = np.zeros(64, np.uint32)
    run_ptx(body, {"out": out}, block=64)
    assert out[32:].tolist() == list(range(31, -1, -1))


OBJECT = (
    START
    + """
  .shared .align 8 .b8 object[8]; .reg .b64 bar, state; mov.u64 bar, object;
  setp.eq.u32 p, t, 0;
"""
)


def test_objects_lose_participants(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.13.15.14: arrive_drop counts for this phase, and is missing from the next."""
    body = (
        OBJECT
        + """
      @!p exit;
      mbarrier.init.shared::cta.b64 [bar], 2;
      mbarrier.arrive_drop.shared::cta.b64 state, [bar];
      mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [bar];
      mbarrier.test_wait.shared::cta.b64 q, [bar], state; selp.u32 w0, 1, 0, q;
      mbarrier.arrive.shared::cta.b64 state, [bar];
      mbarrier.test_wait.relaxed.cta.shared::cta.b64 q, [bar], state; selp.u32 w1, 1, 0, q;
      st.global.v2.u32 [base], {w0, w1};
    """
    )
    out = np.zeros(2, np.uint32)
    run_ptx(body, {"out": out}, block=32)
    assert out.tolist() == [1, 1]


def test_objects_wait_for_bytes(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.13.15.11-13: expect_tx and complete_tx; noComplete."""
    body = (
        OBJECT
        + """
      @!p exit;
      mbarrier.init.shared::cta.b64 [bar], 3;
      mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 64;
      mbarrier.arrive.noComplete.shared::cta.b64 state, [bar], 2;
      mbarrier.arrive.shared::cta.b64 state, [bar];
      mbarrier.test_wait.shared::cta.b64 q, [bar], state; selp.u32 w0, 1, 0, q;
      mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 64;
      mbarrier.test_wait.shared::cta.b64 q, [bar], state; selp.u32 w1, 1, 0, q;
      st.global.v2.u32 [base], {w0, w1};
    """
    )
    out = np.zeros(2, np.uint32)
    run_ptx(body, {"out": out}, block=32)
    assert out.tolist() == [0, 1]


def test_memory_of_an_object_is_free_after_it(run_ptx: Callable[..., Any]) -> None:
    """PTX ISA 9.7.13.15.10: inval; the object is none any more."""
    body = (
        OBJECT
        + """
      @!p exit;
      mbarrier.init.shared::cta.b64 [bar], 1;
      mbarrier.inval.shared::cta.b64 [bar];
      st.shared.u32 [bar], 9; ld.shared.u32 v, [bar]; st.global.u32 [base], v;
    """
    )
    out = np.zeros(1, np.uint32)
    run_ptx(body, {"out": out}, block=32)
    assert out[0] == 9
    late = body.replace("st.shared.u32 [bar], 9;", "mbarrier.arrive.shared::cta.b64 _, [bar];")
    with pytest.raises(errors.BarrierError, match="no initialized mbarrier"):
        run_ptx(late, {"out": out}, block=32)
