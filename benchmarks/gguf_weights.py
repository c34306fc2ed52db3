"""Reads the 4-bit matrices of a GGUF file: the real weights that `real_weights.py` runs.

Only what that needs: version 2 and 3 files, tensors of type Q4_1 (blocks of 32 values: a scale d
and a minimum m in float16, then 16 bytes whose low nibbles are values 0..15 and high nibbles
16..31; a value is d * q + m).
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_Q4_1, _BLOCK, _BLOCK_BYTES = 3, 32, 20
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class Matrix(NamedTuple):
    """A matrix [N, K] as the file holds it.

    Attributes:
        codes: uint8 [N, K], values 0 to 15.
        scales, minima: float16 [N, K / 32]; a weight is scale * code + minimum.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    minima: npt.NDArray[np.float16]

    def dense(self) -> npt.NDArray[np.float32]:
        """The weights [N, K]."""
        scales, minima = (x.astype(np.float32).repeat(_BLOCK, 1) for x in self[1:])
        return self.codes * scales + minima


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        size = self.take("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.take("I"), self.take("Q")
            return [self.value(element) for _ in range(count)]
        return self.take(_SCALARS[kind])


def read_matrices(path: Path) -> dict[str, Matrix]:
    """The Q4_1 matrices of a GGUF file by name, embeddings and output left out."""
    with path.open("rb") as file:
        reader = _Reader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if reader.data[:4] != b"GGUF":
        raise SystemExit(f"{path} is no GGUF file")
    reader.at = 8
    tensors, pairs = reader.take("Q"), reader.take("Q")
    metadata = {}
    for _ in range(pairs):
        name = reader.string()
        metadata[name] = reader.value(reader.take("I"))
    places = []
    for _ in range(tensors):
        name = reader.string()
        shape = [reader.take("Q") for _ in range(reader.take("I"))]
        places.append((name, shape, reader.take("I"), reader.take("Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-reader.at // alignment) * alignment
    return {
        name: _matrix(reader.data, start + offset, *shape)
        for name, shape, kind, offset in places
        if kind == _Q4_1 and len(shape) == 2 and name.startswith("blk.")
    }


def _matrix(data: mmap.mmap, at: int, k: int, n: int) -> Matrix:
    size = n * k // _BLOCK * _BLOCK_BYTES
    blocks = np.frombuffer(data, np.uint8, size, at).reshape(n, k // _BLOCK, _BLOCK_BYTES)
    halves = blocks[..., :4].copy().view(np.float16)
    nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    return Matrix(nibbles.reshape(n, k), halves[..., 0], halves[..., 1])
