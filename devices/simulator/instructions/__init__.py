"""The instructions, a module for each family; importing this registers their builders."""

from . import (
    arithmetic,
    async_copy,
    atomics,
    barrier,
    bits,
    compare,
    control,
    convert,
    data,
    matrix,
    memory,
    warp,
)

__all__ = [
    "arithmetic",
    "async_copy",
    "atomics",
    "barrier",
    "bits",
    "compare",
    "control",
    "convert",
    "data",
    "matrix",
    "memory",
    "warp",
]
