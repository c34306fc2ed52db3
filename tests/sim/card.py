"""Launches a kernel's PTX on the CUDA device that is present, on copies of host memory."""

import contextlib
import ctypes
import importlib
import multiprocessing
import re
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

tensor_maps = importlib.import_module("humming.devices.simulator.tensor_maps")
_PTX_VERSION, _GUARD_BYTES, _PATIENCE_S = "9.0", 4096, 60.0
# A start of a process takes seconds, on a busy machine many.
_START_PATIENCE_S = 300.0
_END_PATIENCE_S = 10.0
# After these a process has to be started anew to use the card again.
_STICKY = (
    "LAUNCH_FAILED",
    "ILLEGAL_",
    "MISALIGNED_",
    "HARDWARE_STACK_ERROR",
    "CONTEXT_IS_DESTROYED",
)
_MAGIC = b"hummingT"

Place = tuple[int, np.ndarray]
"""An allocation: its address on the host, and its bytes before the launch."""


class CardError(Exception):
    """The driver refused something; `assembled` tells whether the PTX had been accepted."""

    def __init__(self, told: str, assembled: bool) -> None:
        super().__init__(told)
        self.assembled = assembled


class CardHangError(Exception):
    """A kernel does not end; the device can't be used any more by this process."""


class Launch(NamedTuple):
    """What a launch says beside its memory.

    Attributes:
        grid, block, cluster: shapes, in CTAs and threads.
        params: bytes of all parameters, where the PTX places them.
        smem_bytes: of dynamic shared memory.
        offsets: of each parameter in `params`. The driver's may differ where one is aligned.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: bytes
    cluster: tuple[int, int, int]
    smem_bytes: int
    offsets: tuple[int, ...] = ()


def retargeted(text: str, target: str) -> str:
    """The PTX for another architecture, in a version that the driver knows."""
    text = re.sub(r"\.version\s+[\d.]+", f".version {_PTX_VERSION}", text)
    return re.sub(r"\.target\s+\w+", f".target {target}", text)


def home_of(address: int, places: Sequence[Place], homes: Sequence[int]) -> int | None:
    """Where an address lies in the copies; None if it is in no allocation."""
    for (start, before), home in zip(places, homes, strict=True):
        if start <= address < start + max(1, len(before)):
            return home + address - start
    return None


def moved(params: bytes, places: Sequence[Place], homes: Sequence[int]) -> bytes:
    """Parameters with every address of an allocation replaced by that of its copy."""
    data = bytearray(params)
    for at in range(0, len(data) - 7, 8):
        (value,) = struct.unpack_from("<Q", data, at)
        home = home_of(value, places, homes)
        if home is not None:
            struct.pack_into("<Q", data, at, home)
    return bytes(data)


def maps_in(data: bytes) -> list[tuple[int, Any]]:
    """The simulator's tensor maps in some memory: their offsets and what they stand for."""
    found, at = [], data.find(_MAGIC)
    while at >= 0:
        part = data[at : at + tensor_maps.BYTES]
        # It may be the same eight bytes by chance, or a map that a kernel is changing.
        with contextlib.suppress(tensor_maps.HummingError):
            found.append((at, tensor_maps.decode(part)))
        at = data.find(_MAGIC, at + 1)
    return found


def arguments_of(tensor: Any, address: int) -> tuple[Any, ...]:
    """What `cuTensorMapEncodeTiled` takes for a map whose tensor lies elsewhere, as numbers.

    Behind these, the corners of the bounding box: only `cuTensorMapEncodeIm2col` takes them.
    """
    names = [each.name for each in tensor_maps.TYPES]
    no_promotion = 0
    return (
        names.index(tensor.dtype),
        tensor.rank,
        address,
        list(tensor.dims),
        list(tensor.strides),
        list(tensor.box),
        list(tensor.element_strides or (1,) * tensor.rank),
        tensor.interleave,
        tensor.swizzle,
        no_promotion,
        tensor.fill,
        list(tensor.corners),
    )


def with_maps(
    data: bytes,
    original: bytes,
    places: Sequence[Place],
    homes: Sequence[int],
    encode: Callable[..., bytes],
) -> bytes:
    """Memory with the driver's tensor maps in place of the simulator's.

    Args:
        data: to be changed.
        original: where the maps are read, which may have been moved in `data`.
        places, homes: allocations and the addresses of their copies.
        encode: the bytes of a map, of the arguments that `arguments_of` makes.

    Raises:
        CardError: a map of something that is no allocation.
    """
    changed = bytearray(data)
    for at, tensor in maps_in(original):
        home = home_of(tensor.address, places, homes)
        if home is None:
            raise CardError("a tensor map of memory that is in no allocation", True)
        changed[at : at + tensor_maps.BYTES] = encode(*arguments_of(tensor, home))
    return bytes(changed)


class Card:
    """The first CUDA device, with a context that is made anew after a fault.

    Attributes:
        name, driver_version: what the driver says.
        target: the architecture that kernels are assembled for.
        most_smem_bytes: of shared memory of a CTA.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._ok(driver.cuInit(0))
        self._device = self._ok(driver.cuDeviceGet(0))
        kinds = driver.CUdevice_attribute
        major, minor = (
            self._ok(driver.cuDeviceGetAttribute(attribute, self._device))
            for attribute in (
                kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        most = kinds.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self.most_smem_bytes = int(self._ok(driver.cuDeviceGetAttribute(most, self._device)))
        self.name = self._ok(driver.cuDeviceGetName(256, self._device)).split(b"\0")[0].decode()
        self.driver_version = int(self._ok(driver.cuDriverGetVersion()))
        self.target = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
        self._enter()

    def _enter(self) -> None:
        driver = self._driver
        self._ok(driver.cuCtxSetCurrent(self._ok(driver.cuDevicePrimaryCtxRetain(self._device))))

    def _ok(self, result: tuple[Any, ...], assembled: bool = True) -> Any:
        if int(result[0]) != 0:
            _, name = self._driver.cuGetErrorName(result[0])
            raise CardError(name.decode() if name else str(result[0]), assembled)
        return result[1] if len(result) > 1 else None

    def run(
        self, text: str, entry: str, places: Sequence[Place], launch: Launch
    ) -> list[np.ndarray]:
        """Launches a kernel on copies of host memory, and returns the memory after it.

        Raises:
            CardError: the driver refuses the kernel or the launch, or the kernel fails.
            CardHangError: it does not end.
        """
        driver = self._driver
        image = retargeted(text, self.target).encode() + b"\0"
        module = self._ok(driver.cuModuleLoadData(image), assembled=False)
        held: list[tuple[Any, int]] = []
        try:
            function = self._ok(driver.cuModuleGetFunction(module, entry.encode()))
            self._set_limits(function, launch)
            for address, before in places:
                # The same offset within 256 bytes, so that alignment is what it was.
                base = self._ok(driver.cuMemAlloc(len(before) + 256 + _GUARD_BYTES))
                held.append((base, int(base) + address % 256))
            homes = [at for _, at in held]
            for (_, before), at in zip(places, homes, strict=True):
                raw = before.tobytes()
                data = np.frombuffer(with_maps(raw, raw, places, homes, self._encode), np.uint8)
                self._ok(driver.cuMemcpyHtoD(at, data, len(data)))
            params = moved(launch.params, places, homes)
            params = with_maps(params, launch.params, places, homes, self._encode)
            self._launch(function, launch, params)
            after = []
            for (_, before), at in zip(places, homes, strict=True):
                found = np.empty(len(before), np.uint8)
                self._ok(driver.cuMemcpyDtoH(found, at, len(before)))
                after.append(found)
            return after
        except CardError:
            driver.cuDevicePrimaryCtxReset(self._device)
            self._enter()
            held, module = [], None
            raise
        except CardHangError:
            held, module = [], None
            raise
        finally:
            for base, _ in held:
                driver.cuMemFree(base)
            if module is not None:
                driver.cuModuleUnload(module)

    def _set_limits(self, function: Any, launch: Launch) -> None:
        driver = self._driver
        attributes = driver.CUfunction_attribute
        if launch.smem_bytes:
            limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._ok(driver.cuFuncSetAttribute(function, limit, launch.smem_bytes))
        x, y, z = launch.cluster
        if x * y * z > 8:
            beyond = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._ok(driver.cuFuncSetAttribute(function, beyond, 1))

    def _encode(self, *arguments: Any) -> bytes:
        """The driver's bytes of a tensor map."""
        driver = self._driver
        kind, rank, address, dims, strides, box, steps, *modes, corners = arguments
        interleave, swizzle, promotion, fill = modes
        wide, narrow = driver.cuuint64_t, driver.cuuint32_t
        shape: list[Any] = [[narrow(b) for b in box]]
        if corners:
            shape = [[c for c, _ in corners], [c for _, c in corners], *shape[0]]
        make = driver.cuTensorMapEncodeIm2col if corners else driver.cuTensorMapEncodeTiled
        encoded = self._ok(
            make(
                driver.CUtensorMapDataType(kind),
                rank,
                address,
                [wide(d) for d in dims],
                [wide(s) for s in strides] or [wide(16)],  # of one dimension, which has none
                *shape,
                [narrow(s) for s in steps],
                driver.CUtensorMapInterleave(interleave),
                driver.CUtensorMapSwizzle(swizzle),
                driver.CUtensorMapL2promotion(promotion),
                driver.CUtensorMapFloatOOBfill(fill),
            ),
            assembled=False,
        )
        return ctypes.string_at(encoded.getPtr(), tensor_maps.BYTES)

    def _launch(self, function: Any, launch: Launch, params: bytes) -> None:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.smem_bytes
        if launch.cluster != (1, 1, 1):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = attribute.value.clusterDim
            dims.x, dims.y, dims.z = launch.cluster
            config.attrs, config.numAttrs = [attribute], 1
        # Tensor maps among the parameters must lie at a multiple of 64 bytes.
        buffer = ctypes.create_string_buffer(len(params) + 64)
        start = -(-ctypes.addressof(buffer) // 64) * 64
        ctypes.memmove(start, params, len(params))
        pointers = [start + offset for offset in launch.offsets]
        array = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
        self._ok(driver.cuLaunchKernelEx(config, function, ctypes.addressof(array), 0))
        self._wait()

    def _wait(self) -> None:
        driver, end = self._driver, time.monotonic() + _PATIENCE_S
        while True:
            result = driver.cuStreamQuery(0)
            if result[0] != driver.CUresult.CUDA_ERROR_NOT_READY:
                self._ok(result)
                return
            if time.monotonic() > end:
                raise CardHangError(f"the kernel has not ended after {_PATIENCE_S:.0f} s")
            time.sleep(0.0005)


class CardProcess:
    """A card that a process of its own uses, which is replaced when a kernel has made it useless.

    Attributes:
        name, driver_version, target, most_smem_bytes: as those of `Card`.

    Args:
        make: makes the card, in the process.
        patience_s: how long an answer may take beyond the patience of the card itself.
    """

    def __init__(
        self, make: Callable[[], Any] = Card, patience_s: float = _START_PATIENCE_S
    ) -> None:
        self._make, self._patience_s = make, patience_s
        self._process: Any = None
        self._start()

    def run(
        self, text: str, entry: str, places: Sequence[Place], launch: Launch
    ) -> list[np.ndarray]:
        """As `Card.run`."""
        if self._process is None:
            self._start()
        with contextlib.suppress(ConnectionError):  # whose reason the answer is
            self._pipe.send((text, entry, list(places), launch))
        found: list[np.ndarray] = self._answer()
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            # What waits for the driver in the kernel of the system may outlive its death.
            self._process.join(_END_PATIENCE_S)
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawned.Pipe()
        self._process = spawned.Process(target=_serve, args=(theirs, self._make), daemon=True)
        self._process.start()
        theirs.close()
        self.name, self.driver_version, self.target, self.most_smem_bytes = self._answer()

    def _answer(self) -> Any:
        try:
            if not self._pipe.poll(_PATIENCE_S + self._patience_s):
                raise CardHangError("the card's process does not answer")
            error, answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(1)  # it may be about to say why
            self.close()
            raise CardError("the card's process has died", True) from None
        except CardHangError:
            self.close()
            raise
        if error == "":
            return answer
        if error == "hang":
            self.close()
            raise CardHangError(answer)
        told, assembled = answer
        if any(name in told for name in _STICKY):
            self.close()
        raise CardError(told, assembled)


def _serve(pipe: Any, make: Callable[[], Any]) -> None:
    """Makes a card, then answers launches with ("", memory) or with what went wrong."""
    try:
        card = make()
        pipe.send(("", (card.name, card.driver_version, card.target, card.most_smem_bytes)))
    except Exception as error:
        pipe.send(("error", (repr(error), False)))
        return
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("", card.run(*asked)))
        except CardError as error:
            pipe.send(("error", (str(error), error.assembled)))
        except CardHangError as error:
            pipe.send(("hang", str(error)))
        except Exception as error:  # of the card's code: the process goes on
            pipe.send(("error", (repr(error), True)))
