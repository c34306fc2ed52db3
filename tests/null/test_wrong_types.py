"""Arguments of another type than is asked for: each is refused with what to do, never a crash."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import humming
from humming import ops, reference
from humming.errors import UnsupportedError, WrongTypeError, check_type
from humming.packing import PackedWeight
from humming.quantized import QuantizedWeight

N, K = 48, 64
MATRIX = torch.randn(N, K)
QUANTIZED = humming.quantize(MATRIX, "int4_g32")
PACKED = humming.pack(QUANTIZED)
LAYER = humming.QuantLinear(PACKED)
PROBLEM = humming.GemmProblem.parse("int4_g32 x fp16", N, K)
X = torch.randn(3, K, dtype=torch.float16)


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[[], Any]:
    return lambda: function(*arguments, **named)


def matmul(*arguments: Any, **named: Any) -> Callable[[], Any]:
    return call(humming.matmul, *arguments, **named)


WRONG = {
    "matmul-quantized": (matmul(X, QUANTIZED), "Pack it first: humming.pack"),
    "matmul-matrix": (matmul(X, MATRIX), "humming.pack(humming.quantize"),
    "matmul-layer": (matmul(X, LAYER), "weight.packed"),
    "matmul-text": (matmul(X, "weight"), "Pass a PackedWeight"),
    "matmul-swapped": (matmul(PACKED, X), "the weight is of type Tensor"),
    "matmul-x-text": (matmul("x", PACKED), "x is of type str. Pass a tensor"),
    "matmul-x-list": (matmul([1.0], PACKED), "x is of type list"),
    "matmul-x-array": (matmul(X.numpy(), PACKED), "x is of type ndarray"),
    "matmul-x-sparse": (matmul(X.to_sparse(), PACKED), ".to_dense()"),
    "matmul-bias-number": (matmul(X, PACKED, 1.0), "bias is of type float"),
    "matmul-bias-array": (matmul(X, PACKED, np.zeros(N, np.float16)), "bias is of type ndarray"),
    "matmul-out-text": (matmul(X, PACKED, out="out"), "out is of type str"),
    "matmul-out-array": (matmul(X, PACKED, out=np.zeros((3, N), np.float16)), "ndarray"),
    "matmul-out-dtype": (matmul(X, PACKED, out_dtype="float16"), "float16, bfloat16, float32"),
    "matmul-device": (matmul(X, PACKED, device=torch.device("cpu")), "sim:t4"),
    "load-number": (call(humming.load_linear, 4, "a"), "the path is of type int"),
    "load-module": (call(humming.load_linear, ".", None), "the module is of type NoneType"),
    "layer-x-text": (call(LAYER, "x"), "x is of type str"),
    "layer-x-array": (call(LAYER, X.numpy()), "x is of type ndarray"),
    "layer-of-quantized": (call(humming.QuantLinear, QUANTIZED), "Pack it first"),
    "layer-bias": (call(humming.QuantLinear, PACKED, [0.0]), "the bias is of type list"),
    "layer-from-packed": (call(humming.QuantLinear.from_quantized, PACKED), "humming.unpack"),
    "pack-packed": (call(humming.pack, PACKED), "humming.unpack(weight)"),
    "pack-packed-elsewhere": (call(humming.pack, PACKED, device="meta"), "humming.unpack(weight)"),
    "pack-matrix": (call(humming.pack, MATRIX), "Quantize it first"),
    "pack-nothing": (call(humming.pack, None), "Pass a QuantizedWeight"),
    "pack-bits": (call(humming.pack, QUANTIZED, 16.0), "operand_bits is of type float"),
    "unpack-quantized": (call(humming.unpack, QUANTIZED), "Pack it first"),
    "quantize-array": (call(humming.quantize, MATRIX.numpy(), "int4"), "torch.as_tensor"),
    "quantize-quantized": (call(humming.quantize, QUANTIZED, "int4"), "type QuantizedWeight"),
    "reference-packed": (call(reference.matmul, X, PACKED), "humming.unpack(weight)"),
    "reference-x": (call(reference.matmul, "x", QUANTIZED), "x is of type str"),
    "reference-bias": (call(reference.matmul, X, QUANTIZED, 1.0), "the bias is of type float"),
    "dequantize-packed": (call(reference.dequantize, PACKED), "humming.unpack(weight)"),
    "dequantize-dtype": (call(reference.dequantize, QUANTIZED, "float16"), "torch.float64"),
    "bound-problem": (call(reference.error_bound, "w4a16", X, QUANTIZED), "GemmProblem"),
    "bound-packed": (call(reference.error_bound, PROBLEM, X, PACKED), "humming.unpack(weight)"),
    "plan-problem": (call(humming.plan, 5, "h200"), "Give a GemmProblem"),
    "plan-weight": (call(humming.plan, QUANTIZED, "h200", n=64, k=64), "Give a GemmProblem"),
    "plan-device": (call(humming.plan, PROBLEM, torch.device("cpu")), "Name a row such as"),
    "plan-m": (call(humming.plan, PROBLEM, "h200", 1.5), "m is no whole number"),
    "plan-n": (call(humming.plan, "w4a16", "h200", n="64", k=64), "n is no whole number"),
    "explain-m": (call(humming.plan(PROBLEM, "h200").explain, "1"), "m is no whole number"),
    "compile-problem": (call(humming.compile, None, "h200"), "Give a GemmProblem"),
    "compile-m": (call(humming.compile, PROBLEM, "h200", m=1.5), "m is no whole number"),
    "compile-m-text": (call(humming.compile, PROBLEM, "h200", m="16"), "m is no whole number"),
    "compile-folder": (call(humming.compile, PROBLEM, "h200", directory=5), "path of a folder"),
    "compile-jobs": (call(humming.compile, PROBLEM, "h200", jobs="2"), "jobs is no whole number"),
    "capabilities-number": (call(humming.capabilities, 1.5), "Name a row such as"),
    "capabilities-bytes": (call(humming.capabilities, b"h200"), "Name a row such as"),
    "supports-list": (call(humming.capabilities("h200").supports, ["tma"]), "Give the name"),
    "supports-number": (call(humming.capabilities("h200").supports, 4), "Give the name"),
    "equals-packed": (call(QUANTIZED.equals, PACKED), "humming.unpack(weight)"),
    "equals-quantized": (call(PACKED.equals, QUANTIZED), "Pack it first"),
    "tensors-metadata": (call(PackedWeight.from_tensors, "n", {}), "its metadata is of type str"),
    "tensors-text": (
        call(PackedWeight.from_tensors, PACKED.metadata(), {"codes": "x"}),
        "its codes is of type str",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_type_is_refused_with_what_to_do(case: str) -> None:
    function, told = WRONG[case]
    with pytest.raises(WrongTypeError) as error:
        function()
    assert told in str(error.value)
    assert isinstance(error.value, TypeError)
    assert isinstance(error.value, UnsupportedError)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("spec", "int4_g32"),
        ("shape", N),
        ("shape", (N, K, 1)),
        ("shape", (float(N), K)),
        ("codes", "codes"),
        ("codes", None),
        ("scales", [1.0]),
        ("zeros", 7),
        ("second_scale", 1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True], ids=["quantized", "packed"])
def test_parts_of_a_weight_have_their_types(part: str, value: Any, packed: bool) -> None:
    whole = PACKED if packed else QUANTIZED
    parts: dict[str, Any] = {"spec": whole.spec, "shape": whole.shape, "codes": whole.codes}
    parts |= {"scales": whole.scales, "operand_bits": 16} if packed else {"scales": whole.scales}
    make: Any = PackedWeight if packed else QuantizedWeight
    make(**parts)
    with pytest.raises(WrongTypeError, match=f"its {part} is"):
        make(**parts | {part: value})


def test_sizes_of_a_weight_may_be_numpys() -> None:
    shape: Any = (np.int64(N), np.int32(K))
    assert QuantizedWeight(QUANTIZED.spec, shape, QUANTIZED.codes, QUANTIZED.scales)


@pytest.mark.parametrize(
    ("matrix", "told"),
    [(MATRIX.to_sparse(), "dense"), (MATRIX.to("meta"), "with data")],
    ids=["sparse", "meta"],
)
def test_matrix_without_its_values_is_not_quantized(matrix: torch.Tensor, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        humming.quantize(matrix, "int4_g32")


def test_metadata_without_numbers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"'many'.*Store what `metadata"):
        PackedWeight.from_tensors(PACKED.metadata() | {"n": "many"}, PACKED.tensors())


def test_bias_of_another_size_has_no_reference() -> None:
    with pytest.raises(UnsupportedError, match=r"bias \[7\].*Pass a bias \[48\]"):
        reference.matmul(X, QUANTIZED, torch.zeros(7))


def test_no_jobs_compile_nothing() -> None:
    with pytest.raises(UnsupportedError, match="jobs of at least 1"):
        humming.compile(PROBLEM, "h200", m=1, jobs=0)


def test_sizes_replace_those_of_a_description_that_is_compiled() -> None:
    with pytest.raises(UnsupportedError, match="n=0"):
        humming.compile(PROBLEM, "h200", n=0)


def test_right_types_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*_: Any) -> None:
        raise AssertionError("costs time in each call")

    for name in ("check_packed", "check_arguments"):
        monkeypatch.setattr(ops, name, looked)
    assert humming.matmul(X, PACKED).shape == (3, N)


@pytest.mark.parametrize("kind", [AttributeError, TypeError, RuntimeError])
def test_faults_of_other_origin_pass(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = kind("of another origin")

    def fail(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(ops, "multiply", fail)
    with pytest.raises(kind) as error:
        humming.matmul(X, PACKED)
    assert error.value is fault


def test_right_type_passes() -> None:
    check_type("a thing", "its name", "x", (int, str), "Pass a text.")
    with pytest.raises(
        WrongTypeError, match=r"^a thing: its name is of type bytes\. Pass a text\."
    ):
        check_type("a thing", "its name", b"x", (int, str), "Pass a text.")
