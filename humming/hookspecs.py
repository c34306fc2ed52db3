"""What a device plugin may implement: the hooks, and the objects that they return.

A plugin is a module, named by an entry point of the group `humming.devices`, with functions marked
`@hookimpl`. It implements the hooks that it needs, each with any subset of the arguments. Every
result is checked; a plugin that fails or returns something else is reported with its distribution
and the hook, and never takes down the others.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pluggy

from humming.capability import DeviceCapabilities
from humming.components import Component
from humming.errors import PluginError

PROJECT = "humming"
ENTRY_POINT_GROUP = "humming.devices"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook of its name."""


@dataclass(frozen=True, slots=True)
class PresentDevice:
    """A device that a plugin found on this machine.

    Attributes:
        index: its number in the driver, counted from 0; the runtime is given it again. -1 is the
            host itself, whose tensors are torch's CPU tensors; it is used where nothing else is.
        driver_name: what its driver calls it.
        row: name of its row; empty to have it found by the driver name.
        sms, l2_bytes, memory_bytes: what the driver says, None if it does not. Where the row says
            otherwise, `notes` tells.
        plugin: the plugin that found it; filled in by the host.
        notes: what disagrees, or why no row fits; filled in by the host.

    Raises:
        PluginError: a field has another type; the message names it.
    """

    index: int
    driver_name: str
    row: str = ""
    sms: int | None = None
    l2_bytes: int | None = None
    memory_bytes: int | None = None
    plugin: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("index", "sms", "l2_bytes", "memory_bytes"):
            value = getattr(self, name)
            if value is not None or name == "index":
                object.__setattr__(self, name, self._whole(name, value))
        _require(self.index >= -1, "index", self.index, "is less than -1, which is the host")
        for name in ("driver_name", "row", "plugin"):
            value = getattr(self, name)
            _require(isinstance(value, str), name, value, "is no text")
        texts = isinstance(self.notes, tuple) and all(isinstance(n, str) for n in self.notes)
        _require(texts, "notes", self.notes, "is no tuple of texts")

    @staticmethod
    def _whole(name: str, value: Any) -> int:
        try:
            return operator.index(value)  # what drivers return need not be Python's own int
        except TypeError:
            raise PluginError(f"PresentDevice: {name} = {value!r} is no whole number") from None


def _require(holds: bool, name: str, value: object, rule: str) -> None:
    if not holds:
        raise PluginError(f"PresentDevice: {name} = {value!r} {rule}")


@dataclass(frozen=True, slots=True)
class Image:
    """A compiled kernel.

    Attributes:
        kind: what `data` is: `cubin`, `ptx`, or a third party's.
        data: the module, as the runtime loads it.
        log: what the compiler said: warnings, registers, spills.
    """

    kind: str
    data: bytes
    log: str = ""


class Compiler(Protocol):
    """Makes images of composed sources. Creating one must be cheap and must not fail.

    What its methods raise beside errors of humming counts as a defect of the plugin.
    """

    @property
    def name(self) -> str:
        """Short name, part of cache keys: `nvrtc`."""

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor); raises CompileError where no compiler is installed."""

    def options(self, caps: DeviceCapabilities) -> tuple[str, ...]:
        """The options for a device; part of cache keys, so without paths."""

    def compile(
        self, source: str, headers: Mapping[str, str], entry: str, caps: DeviceCapabilities
    ) -> Image:
        """Compile.

        Args:
            source: includes nothing but names in `headers`.
            headers: text by include name, such as `humming/params.cuh`.
            entry: the `extern "C"` kernel.
            caps: the device to compile for.

        Raises:
            CompileError: no compiler, or an error in the source; with options and log.
        """


class Kernel(Protocol):
    """A kernel loaded on one device."""

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: Any,
        stream: int,
        pdl: bool = False,
    ) -> None:
        """Launch on a stream.

        Args:
            grid, block: blocks of the grid, threads of a block.
            params: bytes-like: the kernel's one parameter struct.
            stream: the stream's handle as an integer.
            pdl: whether the kernel may start before its predecessor has ended.
        """


class Buffer(NamedTuple):
    """Memory of the host that a kernel which runs there may access during one launch.

    Attributes:
        address, size_bytes: where it is.
        name: for messages.
        undefined: whether its content counts as undefined until the kernel writes it.
        awaited: whether the launch before may still be writing it if `pdl` is set: then the kernel
            must not read it ahead of `griddepcontrol.wait`.
    """

    address: int
    size_bytes: int
    name: str = ""
    undefined: bool = False
    awaited: bool = False


class MappedMatrix(NamedTuple):
    """A matrix in a device's memory, as a copy engine reads boxes of it.

    A box arrives in shared memory row after row, with zeros where the matrix ends.

    Attributes:
        address, pitch_bytes: where it is, and from one row to the next; multiples of 16.
        rows, columns: its size in elements.
        element_bytes: 1, 2, 4 or 8; what the elements mean does not matter.
        box_rows, box_columns: size of a box in elements, at most 256 each.
        swizzled: whether rows of a box, of 128 bytes, lie under the 128-byte swizzle.
    """

    address: int
    pitch_bytes: int
    rows: int
    columns: int
    element_bytes: int
    box_rows: int
    box_columns: int
    swizzled: bool


class Runtime(Protocol):
    """Loads images. Creating one must be cheap and must not fail.

    What it and its kernels raise beside errors of humming counts as a defect of the plugin; only a
    MemoryError is passed on.

    A runtime whose kernels run on the host's own memory also has `register(address, size_bytes,
    name)`, for memory that they may always access, and its kernels' `launch` takes `buffers`, the
    `Buffer`s that one launch may access; they may access nothing else. It also takes `progress`, a
    function of (blocks that have ended, blocks of the grid), to be called every now and then.

    A runtime of devices with the mover `tma` also has `tensor_map(matrix)`, which returns the 128
    bytes that stand for a `MappedMatrix` in a kernel's parameters.
    """

    def load(self, image: Image, entry: str, smem_bytes: int, device_index: int) -> Kernel:
        """Load an image on a device, with room for dynamic shared memory."""

    def allocate(self, size_bytes: int, device_index: int) -> int:
        """The address of new device memory, zero and there for as long as the process lives.

        Kernels that share their sums between CTAs use it; it must be possible while a stream of
        the device records a graph.
        """


@hookspec
def humming_matrix() -> Path | str | Mapping[str, Any] | None:
    """The plugin's device rows: the path of a YAML file in the format of `device_matrix.yaml`, or
    its content as a mapping, with an `origin` for messages if you like.

    Called once. Rows may refer to families, mma sets, features and devices of other plugins.
    None, or not implementing it, means no rows.
    """


@hookspec
def humming_components() -> Iterable[Component]:
    """The plugin's own device code: which header and struct serves which slot, for which key.

    Called once. Needed only for instructions that the shared components do not know.
    """
    raise NotImplementedError


@hookspec
def humming_include_dirs() -> Iterable[Path | str]:
    """Folders with the plugin's `.cuh`: `<humming/P>` is the file P in one of them.

    Called once. No P may lie in two folders, of this or another plugin or of humming itself.
    """
    raise NotImplementedError


@hookspec
def humming_probe() -> Iterable[PresentDevice]:
    """The devices of this plugin that are present on this machine.

    Called whenever devices are listed. No driver means no devices: return nothing. Anything else
    that goes wrong should raise; the error is shown and other plugins' devices stay usable. Claim
    only devices that are surely yours.
    """
    raise NotImplementedError


@hookspec
def humming_variants(devices: Sequence[DeviceCapabilities]) -> Iterable[DeviceCapabilities]:
    """Devices that the plugin makes of the rows of all plugins, such as a simulation of each.

    Called once, after all matrices have been read, with every sound row. Each result is named
    PREFIX:ROW after the row that it is a variant of, and found under the row's aliases too. A
    variant is no row: it is planned and compiled for when it is named, and listed by itself.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def humming_compiler(device: DeviceCapabilities) -> Compiler | None:
    """The compiler for a device, or None if that is another plugin's matter.

    The plugin that has the device's row is asked first, then the others; of these only one may
    answer.
    """


@hookspec(firstresult=True)
def humming_runtime(device: DeviceCapabilities) -> Runtime | None:
    """What loads and launches kernels on a device, or None if that is another plugin's matter.

    Asked in the order of `humming_compiler`.
    """
