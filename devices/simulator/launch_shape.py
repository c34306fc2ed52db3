"""What a launch is: its shape, and how strictly and in which order it runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from humming.capability import DeviceCapabilities
from humming.errors import HummingError

from .groups import WARP

Dim = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Options:
    """How strictly and in which order kernels run.

    Attributes:
        seed: for a random schedule; None is a fixed one that is fast.
        races: whether unordered accesses of two warps or CTAs to memory are errors.
        patience: basic blocks that threads run while others that could run are waiting.
        max_basic_blocks: basic blocks that some threads run, one after the other, after which a
            wave is taken to be in an endless loop.
        wave_warps: about how many warps run at the same time.
        sums: by which share of its bound, -1 to 1, the sums of tensor cores are moved; kernels
            must not rely on what these are more precisely.
        sums_seed: to move each of them up or down at random; None is all in one direction.
        device: what the simulated device can do, for what the PTX alone does not decide.
    """

    seed: int | None = None
    races: bool = True
    patience: int = 256
    max_basic_blocks: int = 5_000_000
    wave_warps: int = 128
    sums: float = 0.0
    sums_seed: int | None = None
    device: DeviceCapabilities | None = None

    def __post_init__(self) -> None:
        for name, least in (("patience", 1), ("max_basic_blocks", 1), ("wave_warps", 1)):
            self._require(name, f"an integer of at least {least}", _is_integer, least)
        for name in ("seed", "sums_seed"):
            if getattr(self, name) is not None:
                self._require(name, "None or an integer of at least 0", _is_integer, 0)
        self._require("sums", "a number from -1 to 1", _is_share)
        self._require("races", "True or False", lambda value: isinstance(value, bool))
        is_row = self.device is None or isinstance(self.device, DeviceCapabilities)
        self._require("device", "None or a row of the registry", lambda _: is_row)

    def _require(self, name: str, wanted: str, holds: Callable[..., bool], *more: int) -> None:
        value = getattr(self, name)
        if not holds(value, *more):
            raise HummingError(f"Options({name}={value!r}): {name} is {wanted}")


def _is_integer(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_share(value: object) -> bool:
    # NaN compares false.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1 <= value <= 1


_CHANGES: ContextVar[Mapping[str, Any]] = ContextVar(
    "options of the simulator", default=MappingProxyType({})
)


@contextmanager
def options(**changes: Any) -> Iterator[None]:
    """Changes fields of `Options` for all kernels that are launched inside of this.

    They hold for the present thread, also for kernels that were loaded before.

    Raises:
        HummingError: an option that there is not, or a value that it does not take.
    """
    known = [field.name for field in fields(Options) if field.name != "device"]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise HummingError(f"options({unknown[0]}=...): the options are {', '.join(known)}")
    changes = {**_CHANGES.get(), **changes}
    Options(**changes)
    token = _CHANGES.set(changes)
    try:
        yield
    finally:
        _CHANGES.reset(token)


def present(base: Options) -> Options:
    """Options with the changes of `options` around the caller."""
    changes = _CHANGES.get()
    return replace(base, **changes) if changes else base


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a wave: CTAs that run at the same time, their threads, CTAs of a cluster."""

    ctas: int
    block: Dim
    cluster: Dim = (1, 1, 1)
    smem_bytes: int = 0

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cta_warps(self) -> int:
        """Warps of a CTA."""
        return -(-self.threads // WARP)

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]
