"""What is computed: a product of quantized weights and activations, without how or where.

D[tokens, n] = X[tokens, k] @ W[n, k].T (+ bias). The number of tokens is no part of a problem: it
is known at run time only.
"""

import operator
import re
from dataclasses import dataclass, fields
from typing import Any

from humming.dtypes import DataType, bfloat16, float16, float32, suggest
from humming.errors import UnsupportedError, WrongTypeError
from humming.formats import ActivationSpec, WeightSpec

LARGEST_SIZE = 1 << 30
"""Largest n, k and group. Kernels hold sizes in 32 bits with a sign, and round them up to tiles and
groups; addresses they compute in 64 bits, so that products of sizes have no limit."""

_OUTPUTS = (float16, bfloat16, float32)
# Quantizations that one word names for both sides, because only instructions for this very type
# of weight make it interesting.
_PAIRS = {
    "e3m4": ("float8e3m4", "float8e3m4"),
    "e0m3": ("float4e0m3_g16_se4m3_s2tensor", "float4e0m3_nv16"),
}
_SHORTHAND = re.compile(r"w([1-8])a(4|8|16|fp8)(?:[ _]+(\S+))?")
_EXAMPLES = (
    "w4a16",
    "w8a16",
    "w4a8",
    "w4a8 int8",
    "w4a8 fp8",
    "w8a8",
    "w8a8 int8",
    "w8a8 fp8",
    "w4a4",
    "w4a4 int4",
    "w4afp8",
    "e3m4",
    "e0m3",
    "int4_g128 x bf16",
    "fp8 x fp8",
    "mxfp4 x bf16",
    "mxfp4 x fp8",
    "mxfp4 x mxfp8",
    "nvfp4 x bf16",
    "nvfp4 x nvfp4",
)


def default_out_dtype(activation: ActivationSpec) -> DataType:
    """The output type that follows from activations: theirs if it has 16 bits, else bfloat16."""
    return bfloat16 if activation.dtype.is_narrow else activation.dtype


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """A product to compute for any number of tokens.

    Attributes:
        n: output features, the rows of the weight.
        k: input features, the columns of the weight.
        weight: how the weight is quantized. A name will do.
        activation: how the activations are quantized. A name will do.
        out_dtype: float16, bfloat16 or float32. A name will do.
        bias: whether a vector [n] is added.
        experts: how many weights [n, k] tokens are spread over; 0 for a dense product.
        deterministic: equal inputs give equal bits, on one device with one plan.
        batch_invariant: a token's result does not depend on how many others are computed with it.
        fp16_accumulation: sums in float16 are permitted where an instruction has them.
        allow_undocumented: instructions that their vendor does not document are permitted.

    Raises:
        UnsupportedError: a size is not positive or beyond what kernels count, or a format is
            unknown or no output type.
    """

    n: int
    k: int
    weight: WeightSpec
    activation: ActivationSpec
    out_dtype: DataType
    bias: bool = False
    experts: int = 0
    deterministic: bool = True
    batch_invariant: bool = False
    fp16_accumulation: bool = False
    allow_undocumented: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", WeightSpec.parse(self.weight))
        object.__setattr__(self, "activation", ActivationSpec.parse(self.activation))
        object.__setattr__(self, "out_dtype", DataType.parse(self.out_dtype))
        for field, least in (("n", 1), ("k", 1), ("experts", 0)):
            size = whole_number("a product", field, getattr(self, field))
            if size < least:
                raise UnsupportedError(
                    f"a product with {field}={size}",
                    f"{field} is less than {least}",
                    f"Give {field} of at least {least}.",
                )
            _check_largest(f"a product with {field}={size}", field, size)
            object.__setattr__(self, field, size)
        for spec in (self.weight, self.activation):
            extent = max(spec.group_size, *getattr(spec, "block", (0,)))
            _check_largest(f"a product with {spec.name}", "a scale's extent", extent)
        if self.out_dtype not in _OUTPUTS:
            raise UnsupportedError(
                f"output in {self.out_dtype}",
                "products are not quantized again",
                f"Possible: {', '.join(dtype.name for dtype in _OUTPUTS)}.",
            )

    @property
    def name(self) -> str:
        """The formats, readable and parsable: `int4_g128 x bfloat16`, `fp8 x fp8 -> float32`.

        The output type is shown where it is not the one that follows from the activations.
        """
        product = f"{self.weight.name} x {self.activation.name}"
        if self.out_dtype == default_out_dtype(self.activation):
            return product
        return f"{product} -> {self.out_dtype}"

    @classmethod
    def parse(cls, text: str, n: int, k: int, **overrides: Any) -> "GemmProblem":
        """The problem of a name or shorthand, for weights [n, k].

        `WEIGHT x ACTIVATION [-> OUT]` takes any formats. In the shorthand `wNaM [FORMAT]` 4-bit
        weights (and all below 8 bits) are integers in groups of 128 and 8-bit ones integers per
        channel; 8- and 4-bit activations are integers with dynamic scales per token, 16-bit ones
        float16. A format replaces what has its width: `w4a8 fp8`, `w8a8 fp8`, `w4a16 bf16`.

        >>> GemmProblem.parse("w4a8 fp8", 4096, 4096).name
        'int4_g128 x fp8'

        Args:
            text: the name, e.g. `int4_g128 x bf16`, `w8a8 int8`, `nvfp4 x nvfp4`, `e3m4`.
            n: output features.
            k: input features.
            **overrides: other fields of the problem, e.g. `bias=True`, `out_dtype="float32"`.

        Raises:
            UnsupportedError: the name or an override is unknown; the message suggests the nearest.
        """
        known = [field.name for field in fields(cls)]
        for override in overrides:
            if override not in known:
                why = "a problem has no such property"
                raise UnsupportedError(f"{override}=...", why, suggest(override, known))
        formats, _, output = _plain(text).partition("->")
        weight, activation = _parse_formats(formats.strip(), text)
        values: dict[str, Any] = {"weight": weight, "activation": activation} | overrides
        if output:
            values.setdefault("out_dtype", output.strip())
        values.setdefault(
            "out_dtype", default_out_dtype(ActivationSpec.parse(values["activation"]))
        )
        return cls(n=n, k=k, **values)

    def __str__(self) -> str:
        return f"{self.name}, n={self.n}, k={self.k}"


def _plain(text: str) -> str:
    if not isinstance(text, str):
        raise UnsupportedError(
            f"problem {text!r}", "it is no string", "Give e.g. 'int4_g128 x bf16'."
        )
    return text.strip().lower().replace("\N{MULTIPLICATION SIGN}", " x ")


def _parse_formats(formats: str, text: str) -> tuple[WeightSpec, ActivationSpec]:
    """The two sides of a product; `text` is what the caller wrote, for the errors."""
    sides = re.split(r"\s+x\s+", formats)
    if len(sides) == 2:
        return WeightSpec.parse(sides[0]), ActivationSpec.parse(sides[1])
    if formats in _PAIRS:
        weight, activation = _PAIRS[formats]
        return WeightSpec.parse(weight), ActivationSpec.parse(activation)
    shorthand = _SHORTHAND.fullmatch(formats)
    if shorthand:
        weight_bits, activation_bits, word = shorthand.groups()
        if activation_bits == "fp8":
            activation_bits, word = "8", word or "fp8"
        return _expand(int(weight_bits), int(activation_bits), word, text)
    if len(sides) == 1 and _is_weight(formats):
        raise UnsupportedError(
            f"problem {text!r}",
            "it names weights but no activations",
            f"Say e.g. '{formats} x bf16' or '{formats} x fp8'.",
        )
    raise UnsupportedError(
        f"problem {text!r}",
        "it is neither 'WEIGHT x ACTIVATION' nor a known shorthand",
        suggest(formats, _EXAMPLES),
    )


def _is_weight(name: str) -> bool:
    try:
        WeightSpec.parse(name)
    except UnsupportedError:
        return False
    return True


def _expand(
    weight_bits: int, activation_bits: int, word: str | None, text: str
) -> tuple[WeightSpec, ActivationSpec]:
    """The formats of the shorthand `wNaM word`."""
    weight = "int8" if weight_bits == 8 else f"int{weight_bits}_g128"
    activation = {16: "fp16", 8: "int8", 4: "int4"}[activation_bits]
    if word:
        bits = _bits(word)
        if bits not in (weight_bits, activation_bits):
            raise UnsupportedError(
                f"problem {text!r}",
                f"{word} has {bits} bits, which neither side has",
                suggest(f"w{weight_bits}a{activation_bits}", _EXAMPLES),
            )
        # A bare integer type stays in the groups that are usual for its width.
        if bits == weight_bits and word != f"int{bits}":
            weight = word
        if bits == activation_bits:
            activation = word
    return WeightSpec.parse(weight), ActivationSpec.parse(activation)


def _bits(word: str) -> int:
    """The width of the codes of a format that may be one of weights or of activations."""
    try:
        return ActivationSpec.parse(word).dtype.bits
    except UnsupportedError:
        return WeightSpec.parse(word).dtype.bits


def _check_largest(asked: str, what: str, size: int) -> None:
    if size > LARGEST_SIZE:
        raise UnsupportedError(
            asked,
            f"{what} is beyond {LARGEST_SIZE}, and kernels count in 32 bits",
            f"Give at most {LARGEST_SIZE}.",
        )


def whole_number(asked: str, name: str, value: Any) -> int:
    """A value as an int; `asked` is what the value is for, and `name` is its own.

    Raises:
        WrongTypeError: it is no whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        asked = f"{asked} with {name}={value!r}"
        raise WrongTypeError(asked, f"{name} is no whole number", "Give an int.") from None
