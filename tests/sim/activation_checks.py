"""Comparing quantized activations with the reference: bit by bit, or after a fused function."""

import torch

from humming import reference
from humming.activations import QuantizedActivation
from humming.formats import ActivationSpec
from humming.quantized import decode_scales, unpack_bits

# exp(-x) of the largest x that is not 0 has a relative error of about 2^-17.
_FUSED_TOLERANCE = 2.0**-15
# Where the reference has subnormal numbers, a kernel may have zeros.
_FUSED_NOTHING = 2.0**-115


def given(spec: ActivationSpec, device: str = "cpu") -> dict[str, torch.Tensor]:
    """What a format wants to be told, at random."""
    told = {}
    if spec.granularity == "tensor":
        told["scale"] = torch.rand(1, device=device) * 0.05 + 0.001
        if not spec.symmetric:
            told["zero"] = torch.randint(-100, 100, (1,), dtype=torch.int8, device=device)
    if spec.second_scale != "none":
        told["second_scale"] = torch.rand(1, device=device) * 0.05 + 0.001
    return told


def check(found: QuantizedActivation, x: torch.Tensor, **arguments: torch.Tensor | None) -> None:
    """Fails unless codes, scales and zero points are the reference's, bit by bit."""
    expected = reference.quantize_activation(x, found.spec, **arguments)  # type: ignore[arg-type]
    assert found.codes.shape == expected.codes.shape
    differ = found.codes != expected.codes
    assert not differ.any(), f"codes differ at {differ.nonzero()[:4].tolist()}"
    assert _same(found.scales, expected.scales)
    if expected.zeros is None:
        assert found.zeros is None
    else:
        assert found.zeros is not None
        assert torch.equal(found.zeros, expected.zeros)
    check_padding(found)


def check_fused(found: QuantizedActivation, x: torch.Tensor, fuse: str) -> None:
    """Fails unless codes are within one of the reference's, and scales within its rounding."""
    spec, k = found.spec, found.shape[1]
    expected = reference.quantize_activation(x, spec, fuse=fuse)
    ours, theirs = (decode_scales(s, spec.scale_dtype) for s in (found.scales, expected.scales))
    assert torch.equal(ours.isnan(), theirs.isnan())
    # A scale of few bits may have been rounded to its neighbour.
    close = ((ours - theirs).abs() <= _FUSED_TOLERANCE * theirs) | theirs.isnan()
    sizeable = ~(theirs * spec.dtype.max < _FUSED_NOTHING)
    assert close[sizeable].all() or spec.scale_dtype.bits < 32
    assert (close | ~sizeable).double().mean() > 0.9
    same = close[:, torch.arange(k, device=x.device) // (spec.group_size or k)]
    steps = _place(found.codes_unpacked(), spec) - _place(
        unpack_bits(expected.codes, spec.dtype.bits, k), spec
    )
    assert (steps.abs()[same] <= 1).all()
    check_padding(found)


def check_padding(found: QuantizedActivation) -> None:
    """Fails unless the bytes between rows are zero."""
    m, width = found.codes.shape
    if m == 0:
        return
    whole = found.codes.as_strided((m, found.codes_row_bytes), (found.codes_row_bytes, 1))
    assert not whole[:, width:].any()


def _place(codes: torch.Tensor, spec: ActivationSpec) -> torch.Tensor:
    """Codes as integers in the order of their numbers."""
    wide, half = codes.int(), 1 << (spec.dtype.bits - 1)
    if spec.dtype.is_integer:
        return torch.where(wide >= half, wide - 2 * half, wide)
    return torch.where(wide >= half, half - wide, wide)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype == torch.uint8:
        return torch.equal(one, other)
    return torch.equal(one.float().nan_to_num(nan=-1.0), other.float().nan_to_num(nan=-1.0))


def awkward(m: int, k: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Rows of very different sizes, some with zeros, a NaN or an infinity."""
    x = torch.randn(m, k, device=device) * 10.0 ** torch.empty(m, 1, device=device).uniform_(-4, 4)
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")])
    for row in range(1, m, 3):
        x[row, int(torch.randint(k, ()))] = special[int(torch.randint(5, ()))]
    x[m // 2] = 0.0
    return x.to(dtype)


def halves(spec: ActivationSpec, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a static scale of 1: every number of the type, halves between, and neighbours."""
    table = torch.tensor(spec.dtype.decode_table())
    numbers = table[table.isfinite()].unique()
    middle = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat([numbers, middle, numbers * 1.5, numbers[-4:] * 4]).float()
    near = torch.cat(
        [values, *(torch.nextafter(values, torch.tensor(s)) for s in (float("inf"), -float("inf")))]
    )
    return torch.cat([near, -near, torch.tensor([0.0, -0.0, 1e-40, -1e-40])])[None].to(dtype)
