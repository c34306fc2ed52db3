"""How quantized weights and activations are described, and the names of such descriptions.

A weight is `(decode(code) - zero) * scale * second_scale`; a scale covers the whole matrix, a row
(`channel`), `group_size` values along K of one row, or a block of rows and columns. Names spell
this out, each part but the first with a default:

    weights      DTYPE [_tensor|_channel|_gN|_blockN|_blockNxK] [_zp|_fzp] [_sDTYPE]
                 [_s2tensor|_s2channel]
    activations  DTYPE [_tensor|_token|_gN|_mx32|_mx16|_nv16] [_static|_dynamic] [_asym] [_sDTYPE]

`_g-1` is one group over all of K, which is the same as `_channel` for weights and `_token` for
activations. Well-known combinations have names of their own: `mxfp4`, `nvfp4`, ...
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import ceil
from types import MappingProxyType
from typing import Any, NoReturn, cast

from humming.dtypes import (
    NARROW,
    DataType,
    bfloat16,
    float4e2m1,
    float6e2m3,
    float6e3m2,
    float8e4m3,
    float8e5m2,
    float8e8m0,
    float16,
    float32,
    int4,
    suggest,
)
from humming.errors import UnsupportedError
from humming.format_names import Part, Parts, split_name

_WIDE_SCALES = (float16, bfloat16, float32)
_SCALES = (*_WIDE_SCALES, float8e4m3, float8e8m0)
# Spellings shorter than the canonical name, used when a description prints its name.
_SHORT = {float8e4m3: "fp8", float4e2m1: "fp4"}
_SHORT_SCALES = {
    float16: "fp16",
    bfloat16: "bf16",
    float32: "fp32",
    float8e4m3: "e4m3",
    float8e8m0: "ue8m0",
}
_BLOCK_SCALES = {"mx32": (32, float8e8m0), "mx16": (16, float8e8m0), "nv16": (16, float8e4m3)}

# Stands for `default_scale_dtype(dtype)` until __post_init__ puts that in its place.
_DEFAULT_SCALE = cast(DataType, None)

_GROUP = Part(
    r"g(-?\d{1,9})",
    "g128",
    lambda match: {"granularity": "group", "group_size": int(match[1])},
)
_SCALE = Part(
    # Nothing but dtypes, so that another word that starts with s is an unknown part.
    r"s(fp16|f16|float16|bf16|bfloat16|fp32|f32|float32|(?:float8)?u?e\dm\d)",
    "sbf16",
    lambda match: {"scale_dtype": DataType.parse(match[1])},
)
_WEIGHT_PARTS = (
    Part(r"tensor", "tensor", lambda match: {"granularity": match[0]}),
    Part(r"channel", "channel", lambda match: {"granularity": match[0]}),
    _GROUP,
    Part(
        r"block(\d{1,9})(?:x(\d{1,9}))?",
        "block128",
        lambda match: {
            "granularity": "block",
            "block": (int(match[1]), int(match[2] or match[1])),
        },
    ),
    Part(r"zp", "zp", lambda _: {"zero_point": "integer"}),
    Part(r"fzp", "fzp", lambda _: {"zero_point": "float"}),
    _SCALE,
    Part(r"s2(tensor|channel)", "s2tensor", lambda match: {"second_scale": match[1]}),
)
_ACTIVATION_PARTS = (
    Part(r"tensor", "tensor", lambda match: {"granularity": match[0]}),
    Part(r"token", "token", lambda match: {"granularity": match[0]}),
    _GROUP,
    Part(
        r"mx32|mx16|nv16",
        "mx32",
        lambda match: {
            "granularity": "block",
            "group_size": _BLOCK_SCALES[match[0]][0],
            "scale_dtype": _BLOCK_SCALES[match[0]][1],
        },
    ),
    Part(r"static|dynamic", "static", lambda match: {"dynamic": match[0] == "dynamic"}),
    Part(r"asym", "asym", lambda _: {"symmetric": False}),
    _SCALE,
)


def default_scale_dtype(dtype: DataType) -> DataType:
    """The scale dtype of weights that name none: float16, or float32 for types beyond 256.

    The scale of typical weights in a type that reaches 448 or 57344 is below the smallest normal
    float16 (6.1e-5), where it would lose most of its bits.
    """
    return float32 if dtype.max > 256 else float16


def _set(spec: object, field: str, value: object) -> None:
    # The way to normalize a field of a frozen dataclass while it is being made.
    object.__setattr__(spec, field, value)


def _refuse(spec: "WeightSpec | ActivationSpec", why: str, possible: str) -> NoReturn:
    shown = ", ".join(f"{field.name}={getattr(spec, field.name)!s}" for field in fields(spec))
    raise UnsupportedError(f"{type(spec).__name__}({shown})", why, possible)


def _whole(spec: "WeightSpec | ActivationSpec", field: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        _refuse(spec, f"{field} {value!r} is no whole number", "Give an int.")


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """How a weight matrix [n, k] is quantized.

    Attributes:
        dtype: type of the codes, at most 8 bits. A name will do here and for `scale_dtype`.
        granularity: what one scale covers: `tensor`, `channel` (a row), `group` or `block`.
        group_size: for `group`: how many values along K share a scale. -1 means all of K and
            turns the granularity into `channel`.
        block: for `block`: (rows, values along K) that share a scale.
        scale_dtype: float16, bfloat16, float32, float8e4m3 or float8e8m0 (the default is
            `default_scale_dtype`).
        zero_point: what is subtracted from the decoded code, per scale: `none`, `integer` (uint8,
            for uint codes) or `float` (of the scale dtype, for integer codes).
        second_scale: float32 factor on top: `none`, `tensor` or `channel`.

    Raises:
        UnsupportedError: the parts contradict one another.
    """

    dtype: DataType
    granularity: str
    group_size: int = 0
    block: tuple[int, int] = (0, 0)
    scale_dtype: DataType = _DEFAULT_SCALE
    zero_point: str = "none"
    second_scale: str = "none"

    def __post_init__(self) -> None:
        _set(self, "dtype", DataType.parse(self.dtype))
        if self.scale_dtype is None:
            _set(self, "scale_dtype", default_scale_dtype(self.dtype))
        _set(self, "scale_dtype", DataType.parse(self.scale_dtype))
        if self.granularity == "group" and self.group_size == -1:
            _set(self, "granularity", "channel")
            _set(self, "group_size", 0)
        self._check_extent()
        self._check_types()

    def _check_extent(self) -> None:
        granularities = ("tensor", "channel", "group", "block")
        if self.granularity not in granularities:
            why = f"{self.granularity!r} is no granularity of weight scales"
            _refuse(self, why, suggest(str(self.granularity), granularities))
        _set(self, "group_size", _whole(self, "group_size", self.group_size))
        if not isinstance(self.block, (tuple, list)) or len(self.block) != 2:
            _refuse(self, "a block is (rows, values along K)", "Give e.g. block=(128, 128).")
        _set(self, "block", tuple(_whole(self, "block", extent) for extent in self.block))
        if self.granularity == "group" and self.group_size < 1:
            why = f"a group of {self.group_size} values is empty"
            _refuse(self, why, "Give a positive group_size, or -1 for one scale per row.")
        if self.granularity != "group" and self.group_size:
            why = f"group_size has no meaning with {self.granularity} scales"
            _refuse(self, why, "Use granularity='group'.")
        if self.granularity == "block" and min(self.block) < 1:
            _refuse(self, f"a block of {self.block} is empty", "Give e.g. block=(128, 128).")
        if self.granularity != "block" and any(self.block):
            why = f"block has no meaning with {self.granularity} scales"
            _refuse(self, why, "Use granularity='block'.")

    def _check_types(self) -> None:
        if not self.dtype.is_narrow:
            _refuse(self, f"{self.dtype} has more than 8 bits", "Use a type of 1 to 8 bits.")
        if self.dtype.kind == "ufloat":
            why = f"{self.dtype} is a type for scales"
            _refuse(self, why, "For weights use e.g. float8e4m3.")
        if self.scale_dtype not in _SCALES:
            possible = ", ".join(str(dtype) for dtype in _SCALES)
            _refuse(self, f"{self.scale_dtype} is no type for scales", f"Possible: {possible}.")
        if self.zero_point not in ("none", "integer", "float"):
            why = f"{self.zero_point!r} is no kind of zero point"
            _refuse(self, why, "Possible: none, integer, float.")
        if self.zero_point != "none" and not self.dtype.is_integer:
            why = f"zero points belong to integer weights, not to {self.dtype}"
            _refuse(self, why, "Use none, or codes such as uint4.")
        if self.zero_point == "integer" and self.dtype.is_signed:
            why = f"integer zero points belong to unsigned weights, not to {self.dtype}"
            _refuse(
                self, why, f"Use uint{self.dtype.bits}, with each code raised by half its range."
            )
        if self.zero_point == "float" and self.scale_dtype not in _WIDE_SCALES:
            why = f"float zero points have the scale dtype, and {self.scale_dtype} is too coarse"
            _refuse(self, why, "Use float16, bfloat16 or float32 scales.")
        if self.second_scale not in ("none", "tensor", "channel"):
            why = f"{self.second_scale!r} is no second scale"
            _refuse(self, why, "Possible: none, tensor, channel.")
        if self.second_scale == self.granularity:
            why = f"both scales would be per {self.granularity}"
            _refuse(self, why, "Multiply them into one and use second_scale='none'.")

    @property
    def name(self) -> str:
        """The shortest name that `parse` turns into this description."""
        if self in _WEIGHT_NAMES:
            return _WEIGHT_NAMES[self]
        rows, columns = self.block
        parts = [
            _SHORT.get(self.dtype, self.dtype.name),
            {
                "tensor": "tensor",
                "channel": "",
                "group": f"g{self.group_size}",
                "block": f"block{rows}" if rows == columns else f"block{rows}x{columns}",
            }[self.granularity],
            {"none": "", "integer": "zp", "float": "fzp"}[self.zero_point],
        ]
        if self.scale_dtype != default_scale_dtype(self.dtype):
            parts.append("s" + _SHORT_SCALES[self.scale_dtype])
        if self.second_scale != "none":
            parts.append("s2" + self.second_scale)
        return "_".join(part for part in parts if part)

    @classmethod
    def parse(cls, text: "str | WeightSpec") -> "WeightSpec":
        """The description of a name; one that is a description already is returned as it is.

        >>> WeightSpec.parse("uint4_g64_zp").zero_point, WeightSpec.parse("mxfp4").group_size
        ('integer', 32)

        Raises:
            UnsupportedError: no such format; the message suggests the nearest.
        """
        if isinstance(text, WeightSpec):
            return text
        named, dtype, parts = split_name(_OF_WEIGHTS, text, NAMED_WEIGHTS, _WEIGHT_EXAMPLES)
        if named is not None:
            return named
        return _WEIGHT_NAMING.read(text, dtype, parts)

    def scale_shape(self, n: int, k: int) -> tuple[int, int]:
        """Rows and columns of the scales, and of the zero points, of an [n, k] weight."""
        if self.granularity == "tensor":
            return 1, 1
        rows = self.block[0] if self.granularity == "block" else 1
        return ceil(n / rows), ceil(k / self.scale_group(k))

    def scale_group(self, k: int) -> int:
        """How many of the k values of a row one column of the scales covers."""
        if self.granularity == "group":
            return self.group_size
        return self.block[1] if self.granularity == "block" else k

    def bits_per_weight(self, n: int, k: int) -> float:
        """Bits that the canonical form of an [n, k] weight takes per value, all scales included.

        Rows of codes end on a byte; integer zero points take 8 bits each.
        """
        rows, columns = self.scale_shape(n, k)
        zero_bits = {"none": 0, "integer": 8, "float": self.scale_dtype.bits}[self.zero_point]
        code_bits = n * ceil(k * self.dtype.bits / 8) * 8
        scale_bits = rows * columns * (self.scale_dtype.bits + zero_bits)
        second_bits = 32 * {"none": 0, "tensor": 1, "channel": n}[self.second_scale]
        return (code_bits + scale_bits + second_bits) / (n * k)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """How the activations [tokens, k] of a product arrive or are quantized.

    Attributes:
        dtype: float16 or bfloat16, or a signed type of at most 8 bits. A name will do here and for
            `scale_dtype`.
        granularity: what one scale covers: `none` (16-bit activations), `tensor`, `token` (a row),
            `group` (`group_size` values of a row), or `block`: as `group`, with the narrow scales
            that block-scaled instructions read.
        group_size: for `group` any positive number, -1 meaning `token`; for `block` 16 or 32.
        scale_dtype: float32, float16 or bfloat16; for `group` also float8e8m0; for `block`
            float8e8m0, or float8e4m3 with groups of 16.
        dynamic: whether scales come from the activations at run time. False is for `tensor` only:
            one scale, known beforehand. Ignored (and stored as False) where there are no scales.
        symmetric: False when integer codes have a zero point.

    Raises:
        UnsupportedError: the parts contradict one another.
    """

    dtype: DataType
    granularity: str
    group_size: int = 0
    scale_dtype: DataType = float32
    dynamic: bool = True
    symmetric: bool = True

    def __post_init__(self) -> None:
        _set(self, "dtype", DataType.parse(self.dtype))
        _set(self, "scale_dtype", DataType.parse(self.scale_dtype))
        if self.granularity == "group" and self.group_size == -1:
            _set(self, "granularity", "token")
            _set(self, "group_size", 0)
        if self.granularity == "none":
            _set(self, "dynamic", False)
            _set(self, "scale_dtype", float32)
        self._check_type()
        self._check_scales()

    def _check_type(self) -> None:
        granularities = ("none", "tensor", "token", "group", "block")
        if self.granularity not in granularities:
            why = f"{self.granularity!r} is no granularity of activation scales"
            _refuse(self, why, suggest(str(self.granularity), granularities))
        if self.dtype == float32:
            _refuse(self, "activations have at most 16 bits", "Use float16 or bfloat16.")
        if self.dtype.is_narrow == (self.granularity == "none"):
            why = f"{self.dtype} with {self.granularity} scales"
            possible = (
                "8 bits and fewer need scales, e.g. per token; float16 and bfloat16 have none."
            )
            _refuse(self, why, possible)
        if not self.dtype.is_signed:
            why = f"activations have a sign, {self.dtype} does not"
            _refuse(self, why, "Use a signed type, e.g. int8, with symmetric=False if need be.")
        if not self.symmetric and not (self.dtype.is_integer and self.granularity != "block"):
            why = "zero points belong to integer activations without block scales"
            _refuse(self, why, "Use symmetric=True.")

    def _check_scales(self) -> None:
        _set(self, "group_size", _whole(self, "group_size", self.group_size))
        if self.granularity in ("group", "block") and self.group_size < 1:
            why = f"a group of {self.group_size} values is empty"
            _refuse(self, why, "Give a positive group_size, or -1 for one scale per token.")
        if self.granularity not in ("group", "block") and self.group_size:
            why = f"group_size has no meaning with {self.granularity} scales"
            _refuse(self, why, "Use granularity='group'.")
        if not self.dynamic and self.granularity not in ("none", "tensor"):
            why = f"scales per {self.granularity} cannot be known beforehand"
            _refuse(self, why, "Use dynamic=True, or granularity='tensor'.")
        if self.granularity == "block":
            if (self.group_size, self.scale_dtype) not in _BLOCK_SCALES.values():
                why = f"no instruction takes {self.scale_dtype} scales of {self.group_size} values"
                _refuse(self, why, "Possible: float8e8m0 of 32 or 16, float8e4m3 of 16.")
            return
        allowed = _WIDE_SCALES + ((float8e8m0,) if self.granularity == "group" else ())
        if self.scale_dtype not in allowed:
            why = f"{self.scale_dtype} scales do not go with granularity {self.granularity!r}"
            _refuse(self, why, f"Possible: {', '.join(str(dtype) for dtype in allowed)}.")

    @property
    def second_scale(self) -> str:
        """`tensor` where a static float32 factor comes on top (float8e4m3 scales), else `none`."""
        return "tensor" if self.scale_dtype == float8e4m3 else "none"

    @property
    def name(self) -> str:
        """The shortest name that `parse` turns into this description."""
        if self in _ACTIVATION_NAMES:
            return _ACTIVATION_NAMES[self]
        parts = [_SHORT.get(self.dtype, self.dtype.name)]
        if self.granularity == "block":
            scales = (self.group_size, self.scale_dtype)
            parts += [part for part, known in _BLOCK_SCALES.items() if known == scales]
        elif self.granularity == "tensor":
            parts += ["tensor", "dynamic"] if self.dynamic else ["tensor"]
        elif self.granularity == "group":
            parts.append(f"g{self.group_size}")
        if not self.symmetric:
            parts.append("asym")
        if self.granularity != "block" and self.scale_dtype != float32:
            parts.append("s" + _SHORT_SCALES[self.scale_dtype])
        return "_".join(parts)

    @classmethod
    def parse(cls, text: "str | ActivationSpec") -> "ActivationSpec":
        """The description of a name; one that is a description already is returned as it is.

        Types of at most 8 bits have dynamic scales per token if the name does not say otherwise,
        and a static one with `_tensor`.

        >>> ActivationSpec.parse("int8").granularity, ActivationSpec.parse("fp8_g128").group_size
        ('token', 128)

        Raises:
            UnsupportedError: no such format; the message suggests the nearest.
        """
        if isinstance(text, ActivationSpec):
            return text
        named, dtype, parts = split_name(
            _OF_ACTIVATIONS, text, NAMED_ACTIVATIONS, _ACTIVATION_EXAMPLES
        )
        if named is not None:
            return named
        return _ACTIVATION_NAMING.read(text, dtype, parts)

    def __str__(self) -> str:
        return self.name


def _weight(dtype: DataType, values: dict[str, Any]) -> WeightSpec:
    return WeightSpec(**{"dtype": dtype, "granularity": "channel", **values})


def _activation(dtype: DataType, values: dict[str, Any]) -> ActivationSpec:
    granularity = values.get("granularity", "token" if dtype.is_narrow else "none")
    dynamic = granularity not in ("tensor", "none")
    known = {"dtype": dtype, "granularity": granularity, "dynamic": dynamic}
    return ActivationSpec(**{**known, **values})


_OF_WEIGHTS, _OF_ACTIVATIONS = "weight format", "activation format"
_WEIGHT_NAMING = Parts(_OF_WEIGHTS, _WEIGHT_PARTS, (_OF_ACTIVATIONS, _ACTIVATION_PARTS), _weight)
_ACTIVATION_NAMING = Parts(
    _OF_ACTIVATIONS, _ACTIVATION_PARTS, (_OF_WEIGHTS, _WEIGHT_PARTS), _activation
)


def _microscaled(dtype: DataType) -> WeightSpec:
    return WeightSpec(dtype, "group", 32, scale_dtype=float8e8m0)


NAMED_WEIGHTS: Mapping[str, WeightSpec] = MappingProxyType(
    {
        "mxfp4": _microscaled(float4e2m1),
        "mxfp6_e3m2": _microscaled(float6e3m2),
        "mxfp6_e2m3": _microscaled(float6e2m3),
        "mxfp8": _microscaled(float8e4m3),
        "mxfp8_e4m3": _microscaled(float8e4m3),
        "mxfp8_e5m2": _microscaled(float8e5m2),
        "mxint4": _microscaled(int4),
        "nvfp4": WeightSpec(float4e2m1, "group", 16, scale_dtype=float8e4m3, second_scale="tensor"),
    }
)
"""Weight formats whose names are not made of parts."""

NAMED_ACTIVATIONS: Mapping[str, ActivationSpec] = MappingProxyType(
    {
        name: ActivationSpec(spec.dtype, "block", spec.group_size, spec.scale_dtype)
        for name, spec in NAMED_WEIGHTS.items()
        if name != "mxint4"
    }
)
"""Activation formats whose names are not made of parts."""

_DTYPE_NAMES = [_SHORT.get(dtype, dtype.name) for dtype in NARROW]
_WEIGHT_EXAMPLES = ["int4_g128", "uint4_g128_zp", "fp8_block128", *NAMED_WEIGHTS, *_DTYPE_NAMES]
_ACTIVATION_EXAMPLES = ["fp16", "bf16", *NAMED_ACTIVATIONS, *_DTYPE_NAMES]

# Of two names for one description the shorter is the one to print, so it is entered last.
_WEIGHT_NAMES: dict[WeightSpec, str] = {
    NAMED_WEIGHTS[name]: name for name in sorted(NAMED_WEIGHTS, key=len, reverse=True)
}
_ACTIVATION_NAMES: dict[ActivationSpec, str] = {
    NAMED_ACTIVATIONS[name]: name for name in sorted(NAMED_ACTIVATIONS, key=len, reverse=True)
}
