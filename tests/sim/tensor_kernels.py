"""A kernel around `tcgen05` instructions, and matrices as its descriptors describe them.

The kernel fills shared and tensor memory, lets one thread issue the instructions of a test, waits
for their commit, and writes tensor memory out. Layouts are computed here row by row, as the tables
of PTX ISA 9.7.16 draw them, and values by the definition of each format.
"""

import importlib
import struct
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import humming
from humming.errors import CompileError
from humming.hookspecs import Image

_compiler = importlib.import_module("humming.devices.simulator.compiler")
_runtime = importlib.import_module("humming.devices.simulator.runtime")
_launch_shape = importlib.import_module("humming.devices.simulator.launch_shape")

SOURCE = r"""
typedef unsigned u32; typedef unsigned long long u64;
__device__ u32 rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ void wait(u32 bar, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(bar), "r"(parity) : "memory");
}
__device__ void fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
__device__ void fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
extern __shared__ __align__(1024) unsigned char tile[];
extern "C" __global__ void __launch_bounds__(128) test(
    const u32* image, u64 image_words, const u32* filled, u64 columns, u32* out, const u64* args) {
  __shared__ __align__(8) u64 barrier;
  __shared__ u32 address;
  u32 thread = threadIdx.x, warp = thread / 32, cta = rank();
  u32 smem = (u32)__cvta_generic_to_shared(tile);
  u32 bar = (u32)__cvta_generic_to_shared(&barrier);
  if (warp == 0)
    asm volatile("tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%0], ALLOCATED;"
                 :: "r"((u32)__cvta_generic_to_shared(&address)) : "memory");
  for (u64 i = thread; i < image_words; i += 128)
    ((u32*)tile)[i] = image[cta * image_words + i];
  if (thread == 0)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  fence_before();
  __syncthreads();
  fence_after();
  u32 tmem = address, own;
  asm("shl.b32 %0, %1, 21;" : "=r"(own) : "r"(warp));
  own += tmem;
  filled += (cta * 128 + thread) * columns;
  for (u64 i = 0; i < columns; ++i)
    asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};"
                 :: "r"(own + (u32)i), "r"(filled[i]) : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
  fence_before();
  CLUSTER
  fence_after();
  u64 base = (smem & 0x3FFFF) >> 4;
  if (thread == 0 && cta == 0) {
    ISSUE
  }
  wait(bar, 0);
  fence_after();
  out += (cta * 128 + thread) * columns;
  for (u32 i = 0; i < columns; ++i) {
    u32 value;
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];"
                 : "=r"(value) : "r"(own + i) : "memory");
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    out[i] = value & MASK;
  }
  fence_before();
  CLUSTER
  if (warp == 0) {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;");
    asm volatile("tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %0, ALLOCATED;" :: "r"(tmem));
  }
}
"""

COMMIT = (
    'asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"'
    ' :: "r"(bar) : "memory");'
)
COMMIT_PAIR = (
    'asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster'
    '.multicast::cluster.b64 [%0], %1;" :: "r"(bar), "h"((unsigned short)3) : "memory");'
)


@cache
def ptx_of(source: str, arch: str) -> str:
    """The PTX that NVRTC makes of a source; skips the test where NVRTC is too old for it."""
    caps = replace(humming.capabilities("b200"), arch=arch)
    try:
        image = _compiler.PtxCompiler().compile(source, {}, "test", caps)
    except CompileError as error:
        if f"does not know {arch}" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
    text: str = image.data.decode()
    return text


def launch(
    text: str,
    buffers: dict[str, np.ndarray],
    words: list[Any],
    *,
    block: int = 128,
    grid: int = 1,
    cluster: int = 1,
    smem_bytes: int = 0,
    undefined: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Runs the kernel `test`; `words` are its parameters: numbers, or names of buffers."""
    simulator = _runtime.SimulatorRuntime(_launch_shape.Options(**options))
    for name, array in buffers.items():
        simulator.register(array.ctypes.data, array.nbytes, name, undefined=name in undefined)
    kernel = simulator.load(Image("ptx", text.encode()), "test", smem_bytes)
    values = [buffers[w].ctypes.data if isinstance(w, str) else w for w in words]
    params = struct.pack(f"<{len(values)}Q", *values)
    kernel.launch((grid, 1, 1), (block, 1, 1), params, cluster=(cluster, 1, 1))


def run(
    issue: str,
    image: np.ndarray,
    filled: np.ndarray,
    args: list[int],
    *,
    arch: str = "sm_100a",
    group: int = 1,
    allocated: int = 512,
    mask: int = 0xFFFFFFFF,
    edit: Any = None,
    **options: Any,
) -> np.ndarray:
    """Tensor memory after instructions, uint32 [CTAs, 128, columns].

    Args:
        issue: CUDA text of what the thread issues; `tmem` and `smem` are the addresses of tensor
            and shared memory, `base` is what descriptors add, `args[i]` the given numbers.
        image: bytes of shared memory, uint8 [bytes] or [CTAs, bytes].
        filled: first columns of tensor memory, uint32 [128, columns] or [CTAs, 128, columns],
            which are also those that are returned.
        args: see `issue`.
        arch: what is compiled for.
        group: CTAs of the `.cta_group`, and of the launch.
        allocated: columns of tensor memory.
        mask: which bits of each word are read.
        edit: a function of the PTX, that plants a fault.
        options: of the simulator.
    """
    barrier = "cluster_sync();" if group == 2 else "__syncthreads();"
    commit = COMMIT_PAIR if group == 2 else COMMIT
    source = SOURCE.replace("GROUP", str(group)).replace("CLUSTER", barrier)
    source = source.replace("ISSUE", issue.replace("COMMIT", commit))
    source = source.replace("ALLOCATED", str(allocated)).replace("MASK", hex(mask))
    text = ptx_of(source, arch)
    image = np.ascontiguousarray(np.broadcast_to(image, (group, image.shape[-1])))
    filled = np.ascontiguousarray(np.broadcast_to(filled, (group, 128, filled.shape[-1])))
    out = np.zeros(filled.shape, np.uint32)
    buffers = {
        "image": image,
        "filled": filled,
        "out": out,
        "args": np.array([*args, 0], np.uint64),
    }
    launch(
        edit(text) if edit else text,
        buffers,
        ["image", image.shape[1] // 4, "filled", filled.shape[2], "out", "args"],
        grid=group,
        cluster=group,
        smem_bytes=image.shape[1],
        undefined=("out",),
        **options,
    )
    return out


def mma(kind: str, operands: str = "ss", *, group: int = 1, more: str = "", op: str = "") -> str:
    """CUDA text of a product.

    Its arguments: args[0], args[1] are the descriptors of A (or its column in tensor memory) and B
    without the base, args[2] is the instruction descriptor, args[3] the column of D, args[4]
    whether D is read.
    """
    a = "%1" if operands == "ss" else "[%1]"
    value = '"l"(args[0] + base)' if operands == "ss" else '"r"(tmem + (u32)args[0])'
    return f"""
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %4, 0;"
      "tcgen05.mma{op}.cta_group::{group}.kind::{kind} [%0], {a}, %2, %3, p{more}; }}"
      :: "r"(tmem + (u32)args[3]), {value}, "l"(args[1] + base), "r"((u32)args[2]),
         "r"((u32)args[4]) : "memory");
    """


def scaled_mma(kind: str, operands: str = "ss", *, group: int = 1) -> str:
    """The same with block scales, at columns args[5] and args[6]; `kind` has the block size."""
    a = "%1" if operands == "ss" else "[%1]"
    value = '"l"(args[0] + base)' if operands == "ss" else '"r"(tmem + (u32)args[0])'
    return f"""
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %4, 0;"
      "tcgen05.mma.cta_group::{group}.kind::{kind} [%0], {a}, %2, %3, [%5], [%6], p; }}"
      :: "r"(tmem + (u32)args[3]), {value}, "l"(args[1] + base), "r"((u32)args[2]),
         "r"((u32)args[4]), "r"(tmem + (u32)args[5]), "r"(tmem + (u32)args[6]) : "memory");
    """


# -- descriptors ----------------------------------------------------------------------------------

SWIZZLE = {0: 0, 32: 6, 64: 4, 128: 2, "128/32": 1}


def descriptor(start: int, leading: int, stride: int, swizzle: Any = 0) -> int:
    """A shared memory descriptor (9.7.16.4.1), all in bytes."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE[swizzle] << 61


TYPES = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e3m4": 2, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "i8": {"u8": 0, "s8": 1},
    "mxf4": {"e2m1": 1},
    "mxf4nvf4": {"e0m3": 0, "e2m1": 1},
}
TYPES["mxf8f6f4"] = TYPES["f8f6f4"]


def instruction_descriptor(kind: str, a: str, b: str, d: str, m: int, n: int, **fields: int) -> int:
    """An instruction descriptor (9.7.16.4.2) without block scales; fields by their first bit."""
    bits = {"f16": 0, "f32": 1, "s32": 2}[d] << 4
    bits |= TYPES[kind][a] << 7 | TYPES[kind][b] << 10 | n // 8 << 17 | m // 16 << 24
    return bits | sum(value << int(place[1:]) for place, value in fields.items())


def scaled_descriptor(
    kind: str, a: str, b: str, scale: str, m: int, n: int, sfa: int = 0, sfb: int = 0, **fields: int
) -> int:
    """The same with block scales."""
    bits = sfb << 4 | TYPES[kind][a] << 7 | TYPES[kind][b] << 10 | n // 8 << 17
    bits |= int(scale == "ue8m0") << 23 | m // 128 << 27 | sfa << 29
    return bits | sum(value << int(place[1:]) for place, value in fields.items())


# -- values ---------------------------------------------------------------------------------------

_FIELDS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e3m4": (3, 4, 3), "e3m2": (3, 2, 3)}
_FIELDS |= {"e2m3": (2, 3, 1), "e2m1": (2, 1, 1), "f16": (5, 10, 15), "bf16": (8, 7, 127)}
BITS = {name: 1 + e + m for name, (e, m, _) in _FIELDS.items()} | {"e0m3": 4, "u8": 8, "s8": 8}
BITS["tf32"] = 32


def value_of(code: int, name: str) -> float:
    """The value of a code by the definition of its format."""
    if name == "ue8m0":
        return float("nan") if code == 255 else 2.0 ** (code - 127)
    if name == "ue4m3":
        return value_of(code & 127, "e4m3")
    if name == "e0m3":
        return float((code & 7) * (-1) ** (code >> 3))
    if name in ("u8", "s8"):
        return float(code - 256 if name == "s8" and code > 127 else code)
    exponent_bits, mantissa_bits, bias = _FIELDS[name]
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    top = exponent == (1 << exponent_bits) - 1
    if name in ("e4m3", "e3m4") and top and mantissa == (1 << mantissa_bits) - 1:
        return float("nan")
    if name in ("e5m2", "f16", "bf16") and top:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


@cache
def table(name: str) -> np.ndarray:
    """float64 value of every code."""
    bits = {"ue8m0": 8, "ue4m3": 8}.get(name) or BITS[name]
    return np.array([value_of(code, name) for code in range(1 << bits)])


def random_codes(
    rng: np.random.Generator, shape: tuple[int, ...], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Random codes that are finite and of moderate size, and their float64 values."""
    if name in ("f16", "bf16", "tf32"):
        raw = rng.normal(size=shape).astype(np.float32).view(np.uint32)
        if name == "tf32":
            return raw, (raw & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
        if name == "bf16":
            return raw >> 16, (raw >> 16 << 16).view(np.float32).astype(np.float64)
        half = raw.view(np.float32).astype(np.float16)
        return half.view(np.uint16).astype(np.uint32), half.astype(np.float64)
    usable = np.flatnonzero(np.abs(table(name)) < 1000)
    codes = rng.choice(usable, shape).astype(np.uint32)
    return codes, table(name)[codes]


# -- matrices in shared memory --------------------------------------------------------------------


def element_bytes(codes: np.ndarray, name: str, dense4: bool = False) -> np.ndarray:
    """Rows of codes [rows, K] as bytes: 4 and 6 bits in padded groups of 16, or 4 bits dense."""
    if dense4:
        return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    bits = BITS[name]
    if bits in (8, 16, 32):
        return np.ascontiguousarray(codes.astype(f"<u{bits // 8}")).view(np.uint8)
    groups = codes.reshape(len(codes), -1, 16)
    found = np.zeros((*groups.shape[:2], 16), np.uint8)
    for index in np.ndindex(groups.shape[:2]):
        whole = sum(int(code) << bits * place for place, code in enumerate(groups[index]))
        found[index] = np.frombuffer(whole.to_bytes(16, "little"), np.uint8)
    return found.reshape(len(codes), -1)


def k_major(data: np.ndarray, swizzle: int) -> tuple[np.ndarray, int]:
    """Bytes [rows, bytes of K] as they lie in shared memory, and a descriptor that starts at 0."""
    rows, size = data.shape
    if swizzle == 0:
        stride, leading = 128, rows * 16
        image = np.zeros(rows * size, np.uint8)
        for row in range(rows):
            for chunk in range(size // 16):
                at = row // 8 * stride + chunk * leading + row % 8 * 16
                image[at : at + 16] = data[row, 16 * chunk : 16 * chunk + 16]
        return image, descriptor(0, leading, stride)
    image = np.zeros(rows * swizzle, np.uint8)
    for row in range(rows):
        turn = {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}[swizzle]
        for chunk in range(size // 16):
            at = row * swizzle + (chunk ^ turn) * 16
            image[at : at + 16] = data[row, 16 * chunk : 16 * chunk + 16]
    return image, descriptor(0, 16, 8 * swizzle, swizzle)


def mn_major(codes: np.ndarray, name: str, swizzle: Any) -> tuple[np.ndarray, int]:
    """Codes [rows, K] that lie along rows in shared memory, and a descriptor."""
    rows, depth = codes.shape
    size = BITS[name] // 8
    columns = np.ascontiguousarray(codes.T.astype(f"<u{size}")).view(np.uint8)  # [K, bytes]
    width = {0: 16, "128/32": 128}.get(swizzle, swizzle)
    group = 4 if swizzle == "128/32" else 8
    atoms, groups = -(-rows * size // width), depth // group
    image = np.zeros(atoms * groups * group * width, np.uint8)
    per_atom = groups * group * width
    for k in range(depth):
        for chunk in range(rows * size // 16):
            atom, inner = divmod(chunk, width // 16)
            if swizzle == "128/32":
                inner = inner ^ (k % 4) << 1
            elif swizzle:
                turn = {128: k % 8, 64: k // 2 % 4, 32: k // 4 % 2}[swizzle]
                inner = inner ^ turn
            at = atom * per_atom + k // group * group * width + k % group * width + inner * 16
            image[at : at + 16] = columns[k, 16 * chunk : 16 * chunk + 16]
    between_k, between_atoms = group * width, per_atom
    if swizzle == 0:  # the two offsets change places
        return image, descriptor(0, between_k, between_atoms)
    return image, descriptor(0, between_atoms, between_k, swizzle)


def joined(*images: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Images one after the other at multiples of 1024 bytes, and where each begins."""
    parts, starts, at = [], [], 0
    for image in images:
        starts.append(at)
        room = -(-len(image) // 1024) * 1024
        parts.append(np.pad(image, (0, room - len(image))))
        at += room
    return np.concatenate(parts), starts


def scale_columns(codes: np.ndarray) -> np.ndarray:
    """Scales [rows, count] as tensor memory holds them (9.7.16.10.7): uint32 [128, columns]."""
    rows, count = codes.shape
    words = -(-count // 4)
    height = max(4, -(-rows // 32))
    found = np.zeros((words, height, 128), np.uint32)
    for row in range(rows):
        for k in range(count):
            lanes = row % 32 + 32 * np.arange(4)
            found[k // 4, row // 32, lanes] |= np.uint32(int(codes[row, k]) << 8 * (k % 4))
    return np.ascontiguousarray(found.reshape(words * height, 128).T)
