"""Where tensors are to be put: devices as torch names them."""

import torch

from humming.errors import UnsupportedError

_SIMULATED = (
    "Pass 'cpu': products of tensors there are simulated, by the device that HUMMING_SIMULATE or "
    "humming.matmul(..., device='sim:t4') names."
)


def place_of(asked: str, device: object) -> torch.device:
    """A device of torch that tensors can be moved to; `asked` is what it is for.

    Raises:
        UnsupportedError: torch knows no such device, or it is not present.
    """
    asked = f"{asked} on device {device!r}"
    try:
        place = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        why = "it is no place of tensors"
        raise UnsupportedError(asked, why, f"Pass 'cuda' or 'cuda:0'. {_SIMULATED}") from None
    if place.type != "cuda":
        return place  # type: ignore[no-any-return]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UnsupportedError(asked, "torch finds no CUDA device", _SIMULATED)
    if place.index is not None and place.index >= count:
        raise UnsupportedError(
            asked, "there is no such device", f"The last one is cuda:{count - 1}."
        )
    return place  # type: ignore[no-any-return]
