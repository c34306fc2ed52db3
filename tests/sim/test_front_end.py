"""What NVRTC makes of ordinary CUDA: parsed as it comes, and executed with the right result."""

import importlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc

from humming.hookspecs import Image

errors = importlib.import_module("humming.devices.simulator.errors")
parser = importlib.import_module("humming.devices.simulator.ptx_parser")
runtime = importlib.import_module("humming.devices.simulator.runtime")

THREADS = 96


def compiled(source: str, *options: str, arch: str = "compute_80") -> str:
    """The PTX of a source."""
    arguments = [f"--gpu-architecture={arch}", "--std=c++20", *options]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [a.encode() for a in arguments])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(error) == 0, log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    return bytes(text).rstrip(b"\0").decode()


SOURCES: dict[str, tuple[str, Callable[[int], float]]] = {
    "loop with break": (
        """
        int n = 0;
        for (int i = t; i < 200; i += 7) { if (i % 11 == 5) break; n += i; }
        out[t] = n;
        """,
        lambda t: next(
            (sum(range(t, i, 7)) for i in range(t, 200, 7) if i % 11 == 5),
            sum(range(t, 200, 7)),
        ),
    ),
    "switch": (
        """
        switch (t % 9) {
          case 0: out[t] = 3; break;
          case 1: out[t] = t * t; break;
          case 2: out[t] = t - 50; break;
          case 3: out[t] = 7; break;
          case 4: out[t] = t << 3; break;
          case 5: out[t] = t ^ 21; break;
          case 6: out[t] = -t; break;
          default: out[t] = 1000 + t;
        }
        """,
        lambda t: [3, t * t, t - 50, 7, t << 3, t ^ 21, -t, 1000 + t, 1000 + t][t % 9],
    ),
    "array in local memory": (
        """
        int a[24];
        for (int i = 0; i < 24; ++i) a[(i * 5 + t) % 24] = i;
        int n = 0;
        for (int i = 0; i < 24; ++i) n = n * 3 % 1000 + a[(i + t) % 24];
        out[t] = n;
        """,
        lambda t: _local(t),
    ),
    "call of a function": ("out[t] = twice(t) + twice(t + 1);", lambda t: 3 * t + 3 * t + 3),
    "64-bit division": (
        "long long a = 1000000007LL * t - 5; out[t] = int(a / 12345 % 1000) + int(a % 77);",
        lambda t: _divided(t),
    ),
    "shared memory and shuffles": (
        """
        __shared__ int box[96];
        int v = t;
        for (int o = 16; o; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
        box[t] = v;
        __syncthreads();
        out[t] = box[(t + 32) % 96];
        """,
        lambda t: sum(range((t // 32 + 1) % 3 * 32, (t // 32 + 1) % 3 * 32 + 32)),
    ),
    "table in constant memory": ("out[t] = table[t % 5];", lambda t: [2, 3, 5, 7, 11][t % 5]),
    "floating point": (
        "float f = t * 0.25f; out[t] = fmaf(f, f, 1.5f) + sqrtf(f) + float(double(f) / 3.0);",
        lambda t: _floats(t),
    ),
}


def _local(t: int) -> int:
    a, n = [0] * 24, 0
    for i in range(24):
        a[(i * 5 + t) % 24] = i
    for i in range(24):
        n = n * 3 % 1000 + a[(i + t) % 24]
    return n


def _divided(t: int) -> int:
    a = 1000000007 * t - 5

    def quotient(x: int, y: int) -> int:
        return abs(x) // y * (1 if x >= 0 else -1)

    def rest(x: int, y: int) -> int:
        return x - y * quotient(x, y)

    return rest(quotient(a, 12345), 1000) + rest(a, 77)


def _floats(t: int) -> float:
    f = np.float32(t) * np.float32(0.25)
    square = np.float32(float(f) * float(f) + 1.5)
    return float(square + np.sqrt(f) + np.float32(float(f) / 3.0))


@pytest.mark.parametrize("debug", [(), ("--generate-line-info",), ("--device-debug",)], ids=len)
@pytest.mark.parametrize("name", SOURCES)
def test_cuda_source(name: str, debug: tuple[str, ...]) -> None:
    body, expected = SOURCES[name]
    kind = "float" if name == "floating point" else "int"
    source = f"""
      __constant__ int table[5] = {{2, 3, 5, 7, 11}};
      __device__ __noinline__ int twice(int v) {{ return v * 3; }}
      extern "C" __global__ void test({kind}* out) {{
        int t = threadIdx.x;
        {body}
      }}
    """
    out = np.zeros(THREADS, np.float32 if kind == "float" else np.int32)
    simulator = runtime.SimulatorRuntime()
    simulator.register(out.ctypes.data, out.nbytes, "out", undefined=True)
    text = compiled(source, *debug)
    kernel = simulator.load(Image("ptx", text.encode()), "test", 0)
    kernel.launch((1, 1, 1), (THREADS, 1, 1), struct.pack("<Q", out.ctypes.data))
    assert out.tolist() == [expected(t) for t in range(THREADS)]


def test_module_with_everything_declared() -> None:
    """Directives that NVRTC writes, one of each."""
    text = """
      .version 9.5
      .target sm_100a, debug
      .address_size 64
      .file 1 "http://here/with//slashes.cu", 1700000000, 123
      .extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b) ;
      .weak .global .align 8 .b8 names[3][4] = {{1, 2}, {3}};
      .const .align 4 .f64 pi = 0d400921FB54442D18;
      .visible .entry other() .reqntid 32, 1, 1 .minnctapersm 2 .maxnreg 64 { ret; }
      .visible .entry kernel(.param .u64 .ptr .global .align 16 p, .param .align 8 .b8 q[24])
      .maxntid 128
      .noreturn
      {
        .reg .pred %p<3>; .reg .b32 %r<4>, %s; .reg .b64 %rd<2>; .reg .f32 %f<1>;
        .local .align 16 .b8 __local_depot0[32];
        .loc 1 10 3, function_name $L__info_string0, inlined_at 1 20 1
        mov.f32 %f0, 0fBF800000; /* a comment
        over lines */ mov.u32 %r0, 0x7fffffffU; mov.u32 %r1, -(3 + 4) * 2;
        ld.param.u64 %rd0, [q+8+8]; .pragma "nounroll";
        @!%p1 bra.uni $L__end; st.local.v2.u32 [__local_depot0 + 8], {%r0, _};
        setp.lt.and.s32 %p1|%p2, %r0, %r1, !%p0;
      $L__end:
        ret;
      }
      .section .debug_str { $L__info_string0: .b8 97, 98, 0 .b32 .debug_abbrev }
    """
    module = parser.parse(text)
    assert module.version == (9, 5)
    assert module.target == "sm_100a"
    assert module.variables["names"].size_bytes == 12
    kernel = module.functions["kernel"]
    assert kernel.limits["maxntid"] == (128,)
    assert module.functions["other"].limits["reqntid"] == (32, 1, 1)
    assert not module.functions["vprintf"].defined
    assert [i.opcode for i in kernel.body][:3] == ["mov.f32", "mov.u32", "mov.u32"]
    assert kernel.body[2].operands[1].value == -14
    assert kernel.body[3].operands[1].offset == 16
    branch: Any = kernel.body[4]
    assert branch.guard.negated
    assert branch.operands[0].index == 7


BEGIN = (
    ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry test()\n{\n.reg .b32 %r<3>;\n"
)


@pytest.mark.parametrize(
    ("rest", "told", "line"),
    [
        ("mov.u32 %r1, %r77;\nret;\n}\n", "the name '%r77' is not declared", 7),
        ("mov.b64 %rd1, 0;\nret;\n}\n", "the name '%rd1' is not declared", 7),
        ("mov.u32 %r1, 0;\nret;\n", "nothing closes this brace", 5),
        ("{\nmov.u32 %r1, 0;\nret;\n}\n", "nothing closes this brace", 5),
        ("ret; /* open\n}\n", "the text ends inside of a comment that begins here", 7),
    ],
)
def test_what_is_missing_is_said(rest: str, told: str, line: int) -> None:
    with pytest.raises(errors.PtxSyntaxError, match=told) as caught:
        parser.parse(BEGIN + rest)
    assert caught.value.where.line == line


@pytest.mark.parametrize("name", ["%pm0", "%envreg3", "%tid.x", "%clock64", "%lanemask_lt"])
def test_special_registers_are_not_declared(name: str) -> None:
    assert parser.parse(f"{BEGIN}mov.u32 %r1, {name};\nret;\n}}\n")
