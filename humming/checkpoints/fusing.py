"""Layers with the same inputs as one: q, k and v, or gate and up, their rows below one another.

What a layer has once for all its rows is given to each row where it differs from one to the next;
nothing is rounded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import torch

from humming.checkpoints.decisions import Linear
from humming.errors import UnsupportedError, check_type
from humming.quantized import QuantizedWeight, same_bits

_HOW = "Load them as layers of their own."


def fuse(linears: Mapping[str, Linear]) -> Linear:
    """One layer whose outputs are those of several, one after another.

    Scales of whole tensors that differ become scales of rows, second scales likewise. Blocks of
    scales that would straddle two layers become groups, in which their packed form is the same.

    Args:
        linears: the layers in the order of their outputs, by names for errors.

    Raises:
        UnsupportedError: formats, inputs or activations differ; the message names both layers.
    """
    check_type("fusing layers", "they", linears, Mapping, "Pass a mapping of names to layers.")
    if not linears:
        raise UnsupportedError("fusing no layers", "nothing would be left", "Name one or more.")
    (first, one), *others = linears.items()
    for name, other in others:
        _check_alike(first, one, name, other)
    of_all = [note for note in one.notes if all(note in other.notes for _, other in others)]
    notes = (
        *of_all,
        *(
            f"{name}: {note}"
            for name, linear in linears.items()
            for note in linear.notes
            if note not in of_all
        ),
    )
    weights = {name: linear.weight for name, linear in linears.items()}
    weight, told = _joined(weights)
    return replace(
        one, weight=weight, bias=_joined_bias(list(linears.values())), notes=(*notes, *told)
    )


def _check_alike(first: str, one: Linear, name: str, other: Linear) -> None:
    """Refuses layers that take other inputs or quantize them otherwise."""
    if one.weight.shape[1] != other.weight.shape[1]:
        _refuse(first, name, f"have {one.weight.shape[1]} and {other.weight.shape[1]} inputs")
    if one.activation != other.activation:
        _refuse(
            first,
            name,
            f"quantize activations to {one.activation or '16 bits'} and "
            f"{other.activation or '16 bits'}",
        )
    for part in ("input_permutation", "input_scale", "activation_scale"):
        mine, theirs = getattr(one, part), getattr(other, part)
        if (mine is None) != (theirs is None):
            _refuse(first, name, f"differ: {first if theirs is None else name} has an {part}")
        if mine is not None and not torch.equal(mine, theirs):
            told = ""
            if mine.numel() == 1:
                told = f", {float(mine):g} and {float(theirs):g}"
            how = _HOW
            if part == "activation_scale":
                how = "Give both the larger one with dataclasses.replace, or quantize per token."
            _refuse(first, name, f"have different values of {part}{told}", how)


def _joined(
    weights: Mapping[str, QuantizedWeight | torch.Tensor],
) -> tuple[QuantizedWeight | torch.Tensor, tuple[str, ...]]:
    """The rows of all weights, and notes on what became of their format."""
    plain = {name: w for name, w in weights.items() if isinstance(w, torch.Tensor)}
    quantized = {name: w for name, w in weights.items() if isinstance(w, QuantizedWeight)}
    if plain and quantized:
        name, other = next(iter(quantized)), next(iter(plain))
        _refuse(name, other, f"are {quantized[name].spec} and {plain[other].dtype}")
    if plain:
        (first, tensor), *others = plain.items()
        for other, matrix in others:
            if matrix.dtype != tensor.dtype:
                _refuse(first, other, f"are {tensor.dtype} and {matrix.dtype}")
        return torch.cat(list(plain.values())), ()
    made, notes = _of_one_format(quantized)
    return _below_one_another(made), notes


def _below_one_another(weights: list[QuantizedWeight]) -> QuantizedWeight:
    """The rows of weights of one format; what a whole tensor has once is the same in all."""
    one = weights[0]
    second = one.second_scale
    if one.spec.second_scale == "channel":
        second = torch.cat([w.second_scale for w in weights if w.second_scale is not None])
    scales, zeros = one.scales, one.zeros
    if one.spec.granularity != "tensor":
        scales = torch.cat([w.scales for w in weights])
        if zeros is not None:
            zeros = torch.cat([w.zeros for w in weights if w.zeros is not None])
    shape = sum(w.shape[0] for w in weights), one.shape[1]
    codes = torch.cat([w.codes for w in weights])
    return QuantizedWeight(one.spec, shape, codes, scales, zeros, second)


def _of_one_format(
    weights: Mapping[str, QuantizedWeight],
) -> tuple[list[QuantizedWeight], tuple[str, ...]]:
    """The weights in a format that holds all of them, exactly."""
    specs = {weight.spec for weight in weights.values()}
    notes = []
    granularities = {spec.granularity for spec in specs}
    whole = granularities == {"tensor"} and not _differ(weights, ("scales", "zeros"))
    if "tensor" in granularities and not whole:
        # One of them may have scales of rows already.
        for name, weight in weights.items():
            if weight.spec.granularity == "tensor" and weight.spec.second_scale == "channel":
                raise UnsupportedError(
                    f"fusing {', '.join(weights)}",
                    f"{name} is {weight.spec}, and its scale of the whole tensor would become one "
                    "of each row beside the second one",
                    _HOW,
                )
        notes.append("scales of whole tensors became scales of rows")
        weights = {name: _with_row_scales(weight) for name, weight in weights.items()}
    if any(_straddles(weight) for weight in list(weights.values())[:-1]):
        notes.append("blocks of scales became groups, as no whole ones end with each layer")
        weights = {name: _with_group_scales(weight) for name, weight in weights.items()}
    seconds = {weight.spec.second_scale for weight in weights.values()}
    if "tensor" in seconds and (len(seconds) > 1 or _differ(weights, ("second_scale",))):
        notes.append("second scales of whole tensors became second scales of rows")
        weights = {name: _with_row_seconds(weight) for name, weight in weights.items()}
    (first, one), *others = weights.items()
    for name, other in others:
        if other.spec != one.spec:
            _refuse(first, name, f"are {one.spec} and {other.spec}")
    return list(weights.values()), tuple(notes)


def _differ(weights: Mapping[str, QuantizedWeight], parts: tuple[str, ...]) -> bool:
    one, *others = weights.values()
    return any(
        not same_bits(getattr(one, part), getattr(other, part))
        for other in others
        for part in parts
    )


def _with_row_scales(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.spec.granularity != "tensor":
        return weight
    n = weight.shape[0]
    return replace(
        weight,
        spec=replace(weight.spec, granularity="channel"),
        scales=weight.scales.expand(n, 1).contiguous(),
        zeros=None if weight.zeros is None else weight.zeros.expand(n, 1).contiguous(),
    )


def _with_row_seconds(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.second_scale is None or weight.spec.second_scale != "tensor":
        return weight
    return replace(
        weight,
        spec=replace(weight.spec, second_scale="channel"),
        second_scale=weight.second_scale.expand(weight.shape[0], 1).contiguous(),
    )


def _straddles(weight: QuantizedWeight) -> bool:
    """Whether the last rows of a weight fill a block but in part."""
    return weight.spec.granularity == "block" and weight.shape[0] % weight.spec.block[0] != 0


def _with_group_scales(weight: QuantizedWeight) -> QuantizedWeight:
    if weight.spec.granularity != "block":
        return weight
    (rows, columns), n = weight.spec.block, weight.shape[0]
    spec = replace(weight.spec, granularity="group", group_size=columns, block=(0, 0))
    zeros = weight.zeros
    return replace(
        weight,
        spec=spec,
        scales=_spread(weight.scales, rows, n),
        zeros=None if zeros is None else _spread(zeros, rows, n),
    )


def _spread(scales: torch.Tensor, rows: int, n: int) -> torch.Tensor:
    return scales.repeat_interleave(rows, 0)[:n].contiguous()


def _joined_bias(linears: list[Linear]) -> torch.Tensor | None:
    """The biases of all, zeros where one has none; of different types in one that holds them."""
    found = [linear.bias for linear in linears if linear.bias is not None]
    if not found:
        return None
    return torch.cat(
        [
            found[0].new_zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias
            for linear in linears
        ]
    )


def _refuse(first: str, name: str, why: str, how: str = _HOW) -> NoReturn:
    raise UnsupportedError(f"fusing {first} and {name}", f"they {why}", how)
