"""Cards that fail, for a process of their own: it imports them by the name of this module."""

import os
from typing import Any

import numpy as np
from card import CardError, CardHangError


class FaultyCard:
    """Says in memory how often it was used, and does what the PTX asks for."""

    name, driver_version, target, most_smem_bytes = "a card", 7, "sm_90a", 1 << 17

    def __init__(self) -> None:
        self.launches = 0

    def run(self, text: str, *_: Any) -> list[np.ndarray]:
        self.launches += 1
        if text == "dies":
            os._exit(1)
        if text == "hangs":
            raise CardHangError("no end")
        if text != "works":
            raise CardError(text, text != "INVALID_PTX")
        return [np.array([self.launches], np.uint8)]


class NoCard:
    """A machine without a driver."""

    def __init__(self) -> None:
        raise OSError("no driver")
