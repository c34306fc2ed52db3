"""Loads and launches kernels through the CUDA driver API, in the context that torch uses.

A launch is one driver call: everything that can be prepared is prepared when a kernel is loaded.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from humming.errors import HummingError
from humming.hookspecs import Image, MappedMatrix

_TENSOR_MAP_BYTES = 128


class CudaKernel:
    """A loaded kernel; any thread may launch it."""

    def __init__(self, driver: Any, function: Any, entry: str, smem_bytes: int, device: "_Device"):
        self.entry = entry
        self.smem_bytes = smem_bytes
        self._driver = driver
        self._function = function
        self._device = device
        # The driver call releases the interpreter lock: threads must not share these buffers.
        self._slots = threading.local()

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: bytes,
        stream: int,
        pdl: bool = False,
    ) -> None:
        """Enqueues the kernel; returns before it has run.

        Args:
            grid: number of blocks in x, y and z, each at least 1.
            block: threads of a block in x, y and z.
            params: the kernel's one by-value struct, copied before this returns.
            stream: handle of a stream of the kernel's device; 0 is the default stream.
            pdl: lets the kernel start before the one ahead of it in the stream has finished
                (programmatic dependent launch); the kernel must wait for it by itself.

        Raises:
            HummingError: the driver refused; its error is named.
        """
        try:
            slot: _LaunchSlot = self._slots.slot
        except AttributeError:
            slot = self._slots.slot = _LaunchSlot(self._driver, self.smem_bytes, len(params))
        slot.params[:] = params
        config = slot.dependent if pdl else slot.plain
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.hStream = stream
        (error,) = self._driver.cuLaunchKernelEx(config, self._function, slot.pointers, 0)
        if error:
            self._launch_again(error, config, slot.pointers)

    def _launch_again(self, error: Any, config: Any, pointers: int) -> None:
        """Binds the context to a thread that has none yet and tries once more; else reports."""
        driver = self._driver
        if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            _check(driver, driver.cuCtxSetCurrent(self._device.context), "cuCtxSetCurrent")
            (error,) = driver.cuLaunchKernelEx(config, self._function, pointers, 0)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        _check(
            driver,
            (error,),
            f"launching {self.entry} with grid {grid}, block {block} and {self.smem_bytes} bytes "
            f"of shared memory on {self._device}",
        )


class _LaunchSlot:
    """What one thread reuses for each launch of one kernel: parameter buffer and launch configs."""

    def __init__(self, driver: Any, smem_bytes: int, params_bytes: int) -> None:
        buffer = bytearray(params_bytes)
        self.params = memoryview(buffer)
        data = (ctypes.c_char * params_bytes).from_buffer(buffer)
        # The driver takes an array of pointers to parameters; there is one parameter.
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(data))
        self._keep_alive = data
        self.pointers = ctypes.addressof(self._pointers)
        self.plain, self.dependent = driver.CUlaunchConfig(), driver.CUlaunchConfig()
        for config in (self.plain, self.dependent):
            config.sharedMemBytes = smem_bytes
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        self.dependent.attrs = [attribute]
        self.dependent.numAttrs = 1


class CudaRuntime:
    """Kernels and memory of CUDA devices, by the index that torch gives them."""

    name = "cuda"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._devices: dict[int, _Device] = {}
        self._cuda: Any = None

    def load(self, image: Image, entry: str, smem_bytes: int, device_index: int) -> CudaKernel:
        """Loads a compiled kernel, ready to be launched.

        Args:
            image: a cubin for the device's architecture.
            entry: name of the kernel in it.
            smem_bytes: dynamic shared memory of each of its blocks.
            device_index: the device.

        Raises:
            HummingError: no driver, no such device, or an image that it cannot run.
        """
        device = self._device(device_index)
        driver = self._cuda
        with device.current():
            error, module = driver.cuModuleLoadData(image.data)
            _check(driver, (error,), f"loading {entry} on {device}")
            error, function = driver.cuModuleGetFunction(module, entry.encode())
            _check(driver, (error,), f"finding the kernel {entry} in its image")
            if smem_bytes:
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                result = driver.cuFuncSetAttribute(function, limit, smem_bytes)
                _check(driver, result, f"giving {entry} {smem_bytes} bytes of shared memory")
        # Never unloaded: CUDA graphs may hold the kernel as long as the process lives.
        return CudaKernel(driver, function, entry, smem_bytes, device)

    def allocate(self, size_bytes: int, device_index: int) -> int:
        """Returns the address of new device memory that is zero, on every stream, from now on.

        It is outside of torch's allocator, aligned to 256 bytes and never taken back.

        Raises:
            MemoryError: too little is left.
            HummingError: the driver refused; its error is named.
        """
        device = self._device(device_index)
        driver = self._cuda
        with device.current():
            error, address = driver.cuMemAlloc(size_bytes)
            if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise MemoryError(f"{device} has no {size_bytes} bytes left")
            _check(driver, (error,), f"allocating {size_bytes} bytes on {device}")
            # A stream of its own, since another stream may be recording a graph.
            non_blocking = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            error, stream = driver.cuStreamCreate(non_blocking)
            _check(driver, (error,), "cuStreamCreate")
            for result in (
                driver.cuMemsetD8Async(address, 0, size_bytes, stream),
                driver.cuStreamSynchronize(stream),
                driver.cuStreamDestroy(stream),
            ):
                _check(driver, result, f"clearing {size_bytes} bytes on {device}")
        return int(address)

    def tensor_map(self, matrix: MappedMatrix) -> bytes:
        """Returns the driver's tensor map of a matrix; it belongs to no device.

        Raises:
            HummingError: the driver refused; its error is named.
        """
        with self._lock:
            if self._cuda is None:
                self._cuda = _load_driver()
        driver = self._cuda
        types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
        swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_128B
        error, made = driver.cuTensorMapEncodeTiled(
            {
                1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
                2: types.CU_TENSOR_MAP_DATA_TYPE_UINT16,
                4: types.CU_TENSOR_MAP_DATA_TYPE_UINT32,
                8: types.CU_TENSOR_MAP_DATA_TYPE_UINT64,
            }[matrix.element_bytes],
            2,
            matrix.address,
            [driver.cuuint64_t(size) for size in (matrix.columns, matrix.rows)],
            [driver.cuuint64_t(matrix.pitch_bytes)],
            [driver.cuuint32_t(size) for size in (matrix.box_columns, matrix.box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle if matrix.swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        _check(driver, (error,), f"describing {matrix}")
        return ctypes.string_at(made.getPtr(), _TENSOR_MAP_BYTES)

    def _device(self, index: int) -> "_Device":
        with self._lock:
            if self._cuda is None:
                self._cuda = _load_driver()
            if index not in self._devices:
                self._devices[index] = _Device(self._cuda, index)
            return self._devices[index]


class _Device:
    """A device's primary context: the one of the CUDA runtime, hence of torch."""

    def __init__(self, driver: Any, index: int) -> None:
        self._driver, self._index = driver, index
        error, device = driver.cuDeviceGet(index)
        _check(driver, (error,), f"finding CUDA device {index}")
        error, self.context = driver.cuDevicePrimaryCtxRetain(device)
        _check(driver, (error,), f"using CUDA device {index}")

    def __str__(self) -> str:
        return f"CUDA device {self._index}"

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the context current, for calls that are also allowed while a graph is recorded."""
        driver = self._driver
        _check(driver, driver.cuCtxPushCurrent(self.context), "cuCtxPushCurrent")
        # Loading and allocating are forbidden to threads while any thread records a graph in the
        # usual mode, lest they wait for work that is only recorded. These calls don't.
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        error, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
        _check(driver, (error,), "cuThreadExchangeStreamCaptureMode")
        try:
            yield
        finally:
            driver.cuThreadExchangeStreamCaptureMode(before)
            driver.cuCtxPopCurrent()


def _load_driver() -> Any:
    try:
        from cuda.bindings import driver

        result = driver.cuInit(0)
    except (ImportError, RuntimeError, OSError) as error:
        raise HummingError(
            f"The CUDA driver cannot be used ({error}). It needs `pip install cuda-bindings` and "
            "a driver that provides libcuda.so.1."
        ) from error
    _check(driver, result, "starting the CUDA driver")
    return driver


def _check(driver: Any, result: tuple[Any], doing: str) -> None:
    (error,) = result
    if not error:
        return
    _, name = driver.cuGetErrorName(error)
    _, text = driver.cuGetErrorString(error)
    raise HummingError(f"{doing} failed: {_text(name)}: {_text(text)}")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
