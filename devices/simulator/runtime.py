"""Loads PTX images and runs their kernels on the CPU, on the memory of this process."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from humming.capability import DeviceCapabilities
from humming.errors import HummingError
from humming.hookspecs import Buffer, Image, MappedMatrix

from . import (
    availability,
    instructions,  # noqa: F401  (registers the builders)
)
from .global_memory import Allocation, GlobalMemory
from .global_order import GlobalOrder
from .groups import WARP
from .launch_limits import check_directives, check_launch, required_cluster, resident_clusters
from .launch_shape import Dim, Options, Shape, present
from .machine import Beat, Machine
from .program import Program, link
from .ptx_parser import parse
from .ptx_syntax import TYPE_BITS, Symbol, Variable
from .swizzles import B128, OF_TENSOR_MAP
from .tensor_maps import TensorMap

_KEPT_MACHINES = 16
"""How many shapes of launches a kernel keeps a machine for."""


class SimulatedKernel:
    """A loaded kernel. It runs when it is launched, and the launch returns when it has ended."""

    def __init__(
        self, program: Program, memory: GlobalMemory, smem_bytes: int, options: Options
    ) -> None:
        self.program, self.smem_bytes, self.options = program, smem_bytes, options
        self._memory = memory
        self._machines: dict[tuple[Shape, Options], Machine] = {}
        self._globals = _place_globals(program, memory)

    def launch(
        self,
        grid: Dim,
        block: Dim,
        params: Any,
        stream: int = 0,
        pdl: bool = False,
        *,
        cluster: Dim | None = None,
        non_portable: bool = False,
        buffers: Sequence[Buffer] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Runs the kernel.

        Args:
            grid: number of CTAs in x, y and z.
            block: threads of a CTA in x, y and z.
            params: bytes of the kernel's parameters.
            stream: without meaning here: kernels run one after the other.
            pdl: whether buffers that are `awaited` must be read behind `griddepcontrol.wait`.
            cluster: CTAs of a cluster in x, y and z; by default what the kernel requires.
            non_portable: whether clusters may have more CTAs than every device with clusters has.
            buffers: what the kernel may access beside all that the runtime has registered.
            progress: is told every now and then how many CTAs of how many have ended.

        Raises:
            SimulationError: the kernel did what it must not do.
            HummingError: a launch that no device would accept.
        """
        data = bytes(params)
        options = present(self.options)
        cluster = cluster or required_cluster(self.program)
        self._check(grid, Shape(1, block, cluster, self.smem_bytes), data, non_portable)
        # One kernel at a time: they share what is registered, and each machine has one state.
        with self._memory.lent():
            for buffer in buffers:
                self._memory.register(
                    buffer.address, buffer.size_bytes, buffer.name, undefined=buffer.undefined
                )
            try:
                order = GlobalOrder(self._memory) if options.races else None
                self._memory.order = order
                if order is not None:
                    awaited = [b for b in buffers if b.awaited and pdl]
                    order.begin_launch([(b.address, b.address + b.size_bytes) for b in awaited])
                self._run(grid, block, data, cluster, progress, options)
            finally:
                for buffer in buffers:
                    self._memory.forget(buffer.address, buffer.size_bytes)

    def _run(
        self,
        grid: Dim,
        block: Dim,
        data: bytes,
        cluster: Dim,
        progress: Callable[[int, int], None] | None,
        options: Options,
    ) -> None:
        beat = None if progress is None else Beat(progress, math.prod(grid))
        first = 0
        shape = None
        for ctas in self._waves(grid, block, cluster, options):
            # The last wave is a smaller one, on the same machine.
            shape = shape or Shape(len(ctas), block, cluster, self.smem_bytes)
            machine = self._machines.get((shape, options))
            if machine is None:
                if len(self._machines) >= _KEPT_MACHINES:
                    self._machines.clear()
                machine = Machine(self.program, shape, self._memory, options)
                self._machines[shape, options] = machine
            machine.run(ctas, grid, data, self._globals, first, beat)
            first += len(ctas)
            if beat is not None:
                beat.wave_has_ended(len(ctas))

    def _check(self, grid: Dim, shape: Shape, data: bytes, non_portable: bool) -> None:
        program = self.program
        check_launch(program, self.options.device, grid, shape, non_portable=non_portable)
        check_directives(program, shape)
        if len(data) != program.param_bytes:
            told = f"{program.entry.name} has {program.param_bytes} bytes of parameters"
            raise HummingError(f"{told}; {len(data)} are given")

    def _waves(self, grid: Dim, block: Dim, cluster: Dim, options: Options) -> Iterator[list[Dim]]:
        """CTAs that run at the same time, those of a cluster next to each other."""
        threads = block[0] * block[1] * block[2]
        cluster_size = cluster[0] * cluster[1] * cluster[2]
        warps = -(-threads // 32) * cluster_size
        clusters = max(1, options.wave_warps // warps)
        if self.program.polls:
            # A CTA may wait for any other that the device holds at the same time.
            shape = Shape(1, block, cluster, self.smem_bytes)
            resident = resident_clusters(self.program, self.options.device, shape)
            clusters = max(clusters, min(resident, math.prod(grid) // cluster_size))
        wave: list[Dim] = []
        for z in range(0, grid[2], cluster[2]):
            for y in range(0, grid[1], cluster[1]):
                for x in range(0, grid[0], cluster[0]):
                    wave += [
                        (x + i, y + j, z + k)
                        for k in range(cluster[2])
                        for j in range(cluster[1])
                        for i in range(cluster[0])
                    ]
                    if len(wave) == clusters * cluster_size:
                        yield wave
                        wave = []
        if wave:
            yield wave


class SimulatorRuntime:
    """Kernels and memory of a simulated device.

    Kernels may access what is registered, and nothing else. The host registers the tensors that it
    passes to a kernel, by address: their memory is used in place.

    Attributes:
        memory: what is registered.
        options: how kernels that are loaded from now on run.
    """

    name = "simulator"

    def __init__(self, options: Options | None = None) -> None:
        self.memory = GlobalMemory()
        self.options = options or Options()

    def load(
        self, image: Image, entry: str, smem_bytes: int, device_index: int = 0
    ) -> SimulatedKernel:
        """Loads a PTX image.

        Args:
            image: of the kind `ptx`.
            entry: name of the kernel in it.
            smem_bytes: dynamic shared memory of each CTA.
            device_index: without meaning here.

        Raises:
            HummingError: an image of another kind, for another target, or without this kernel.
            PtxSyntaxError: text that is no PTX.
            UnknownInstructionError: an instruction of the kernel, or of a function that it calls,
                that the simulator or the target does not know, also where no thread comes.
        """
        if image.kind != "ptx":
            raise HummingError(f"the simulator runs PTX, and {entry} is a {image.kind}")
        program = _linked(image.data, entry)
        reason = availability.target_refusal(program.module.target, self.options.device)
        if program.module.version == (0, 0):
            reason = "it does not begin with .version"
        if reason:
            raise HummingError(f"the PTX of {entry} cannot be loaded: {reason}")
        _check_instructions(program, self.options.device)
        return SimulatedKernel(program, self.memory, smem_bytes, self.options)

    def register(
        self, address: int, size_bytes: int, name: str = "", *, undefined: bool = False
    ) -> Allocation:
        """Lets kernels access memory of this process; see `GlobalMemory.register`."""
        return self.memory.register(address, size_bytes, name, undefined=undefined)

    def forget(self, address: int, size_bytes: int) -> None:
        """Takes registered memory back."""
        self.memory.forget(address, size_bytes)

    def tensor_map(self, matrix: MappedMatrix) -> bytes:
        """Returns a tensor map for kernels that run here."""
        element = f"uint{8 * matrix.element_bytes}"
        size, box = (matrix.columns, matrix.rows), (matrix.box_columns, matrix.box_rows)
        pitch = (matrix.pitch_bytes,)
        swizzle = OF_TENSOR_MAP.index(B128) if matrix.swizzled else 0
        return TensorMap(element, matrix.address, size, pitch, box, swizzle=swizzle).encode()

    def allocate(self, size_bytes: int, device_index: int = 0) -> int:
        """Returns the address of new memory that is zero; it is never taken back."""
        return self.memory.allocate(size_bytes, "a workspace").base


@lru_cache(maxsize=64)
def _linked(text: bytes, entry: str) -> Program:
    """The program of a kernel; the same one for the same text, which takes long to read."""
    return link(parse(text.decode(errors="replace").rstrip("\0")), entry)


@lru_cache(maxsize=64)
def _check_instructions(program: Program, device: DeviceCapabilities | None) -> None:
    """Decodes every instruction of a kernel, for a machine that never runs it."""
    shape = Shape(1, (WARP, 1, 1))
    machine = Machine(program, shape, GlobalMemory(), Options(races=False, device=device))
    machine.globals = dict.fromkeys((variable.name for variable in program.globals), 0)
    machine.decode_all()


def _place_globals(program: Program, memory: GlobalMemory) -> dict[str, int]:
    """Allocates the module's variables and writes their initial values."""
    places = {
        variable.name: memory.allocate(
            variable.size_bytes or 0, f"the variable {variable.name}", align=variable.align
        )
        for variable in program.globals
    }
    addresses = {name: place.base for name, place in places.items()}
    for variable in program.globals:
        memory.write(addresses[variable.name], _initial_bytes(variable, addresses))
        places[variable.name].writable = variable.space != "const"
    return addresses


def _initial_bytes(variable: Variable, addresses: dict[str, int]) -> bytes:
    width = max(1, TYPE_BITS[variable.type] // 8)
    data = b""
    for value in variable.values:
        number = value
        if isinstance(value, Symbol):
            if value.name not in addresses:
                raise HummingError(f"{variable.name} holds the address of {value.name}")
            number = addresses[value.name] + value.offset >> value.shift
        assert isinstance(number, int)
        data += (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return data
