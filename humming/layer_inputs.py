"""What a layer does to its inputs before the product: checks of their scales and their order."""

from math import isfinite

import torch

from humming.errors import UnsupportedError, check_type
from humming.formats import ActivationSpec
from humming.quantized import SCALE_TENSOR_DTYPES, check_number


def static_scale(
    spec: ActivationSpec | None, scale: torch.Tensor | float | None
) -> torch.Tensor | None:
    """The scale that activations have beforehand, as operators take it: [1, 1], or [1] on top.

    Raises:
        UnsupportedError: the format needs one that is not given, has none, or it is not positive.
    """
    asked = f"a QuantLinear for activations {spec.name if spec else 'of 16 bits'}"
    is_static = spec is not None and spec.granularity == "tensor"
    if scale is None:
        if spec is not None and is_static:
            how = f"Pass activation_scale, or use {spec.dtype.name}, with one for each token."
            raise UnsupportedError(asked, "their scale is known beforehand, and none is given", how)
        return None
    if spec is None or not (is_static or spec.second_scale != "none"):
        why = "an activation_scale is given, but theirs are found from the activations"
        raise UnsupportedError(asked, why, "Leave it away, or use e.g. fp8_tensor.")
    check_number(asked, "the activation_scale", scale)
    found = torch.as_tensor(scale).detach()
    if found.numel() != 1 or not (found.is_floating_point() or isinstance(scale, int)):
        why = f"the activation_scale is {found.dtype} {list(found.shape)}"
        raise UnsupportedError(asked, why, "Pass one positive number.")
    if not found.is_meta and not (isfinite(float(found)) and float(found) > 0):
        raise UnsupportedError(
            asked, f"the activation_scale is {float(found)}", "Pass a positive number."
        )
    if not is_static:
        return found.reshape(1).float()
    return found.reshape(1, 1).to(SCALE_TENSOR_DTYPES[spec.scale_dtype])


def permutation_of(permutation: torch.Tensor | None, k: int) -> torch.Tensor | None:
    """The order of K inputs as int64.

    Raises:
        UnsupportedError: it does not name each input once.
    """
    if permutation is None:
        return None
    asked, how = (
        f"a QuantLinear with {k} inputs in an order of their own",
        "Pass integers, or None.",
    )
    check_type(asked, "the permutation", permutation, torch.Tensor, how)
    if permutation.shape != (k,) or permutation.dtype not in (torch.int32, torch.int64):
        why = f"the permutation is {permutation.dtype} {list(permutation.shape)}"
        raise UnsupportedError(asked, why, f"Pass int64 [{k}].")
    found = permutation.detach().long()
    # One beyond the inputs would be read from other memory.
    if not found.is_meta and not torch.equal(found.sort().values.cpu(), torch.arange(k)):
        raise UnsupportedError(
            asked, "the permutation does not name each of them once", "Pass a permutation."
        )
    return found.contiguous()


def input_scale_of(scale: torch.Tensor | None, k: int) -> torch.Tensor | None:
    """What K inputs are multiplied by.

    Raises:
        UnsupportedError: it is not one number of 16 or 32 bits for each.
    """
    if scale is None:
        return None
    asked, how = f"a QuantLinear with {k} inputs and a scale of each", "Pass a tensor, or None."
    check_type(asked, "the input_scale", scale, torch.Tensor, how)
    if scale.shape != (k,) or scale.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        why = f"the input_scale is {scale.dtype} {list(scale.shape)}"
        raise UnsupportedError(asked, why, f"Pass [{k}] of 16 or 32 bits.")
    return scale.detach().contiguous()
