"""Block-scaled products of tcgen05 (PTX ISA 9.7.16.10.7), with every scale and every code."""

from typing import Any

import numpy as np
import pytest
import tensor_kernels as tk

import humming

KINDS = [
    *(("mxf8f6f4.block_scale", a, b, "ue8m0", 32) for a in ("e4m3", "e5m2") for b in ("e4m3",)),
    *(("mxf8f6f4.block_scale", a, "e4m3", "ue8m0", 32) for a in ("e2m3", "e3m2", "e2m1")),
    ("mxf8f6f4.block_scale.block32", "e2m1", "e2m1", "ue8m0", 32),
    ("mxf8f6f4.block_scale.scale_vec::1X", "e4m3", "e2m3", "ue8m0", 32),
    ("mxf4.block_scale", "e2m1", "e2m1", "ue8m0", 32),
    ("mxf4.block_scale.block32", "e2m1", "e2m1", "ue8m0", 32),
    ("mxf4.block_scale.scale_vec::2X", "e2m1", "e2m1", "ue8m0", 32),
    ("mxf4nvf4.block_scale.block32", "e2m1", "e2m1", "ue8m0", 32),
    ("mxf4nvf4.block_scale.scale_vec::4X", "e2m1", "e2m1", "ue4m3", 16),
    ("mxf4nvf4.block_scale.block16", "e2m1", "e2m1", "ue4m3", 16),
    ("mxf4nvf4.block_scale.block16", "e2m1", "e2m1", "ue8m0", 16),
]


def scaled(
    rng: Any,
    spelling: str,
    a: str,
    b: str,
    scale: str,
    block: int,
    *,
    n: int = 64,
    depth: int = 0,
    sfa: int = 0,
    sfb: int = 0,
    operands: str = "ss",
    group: int = 1,
    fields: dict[str, int] | None = None,
    scales: tuple[np.ndarray, np.ndarray] | None = None,
    codes: np.ndarray | None = None,
    **more: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(D, exact) of a random product with block scales; of both CTAs of a pair below each other.

    Args:
        scales: (of A [rows, count], of B [N, count]) instead of random ones.
        codes: of A instead of random ones.
    """
    kind = spelling.split(".")[0]
    dense4 = kind != "mxf8f6f4"
    depth = depth or (64 if dense4 else 32)
    rows, count = 128 * group, depth // block
    a_codes, a_values = tk.random_codes(rng, (rows, depth), a)
    if codes is not None:
        a_codes, a_values = codes, tk.table(a)[codes]
    b_codes, b_values = tk.random_codes(rng, (n, depth), b)
    if scales is None:
        low, high = (110, 140) if scale == "ue8m0" else (0, 127)
        scales = (
            rng.integers(low, high, (rows, count)),
            rng.integers(low, high, (n, count)),
        )
    # Columns: D, A where it is in tensor memory, the scales.
    in_tensor, at_a, at_b = n, n + 16, n + 24
    images, filled = [], []
    width = {32: 32, 48: 128, 64: 64}[depth // 2 if dense4 else depth]
    for cta in range(group):
        own = slice(128 * cta, 128 * (cta + 1))
        own_b = slice(n // group * cta, n // group * (cta + 1))
        a_bytes = tk.element_bytes(a_codes[own], a, dense4)
        b_bytes = tk.element_bytes(b_codes[own_b], b, dense4)
        a_image, a_desc = tk.k_major(a_bytes, width)
        b_image, b_desc = tk.k_major(b_bytes, width)
        image, (_, b_start) = tk.joined(a_image, b_image)
        images.append(image)
        words = rng.normal(size=(128, n + 32)).astype(np.float32).view(np.uint32)
        if operands == "ts":
            stored = a_bytes
            if not dense4:
                containers = a_codes[own] << 2 if a == "e2m1" else a_codes[own]
                stored = containers.astype(np.uint8)
            part = np.ascontiguousarray(stored).view(np.uint32)
            words[:, in_tensor : in_tensor + part.shape[1]] = part
        # The scales begin at the data id; what is in the other bytes does not matter.
        for column, first, found in ((at_a, sfa, scales[0][own]), (at_b, sfb, scales[1])):
            padded = rng.integers(0, 256, (len(found), -(-(first + count) // 4) * 4))
            padded[:, first : first + count] = found
            part = tk.scale_columns(padded)
            words[:, column : column + part.shape[1]] = part
        filled.append(words)
    idesc = tk.scaled_descriptor(kind, a, b, scale, 128 * group, n, sfa, sfb, **(fields or {}))
    first = in_tensor if operands == "ts" else a_desc
    args = [first, b_desc + (b_start >> 4), idesc, 0, 0, at_a, at_b]
    text = tk.scaled_mma(spelling, operands, group=group)
    out = tk.run(f"{text} COMMIT", np.stack(images), np.stack(filled), args, group=group, **more)
    table = tk.table(scale)
    left = a_values * np.repeat(table[scales[0]], block, axis=1)
    right = b_values * np.repeat(table[scales[1]], block, axis=1)
    found = out[:, :, :n].reshape(rows, n).view(np.float32)
    with np.errstate(invalid="ignore"):
        return found, left @ right.T


def close(found: np.ndarray, exact: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return np.allclose(found, exact.astype(np.float32), rtol=2**-22, atol=0, equal_nan=True)


@pytest.mark.parametrize(("spelling", "a", "b", "scale", "block"), KINDS)
def test_kinds(rng: Any, spelling: str, a: str, b: str, scale: str, block: int) -> None:
    assert close(*scaled(rng, spelling, a, b, scale, block))


@pytest.mark.parametrize(
    ("spelling", "a", "sfa", "sfb"),
    [
        *(("mxf8f6f4.block_scale", "e4m3", sfa, 3 - sfa) for sfa in range(4)),
        ("mxf4.block_scale", "e2m1", 2, 0),
        ("mxf4.block_scale", "e2m1", 0, 2),
    ],
)
def test_data_ids_choose_bytes(rng: Any, spelling: str, a: str, sfa: int, sfb: int) -> None:
    """9.7.16.10.7.2-3."""
    assert close(*scaled(rng, spelling, a, a, "ue8m0", 32, sfa=sfa, sfb=sfb))


@pytest.mark.parametrize("spelling", ["mxf8f6f4.block_scale", "mxf4nvf4.block_scale.block16"])
def test_a_in_tensor_memory(rng: Any, spelling: str) -> None:
    scale, block = ("ue4m3", 16) if "nv" in spelling else ("ue8m0", 32)
    assert close(*scaled(rng, spelling, "e2m1", "e2m1", scale, block, operands="ts"))


@pytest.mark.parametrize("n", [8, 200, 256])
def test_scales_of_many_columns(rng: Any, n: int) -> None:
    """Column n // 32 of the scales of B, in up to 8 columns."""
    assert close(*scaled(rng, "mxf8f6f4.block_scale", "e4m3", "e4m3", "ue8m0", 32, n=n))


def test_pair_of_ctas(rng: Any) -> None:
    """The scales of A are each CTA's own, those of B all in both."""
    assert close(*scaled(rng, "mxf4.block_scale", "e2m1", "e2m1", "ue8m0", 32, group=2))


def test_every_scale_of_ue8m0(rng: Any) -> None:
    """All 256 of them, NaN too, half on the rows of A and half on the columns of B."""
    ones = np.full((64, 1), 127)
    for part in range(2):
        own = np.arange(128 * part, 128 * (part + 1))[:, None]
        pair = (own, ones)
        found, exact = scaled(rng, "mxf8f6f4.block_scale", "e4m3", "e5m2", "ue8m0", 32, scales=pair)
        assert close(found, exact)
        assert np.isnan(found[127]).all() == (part == 1)


def test_every_scale_of_ue4m3(rng: Any) -> None:
    """The 128 that there are; bit 7 is ignored."""
    own = np.arange(256).reshape(2, 128).T.repeat(2, axis=1)
    found, exact = scaled(
        rng,
        "mxf4nvf4.block_scale.block16",
        "e2m1",
        "e2m1",
        "ue4m3",
        16,
        scales=(own, np.full((64, 4), 0x38)),
    )
    assert close(found, exact)
    assert np.isnan(found[127]).all()


@pytest.mark.parametrize("a", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
def test_every_code(rng: Any, a: str) -> None:
    codes = np.arange(128 * 32, dtype=np.uint32).reshape(128, 32) % (1 << tk.BITS[a])
    # A code that is no number makes its row none: each row has 32 neighbours.
    found, exact = scaled(rng, "mxf8f6f4.block_scale", a, "e4m3", "ue8m0", 32, codes=codes)
    assert close(found, exact)


@pytest.mark.parametrize("kind", ["block16", "block32"])
@pytest.mark.parametrize("sfa", [0, 2])
def test_k_of_96(rng: Any, kind: str, sfa: int) -> None:
    """sm_103: 6 or 3 scales, which may go on in the next word."""
    scale, block = ("ue4m3", 16) if kind == "block16" else ("ue8m0", 32)
    found, exact = scaled(
        rng,
        f"mxf4nvf4.block_scale.{kind}",
        "e2m1",
        "e2m1",
        scale,
        block,
        depth=96,
        sfa=sfa,
        sfb=2 - sfa,
        arch="sm_103a",
        fields={"_31": 1},
    )
    assert close(found, exact)


def test_rubin_doubles_k(rng: Any) -> None:
    """sm_107: bit 31 for mxf8f6f4, bit 3 for mxf4nvf4."""
    found, exact = scaled(
        rng,
        "mxf8f6f4.block_scale",
        "e4m3",
        "e4m3",
        "ue8m0",
        32,
        depth=64,
        arch="sm_107a",
        fields={"_31": 1},
    )
    assert close(found, exact)
    found, exact = scaled(
        rng,
        "mxf4nvf4.block_scale.block16",
        "e2m1",
        "e2m1",
        "ue4m3",
        16,
        depth=128,
        arch="sm_107a",
        fields={"_3": 1},
    )
    assert close(found, exact)


@pytest.mark.parametrize("device", ["b200", "b300"])
def test_undocumented_formats(rng: Any, device: str) -> None:
    """e3m4 and e0m3 on the devices whose rows have them."""
    caps = humming.capabilities(device)
    arch = caps.arch
    found, exact = scaled(
        rng, "mxf8f6f4.block_scale", "e3m4", "e4m3", "ue8m0", 32, device=caps, arch=arch
    )
    assert close(found, exact)
    found, exact = scaled(
        rng,
        "mxf4nvf4.block_scale.block16",
        "e0m3",
        "e2m1",
        "ue4m3",
        16,
        device=caps,
        arch=arch,
        codes=np.arange(128 * 64, dtype=np.uint32).reshape(128, 64) % 16,
    )
    assert close(found, exact)
