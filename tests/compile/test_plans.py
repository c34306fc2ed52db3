"""Plans of every kind compile to cubins for every architecture, without a device."""

import pytest

from humming.compiler import compile_plan
from humming.composer import M_RANGES, compose
from humming.errors import UnsupportedError
from humming.plugins import compiler_for, registry
from humming.problem import GemmProblem

FORMATS = (
    "int4_g128",
    "uint4_g32_zp",
    "int4",
    "uint4_g64_fzp",
    "int4_g64_sfp32",
    "uint4_zp",
    "mxint4",
    "int4_block128_s2channel",
)
OUT_DTYPES = ("float16", "bfloat16", "float32")


def one_device_of_each_architecture():
    """The first row of each architecture whose compiler makes cubins on this machine."""
    found = {}
    for caps in registry().devices():
        if caps.arch.startswith("sm_"):
            found.setdefault(caps.arch, caps)
    return list(found.values())


@pytest.mark.parametrize("m_range", M_RANGES, ids=lambda r: f"m{r[0]}-{r[1] or 'up'}")
@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
@pytest.mark.parametrize("caps", one_device_of_each_architecture(), ids=lambda c: c.name)
def test_plans_compile(caps, activation, m_range):
    version = compiler_for(caps).version
    if caps.min_compiler and version < caps.min_compiler:
        pytest.skip(f"{caps.arch} needs compiler {caps.min_compiler}, found {version}")
    # One format a case, rotated so that all of them meet each architecture.
    place = M_RANGES.index(m_range) + (4 if activation == "bfloat16" else 0) + len(caps.name)
    spec, out = FORMATS[place % 8], OUT_DTYPES[place % 3]
    if spec.endswith("_fzp") and activation == "bfloat16":
        spec += "_sbf16"  # a float zero point is subtracted in the operand's type
    problem = GemmProblem.parse(f"{spec} x {activation} -> {out}", 4096, 4096, bias=True)
    if not any(row.b == activation and row.a == activation for row in caps.mma):
        with pytest.raises(UnsupportedError, match=activation):
            compose(problem, caps, m_range)
        return
    compiled = compile_plan(compose(problem, caps, m_range), cache=False)
    assert compiled.image.kind == "cubin"
    assert compiled.image.data.startswith(b"\x7fELF")
