"""Kernels that quantize activations compile to cubins for every architecture, without warnings."""

import pytest

from humming import plugins
from humming.capability import DeviceCapabilities
from humming.compiler import compile_source
from humming.dtypes import DataType
from humming.formats import ActivationSpec
from humming.quantize_kernel import ENTRY, FUSED, INPUTS, compose_quantize, plan_quantize

FORMATS = (
    *("int8", "int8_asym", "int4_g128", "int8_tensor_asym", "int8_g6_sfp16", "fp8", "fp8_e5m2"),
    *("fp8_g128", "fp8_tensor", "float8e3m4", "mxfp8", "mxfp4", "nvfp4", "float4e0m3_nv16"),
)


def one_device_of_each_architecture() -> list[DeviceCapabilities]:
    """The first row of each architecture whose compiler makes cubins on this machine."""
    found: dict[str, DeviceCapabilities] = {}
    for caps in plugins.registry().devices():
        if caps.arch.startswith("sm_"):
            found.setdefault(caps.arch, caps)
    return list(found.values())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("caps", one_device_of_each_architecture(), ids=lambda c: c.name)
def test_kernels_compile(caps: DeviceCapabilities, name: str) -> None:
    version = plugins.compiler_for(caps).version
    if caps.min_compiler and version < caps.min_compiler:
        pytest.skip(f"{caps.arch} needs compiler {caps.min_compiler}, found {version}")
    # One input, function and length a case, rotated so that each architecture meets all of them.
    place = FORMATS.index(name) + len(caps.name)
    source, fuse = list(INPUTS)[place % 3], list(FUSED)[place % 4]
    k, m = ((4096, 1), (14336, 4096), (70000, 16))[place % 3]
    plan = plan_quantize(ActivationSpec.parse(name), DataType.parse(source), fuse, k, m, caps)
    text = compose_quantize(plan.config, caps, plugins.registry())
    compiled = compile_source(text, ENTRY, caps, cache=False)
    assert compiled.image.data.startswith(b"\x7fELF")
    assert "warning" not in compiled.log
    assert "0 bytes spill stores" in compiled.log
