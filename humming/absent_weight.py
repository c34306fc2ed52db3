"""What stands at `weight` of a layer that holds packed tensors in its place."""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from humming.errors import UnsupportedError


class AbsentAttributeError(UnsupportedError, AttributeError):
    """What a tensor has and a packed weight has not; an AttributeError to `hasattr`."""


class AbsentWeight:
    """Answers what modules ask of a layer's weight in passing, and refuses to be computed with.

    Modules cast activations to `proj.weight.dtype`, or look at its device, before they call the
    layer. It is no tensor, and one of those that take torch's functions over: torch's encoder
    layers, whose fast path would multiply by the weight themselves, call their layers then.

    Args:
        name: what errors call the layer.
        shape: of the weight, [N, K].
        dtype: of activations, in which a layer of torch would have its weight; None where nobody
            said.
        device: where the packed tensors are.
    """

    requires_grad = False
    # The mark of transformers for what its initialization is to leave alone.
    _is_hf_initialized = True

    def __init__(
        self, name: str, shape: tuple[int, int], dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self._name = name
        self.shape, self.device = torch.Size(shape), device
        if dtype is not None:
            self.dtype = dtype

    def __getattr__(self, name: str) -> NoReturn:
        if name == "dtype":
            raise AbsentAttributeError(
                f"the dtype of the weight of {self._name}",
                "the layer was made from packed tensors, which go with several",
                "Cast the layer to that of the activations, e.g. with .to(torch.bfloat16).",
            )
        raise AbsentAttributeError(*self._refusal(f"`{name}`"))

    def __repr__(self) -> str:
        return f"<the weight of {self._name}, which is packed>"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Iterable[Any] = (), named: Any = None
    ) -> NoReturn:
        found = (*arguments, *(named or {}).values())
        weight = next((value for value in found if isinstance(value, cls)), None)
        told = getattr(function, "__name__", str(function))
        parts = cls._refusal(
            weight or cls("a QuantLinear", (0, 0), None, torch.device("cpu")), told
        )
        raise UnsupportedError(*parts)

    def _refusal(self, what: str) -> tuple[str, str, str]:
        return (
            f"{what} of the weight of {self._name}",
            "its numbers are packed, and the module that reads them does not call the layer",
            "Leave that layer as it is, by its name in `skip`; "
            "humming.reference.dequantize(humming.unpack(layer.packed)) has the numbers.",
        )
