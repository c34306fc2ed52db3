"""The formats that groups of compressed-tensors describe, of weights and of activations."""

from dataclasses import dataclass
from typing import Any

from humming.checkpoints.config_keys import ConfigKeys
from humming.checkpoints.scaled import MXFP4, MXFP8, NVFP4
from humming.dtypes import DataType, bfloat16, float8e4m3
from humming.errors import CheckpointError, UnsupportedError
from humming.formats import ActivationSpec, WeightSpec

MXFP6 = WeightSpec.parse("mxfp6_e2m3")
_FLOAT_WEIGHTS = {
    ("nv", 4, 16): NVFP4,
    ("mx", 4, 32): MXFP4,
    ("mx", 6, 32): MXFP6,
    ("mx", 8, 32): MXFP8,
}


@dataclass(frozen=True, slots=True)
class Args:
    """How one tensor is quantized, as a group says it."""

    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]
    dynamic: bool | str
    scale_dtype: str


def read_args(values: Any, where: str) -> Args | None:
    """What a group says of weights or of activations; None where it says nothing.

    Raises:
        CheckpointError: it says something that is not understood.
    """
    if values is None:
        return None
    keys = ConfigKeys(values, where)
    bits = keys.take("num_bits", int, 8)
    kind = keys.one_of("type", ("int", "float"), "int")
    symmetric = keys.take("symmetric", bool, True)
    size = keys.take("group_size", int, None)
    block = keys.take("block_structure", (list, tuple, str), None)
    default = "block" if block else "tensor" if size is None else "group"
    strategies = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
    strategy = keys.one_of("strategy", strategies, default)
    if strategy == "group" and size == -1:
        strategy, size = "channel", None
    dynamic = keys.take("dynamic", (bool, str), False)
    if isinstance(dynamic, str) and dynamic != "local":
        raise CheckpointError(f"{where}: 'dynamic' is {dynamic!r}; possible: true, false, 'local'")
    keys.take("actorder", (str, bool), None)
    scale_dtype = keys.take("scale_dtype", str, "")
    keys.ignore("observer", "observer_kwargs", "zp_dtype")
    keys.finish()
    pair = (0, 0)
    if strategy == "block":
        if isinstance(block, str):
            block = block.lower().split("x")
        if not block or len(block) != 2 or not all(str(extent).isdigit() for extent in block):
            raise CheckpointError(f"{where}: 'block_structure' is {block!r}, not [rows, columns]")
        pair = (int(block[0]), int(block[1]))
    if strategy in ("group", "tensor_group") and size is None:
        raise CheckpointError(f"{where}: 'group_size' is missing for the strategy {strategy!r}")
    return Args(
        bits,
        kind == "float",
        symmetric,
        strategy,
        size if size is not None and strategy in ("group", "tensor_group") else 0,
        pair,
        dynamic,
        scale_dtype.removeprefix("torch."),
    )


def weight_format(args: Args) -> WeightSpec:
    """The format of weights.

    Raises:
        UnsupportedError: there is none.
    """
    asked = f"weights of {args.bits} bits ({'float' if args.is_float else 'int'})"
    if args.dynamic:
        raise UnsupportedError(asked, "weights are not quantized at run time", "Use false.")
    if args.strategy in ("token", "attn_head"):
        raise UnsupportedError(
            asked, f"the strategy {args.strategy!r} is none of weights", "Use 'group'."
        )
    if args.is_float:
        microscaled = args.scale_dtype in ("uint8", "float8_e8m0fnu") or args.bits < 8
        family = "nv" if args.strategy == "tensor_group" else "mx"
        named = _FLOAT_WEIGHTS.get((family, args.bits, args.group_size))
        if named is not None and microscaled:
            return named
        if args.bits != 8 or args.strategy == "tensor_group" or not args.symmetric:
            raise UnsupportedError(
                asked,
                f"with the strategy {args.strategy!r}, groups of {args.group_size} and "
                f"symmetric={args.symmetric} there is no such format",
                "Possible: 4 bits in groups of 32 or 16, 6 bits in groups of 32, 8 bits.",
            )
        return WeightSpec(float8e4m3, args.strategy, args.group_size, args.block, bfloat16)
    if args.strategy == "tensor_group":
        raise UnsupportedError(asked, "two scales belong to 4-bit floats", "Use 'group'.")
    prefix, zero = ("int", "none") if args.symmetric else ("uint", "integer")
    return WeightSpec(
        DataType.parse(f"{prefix}{args.bits}"),
        args.strategy,
        args.group_size,
        args.block,
        scale_dtype=bfloat16,
        zero_point=zero,
    )


def activation_format(args: Args) -> ActivationSpec:
    """The format of activations.

    Raises:
        UnsupportedError: there is none.
    """
    kind = "float" if args.is_float else "int"
    asked = f"activations of {args.bits} bits ({kind}, strategy {args.strategy!r})"
    if args.strategy == "tensor_group":
        if (args.bits, args.group_size, args.is_float) == (4, 16, True):
            return ActivationSpec.parse("nvfp4")
        raise UnsupportedError(asked, "two scales belong to nvfp4", "Use 4 bits in groups of 16.")
    if args.strategy not in ("tensor", "token", "group"):
        raise UnsupportedError(asked, "it is none of activations", "Use tensor, token or group.")
    if args.is_float:
        if args.strategy == "group" and (
            args.bits == 4 or args.scale_dtype in ("uint8", "float8_e8m0fnu")
        ):
            names = {(4, 32): "mxfp4", (6, 32): "mxfp6_e2m3", (8, 32): "mxfp8"}
            if (args.bits, args.group_size) in names:
                return ActivationSpec.parse(names[args.bits, args.group_size])
        if args.bits != 8:
            raise UnsupportedError(asked, "there is no such format", "Use 8 bits.")
        dtype = float8e4m3
    else:
        dtype = DataType.parse(f"int{args.bits}")
    if not args.dynamic and not args.symmetric:
        raise UnsupportedError(
            asked,
            "its scale and zero point are known beforehand, and a static zero point is not read",
            "Use dynamic=true, or symmetric=true.",
        )
    return ActivationSpec(
        dtype,
        args.strategy,
        args.group_size,
        dynamic=bool(args.dynamic),
        symmetric=args.symmetric,
    )
