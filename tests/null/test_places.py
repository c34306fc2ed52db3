"""Devices that are no places of tensors, wherever one is to be given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import humming
from humming import QuantLinear
from humming.errors import UnsupportedError
from humming.places import place_of


def _weight() -> humming.QuantizedWeight:
    return humming.quantize(torch.ones(16, 64), "int8")


def _linear() -> torch.nn.Linear:
    return torch.nn.Linear(64, 16)


TAKERS: dict[str, Callable[[Any], Any]] = {
    "pack": lambda device: humming.pack(_weight(), device=device),
    "packed": lambda device: humming.pack(_weight()).to(device),
    "quantized": lambda device: _weight().to(device),
    "from_linear": lambda device: QuantLinear.from_linear(_linear(), "int8", device=device),
    "from_quantized": lambda device: QuantLinear.from_quantized(_weight(), device=device),
    "model": lambda device: humming.quantize_model(
        torch.nn.Sequential(_linear()), "int8", device=device
    ),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("device", ["sim:t4", "t4", 3.5, ["cuda"]], ids=str)
def test_what_is_no_place_is_refused(taker: str, device: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"no place of tensors.*'cuda'.*'cpu'"):
        TAKERS[taker](device)


@pytest.mark.parametrize("taker", TAKERS)
def test_absent_card_is_refused(taker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"no CUDA device.*'cpu'"):
        TAKERS[taker]("cuda")


def test_card_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert place_of("x", "cuda:1") == torch.device("cuda:1")
    with pytest.raises(UnsupportedError, match="last one is cuda:1"):
        place_of("x", "cuda:2")
