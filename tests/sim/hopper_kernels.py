"""Runs CUDA kernels for sm_90a in the simulator: NVRTC makes PTX of them, as for composed ones."""

import functools
import importlib
import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from humming.hookspecs import Image

runtime = importlib.import_module("humming.devices.simulator.runtime")
launch_shape = importlib.import_module("humming.devices.simulator.launch_shape")
tensor_maps = importlib.import_module("humming.devices.simulator.tensor_maps")
compiler = importlib.import_module("humming.devices.simulator.compiler")
errors = importlib.import_module("humming.devices.simulator.errors")

PRELUDE = r"""
using u8 = unsigned char; using u16 = unsigned short; using u32 = unsigned; using i32 = int;
using u64 = unsigned long long;
struct alignas(64) Map { u64 opaque[16]; };
u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
u32 remote(u32 address, u32 rank) {
  u32 r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
u32 rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
void init(u64* bar, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(shared(bar)), "r"(count) : "memory");
}
void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
void expect(u64* bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
               :: "r"(shared(bar)), "r"(bytes) : "memory");
}
void arrive(u64* bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared(bar)) : "memory");
}
void arrive_remote(u64* bar, u32 rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
               :: "r"(remote(shared(bar), rank)) : "memory");
}
void wait(u64* bar, u32 parity) {
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra L; }"
               :: "r"(shared(bar)), "r"(parity) : "memory");
}
void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
               ::: "memory");
}
void load(void* to, const void* from, u32 bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1], %2, [%3];"
               :: "r"(shared(to)), "l"(from), "r"(bytes), "r"(shared(bar)) : "memory");
}
void store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(to), "r"(shared(from)), "r"(bytes) : "memory");
}
void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
void wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
void load_2d(void* to, const Map* map, i32 x, i32 y, u64* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3}], [%4];"
               :: "r"(shared(to)), "l"(map), "r"(x), "r"(y), "r"(shared(bar)) : "memory");
}
"""


@functools.cache
def ptx(source: str, entry: str = "test", arch: str = "sm_90a") -> Image:
    """The PTX that NVRTC makes of a kernel behind the prelude."""
    caps: Any = SimpleNamespace(arch=arch)
    return compiler.PtxCompiler().compile(PRELUDE + source, {}, entry, caps)


def run(
    source: str,
    *arguments: Any,
    grid: Any = 1,
    block: int = 128,
    cluster: Any = 1,
    smem_bytes: int = 0,
    undefined: tuple[int, ...] = (),
    arch: str = "sm_90a",
    **options: Any,
) -> None:
    """Runs the kernel `test`, with arrays (by address), 32-bit integers and tensor maps."""
    simulator = runtime.SimulatorRuntime(launch_shape.Options(**options))
    params = b""
    for place, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            name = f"argument {place}"
            simulator.register(
                argument.ctypes.data, argument.nbytes, name, undefined=place in undefined
            )
            params = _aligned(params, 8) + struct.pack("<Q", argument.ctypes.data)
        elif isinstance(argument, MapOf):
            simulator.register(
                argument.array.ctypes.data, _extent(argument.array), "the array of a map"
            )
            params = _aligned(params, 64) + argument.data
        else:
            params = _aligned(params, 4) + struct.pack("<I", argument & 0xFFFFFFFF)
    kernel = simulator.load(ptx(source, arch=arch), "test", smem_bytes)
    params = params[: kernel.program.param_bytes]
    kernel.launch(_dim(grid), _dim(block), params, cluster=_dim(cluster))


def _extent(array: np.ndarray) -> int:
    """Bytes from the first to the last element of an array."""
    steps = zip(array.shape, array.strides, strict=True)
    return sum((size - 1) * stride for size, stride in steps) + array.itemsize


def _aligned(data: bytes, to: int) -> bytes:
    return data + bytes(-len(data) % to)


def _dim(value: Any) -> tuple[int, int, int]:
    return value if isinstance(value, tuple) else (value, 1, 1)


def aligned(shape: Any, dtype: Any, align: int = 128) -> np.ndarray:
    """A zeroed array whose address is a multiple of `align`."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size].view(dtype).reshape(shape)


def placed(values: np.ndarray) -> np.ndarray:
    """A copy of an array at an aligned address."""
    found = aligned(values.shape, values.dtype)
    found[...] = values
    return found


class MapOf(NamedTuple):
    """A tensor map as an argument of a kernel, with the array that it is of."""

    data: bytes
    array: np.ndarray


def tensor_map(array: np.ndarray, dtype: str, box: tuple[int, ...], **more: Any) -> MapOf:
    """A map of a whole array, whose last dimension is the first one of the map."""
    tensor = tensor_maps.TensorMap(
        dtype, array.ctypes.data, array.shape[::-1], array.strides[-2::-1], box, **more
    )
    return MapOf(tensor.encode(), array)
