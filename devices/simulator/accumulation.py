"""How far the sums of a tensor core may lie from the exact ones, and sums that do lie that far.

The order in which a tensor core adds, and with how many bits, is not documented. Measured are
(Fasi, Higham, Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ CS 7:e330, 2021):
products are exact; a few of them at a time, at least 4, are aligned to the largest and added to the
accumulator with the bits of float32 behind that, truncated; results in float16 are rounded to
nearest for every such addition. Of 8-bit operands, Ada and Hopper keep 13 bits behind the largest
(DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2; SageAttention2, arXiv 2411.10958).

With S = |A| |B| + |C| of K products, each of K addends and of ceil(K / 4) sums is off by at most
u S, and so is the rounding of the result:

    |sum - exact| <= (K + ceil(K / 4) + 2) u S + ceil(K / 4) u16 S (for float16) + h
"""

import math
from typing import Any

import numpy as np

from .groups import Array

_TRUNCATED = 2.0**-23
_TRUNCATED_OF_8_BITS = 2.0**-13
_ROUNDED_F16 = 2.0**-11
_ROUNDED_F64 = 2.0**-53
_SMALLEST = {"f16": 2.0**-24, "f32": 2.0**-149, "f64": 0.0}
_NARROW = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


def bound(a: Array, b: Array, before: Any, kind: str, of: str) -> Array:
    """float64 [..., M, N]: how far a tensor core's sums may lie from A B + C.

    Args:
        a, b: float64 [..., M, K] and [..., K, N], with their scales.
        before: C, float64 [..., M, N].
        kind: PTX type of the accumulator: f16, f32, or f64, whose sums are rounded to nearest.
        of: PTX type of the elements.
    """
    k = a.shape[-1]
    sizes = np.abs(a) @ np.abs(b) + np.abs(before)
    blocks = math.ceil(k / 4)
    relative = (k + blocks + 2) * (_TRUNCATED_OF_8_BITS if of in _NARROW else _TRUNCATED)
    if kind == "f64":
        relative = 2 * (k + 1) * _ROUNDED_F64
    if kind == "f16":
        relative += (blocks + 1) * _ROUNDED_F16
    found: Array = relative * sizes + _SMALLEST[kind]
    return np.where(np.isfinite(found), found, 0.0)


class Sums:
    """The sums of a machine's tensor cores: exact ones, or such as lie off by as much as may be.

    Args:
        by: by which share of the bound they are moved, -1 to 1.
        seed: if it is given, each up or down at random.
    """

    def __init__(self, by: float, seed: int | None) -> None:
        self._by = by
        self._random = None if seed is None else np.random.default_rng(seed)

    def moved(self, total: Array, a: Array, b: Array, before: Any, kind: str, of: str) -> Array:
        """Sums A B + C, which are `total`, moved; arguments as those of `bound`."""
        if not self._by or kind not in _SMALLEST:
            return total
        way = 1.0
        if self._random is not None:
            way = self._random.choice([-1.0, 1.0], size=total.shape)
        return total + way * self._by * bound(a, b, before, kind, of)
