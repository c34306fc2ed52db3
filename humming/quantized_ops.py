"""Products of quantized activations, and the torch operator behind them.

`humming::matmul_quantized` takes what `humming::quantize_activation` returns, the tensors of a
packed weight and both formats by name: like `humming::matmul` it stays in the graphs of
`torch.compile` and is recorded into CUDA graphs.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch

from humming import plugins, runtime
from humming.activations import QuantizedActivation, codes_of, quantize_activation
from humming.dtypes import DataType
from humming.errors import UnsupportedError
from humming.formats import ActivationSpec, WeightSpec
from humming.lowering import packed_bits
from humming.packing import PackedWeight
from humming.problem import GemmProblem, default_out_dtype
from humming.quantize_kernel import code_bytes, row_bytes
from humming.runtime import Gemm, Operands, TokenScales, is_plain

_NO_GRAD = "Use torch.no_grad()."


def matmul_quantized(
    x: QuantizedActivation | torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    activation: ActivationSpec | str | None = None,
    out_dtype: torch.dtype | None = None,
    device: str | None = None,
) -> torch.Tensor:
    """x @ W.T + bias where x is quantized, or is quantized first as `activation` says.

    Arguments, results and errors as `humming.matmul`.
    """
    leading: Sequence[int]
    if isinstance(x, QuantizedActivation):
        if activation is not None and ActivationSpec.parse(activation) != x.spec:
            _refuse(
                f"a product with activation={ActivationSpec.parse(activation).name}",
                f"the activations are quantized as {x.spec.name} already",
                "Leave `activation` away.",
            )
        leading, quantized = (x.shape[0],), x
        if out_dtype is None:
            name = default_out_dtype(x.spec).name
            out_dtype = bias.dtype if bias is not None else getattr(torch, name)
    else:
        if activation is None:
            raise TypeError("activation")  # matmul never asks so
        leading = x.shape[:-1]
        quantized = quantize_activation(x, activation, device=device)
        out_dtype = x.dtype if out_dtype is None else out_dtype
    _check(quantized, weight, bias, out_dtype)
    q, w = quantized, weight
    codes = q.codes
    sums = None if q.spec.symmetric else w.row_sums
    arguments = (
        *(codes, q.scales, q.zeros, q.second_scale),
        *(w.codes, w.scales, w.zeros, w.second_scale, sums, bias),
        *(*_names(q.spec, w.spec), *w.shape, out_dtype),
    )
    if device is None and not is_plain(codes, bias, q.scales, q.second_scale):
        out = _OPERATOR(*arguments)
    else:
        out = _run(*arguments, device=device)
    result: torch.Tensor = out.view(*leading, w.shape[0])
    return result


def multiply_quantized(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor | None],
    bias: torch.Tensor | None,
    activation: str,
    weight_format: str,
    shape: tuple[int, int],
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantizes x [..., K] and multiplies it, in operators alone: for layers, which are traced.

    Args:
        weight: codes, scales, zeros, second scale and row sums.
        bias: [N] in the output's dtype, or None.
        activation, weight_format: names.
        shape: (N, K) of the weight.
        out_dtype: by default that of x.
        scale: known beforehand: [1, 1] of formats with one scale, else [1], the factor on top.
    """
    if x.dim() < 1 or x.shape[-1] != shape[1]:
        _refuse(
            f"a product of activations {list(x.shape)} with a weight {list(shape)}",
            f"the last size of the activations is not K = {shape[1]}",
            f"Pass activations [..., {shape[1]}].",
        )
    if not x.is_floating_point() or x.element_size() not in (2, 4):
        _refuse(f"activations of {x.dtype}", "they are no floats of 16 or 32 bits", "Cast them.")
    second = None
    if scale is not None and scale.dim() == 1:
        scale, second = None, scale
    codes, found, zeros = codes_of(x, activation, scale=scale, second_scale=second)
    scales = found if scale is None else scale
    symmetric = described(activation, weight_format, *shape)[1]
    made = codes, scales, None if symmetric else zeros, second
    run: Any = _run if is_plain(x, bias, scale, second) else _OPERATOR
    out = run(*made, *weight, bias, activation, weight_format, *shape, out_dtype or x.dtype)
    result: torch.Tensor = out.view(*x.shape[:-1], shape[0])
    return result


def described(activation: str, weight_format: str, n: int, k: int) -> tuple[str, bool, int]:
    """Of a pair of formats the activations' name, whether they are symmetric, and packed bits."""
    return _described(activation, weight_format, n, k)


@cache
def _described(activation: str, weight_format: str, n: int, k: int) -> tuple[str, bool, int]:
    spec = ActivationSpec.parse(activation)
    bits = packed_bits_for(WeightSpec.parse(weight_format), activation, n, k)
    return spec.name, spec.symmetric, bits


# As `torch.compiler.assume_constant_result`: what follows from names is constant in a graph.
described._dynamo_marked_constant = True  # type: ignore[attr-defined]


def packed_bits_for(weight: WeightSpec, activation: str, n: int, k: int) -> int:
    """What a weight is packed for to be multiplied with activations of a format."""
    return _packed_bits(ActivationSpec.parse(activation), weight, n, k)


# Products are many, formats few.
@cache
def _packed_bits(activation: ActivationSpec, weight: WeightSpec, n: int, k: int) -> int:
    return packed_bits(problem_of(activation, weight, n, k, torch.bfloat16, False))


@cache
def _names(activation: ActivationSpec, weight: WeightSpec) -> tuple[str, str]:
    return activation.name, weight.name


def problem_of(
    activation: ActivationSpec, weight: WeightSpec, n: int, k: int, out: torch.dtype, bias: bool
) -> GemmProblem:
    """The problem of a product by its formats."""
    return GemmProblem(n, k, weight, activation, DataType.parse(out), bias)


def _check(
    x: QuantizedActivation,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    (n, k), asked = weight.shape, f"a product of {x.spec.name} activations {list(x.shape)}"
    if x.shape[1] != k:
        _refuse(f"{asked} with a weight [{n}, {k}]", "K differs", f"Pass activations [m, {k}].")
    if out_dtype not in (torch.float16, torch.bfloat16, torch.float32):
        _refuse(f"{asked} in {out_dtype}", "no kernel writes it", "Use float16, bfloat16, float32.")
    wanted = _packed_bits(x.spec, weight.spec, n, k)
    if weight.operand_bits != wanted:
        _refuse(
            f"{asked} with a weight packed for {weight.operand_bits}-bit operands",
            f"their kernels read a weight packed for {wanted} bits",
            f"Pack it with humming.pack(weight, activation={x.spec.name!r}).",
        )
    if x.codes.device != weight.codes.device:
        places = f"on {x.codes.device} with a weight on {weight.codes.device}"
        _refuse(f"{asked} {places}", "devices differ", "Move them together.")
    if bias is not None and (
        bias.shape != (n,)
        or bias.dtype != out_dtype
        or bias.device != x.codes.device
        or (n > 1 and bias.stride(0) != 1)
    ):
        _refuse(
            f"{asked} and a bias {list(bias.shape)} of {bias.dtype} on {bias.device}",
            f"it is added to results [..., {n}] of {out_dtype} on {x.codes.device}",
            f"Pass a contiguous bias [{n}] of that dtype there.",
        )


_gemms: dict[tuple[Any, ...], Gemm] = {}


def _run(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    x_zeros: torch.Tensor | None,
    x_second: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    second_scale: torch.Tensor | None,
    row_sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    weight: str,
    n: int,
    k: int,
    out_dtype: torch.dtype,
    *,
    device: str | None = None,
) -> torch.Tensor:
    _check_parts(x, bias, activation, n, k, out_dtype)
    others = (x_scales, x_zeros, x_second, codes, scales, zeros, second_scale, row_sums, bias)
    if any(t is not None and t.device != x.device for t in others):
        places = ", ".join(sorted({str(t.device) for t in others if t is not None}))
        _refuse(
            f"a product of {activation} activations on {x.device} with operands on {places}",
            "devices differ",
            "Move them together.",
        )
    if (x_zeros is None) != (row_sums is None):
        _refuse(
            f"a product of {activation} activations",
            "zero points of activations come with sums of the weight's rows",
            "Pass PackedWeight.row_sums.",
        )
    out = torch.empty((x.shape[0], n), dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    index = x.get_device()
    key = (activation, weight, n, k, out_dtype, bias is None, index, device)
    gemm = _gemms.get(key)
    if gemm is None:
        if not x.is_cuda and not any(found.index < 0 for found in plugins.devices()):
            _refuse(
                "a product of tensors on the CPU",
                "kernels run on accelerators, and no plugin that simulates one is installed",
                "Move the tensors to an accelerator.",
            )
        specs = ActivationSpec.parse(activation), WeightSpec.parse(weight)
        problem = problem_of(*specs, n, k, out_dtype, bias is not None)
        gemm = _gemms[key] = runtime.gemm_for(problem, index, device)
    tokens = TokenScales(x_scales, x_zeros, x_second, row_sums)
    gemm(x, Operands(codes, scales, zeros, second_scale, bias), out, tokens)
    return out


def _check_parts(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    n: int,
    k: int,
    out_dtype: torch.dtype,
) -> None:
    """Refuses codes of another K, and a bias that a kernel would misread."""
    bits = _bits_of(activation)
    if x.dim() == 2 and x.numel() and (x.stride(1) != 1 or x.stride(0) % 16):
        _refuse(
            f"a product of {activation} codes of strides {list(x.stride())}",
            "kernels read rows in pieces of 16 bytes",
            "Pass what quantize_activation returns.",
        )
    if x.dim() != 2 or x.shape[1] not in (code_bytes(k, bits), row_bytes(k, bits)):
        _refuse(
            f"a product of {activation} codes {list(x.shape)} with a weight [{n}, {k}]",
            f"rows of {k} codes take {code_bytes(k, bits)} bytes",
            f"Pass activations [..., {k}].",
        )
    if bias is not None and (
        bias.shape != (n,) or bias.dtype != out_dtype or (n > 1 and bias.stride(0) != 1)
    ):
        _refuse(
            f"a bias {list(bias.shape)} of {bias.dtype}, stride {list(bias.stride())}",
            f"it is added to results [..., {n}] of {out_dtype}",
            f"Pass a contiguous bias [{n}] of that dtype.",
        )


@cache
def _bits_of(activation: str) -> int:
    return ActivationSpec.parse(activation).dtype.bits


def _fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    bias, activation, _, n, k, out_dtype = arguments[-6:]
    _check_parts(x, bias, activation, n, k, out_dtype)
    return x.new_empty((x.shape[0], n), dtype=out_dtype)


def _backward(context: Any, gradient: torch.Tensor) -> NoReturn:
    _refuse("a backward pass through a quantized product", "it is for inference", _NO_GRAD)


def _refuse(asked: str, why: str, possible: str) -> NoReturn:
    raise UnsupportedError(asked, why, possible)


_library: Any = torch.library  # parts of it are untyped
_LIBRARY = _library.Library("humming", "FRAGMENT")
_LIBRARY.define(
    "matmul_quantized(Tensor x, Tensor x_scales, Tensor? x_zeros, Tensor? x_second, Tensor codes, "
    "Tensor scales, Tensor? zeros, Tensor? second_scale, Tensor? row_sums, Tensor? bias, "
    "str activation, str weight, int n, int k, ScalarType out_dtype) -> Tensor"
)
_LIBRARY.impl("matmul_quantized", _run, "CUDA")
_LIBRARY.impl("matmul_quantized", _run, "CPU")
_library.register_fake("humming::matmul_quantized", _fake, lib=_LIBRARY)
_library.register_autograd("humming::matmul_quantized", _backward, lib=_LIBRARY)
_OPERATOR = torch.ops.humming.matmul_quantized.default
