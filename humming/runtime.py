"""What a device holds while it computes products: loaded kernels by range of M, and workspaces.

`gemm_for` answers with a `Gemm`, and calling that is all that a product does on the host: a look-up
in a table of ranges and one launch. Kernels are composed, compiled and loaded when the first
product of their range is asked for, or ahead of that by `Gemm.prepare`.
"""

import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._device import DeviceContext

from humming import env, hookspecs, mapped, plugins, progress
from humming.capability import DeviceCapabilities
from humming.compiler import CompiledKernel, compile_many, compile_plan
from humming.composer import KernelPlan, compose, m_ranges
from humming.errors import HummingError, PluginError, UnsupportedError
from humming.problem import GemmProblem

# GemmParams of kernels/params.cuh: 13 addresses, 2 strides, then m, n, k, scales of a token and
# whether dependents start early, and padding.
_PARAMS = struct.Struct("<15q5i4x")
# The tensor maps of MappedGemmParams, and what lies before them.
_TENSOR_MAP_BYTES = 128
_MAPS_PADDING = bytes(-_PARAMS.size % mapped.PARAMS_ALIGN_BYTES)
# Matrices whose tensor maps a kernel keeps, of activations and of weights each: those of a model
# return to the same addresses.
_KEPT_MAPS = 4096
_HOOK = "humming_runtime"
# Tiles along tokens: grids are narrow in y, and tiles are numbered in 32 bits with a sign.
_MAX_GRID_Y = 65535
_MAX_TILES = (1 << 31) - 1
_ALIGNMENT_BYTES = 16

# What is allocated at a time for split-K: counters of graphs and counters of a stream (4 bytes
# each), and the least that partial sums of a stream get.
_ARENA_COUNTERS = 1 << 18
_STREAM_COUNTERS = 1 << 14
_STREAM_PARTIALS_BYTES = 1 << 20

# The handle of the current stream; the private function is the one that torch's own generated code
# calls, and several times faster than making a Stream object.
_current_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda index: torch.cuda.current_stream(index).cuda_stream,
)


class Operands(NamedTuple):
    """The constant tensors of a product: a packed weight and a bias."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    second_scale: torch.Tensor | None
    bias: torch.Tensor | None


class TokenScales(NamedTuple):
    """What belongs to the codes of quantized activations.

    Attributes:
        scales: [m, G], [m, 1] or [1, 1], as `QuantizedActivation` holds them.
        zeros: int8 of the scales' shape where the activations have a zero point.
        second: float32 [1] or None.
        row_sums: float32 [n] where they have a zero point: the sums of the weights of each row, as
            the kernel sums them: codes less zero points where their scales come last, else scaled.
    """

    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    second: torch.Tensor | None = None
    row_sums: torch.Tensor | None = None


class Workspaces:
    """Memory of one device in which split-K kernels reduce: partial sums and counters of tiles.

    Kernels expect counters that are zero and leave them zero, so memory that is cleared once serves
    any number of launches as long as these do not overlap.

    - Eager launches: those of one stream follow each other, so they share one workspace a stream.
    - Launches recorded into CUDA graphs: a graph is replayed on any stream, beside other graphs and
      eager work, so nothing of the above may be in it. Partial sums come from torch while it
      records: from the graph's own memory, which torch reuses along the graph. Counters cannot
      come from there, because the graph puts other things into that memory, and clearing it would
      add a node to each replay. Each recorded launch has counters that no other launch uses.

    The memory comes from the device's runtime instead of torch, for torch may be recording, or
    warming up with a pool whose every block it wants back, when a workspace has to grow.

    Args:
        allocate: returns the address of so many bytes of cleared memory, for good.
    """

    def __init__(self, allocate: Callable[[int], int]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._streams: dict[int, _StreamWorkspace] = {}
        self._arena_at = self._arena_counters = 0

    def of_stream(self, stream: int, partials_bytes: int, counters: int) -> tuple[int, int]:
        """Returns the addresses of partial sums and counters for launches outside of graphs."""
        found = self._streams.get(stream)
        if found is None or found.partials_bytes < partials_bytes or found.counters < counters:
            found = self._grow(stream, partials_bytes, counters)
        return found.partials_at, found.counters_at

    def of_graph(self, counters: int) -> int:
        """Returns the address of counters that no other launch uses."""
        # Whole cache lines of 128 bytes, so that launches side by side do not slow each other.
        counters = -(-counters // 32) * 32
        with self._lock:
            if self._arena_counters < counters:
                self._arena_counters = max(_ARENA_COUNTERS, counters)
                self._arena_at = self._allocate(4 * self._arena_counters)
            self._arena_counters -= counters
            return self._arena_at + 4 * self._arena_counters

    def _grow(self, stream: int, partials_bytes: int, counters: int) -> "_StreamWorkspace":
        with self._lock:
            old = self._streams.get(stream, _StreamWorkspace(0, 0, 0, 0))
            # Powers of two, because what is outgrown stays: another thread may be about to launch
            # with it. All that was outgrown together is no larger than what replaces it.
            if old.partials_bytes < partials_bytes:
                size = max(_STREAM_PARTIALS_BYTES, 1 << (partials_bytes - 1).bit_length())
                old = old._replace(partials_at=self._allocate(size), partials_bytes=size)
            if old.counters < counters:
                count = max(_STREAM_COUNTERS, 1 << (counters - 1).bit_length())
                old = old._replace(counters_at=self._allocate(4 * count), counters=count)
            self._streams[stream] = old
            return old


class _StreamWorkspace(NamedTuple):
    partials_at: int
    partials_bytes: int
    counters_at: int
    counters: int


class Kernel:
    """The kernel of a plan, loaded on one device.

    Args:
        plan: what was composed.
        device_index: index of the device, as torch counts.
        compiled: the plan's compiled kernel; if None, it is compiled here, through the cache.
    """

    def __init__(
        self, plan: KernelPlan, device_index: int, compiled: CompiledKernel | None = None
    ) -> None:
        self.plan = plan
        self.compiled = compiled or compile_plan(plan)
        device = _device(plan.decision.capabilities, device_index)
        self._launch: Any = device.load(self.compiled, plan.smem_bytes).launch
        self._workspaces = device.workspaces
        self._on_host = device_index < 0
        self._task = f"{plan.decision.capabilities.name}, CTAs"
        # Everything that a launch needs of the plan, so that it looks nothing up.
        tile = plan.tile
        self._n, self._tiles_n = plan.problem.n, plan.grid(1)[0]
        early = plan.overlap.early_ctas
        self._early_tiles_m = (
            _MAX_TILES if early is None else early / (self._tiles_n * tile.split_k)
        )
        self._max_tiles_m = min(_MAX_GRID_Y, _MAX_TILES // self._tiles_n)
        self._block_m, self._split_k, self._block = tile.block_m, tile.split_k, (tile.threads, 1, 1)
        self._uses_workspace = tile.uses_workspace
        self._partials_bytes = 4 * tile.block_n * tile.block_m * tile.split_k  # a tile
        self._pdl = plan.pdl and env.dependent_launch()
        self._mapped, self._map_of = plan.lowering.has_producer, device.tensor_map
        self._token_maps: dict[tuple[int, ...], bytes] = {}
        self._weight_maps: dict[tuple[int, ...], bytes] = {}

    def launch(
        self,
        x: torch.Tensor,
        operands: Operands,
        out: torch.Tensor,
        stream: int,
        tokens: TokenScales | None = None,
    ) -> None:
        """Enqueues a product on a stream of the current device; all operands have been checked.

        Args:
            x: activations [m, k], m > 0, in rows that are 16-byte aligned and have unit stride, k a
                multiple of 8; or codes of quantized ones, uint8 [m, bytes of a row], in rows that
                may be read, as zeros, up to a multiple of 16 bytes.
            operands: what x is multiplied with, n rows.
            out: [m, n] with unit stride along n; it is written.
            stream: handle of the stream.
            tokens: what belongs to the codes, if x holds codes.

        Raises:
            UnsupportedError: more tokens than a launch can cover, or an operand lies askew.
            HummingError: the driver refused, or the runtime's plugin is broken.
        """
        m, k = x.shape
        tiles_m = -(-m // self._block_m)
        if tiles_m > self._max_tiles_m:
            raise UnsupportedError(
                f"a product of {m} tokens",
                f"a launch covers at most {self._max_tiles_m * self._block_m}",
                "Split the tokens over several calls.",
            )
        partials = None  # holds a graph's partial sums until the launch is recorded
        partials_at = counters_at = 0
        if self._uses_workspace:
            tiles = self._tiles_n * tiles_m
            if not self._on_host and torch.cuda.is_current_stream_capturing():
                partials = x.new_empty(tiles * self._partials_bytes, dtype=torch.uint8)
                partials_at = partials.data_ptr()
                counters_at = self._workspaces.of_graph(tiles)
            else:
                partials_at, counters_at = self._workspaces.of_stream(
                    stream, tiles * self._partials_bytes, tiles
                )
        codes, scales, zeros, second_scale, bias = operands
        x_at, codes_at, scales_at = x.data_ptr(), codes.data_ptr(), scales.data_ptr()
        zeros_at = 0 if zeros is None else zeros.data_ptr()
        if (x_at | codes_at | scales_at | zeros_at) % _ALIGNMENT_BYTES:
            raise UnsupportedError(
                "activations and packed weight at the addresses "
                f"{x_at:#x}, {codes_at:#x}, {scales_at:#x}, {zeros_at:#x}",
                f"kernels read them in pieces of {_ALIGNMENT_BYTES} bytes",
                "Clone the tensor that does not start at a multiple of that.",
            )
        x_scales_at, x_zeros_at, x_second_at, row_sums_at, x_groups = 0, 0, 0, 0, 0
        if tokens is not None:
            k = self.plan.problem.k
            x_groups = tokens.scales.shape[1]
            x_scales_at, x_zeros_at, x_second_at, row_sums_at = map(address_of, tokens)
        params = _PARAMS.pack(
            x_at,
            x_scales_at,
            x_zeros_at,
            x_second_at,
            codes_at,
            scales_at,
            zeros_at,
            0 if second_scale is None else second_scale.data_ptr(),
            row_sums_at,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            partials_at,
            counters_at,
            x.stride(0) * x.element_size(),
            out.stride(0),
            m,
            self._n,
            k,
            x_groups,
            tiles_m >= self._early_tiles_m,
        )
        if self._mapped:
            params += self._maps_of(x, m, codes_at, scales_at, zeros_at)
        grid = (self._tiles_n, tiles_m, self._split_k)
        try:
            if self._on_host:
                # The host takes its time, and its launches return when they have ended.
                with progress.watch(self._task) as told:
                    self._launch(
                        grid,
                        self._block,
                        params,
                        stream,
                        self._pdl,
                        buffers=_buffers(x, operands, out, tokens),
                        progress=told,
                    )
            else:
                self._launch(grid, self._block, params, stream, self._pdl)
        except (HummingError, MemoryError):
            raise
        except Exception as error:
            raise plugins.fault(_HOOK, self.plan.decision.capabilities, error) from error

    def _maps_of(self, x: torch.Tensor, m: int, codes: int, scales: int, zeros: int) -> bytes:
        """What follows the parameters of a kernel whose operands a copy engine reads."""
        # Apart, for layers of one shape share a kernel, and their tokens the places torch gives.
        tokens = (x.data_ptr(), x.stride(0) * x.element_size(), m, x.shape[1], x.element_size())
        of_tokens = self._token_maps.get(tokens)
        if of_tokens is None:
            matrix = mapped.tokens_matrix(self.plan, *tokens)
            of_tokens = _keep(self._token_maps, tokens, self._encode([matrix]))
        weight = codes, scales, zeros
        of_weight = self._weight_maps.get(weight)
        if of_weight is None:
            matrices = mapped.weight_matrices(self.plan, *weight)
            of_weight = _keep(self._weight_maps, weight, self._encode(matrices))
        return _MAPS_PADDING + of_tokens + of_weight

    def _encode(self, matrices: Iterable[hookspecs.MappedMatrix | None]) -> bytes:
        """Maps one behind the other; zeros where there is no matrix."""
        return b"".join(
            bytes(_TENSOR_MAP_BYTES) if matrix is None else self._map_of(matrix)
            for matrix in matrices
        )


def _keep(maps: dict[tuple[int, ...], bytes], key: tuple[int, ...], made: bytes) -> bytes:
    """Keeps what was made; where it is too much, of the rest nothing."""
    if len(maps) >= _KEPT_MAPS:
        maps.clear()
    maps[key] = made
    return made


class Gemm:
    """One problem on one device: a table from ranges of M to loaded kernels.

    Args:
        problem: what is computed.
        device_index: index of the device, as torch counts; -1 is the host.
        device: name of the device where that is to be another than the index implies: one that
            the host simulates.
    """

    def __init__(self, problem: GemmProblem, device_index: int, device: str | None = None) -> None:
        self.problem = problem
        self.device_index = device_index
        self.capabilities = plugins.capabilities(device_index if device is None else device)
        if device is not None:
            check_place(self.capabilities, device_index)
        self._lock = threading.Lock()
        self._ranges = m_ranges(problem, self.capabilities)
        self._bounds = [high for _, high in self._ranges if high is not None]
        self._kernels: list[Kernel | None] = [None] * len(self._ranges)

    def __call__(
        self,
        x: torch.Tensor,
        operands: Operands,
        out: torch.Tensor,
        tokens: TokenScales | None = None,
    ) -> None:
        """Enqueues a product on the current stream of the device; arguments as `Kernel.launch`."""
        index = self.device_index
        kernel = self.kernel(x.shape[0])
        if index < 0:
            kernel.launch(x, operands, out, 0, tokens)  # the host runs one kernel after the other
        elif torch.cuda.current_device() == index:
            kernel.launch(x, operands, out, _current_stream(index), tokens)
        else:
            with torch.cuda.device(index):
                kernel.launch(x, operands, out, _current_stream(index), tokens)

    def kernel(self, m: int) -> Kernel:
        """Returns the kernel that serves `m` tokens; composes, compiles and loads it if need be."""
        place = bisect_left(self._bounds, m)
        return self._kernels[place] or self._load([place])[0]

    def prepare(self, tokens: Iterable[int] | None = None) -> None:
        """Loads the kernels for these numbers of tokens, or for any, and compiles them in parallel.

        Worth calling before a CUDA graph is recorded or a server takes requests.
        """
        if tokens is None:
            self._load(range(len(self._ranges)))
        else:
            self._load(sorted({bisect_left(self._bounds, m) for m in tokens}))

    def _load(self, places: Sequence[int]) -> list[Kernel]:
        with self._lock:
            missing = [place for place in places if self._kernels[place] is None]
            ranges = (self._ranges[place] for place in missing)
            plans = [compose(self.problem, self.capabilities, m_range) for m_range in ranges]
            for place, plan, compiled in zip(missing, plans, compile_many(plans), strict=True):
                self._kernels[place] = Kernel(plan, self.device_index, compiled)
            return [kernel for place in places if (kernel := self._kernels[place])]


class _Device:
    """What all kernels of one device share."""

    def __init__(self, caps: DeviceCapabilities, index: int) -> None:
        self._caps, self._runtime, self._index = caps, plugins.runtime_for(caps), index
        self._lock = threading.Lock()
        self._loaded: dict[tuple[str, int], hookspecs.Kernel] = {}
        self.workspaces = Workspaces(self._allocate)

    def load(self, compiled: CompiledKernel, smem_bytes: int) -> hookspecs.Kernel:
        """Loads a kernel once, however many layers use it: its source does not know N and K."""
        with self._lock:
            key = (compiled.key, smem_bytes)
            if key not in self._loaded:
                with plugins.calling(_HOOK, self._caps):
                    kernel = self._runtime.load(
                        compiled.image, compiled.entry, smem_bytes, self._index
                    )
                    if not callable(getattr(kernel, "launch", None)):
                        raise PluginError(f"load returned {kernel!r}, which has no launch")
                self._loaded[key] = kernel
            return self._loaded[key]

    def tensor_map(self, matrix: hookspecs.MappedMatrix) -> bytes:
        """The bytes that stand for a matrix in parameters of kernels."""
        with plugins.calling(_HOOK, self._caps):
            made: Any = getattr(self._runtime, "tensor_map", None)
            if made is None:
                raise PluginError("the runtime has no tensor_map, which kernels of the device need")
            found = bytes(made(matrix))
            if len(found) != _TENSOR_MAP_BYTES:
                raise PluginError(f"tensor_map returned {len(found)} bytes")
            return found

    def _allocate(self, size_bytes: int) -> int:
        with plugins.calling(_HOOK, self._caps):
            try:
                return int(self._runtime.allocate(size_bytes, self._index))
            except MemoryError:
                # torch may keep all that is left of the device for itself.
                torch.cuda.empty_cache()
                return int(self._runtime.allocate(size_bytes, self._index))


_lock = threading.RLock()
_devices: dict[tuple[int, str], _Device] = {}
_gemms: dict[tuple[GemmProblem, int, str | None], Gemm] = {}


def gemm_for(problem: GemmProblem, device_index: int, device: str | None = None) -> Gemm:
    """Returns the table of kernels for a problem on a device, the same one each time.

    Raises:
        UnsupportedError: no row of the matrix describes the device, or it is somewhere else.
    """
    with _lock:
        key = (problem, device_index, device)
        if key not in _gemms:
            _gemms[key] = Gemm(problem, device_index, device)
        return _gemms[key]


def runs_on_host(caps: DeviceCapabilities) -> bool:
    """Whether kernels of a device run on this machine's own memory, whatever is present."""
    try:
        runtime = plugins.runtime_for(caps)
        with plugins.calling(_HOOK, caps):
            return hasattr(runtime, "register")
    except PluginError:
        return False  # nothing runs its kernels, here or elsewhere


def load_kernel(
    compiled: CompiledKernel, caps: DeviceCapabilities, device_index: int, smem_bytes: int = 0
) -> hookspecs.Kernel:
    """A compiled kernel on a device, loaded once per process; -1 is the host."""
    return _device(caps, device_index).load(compiled, smem_bytes)


def current_stream(index: int) -> int:
    """The handle of torch's current stream of a device; 0 on the host."""
    return 0 if index < 0 else _current_stream(index)


def is_plain(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether an operator would do nothing but call what it is made of.

    Then the detour through torch's dispatcher, which takes longer on the host than all the rest,
    can be left out.
    """
    return not torch.compiler.is_compiling() and x.is_cuda and not is_watched(x, *others)


def is_watched(*tensors: torch.Tensor | None) -> bool:
    """Whether someone traces, counts, transforms or differentiates what is done with tensors."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or (torch._C._len_torch_function_stack() and _functions_are_watched())
    ):
        return True
    if not _ORDINARY.issuperset(map(type, tensors)):
        return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors if t is not None)


_ORDINARY = {torch.Tensor, torch.nn.Parameter, type(None)}


def _functions_are_watched() -> bool:
    """Whether a mode of torch's functions is more than the default device, which is one as well."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def check_place(caps: DeviceCapabilities, index: int, doing: str = "a product") -> None:
    """Refuses a device that is not where the tensors are; `doing` is what is to be done there."""
    here = runs_on_host(caps) if index < 0 else plugins.capabilities(index).name == caps.name
    if not here:
        place = "the CPU" if index < 0 else f"CUDA device {index}"
        variants = [v.name for v in plugins.registry().variants()]
        simulated = [name for name in variants if name.endswith(f":{caps.name}")]
        raise UnsupportedError(
            f"{doing} of tensors on {place} by {caps.name}",
            "its kernels run where it is",
            f"Move the tensors there, or name {' or '.join(simulated) or 'a device'} "
            "for tensors on the CPU.",
        )


def _device(caps: DeviceCapabilities, index: int) -> _Device:
    # The host stands in for any device, so its index alone does not tell.
    key = (index, caps.name if index < 0 else "")
    with _lock:
        if key not in _devices:
            _devices[key] = _Device(caps, index)
        return _devices[key]


def address_of(tensor: torch.Tensor | None) -> int:
    """Where a tensor lies; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


# What kernels ahead may still be writing: all that is no part of a packed weight.
_AWAITED = ("x", "x_scales", "x_zeros", "x_second", "bias")


def _buffers(
    x: torch.Tensor, operands: Operands, out: torch.Tensor, tokens: TokenScales | None = None
) -> list[hookspecs.Buffer]:
    """The memory that a product uses: the output not yet written, activations perhaps just so."""
    named = {"x": x, **operands._asdict(), "out": out}
    if tokens is not None:
        named |= {f"x_{name}": tensor for name, tensor in tokens._asdict().items()}
    buffers = [
        hookspecs.Buffer(
            tensor.data_ptr(),
            extent_bytes(tensor),
            name,
            undefined=name == "out",
            awaited=name in _AWAITED,
        )
        for name, tensor in named.items()
        if tensor is not None and tensor.numel()
    ]
    if tokens is not None:
        # Rows of codes are read up to the next one.
        buffers[0] = buffers[0]._replace(size_bytes=x.shape[0] * x.stride(0))
    # Columns of one matrix lie between one another's rows: all of them together are one buffer.
    merged: list[hookspecs.Buffer] = []
    for buffer in sorted(buffers):
        if merged and buffer.address < sum(merged[-1][:2]):
            last = merged.pop()
            end = max(sum(last[:2]), sum(buffer[:2]))
            name = f"{last.name} and {buffer.name}"
            awaited = last.awaited or buffer.awaited
            buffer = hookspecs.Buffer(last.address, end - last.address, name, awaited=awaited)
        merged.append(buffer)
    return merged


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
