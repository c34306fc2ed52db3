"""`humming.quantize_activation`, the torch operator behind it, and what it gives.

One kernel reads the activations once and writes codes and scales; `docs/formats.md` says how they
are defined, and `humming.reference.quantize_activation` computes the same bits in plain torch.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch

from humming import env, plugins, reference, runtime
from humming.compiler import compile_source
from humming.dtypes import DataType
from humming.errors import UnsupportedError, check_type
from humming.formats import ActivationSpec
from humming.hookspecs import Buffer
from humming.places import place_of
from humming.quantize_kernel import (
    ENTRY,
    FUSED,
    INPUTS,
    ROW_BYTES,
    QuantizePlan,
    check_quantizable,
    code_bytes,
    compose_quantize,
    plan_quantize,
    row_bytes,
    scale_columns,
)
from humming.quantized import (
    SCALE_TENSOR_DTYPES,
    check_known_scale,
    check_number,
    part_fault,
    unpack_bits,
)

FUSED_NONE = "none"
"""What the operator takes where nothing is fused."""

SOURCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What `quantize_activation` takes."""

# QuantizeParams of kernels/quantize/params.cuh: 7 addresses, 2 strides, 6 ints.
_PARAMS = struct.Struct("<9q6i")


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """Quantized activations [m, k]; they check themselves.

    A value is (decode(code) - zero) * scale * second_scale.

    Attributes:
        spec: the format.
        shape: (m, k); m may be 0.
        codes: uint8 [m, ceil(k * bits / 8)], rows a multiple of 16 bytes apart, the bytes between
            them zero. Codes of 8 bits take a byte each; of two codes of 4 bits in a byte, the one
            of even k is in the low half.
        scales: contiguous [1, 1] per tensor, [m, 1] per token, [m, ceil(k / g)] in groups and
            blocks of g; float32, float16, bfloat16 or float8_e4m3fn, and ue8m0 as uint8 codes.
        zeros: int8 of the shape of `scales` where the format is asymmetric, else None.
        second_scale: float32 [1], or None for 1; only in formats that have one, such as nvfp4.

    Raises:
        UnsupportedError: a tensor has the wrong dtype, shape, strides or device.
    """

    spec: ActivationSpec
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    second_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _check_narrow(self.spec)
        (m, k), spec = self.shape, self.spec
        if m < 0 or k < 1:
            raise self._refusal("shape", "is empty", "K is 1 or more, and M 0 or more.")
        scale_shape = (1 if spec.granularity == "tensor" else m, scale_columns(spec, k))
        self._check("codes", (m, code_bytes(k, spec.dtype.bits)), torch.uint8)
        self._check("scales", scale_shape, SCALE_TENSOR_DTYPES[spec.scale_dtype])
        self._check("zeros", scale_shape, None if spec.symmetric else torch.int8)
        if self.second_scale is not None or spec.second_scale == "none":
            self._check(
                "second_scale", (1,), None if spec.second_scale == "none" else torch.float32
            )
        row, column = self.codes.stride()
        behind = self.codes.storage_offset() + m * row
        whole = row % ROW_BYTES == 0 and behind <= self.codes.untyped_storage().nbytes()
        if self.codes.numel() and (column != 1 or not whole):
            raise self._refusal(
                "codes",
                f"have strides {[row, column]}",
                f"Rows are adjacent bytes, a multiple of {ROW_BYTES} apart, the last one as well.",
            )
        if not all(t.is_contiguous() for t in (self.scales, self.zeros) if t is not None):
            raise self._refusal("scales or zeros", "are not contiguous", "Call .contiguous().")
        asked = f"quantized activations {spec}"
        if spec.granularity == "tensor" and not spec.dynamic:
            check_known_scale(asked, "scale", self.scales)
        if self.second_scale is not None:
            check_known_scale(asked, "second scale", self.second_scale)

    def _check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        if fault := part_fault(self, name, shape, dtype):
            raise self._refusal(name, *fault)

    def _refusal(self, name: str, why: str, possible: str) -> UnsupportedError:
        asked = f"quantized activations {self.spec} of shape {list(self.shape)}"
        return UnsupportedError(asked, f"their {name} {why}", possible)

    def codes_unpacked(self) -> torch.Tensor:
        """The codes one to a byte: uint8 [m, k], contiguous."""
        return unpack_bits(self.codes, self.spec.dtype.bits, self.shape[1])

    def dequantize(self) -> torch.Tensor:
        """The activations as numbers: float64 [m, k]."""
        return reference.dequantize_activation(
            self.spec, self.shape[1], self.codes, self.scales, self.zeros, self.second_scale
        )

    def magnitudes(self) -> torch.Tensor:
        """What kernels sum of each value at most: (|code| + |zero point|) * scales, float64 [m, k].

        `humming.reference.error_bound` takes them as `x_sizes`.
        """
        parts = self.codes, self.scales, None, self.second_scale
        codes = reference.dequantize_activation(self.spec, self.shape[1], *parts)
        return codes.abs() + (self.dequantize() - codes).abs()

    def to(self, device: torch.device | str) -> "QuantizedActivation":
        """The same activations on another device; the tensors are shared if it is there already."""
        (m, _), codes = self.shape, self.codes
        device = place_of("quantized activations", device)
        if codes.device != device:
            moved = torch.zeros((m, self.codes_row_bytes), dtype=torch.uint8, device=device)
            codes = moved[:, : codes.shape[1]].copy_(codes)
        others = (self.scales, self.zeros, self.second_scale)
        scales, zeros, second = (None if t is None else t.to(device) for t in others)
        return QuantizedActivation(self.spec, self.shape, codes, scales, zeros, second)  # type: ignore[arg-type]

    @property
    def codes_row_bytes(self) -> int:
        """Bytes that a row of codes takes with the zeros after it."""
        return row_bytes(self.shape[1], self.spec.dtype.bits)


def quantize_activation(
    x: torch.Tensor,
    spec: ActivationSpec | str,
    *,
    scale: torch.Tensor | float | None = None,
    zero: torch.Tensor | int | None = None,
    second_scale: torch.Tensor | None = None,
    fuse: str | None = None,
    device: str | None = None,
) -> QuantizedActivation:
    """Quantizes activations in one pass, on the current stream of their device.

    It is one launch without a workspace, for inference: in CUDA graphs as well, and `torch.compile`
    runs it between its graphs. (The operator `torch.ops.humming.quantize_activation` stays in a
    graph.) The first call for a format, an input type and a K compiles.

    Rows are read as they lie if their values are adjacent and one stride leads from each to the
    next: 16 bytes at a time where all of them begin at a multiple of 16 bytes, else value by
    value. Anything else is copied first.

    A NaN or an infinity makes the scale of its row or group NaN and all codes under it 0, so that
    products with them are NaN. With a scale known beforehand infinities saturate, and NaN becomes
    the NaN code where the type has one, else 0.

    A scale known beforehand is a positive number. Numbers and tensors on the CPU are refused if
    they are not; a tensor on an accelerator is not looked at, since every call would wait for it.

    Args:
        x: float16, bfloat16 or float32 [..., K], or [..., 2K] for `silu_mul`.
        spec: the format or its name: `int8`, `int8_asym`, `int4`, `fp8`, `fp8_e5m2`, `fp8_g128`,
            `mxfp8`, `mxfp4`, `nvfp4`, ...; types of 4 and 8 bits.
        scale: the scale of formats with one known beforehand, such as `int8_tensor`: of one value,
            in the format's scale dtype or float32, on the device of x; or a float.
        zero: its zero point, int8 of one value or an int, where such a format is asymmetric.
        second_scale: float32 [1], on the device of x: of nvfp4 and its like the factor on top of
            the scales. None is 1, with which scales of type float8e4m3 hold magnitudes from about
            0.006 to 2688 (nvfp4): what is beyond saturates, and groups below become 0. The largest
            magnitude over 2688 is what uses all of the range.
        fuse: what is done to x in float32 before: None, `silu_mul` (silu of the first half times
            the second half), `gelu` (with erf) or `gelu_tanh`.
        device: name of a device that the CPU simulates, for tensors on the CPU; by default the
            one that HUMMING_SIMULATE names. Not under torch.compile or autograd.

    Returns:
        Of shape (m, K), where m is the product of the leading sizes of x; it may be 0.

    Raises:
        UnsupportedError: format, dtypes, sizes or devices do not fit.
        CompileError: no compiler is usable.
    """
    how = "Pass a tensor of activations."
    check_type("quantizing activations", "x", x, torch.Tensor, how)
    if second_scale is not None:
        how = "Pass a float32 tensor [1], or None."
        check_type("quantizing activations", "second_scale", second_scale, torch.Tensor, how)
    if x.layout != torch.strided:
        _refuse(f"quantizing {x.layout} activations", "they are not dense", "Use .to_dense().")
    name, spec = _named(spec)
    kept = FUSED_NONE if fuse is None else fuse
    scale, zero = _given(x, spec, scale, zero)
    _check(x, spec, scale, zero, second_scale, kept)
    if second_scale is not None:
        check_known_scale(f"quantizing activations to {spec}", "second scale", second_scale)
    if device is not None:
        if torch.is_grad_enabled() and x.requires_grad:
            _refuse(f"quantizing on {device} for autograd", "it has no backward", _NO_GRAD)
        codes, scales, zeros = _run(x, name, kept, scale, zero, second_scale, device)
    else:
        codes, scales, zeros = codes_of(x, name, kept, scale, zero, second_scale)
    k = x.shape[-1] // (2 if kept == "silu_mul" else 1)
    return QuantizedActivation(
        spec,
        (codes.shape[0], k),
        codes[:, : code_bytes(k, spec.dtype.bits)],
        scales if scale is None else scale,  # type: ignore[arg-type]
        None if spec.symmetric else zeros if zero is None else zero,
        second_scale,
    )


def codes_of(
    x: torch.Tensor,
    name: str,
    fuse: str = FUSED_NONE,
    scale: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
    second_scale: torch.Tensor | None = None,
) -> "_Made":
    """Codes with the bytes between rows, scales and zeros; None or empty what is not computed.

    What has been checked is quantized by the operator where someone looks at operators.
    """
    if runtime.is_plain(x, scale, second_scale):
        return _run(x, name, fuse, scale, zero, second_scale)
    made: _Made = _QUANTIZE(x, name, fuse, scale, zero, second_scale)
    return made


# What `torch.compiler.disable` sets; that would import all of torch's compiler, for seconds. A
# traced graph cannot hold a format, and the result has one.
quantize_activation._torchdynamo_disable = True  # type: ignore[attr-defined]

_NO_GRAD = "Use torch.no_grad()."


@lru_cache(maxsize=256)
def _named(spec: ActivationSpec | str) -> tuple[str, ActivationSpec]:
    parsed = ActivationSpec.parse(spec)
    check_quantizable(parsed)
    return parsed.name, parsed


# -- on a device ----------------------------------------------------------------------------------


class _Quantization:
    """One format, input type, K and device: kernels for few rows and for many."""

    def __init__(self, name: str, dtype: torch.dtype, fuse: str, k: int, index: int, device: Any):
        spec = ActivationSpec.parse(name)
        self._arguments = spec, DataType.parse(dtype), fuse, k
        self._index, self._k = index, k
        self._row_bytes = row_bytes(k, spec.dtype.bits)
        self._scale_columns = 0 if spec.granularity == "tensor" else scale_columns(spec, k)
        self._scale_dtype = SCALE_TENSOR_DTYPES[spec.scale_dtype]
        self._has_zeros = bool(self._scale_columns) and not spec.symmetric
        self._caps = plugins.capabilities(index if device is None else device)
        if device is not None:
            runtime.check_place(self._caps, index, "quantizing")
        self._pdl = self._caps.supports("griddepcontrol") and env.dependent_launch()
        # `Any`, because kernels on the host take buffers as well.
        self._plans: dict[int, tuple[QuantizePlan, Any]] = {}

    def plan(self, m: int) -> tuple[QuantizePlan, Any]:
        """What serves m rows. Numbers of rows of one length in bits share it."""
        size = m.bit_length()
        found = self._plans.get(size)
        if found is None:
            plan = plan_quantize(*self._arguments, 1 << (size - 1), self._caps)
            source = compose_quantize(plan.config, self._caps, plugins.registry())
            compiled = compile_source(source, ENTRY, self._caps)
            kernel = runtime.load_kernel(compiled, self._caps, self._index)
            found = self._plans[size] = plan, kernel
        return found

    def empty(self, rows: torch.Tensor) -> "_Made":
        """Codes, scales and zeros of rows, not yet written; None what is not computed."""
        m, device = rows.shape[0], rows.device
        codes = torch.empty((m, self._row_bytes), dtype=torch.uint8, device=device)
        scales = zeros = None
        if self._scale_columns:
            found = m, self._scale_columns
            scales = torch.empty(found, dtype=self._scale_dtype, device=device)
            if self._has_zeros:
                zeros = torch.empty(found, dtype=torch.int8, device=device)
        return codes, scales, zeros

    def launch(self, rows: torch.Tensor, tensors: "_Tensors") -> None:
        """Enqueues the kernel for rows [m, k] or [m, 2k], m above 0."""
        (m, width), k = rows.shape, self._k
        plan, kernel = self.plan(m)
        x_at = rows.data_ptr()
        stride = rows.stride(0) if m > 1 else 0
        value_bytes = rows.element_size()
        starts = x_at | stride * value_bytes | (k * value_bytes if width > k else 0)
        aligned = starts % 16 == 0
        params = _PARAMS.pack(
            x_at,
            *map(runtime.address_of, tensors),
            stride,
            plan.row_bytes,
            m,
            k,
            plan.k_padded,
            plan.piece,
            plan.groups,
            aligned,
        )
        grid, block = plan.grid(m), (plan.config.threads, 1, 1)
        if self._index < 0:
            named = dict(zip(_TENSORS, (rows, *tensors), strict=True))
            kernel.launch(grid, block, params, 0, self._pdl, buffers=_buffers(named))
        elif torch.cuda.current_device() == self._index:
            stream = runtime.current_stream(self._index)
            kernel.launch(grid, block, params, stream, self._pdl)
        else:
            with torch.cuda.device(self._index):
                stream = runtime.current_stream(self._index)
                kernel.launch(grid, block, params, stream, self._pdl)


def _buffers(tensors: dict[str, torch.Tensor | None]) -> list[Buffer]:
    """The memory that a kernel uses on the host, what it writes as not yet written."""
    written = ("codes", "scales", "zeros")
    return [
        Buffer(
            t.data_ptr(),
            runtime.extent_bytes(t),
            name,
            undefined=name in written,
            awaited=name not in written,
        )
        for name, t in tensors.items()
        if t is not None and t.numel()
    ]


_TENSORS = ("x", "scale", "zero", "second_scale", "codes", "scales", "zeros")
_Tensors = tuple[torch.Tensor | None, ...]  # those behind x
_Made = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_quantizations: dict[tuple[Any, ...], _Quantization] = {}


def _run(
    x: torch.Tensor,
    spec: str,
    fuse: str,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    second_scale: torch.Tensor | None,
    device: str | None = None,
) -> _Made:
    if not x.numel():
        return _empty(x, spec, fuse)
    width, index = x.shape[-1], x.get_device()
    key = (spec, x.dtype, fuse, width, index, device)
    quantization = _quantizations.get(key)
    if quantization is None:
        _check_device(x)
        k = width // (2 if fuse == "silu_mul" else 1)
        quantization = _quantizations[key] = _Quantization(spec, x.dtype, fuse, k, index, device)
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    if rows.stride(1) != 1 and width > 1:
        rows = rows.contiguous()
    made = codes, scales, zeros = quantization.empty(rows)
    quantization.launch(rows, (scale, zero, second_scale, codes, scales, zeros))
    return made


def _empty(
    x: torch.Tensor, name: str, fuse: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the operator returns, not yet written; empty what is not computed."""
    _, spec = _named(name)
    k = x.shape[-1] // (2 if fuse == "silu_mul" else 1)
    m = x.numel() // x.shape[-1]
    found = (0, 0) if spec.granularity == "tensor" else (m, scale_columns(spec, k))
    return (
        x.new_empty((m, row_bytes(k, spec.dtype.bits)), dtype=torch.uint8),
        x.new_empty(found, dtype=SCALE_TENSOR_DTYPES[spec.scale_dtype]),
        x.new_empty((0, 0) if spec.symmetric else found, dtype=torch.int8),
    )


# -- checks ---------------------------------------------------------------------------------------


def _check_narrow(spec: ActivationSpec) -> None:
    """Refuses formats without codes, or with codes that rows do not hold."""
    if spec.dtype.bits not in (4, 8):
        check_quantizable(spec)


def _given(
    x: torch.Tensor,
    spec: ActivationSpec,
    scale: torch.Tensor | float | None,
    zero: torch.Tensor | int | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """A static scale and zero point as the kernel reads them: [1, 1] of their types."""
    asked = f"quantizing activations to {spec}"
    if spec.granularity != "tensor":
        if scale is not None or zero is not None:
            why = "its scales are found from the activations"
            _refuse(f"{asked} with a given scale", why, f"Use {spec.dtype}_tensor, or no scale.")
        return None, None
    if scale is None:
        how = f"Pass scale= to quantize_activation, or use {spec.dtype}, with one for each token."
        _refuse(asked, "its scale is known beforehand, and none is given", how)
    check_number(asked, "scale", scale)
    if (zero is None) != spec.symmetric:
        _refuse(
            asked,
            "a zero point is missing" if zero is None else "the format has no zero point",
            "Pass zero= exactly with a format that ends in _asym.",
        )
    wanted = SCALE_TENSOR_DTYPES[spec.scale_dtype]
    # Looked at as its type holds it, a number before it is on an accelerator.
    if not isinstance(scale, torch.Tensor):
        check_known_scale(asked, "scale", torch.tensor(scale, dtype=wanted))
    known = _one(x, "scale", scale, wanted, torch.float32)
    if known is not None:
        check_known_scale(asked, "scale", known)
    return known, _one(x, "zero", zero, torch.int8)


def _one(
    x: torch.Tensor, name: str, value: torch.Tensor | float | None, *dtypes: torch.dtype
) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        if dtypes[0] == torch.int8 and not (isinstance(value, int) and -128 <= value <= 127):
            _refuse(f"a {name} of {value}", "it is an int8", "Pass -128 to 127.")
        return torch.full((1, 1), value, dtype=dtypes[0], device=x.device)
    if value.numel() != 1 or value.dtype not in dtypes or value.device != x.device:
        _refuse(
            f"a {name} of {value.dtype} {list(value.shape)} on {value.device}",
            f"activations on {x.device} have one value of {' or '.join(map(str, dtypes))}",
            f"Pass a number, or e.g. torch.tensor([...], dtype={dtypes[0]}, device={x.device!s}).",
        )
    return value.reshape(1, 1).to(dtypes[0])


def _check(
    x: torch.Tensor,
    spec: ActivationSpec,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    second_scale: torch.Tensor | None,
    fuse: str,
) -> None:
    asked = f"quantizing {str(x.dtype).removeprefix('torch.')} {list(x.shape)} to {spec}"
    if spec.granularity == "tensor" and scale is None:
        _refuse(asked, "its scale is known beforehand, and none is given", "Pass a scale.")
    if spec.granularity == "tensor" and (zero is None) != spec.symmetric:
        why = "a zero point is missing" if zero is None else "the format has no zero point"
        _refuse(asked, why, "Pass a zero exactly with a format that ends in _asym.")
    if x.dtype not in SOURCE_DTYPES:
        _refuse(asked, "these are no activations", f"Possible: {', '.join(INPUTS)}.")
    if fuse not in FUSED:
        names = ", ".join(repr(name) for name in FUSED if name != FUSED_NONE)
        _refuse(f"{asked} after {fuse!r}", "nobody has fused that", f"Possible: {names}, None.")
    if x.dim() == 0 or x.shape[-1] == 0:
        _refuse(asked, "there is no last dimension of values", "Pass [..., K], K above 0.")
    if fuse == "silu_mul" and x.shape[-1] % 2:
        _refuse(asked, "silu_mul takes two halves of equal size", "Pass [..., 2K].")
    given = {"scale": (scale, SCALE_TENSOR_DTYPES[spec.scale_dtype]), "zero": (zero, torch.int8)}
    for name, (tensor, dtype) in given.items():
        if tensor is None:
            continue
        if spec.granularity != "tensor":
            _refuse(f"{asked} with a {name}", "it is found from the activations", "Pass None.")
        if (tensor.numel(), tensor.dtype, tensor.device) != (1, dtype, x.device):
            _refuse(
                f"{asked} with a {name} of {tensor.dtype} {list(tensor.shape)} on {tensor.device}",
                "the kernel reads one value of another type or device",
                f"Pass {dtype} [1, 1] on {x.device}.",
            )
    if second_scale is not None:
        if spec.second_scale == "none":
            why = "the format has no second scale"
            _refuse(f"{asked} with a second scale", why, "Use nvfp4, or second_scale=None.")
        if (tuple(second_scale.shape), second_scale.dtype) != ((1,), torch.float32) or (
            second_scale.device != x.device
        ):
            _refuse(
                f"a second scale of {second_scale.dtype} {list(second_scale.shape)} on "
                f"{second_scale.device}",
                f"activations on {x.device} have one",
                "Pass float32 [1] on their device.",
            )


def _check_device(x: torch.Tensor) -> None:
    if not x.is_cuda and not any(found.index < 0 for found in plugins.devices()):
        _refuse(
            "quantizing tensors on the CPU",
            "kernels run on accelerators, and no plugin that simulates one is installed",
            "Move the tensors to an accelerator; humming.reference.quantize_activation quantizes "
            "slowly anywhere.",
        )


def _refuse(asked: str, why: str, possible: str) -> NoReturn:
    raise UnsupportedError(asked, why, possible)


# -- the operator elsewhere -----------------------------------------------------------------------


def _fake(
    x: torch.Tensor,
    spec: str,
    fuse: str,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    second_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    _check(x, _named(spec)[1], scale, zero, second_scale, fuse)
    return _empty(x, spec, fuse)


def _on_device(
    x: torch.Tensor,
    spec: str,
    fuse: str,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    second_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    told = _named(spec)[1]
    _check(x, told, scale, zero, second_scale, fuse)
    codes, scales, zeros = _run(x, spec, fuse, scale, zero, second_scale)
    if scales is None:
        scales = x.new_empty((0, 0), dtype=SCALE_TENSOR_DTYPES[told.scale_dtype])
    return codes, scales, x.new_empty((0, 0), dtype=torch.int8) if zeros is None else zeros


def _backward(context: Any, *gradients: Any) -> NoReturn:
    _refuse(
        "a backward pass through humming.quantize_activation",
        "rounding has no gradient",
        "Wrap the forward pass in torch.no_grad() or torch.inference_mode().",
    )


_library: Any = torch.library  # parts of it are untyped
_LIBRARY = _library.Library("humming", "FRAGMENT")
_LIBRARY.define(
    "quantize_activation(Tensor x, str spec, str fuse, Tensor? scale, Tensor? zero, "
    "Tensor? second_scale) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("quantize_activation", _on_device, "CUDA")
_LIBRARY.impl("quantize_activation", _on_device, "CPU")
_library.register_fake("humming::quantize_activation", _fake, lib=_LIBRARY)
_library.register_autograd("humming::quantize_activation", _backward, lib=_LIBRARY)
_QUANTIZE = torch.ops.humming.quantize_activation.default
