"""`humming.matmul` and the torch operators behind it.

`humming::matmul` and `humming::matmul_out` are ordinary torch operators with fake implementations:
`torch.compile` keeps them in the graph, and CUDA graphs record them. They take the tensors of a
packed weight one by one, and its format by name, because operators take nothing else.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from humming import plugins, runtime
from humming.activations import QuantizedActivation
from humming.dtypes import DataType
from humming.errors import UnsupportedError, WrongTypeError, check_type
from humming.formats import ActivationSpec, WeightSpec
from humming.packing import PackedWeight, check_packed
from humming.problem import GemmProblem
from humming.quantized_ops import described, matmul_quantized, multiply_quantized
from humming.runtime import Gemm, Operands, extent_bytes, is_plain

ACTIVATION_DTYPES = (torch.float16, torch.bfloat16)
"""What `matmul` takes as activations."""

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What `matmul` returns."""

MISUSE = (AttributeError, TypeError, RuntimeError)
"""How arguments of a wrong type show; only then are they looked at, for each call would pay."""

_PRODUCT = "a product"
_NO_GRAD = "Use torch.no_grad()."

OPERAND_BITS = 16
"""Width of the operand that a weight must be packed for, that of the activations."""

# Rows of activations are read in pieces of 16 bytes: 8 values of 2 bytes.
_PIECE_BYTES, _PIECE_VALUES = 16, 8


def matmul(
    x: torch.Tensor | QuantizedActivation,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationSpec | str | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    device: str | None = None,
) -> torch.Tensor:
    """x @ W.T + bias, with a packed quantized weight; sums are in float32 or int32.

    It runs on the current stream of the tensors' device, under `torch.compile` and in CUDA graphs,
    and is for inference: a backward pass raises. The first call for a range of M compiles. It may
    read the weight ahead of what is before it on the stream (see `PackedWeight`).

    Rows of x are read as they lie if each begins at a multiple of 16 bytes, its values are adjacent
    and K is a multiple of 8. Otherwise x is copied first, padded with zeros to a multiple of 8.

    Args:
        x: activations [..., K], float16 or bfloat16, of any strides; or quantized ones [m, K].
        weight: packed [N, K] for the activations (`humming.pack`), on the device of x.
        bias: [N] of the output dtype, on the device of x.
        activation: a format to quantize x to first, `int8`, `fp8`, `mxfp8`, ...; float32 will do
            as x then. None multiplies x as it is. Under torch.compile give its name.
        out_dtype: float16, bfloat16 or float32; by default that of `out`, else that of x, or of
            the bias or bfloat16 where x is quantized.
        out: [..., N] to write to: contiguous, or two-dimensional with adjacent values in its rows.
            It shares no memory with what is read. Products of quantized activations are copied to
            it.
        device: name of a device that the CPU simulates, for tensors on the CPU; by default the
            one that HUMMING_SIMULATE names. Not under torch.compile or autograd.

    Returns:
        [..., N], `out` if it was given. Empty where x is.

    Raises:
        UnsupportedError: sizes, dtypes or devices do not fit, or the device has no kernel for it.
        WrongTypeError: an argument is of another type; it is an UnsupportedError, too.
        CompileError: no compiler is usable.
    """
    try:
        if activation is not None or isinstance(x, QuantizedActivation):
            if (
                torch.compiler.is_compiling()
                and isinstance(activation, str)
                and isinstance(x, torch.Tensor)
                and out is None
            ):
                return _traced(x, weight, bias, activation, out_dtype)
            return _quantized(x, weight, bias, activation, out_dtype, out, device)
        if weight.operand_bits != OPERAND_BITS:
            _refuse(
                f"activations of {x.dtype} with a weight packed for {weight.operand_bits}-bit "
                "operands",
                "activations of 16 bits are multiplied as they are",
                "Pack the weight with humming.pack(weight), or name what activations are quantized "
                "to: activation='int8'.",
            )
        operands = Operands(weight.codes, weight.scales, weight.zeros, weight.second_scale, bias)
        name = _name_of(weight.spec)
        return multiply(x, operands, name, weight.shape, out_dtype, out, device)
    except torch.OutOfMemoryError:
        raise
    except MISUSE:
        check_packed(weight, _PRODUCT)
        check_arguments(x, bias, out_dtype, out, device)
        raise


def _quantized(
    x: Any,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    activation: ActivationSpec | str | None,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    device: str | None,
) -> torch.Tensor:
    """`matmul` of activations that are quantized, or 16-bit ones that are named so."""
    check_packed(weight, _PRODUCT)
    spec = None if activation is None else ActivationSpec.parse(activation)
    if spec is not None and not spec.dtype.is_narrow:
        if isinstance(x, QuantizedActivation) or x.dtype != getattr(torch, spec.dtype.name):
            _refuse(
                f"a product with activation={spec.name}",
                f"x is {x.spec.name if isinstance(x, QuantizedActivation) else _name(x.dtype)}",
                "Cast x, or leave `activation` away.",
            )
        return matmul(x, weight, bias, out_dtype=out_dtype, out=out, device=device)
    if out is not None and not _writable(out):
        _refuse(
            f"a product into out of strides {list(out.stride())}",
            "its rows are scattered",
            "Pass a contiguous one.",
        )
    if out is None:
        return matmul_quantized(
            x, weight, bias, activation=spec, out_dtype=out_dtype, device=device
        )
    if out_dtype is not None and out_dtype != out.dtype:
        _refuse(f"a product in {out_dtype}", f"out is {out.dtype}", "Leave out_dtype away.")
    made = matmul_quantized(x, weight, bias, activation=spec, out_dtype=out.dtype, device=device)
    if made.shape != out.shape:
        _refuse(
            f"a product into out {list(out.shape)}",
            f"the result is {list(made.shape)}",
            f"Pass {list(made.shape)}.",
        )
    return out.copy_(made)


def _traced(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """`_quantized` for a graph: operators alone, with names that are constants of it."""
    name, shape = _name_of(weight.spec), weight.shape
    told, symmetric, bits = described(activation, name, *shape)
    if weight.operand_bits != bits:
        _refuse(
            f"a product with activation={told} and a weight packed for {weight.operand_bits} bits",
            f"its kernels read a weight packed for {bits} bits",
            f"Pack it with humming.pack(weight, activation={told!r}).",
        )
    if not symmetric:
        _refuse(
            f"a product with activation={told} under torch.compile",
            "sums of the weight's rows cannot be traced",
            "Use a QuantLinear, which holds them.",
        )
    parts = (weight.codes, weight.scales, weight.zeros, weight.second_scale, None)
    return multiply_quantized(x, parts, bias, told, name, shape, out_dtype)


def multiply(
    x: torch.Tensor,
    operands: Operands,
    weight: str,
    shape: tuple[int, int],
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    device: str | None = None,
) -> torch.Tensor:
    """`matmul` with the parts of a packed weight, whose format `weight` names, shape [N, K]."""
    if out_dtype is None:
        out_dtype = x.dtype if out is None else out.dtype
    if device is not None:
        tensors = [t for t in (x, operands.bias, out) if t is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            _refuse(f"a product on {device} for autograd", "it has no backward", _NO_GRAD)
        if out is not None and out.dtype != out_dtype:
            _refuse(f"a product in {out_dtype}", f"out is {out.dtype}", "Leave out_dtype away.")
        return _run(x, operands, weight, *shape, out_dtype, out, device)
    if out is None:
        if is_plain(x, *operands):
            return _run(x, operands, weight, *shape, out_dtype)
        result: torch.Tensor = _MATMUL(x, *operands, weight, *shape, out_dtype)
        return result
    if out.dtype != out_dtype:
        _refuse(f"a product in {out_dtype}", f"out is {out.dtype}", "Leave out_dtype away.")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        _refuse("a product into `out` for autograd", "it has no backward", _NO_GRAD)
    _MATMUL_OUT(x, *operands, weight, *shape, out=out)
    return out


_Format = tuple[str, str, int, tuple[int, int], str, str, str]
_format_names: dict[_Format, str] = {}


def _name_of(spec: WeightSpec) -> str:
    return _format_name(
        (
            spec.dtype.name,
            spec.granularity,
            spec.group_size,
            spec.block,
            spec.scale_dtype.name,
            spec.zero_point,
            spec.second_scale,
        )
    )


def _format_name(parts: _Format) -> str:
    name = _format_names.get(parts)
    if name is None:
        name = _format_names[parts] = WeightSpec(*parts).name  # type: ignore[arg-type]
    return name


# What `torch.compiler.assume_constant_result` sets; that would import all of torch's compiler, for
# seconds. A traced graph holds the name as a constant, guarded by the plain parts that it is made
# of; tracing how names are spelled would not succeed.
_format_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- the operators on a device --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Product:
    """A kind of call: its kernels, and what the packed weight was when it was last checked."""

    gemm: Gemm
    looks: tuple[Any, ...]

    def fits(self, operands: Operands) -> bool:
        """Whether a packed weight looks like the one that was checked."""
        return _looks(operands) == self.looks


def _looks(operands: Operands) -> tuple[Any, ...]:
    """What a kernel relies on in the tensors of a packed weight."""
    return tuple(
        None if t is None else (t.dtype, t.numel(), t.get_device(), t.is_contiguous())
        for t in operands[:4]
    )


# By what distinguishes calls: weight format, n, k, dtypes of x and out, whether biased, device.
_products: dict[tuple[Any, ...], _Product] = {}


def _matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    second_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: str,
    n: int,
    k: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    operands = Operands(codes, scales, zeros, second_scale, bias)
    return _run(x, operands, weight, n, k, out_dtype)


def _matmul_out(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    second_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: str,
    n: int,
    k: int,
    *,
    out: torch.Tensor,
) -> None:
    operands = Operands(codes, scales, zeros, second_scale, bias)
    _check_apart(x, operands, out)
    _run_into(x, operands, weight, n, k, out)


def _run(
    x: torch.Tensor,
    operands: Operands,
    weight: str,
    n: int,
    k: int,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    device: str | None = None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty((*x.shape[:-1], n), dtype=out_dtype, device=x.device)
    else:
        _check_apart(x, operands, out)
    _run_into(x, operands, weight, n, k, out, device)
    return out


def _run_into(
    x: torch.Tensor,
    operands: Operands,
    weight: str,
    n: int,
    k: int,
    out: torch.Tensor,
    device: str | None = None,
) -> None:
    _check(x, operands, n, k, out)
    device_index = x.get_device()
    key = (weight, n, k, x.dtype, out.dtype, operands.bias is None, device_index, device)
    product = _products.get(key)
    if product is None or not product.fits(operands):
        product = _products[key] = _checked(x, operands, weight, n, k, out, device)
    if out.numel():
        product.gemm(_rows(x, k), operands, out if out.dim() == 2 else out.view(-1, n))


def _checked(
    x: torch.Tensor,
    operands: Operands,
    weight: str,
    n: int,
    k: int,
    out: torch.Tensor,
    device: str | None,
) -> _Product:
    codes, scales, zeros, second_scale, bias = operands
    if not x.is_cuda and not any(found.index < 0 for found in plugins.devices()):
        _refuse(
            "a product of tensors on the CPU",
            "kernels run on accelerators, and no plugin that simulates one is installed",
            "Move the tensors to an accelerator; humming.reference.matmul computes products "
            "slowly anywhere.",
        )
    spec = WeightSpec.parse(weight)
    PackedWeight(spec, (n, k), OPERAND_BITS, codes, scales, zeros, second_scale)  # checks itself
    problem = GemmProblem(
        n,
        k,
        spec,
        ActivationSpec.parse(_name(x.dtype)),
        DataType.parse(out.dtype),
        bias is not None,
    )
    return _Product(runtime.gemm_for(problem, x.get_device(), device), _looks(operands))


def _rows(x: torch.Tensor, k: int) -> torch.Tensor:
    """Activations [M, K] as kernels read them: K a multiple of 8, rows 16-byte aligned."""
    rows = x if x.dim() == 2 else x.reshape(-1, k)
    if k % _PIECE_VALUES:
        return torch.nn.functional.pad(rows, (0, -k % _PIECE_VALUES))
    step = rows.stride(0) if rows.shape[0] > 1 else 0
    if rows.stride(1) != 1 or step % _PIECE_VALUES or rows.data_ptr() % _PIECE_BYTES:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


# -- checks ---------------------------------------------------------------------------------------


def _check(x: torch.Tensor, operands: Operands, n: int, k: int, out: torch.Tensor) -> None:
    """Refuses tensors that do not fit one another, sizes and devices named."""
    bias = operands.bias
    if x.dtype not in ACTIVATION_DTYPES:
        _refuse(
            f"a product of {_name(x.dtype)} activations",
            "no kernel reads them",
            f"Pass {' or '.join(map(_name, ACTIVATION_DTYPES))}: x.to(torch.bfloat16), or of a "
            "whole model model.to(torch.bfloat16).",
        )
    if out.dtype not in OUT_DTYPES:
        _refuse(
            f"a product of {_name(x.dtype)} activations in {_name(out.dtype)}",
            "no kernel writes these results",
            f"Results may be {_names(OUT_DTYPES)}.",
        )
    if x.dim() == 0 or x.shape[-1] != k:
        _refuse(
            f"a product of activations {list(x.shape)} with a weight [{n}, {k}]",
            f"the last size of the activations is not K = {k}",
            f"Pass activations [..., {k}].",
        )
    if out.shape != (*x.shape[:-1], n) or not _writable(out):
        _refuse(
            f"a product of activations {list(x.shape)} with a weight [{n}, {k}] into out "
            f"{list(out.shape)} of strides {list(out.stride())}",
            "out has another shape, or its rows are scattered",
            f"Pass {[*x.shape[:-1], n]}, contiguous or a matrix with adjacent values in its rows.",
        )
    if bias is not None and (bias.shape != (n,) or bias.dtype != out.dtype or bias.stride(0) != 1):
        _refuse(
            f"a bias {list(bias.shape)} of {_name(bias.dtype)}, stride {list(bias.stride())}",
            f"it is added to results [..., {n}] of {_name(out.dtype)}",
            f"Pass a contiguous bias [{n}] of that dtype, e.g. bias.to({out.dtype}).",
        )
    device = x.device
    if operands.codes.device != device or (bias is not None and bias.device != device):
        others = f"the weight on {operands.codes.device}"
        if bias is not None:
            others += f" and the bias on {bias.device}"
        _refuse(f"activations on {device} with {others}", "devices differ", "Move them together.")


def _writable(out: torch.Tensor) -> bool:
    if out.is_contiguous():
        return True
    # Rows that overlap, as those of an expanded tensor do, would be written at the same time.
    return out.dim() == 2 and out.stride(1) == 1 and out.stride(0) >= out.shape[1]


def check_arguments(
    x: object,
    bias: object = None,
    out_dtype: object = None,
    out: object = None,
    device: object = None,
) -> None:
    """Refuses arguments of `matmul` of a wrong type.

    Raises:
        WrongTypeError: one is; the message says what to pass.
    """
    tensors = {"x": x, "bias": bias, "out": out}
    for name, tensor in tensors.items():
        if tensor is not None or name == "x":
            kinds = (torch.Tensor, QuantizedActivation) if name == "x" else torch.Tensor
            check_type(_PRODUCT, name, tensor, kinds, f"Pass a tensor as {name}.")
            if isinstance(tensor, torch.Tensor) and tensor.layout != torch.strided:
                why = f"{name} is {tensor.layout}"
                raise WrongTypeError(_PRODUCT, why, "Pass a dense tensor: .to_dense().")
    if out_dtype is not None:
        how = f"Pass torch's {_names(OUT_DTYPES)}."
        check_type(_PRODUCT, "out_dtype", out_dtype, torch.dtype, how)
    if device is not None:
        how = "Name a device that the CPU simulates, e.g. 'sim:t4'; tensors are moved with .to()."
        check_type(_PRODUCT, "device", device, str, how)


def _check_apart(x: torch.Tensor, operands: Operands, out: torch.Tensor) -> None:
    """Refuses an output in memory that is read: CTAs would read what others have written."""
    for name, tensor in {"x": x, **operands._asdict()}.items():
        if tensor is not None and tensor.device == out.device and _overlap(tensor, out):
            _refuse(
                f"a product into out that shares memory with {name}",
                "a kernel writes some results while it still reads operands for others",
                "Pass memory of its own, or leave out away.",
            )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors with adjacent values in their rows share memory."""
    if not (one.numel() and other.numel()):
        return False
    apart = other.data_ptr() - one.data_ptr()
    if apart >= extent_bytes(one) or -apart >= extent_bytes(other):
        return False
    # Columns of one buffer lie side by side in each of its rows.
    if one.dim() == other.dim() == 2:
        pitch = one.stride(0) * one.element_size()
        width, other_width = (t.shape[1] * t.element_size() for t in (one, other))
        if one.stride(1) == 1 and pitch > 0 and pitch == other.stride(0) * other.element_size():
            return apart % pitch < width or apart % pitch + other_width > pitch
    return True


def _refuse(asked: str, why: str, possible: str) -> NoReturn:
    raise UnsupportedError(asked, why, possible)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(_name, dtypes))


# -- the operators elsewhere ----------------------------------------------------------------------


def _matmul_fake(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    second_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight: str,
    n: int,
    k: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    _check(x, Operands(codes, scales, zeros, second_scale, bias), n, k, out)
    return out


def _matmul_out_fake(x: torch.Tensor, *arguments: Any, out: torch.Tensor) -> None:
    *tensors, _, n, k = arguments
    _check(x, Operands(*tensors), n, k, out)


def _backward(context: Any, gradient: torch.Tensor) -> NoReturn:
    _refuse(
        "a backward pass through humming.matmul",
        "quantized weights are for inference",
        "Wrap the forward pass in torch.no_grad() or torch.inference_mode().",
    )


_TENSORS = (
    "Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? second_scale, Tensor? bias"
)
_library: Any = torch.library  # parts of it are untyped
# A fragment, so that another library of this namespace can be loaded beside this one.
_LIBRARY = _library.Library("humming", "FRAGMENT")
_LIBRARY.define(f"matmul({_TENSORS}, str weight, int n, int k, ScalarType out_dtype) -> Tensor")
_LIBRARY.define(f"matmul_out({_TENSORS}, str weight, int n, int k, *, Tensor(a!) out) -> ()")
for _operator, _on_device, _fake in (
    ("matmul", _matmul, _matmul_fake),
    ("matmul_out", _matmul_out, _matmul_out_fake),
):
    _LIBRARY.impl(_operator, _on_device, "CUDA")
    _LIBRARY.impl(_operator, _on_device, "CPU")
    _library.register_fake(f"humming::{_operator}", _fake, lib=_LIBRARY)
_library.register_autograd("humming::matmul", _backward, lib=_LIBRARY)
_MATMUL = torch.ops.humming.matmul.default
_MATMUL_OUT = torch.ops.humming.matmul_out.default
