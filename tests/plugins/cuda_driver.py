"""A stand-in for `cuda.bindings.driver` that shows any devices, or fails in any way."""

from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any


class Result(IntEnum):
    """The results that the probe tells apart, with CUDA's numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_STUB_LIBRARY = 34
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


OK = Result.CUDA_SUCCESS


@dataclass
class Card:
    """A device of the stand-in."""

    name: str
    sms: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 10**9


@dataclass
class FakeDriver:
    """Answers the calls of the probe.

    Attributes:
        cards: the devices, in the driver's order.
        init: what cuInit returns, or raises.
        unknown_attributes: whether no attribute can be read.
    """

    cards: list[Card] = field(default_factory=list)
    init: Result | Exception = OK
    unknown_attributes: bool = False

    CUresult = Result
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms",
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE="l2_bytes",
    )

    def cuInit(self, flags: int) -> tuple[Result]:  # noqa: N802
        if isinstance(self.init, Exception):
            raise self.init
        return (self.init,)

    def cuDeviceGetCount(self) -> tuple[Result, int]:  # noqa: N802
        return OK, len(self.cards)

    def cuDeviceGet(self, index: int) -> tuple[Result, int]:  # noqa: N802
        return OK, index

    def cuDeviceGetName(self, size: int, handle: int) -> tuple[Result, bytes]:  # noqa: N802
        return OK, self.cards[handle].name.encode().ljust(size, b"\0")

    def cuDeviceTotalMem(self, handle: int) -> tuple[Result, int]:  # noqa: N802
        return OK, self.cards[handle].memory_bytes

    def cuDeviceGetAttribute(self, which: str, handle: int) -> tuple[Result, Any]:  # noqa: N802
        if self.unknown_attributes:
            return Result.CUDA_ERROR_INVALID_VALUE, 0
        return OK, getattr(self.cards[handle], which)
