"""Tensor copies in the mode im2col (PTX ISA 5.5.4 and 9.7.9.27.1.2)."""

import functools
import importlib
from typing import Any

import numpy as np
import pytest
from hopper_kernels import MapOf, aligned, run, tensor_map
from test_tensor_copy import random_bits, swizzled_rows

errors = importlib.import_module("humming.devices.simulator.errors")


@functools.cache
def source(rank: int) -> str:
    """A kernel that loads the pixels of a column and writes out the shared memory."""
    count = 2 * rank - 2
    places = [f"%{i + 3}" for i in range(count)]
    numbers = ", ".join(f"i32 c{i}" for i in range(count))
    operands = ", ".join(
        f'"r"(c{i})' if i < rank else f'"h"((unsigned short)c{i})' for i in range(count)
    )
    return f"""
    extern "C" __global__ void test(const __grid_constant__ Map map, u32* out, u32 size,
                                    {numbers}) {{
      extern __shared__ __align__(1024) u32 tile[];
      __shared__ u64 bar;
      if (threadIdx.x == 0) {{
        init(&bar, 1); fence_init(); expect(&bar, size);
        asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col"
                     ".mbarrier::complete_tx::bytes [%0], [%1, {{{", ".join(places[:rank])}}}],"
                     " [%2], {{{", ".join(places[rank:])}}};"
                     :: "r"(shared(tile)), "l"(&map), "r"(shared(&bar)), {operands} : "memory");
      }}
      __syncthreads();
      wait(&bar, 0);
      for (u32 i = threadIdx.x; i < size / 4; i += 32) out[i] = tile[i];
    }}
    """


def load(encoded: MapOf, at: tuple[int, ...], offsets: tuple[int, ...], size: int) -> np.ndarray:
    out = aligned(size, np.uint8)
    run(source(len(at)), encoded, out, size, *at, *offsets, block=32, smem_bytes=size)
    return out


def expected(
    array: np.ndarray,
    at: tuple[int, ...],
    offsets: tuple[int, ...],
    box: tuple[int, int],
    corners: tuple[tuple[int, int], ...],
    steps: tuple[int, ...],
) -> np.ndarray:
    """The pixels one by one: all bases in the order of the tensor, beginning with the given one."""
    sizes = array.shape[::-1]
    lines = [
        list(range(first, size + last, step))
        for (first, last), size, step in zip(corners, sizes[1:-1], steps[1:-1], strict=True)
    ]
    # Images behind the last one have pixels, too: none of them lies in the tensor.
    images = range(at[-1], at[-1] + box[1] + 1)
    bases = [(*place[::-1], n) for n in images for place in np.ndindex(*map(len, lines[::-1]))]
    numbers = [(*(line[i] for line, i in zip(lines, b[:-1], strict=True)), b[-1]) for b in bases]
    start = numbers.index(at[1:])
    found = np.zeros((box[1], box[0]), array.dtype)
    for pixel, base in enumerate(numbers[start : start + box[1]]):
        place = (*(b + o for b, o in zip(base[:-1], offsets, strict=True)), base[-1])
        for channel in range(box[0]):
            where = (at[0] + channel, *place)
            if all(0 <= w < size for w, size in zip(where, sizes, strict=True)):
                found[pixel, channel] = array[where[::-1]]
    return found


@pytest.mark.parametrize("trial", range(3))
@pytest.mark.parametrize("stride", [1, 2], ids=["dense", "strided"])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_columns_of_pixels(rng: np.random.Generator, rank: int, stride: int, trial: int) -> None:
    """Filters of different sizes and padding in W, H and D; columns that end behind the batch."""
    spatial = rank - 2
    shape = (
        int(rng.integers(1, 4)),
        *(int(v) for v in rng.integers(4, 8, spatial)),
        16 * int(rng.integers(1, 3)),
    )
    array = random_bits(rng, shape, np.uint16)
    filters = [int(v) for v in rng.integers(1, 4, spatial)]
    padding = [int(rng.integers(0, size)) for size in filters]
    corners = tuple((-p, p - size + 1) for p, size in zip(padding, filters, strict=True))
    steps = (1, *(int(rng.integers(1, stride + 1)) for _ in range(spatial)), 1)
    box = (8 * int(rng.integers(1, 3)), int(rng.integers(1, 40)))
    sizes = array.shape[::-1]
    base = [
        int(rng.choice(range(first, size + last, step)))
        for (first, last), size, step in zip(corners, sizes[1:-1], steps[1:-1], strict=True)
    ]
    at = (8 * int(rng.integers(0, 3)), *base, int(rng.integers(0, shape[0])))
    offsets = tuple(int(rng.integers(0, size)) for size in filters)
    encoded = tensor_map(array, "uint16", box, element_strides=steps, corners=corners)
    want = expected(array, at, offsets, box, corners, steps)
    found = load(encoded, at, offsets, want.nbytes)
    np.testing.assert_array_equal(found.view(np.uint16).reshape(want.shape), want)


def test_swizzled_pixels(rng: np.random.Generator) -> None:
    """Channels of a pixel are a row of the swizzle."""
    array = random_bits(rng, (2, 5, 6, 64), np.uint16)
    corners, steps = ((-1, -1), (-1, -1)), (1, 1, 1, 1)
    encoded = tensor_map(array, "uint16", (64, 24), swizzle=3, corners=corners)
    want = expected(array, (0, 2, 3, 0), (1, 2), (64, 24), corners, steps)
    found = load(encoded, (0, 2, 3, 0), (1, 2), want.nbytes)
    rows = want.view(np.uint8).reshape(24, 128)
    np.testing.assert_array_equal(found.reshape(24, 128), swizzled_rows(rows, 128))


@pytest.mark.parametrize(
    ("at", "offsets", "told"),
    [
        ((0, -2, 0, 0), (0, 0), "outside of the bounding box"),
        ((0, 5, 0, 0), (0, 0), "outside of the bounding box"),
        ((0, 0, 4, 0), (0, 0), "outside of the bounding box"),
        ((0, 0, 0, 0), (256, 0), "not below 256"),
    ],
)
def test_bases_and_offsets_that_there_are_not(
    rng: np.random.Generator, at: Any, offsets: Any, told: str
) -> None:
    array = random_bits(rng, (2, 5, 6, 16), np.uint16)
    encoded = tensor_map(array, "uint16", (8, 4), corners=((-1, -1), (-1, -1)))
    with pytest.raises(errors.UndefinedBehaviorError, match=told):
        load(encoded, at, offsets, 64)


def test_maps_of_the_other_mode(rng: np.random.Generator) -> None:
    array = random_bits(rng, (2, 5, 6, 16), np.uint16)
    with pytest.raises(errors.UndefinedBehaviorError, match="one of the mode tile"):
        load(tensor_map(array, "uint16", (8, 2, 2, 1)), (0, 0, 0, 0), (0, 0), 64)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"corners": ((-1, -1),)}, "1 pairs of corners"),
        ({"corners": ((-129, 0), (0, 0))}, "corners not in -128 to 127"),
        ({"corners": ((0, -6), (0, 0))}, "an empty bounding box"),
        ({"box": (8, 1025), "corners": ((0, 0), (0, 0))}, "more than 1024 pixels"),
    ],
)
def test_rules_of_the_driver(rng: np.random.Generator, change: Any, told: str) -> None:
    array = random_bits(rng, (2, 5, 6, 16), np.uint16)
    with pytest.raises(Exception, match=told):
        tensor_map(array, "uint16", **{"box": (8, 4), **change})
