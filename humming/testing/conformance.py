"""The conformance kit: what every device plugin must hold to.

A plugin's test file is one import and one fixture, which returns the plugin's module:

    from humming.testing.conformance import *

    @pytest.fixture
    def plugin():
        import humming_acme
        return humming_acme

The tests need no accelerator. What they leave out follows from what the plugin declares and from
what is there: no components, no compiler, no device present.
"""

import re
from types import ModuleType

import pytest

from humming import composer
from humming.cache import include_closure
from humming.capability import DeviceCapabilities
from humming.components import SHARED, Component
from humming.dtypes import DataType
from humming.errors import CompileError, UnsupportedError
from humming.hookspecs import Compiler
from humming.layout import device_struct
from humming.plugins import PluginSet
from humming.problem import GemmProblem
from humming.source import ENTRY, dequantizer

__all__ = [
    "one_per_family",
    "own_devices",
    "plugin_set",
    "test_components_meet_their_contracts",
    "test_composing_is_deterministic",
    "test_device_names_are_unique",
    "test_driver_names_lead_to_their_rows",
    "test_figures_have_sources",
    "test_kernels_compile",
    "test_kernels_compute",
    "test_nothing_is_wrong_with_the_plugin",
    "test_probe_finds_devices_with_rows",
    "test_unsupported_problems_are_refused",
]

N, K = 256, 512
PROBLEMS = ("w4a16", "int4_g128 x bf16", "w8a8 int8", "nvfp4 x nvfp4")
M_VALUES = (1, 64, 1024)
# Which concept of kernels/contracts.cuh a struct is held to by itself. Mainloops and epilogues are
# templates over a whole kernel, and are checked as parts of one.
CONTRACTS = {
    "mover": "Mover",
    "producer": "Producer",
    "mma": "MmaAtom",
    "dequant": "Dequant",
    "convert": "Dequant",
    "tokens": "Tokens",
    "scale": "Scales",
    "token_scale": "Scales",
}


@pytest.fixture
def plugin_set(plugin: ModuleType) -> PluginSet:
    """The plugins of the environment with the one under test, installed or not."""
    installed = PluginSet.of_environment()
    if installed.name_of(plugin):
        return installed
    return PluginSet.of_environment(plugin_under_test=plugin)


@pytest.fixture
def own_devices(plugin: ModuleType, plugin_set: PluginSet) -> list[DeviceCapabilities]:
    """The devices whose rows the plugin has."""
    name, registry = plugin_set.name_of(plugin), plugin_set.registry
    return [caps for caps in registry.devices() if registry.owner(caps.name) == name]


@pytest.fixture
def one_per_family(own_devices: list[DeviceCapabilities]) -> list[DeviceCapabilities]:
    """One device for each family; what is composed depends on little else."""
    return list({caps.family: caps for caps in own_devices}.values())


def test_nothing_is_wrong_with_the_plugin(plugin: ModuleType, plugin_set: PluginSet) -> None:
    """It loads, its hooks are known and marked, their results have the right types."""
    assert not [str(problem) for problem in plugin_set.problems]
    assert plugin_set.name_of(plugin)


def test_device_names_are_unique(plugin: ModuleType, plugin_set: PluginSet) -> None:
    """Every row is there under its name and aliases, in any case."""
    contribution = plugin_set.registry.contribution(plugin_set.name_of(plugin) or "")
    assert contribution is not None
    for row in contribution.matrix.devices.values() if contribution.matrix else ():
        for name in (row.name, row.name.upper(), *row.aliases):
            assert plugin_set.capabilities(name).name == row.name


def test_figures_have_sources(own_devices: list[DeviceCapabilities]) -> None:
    """Every number says where it comes from, and so does every instruction."""
    for caps in own_devices:
        for field in ("sms", "l2_bytes", "memory_bytes", "bandwidth_gbs", "clock_mhz"):
            if getattr(caps, field) is not None:
                assert caps.sources.get(field), f"{caps.name}: {field}"
        assert all(row.source for row in caps.mma), caps.name


def test_driver_names_lead_to_their_rows(
    plugin_set: PluginSet, own_devices: list[DeviceCapabilities]
) -> None:
    """A driver name stands for one device."""
    for caps in own_devices:
        for name in caps.driver_names:
            assert plugin_set.registry.match(name).name == caps.name


def test_probe_finds_devices_with_rows(plugin: ModuleType, plugin_set: PluginSet) -> None:
    """Probing does not fail, and what it finds has rows."""
    present = plugin_set.devices()
    name = plugin_set.name_of(plugin)
    assert not [str(problem) for problem in present.problems if problem.plugin == name]
    for device in present:
        if device.plugin == name:
            assert device.row, device.notes


def test_components_meet_their_contracts(plugin: ModuleType, plugin_set: PluginSet) -> None:
    """Each header compiles alone, and each struct satisfies the concept of its slot."""
    contribution = plugin_set.registry.contribution(plugin_set.name_of(plugin) or "")
    components = contribution.components if contribution else ()
    if not components:
        pytest.skip("the plugin has no components of its own")
    compiled = 0
    registry = plugin_set.registry
    for component in components:
        # Where the device's own compiler is missing, that of its simulation serves.
        known = (*registry.variants(), *registry.devices())
        users = [caps for caps in known if serves(component, caps)]
        assert users, f"no device has what {component} serves"
        by_arch = {c.arch: (c, made) for c in users if (made := _compiler(plugin_set, c))}
        for caps, compile_with in by_arch.values():
            source = contract_source(component)
            headers = include_closure(source, registry.headers)
            compile_with.compile(source, headers, "humming_contract", caps)
            compiled += 1
    if not compiled:
        pytest.skip("no compiler for the plugin's devices")


def test_composing_is_deterministic(
    plugin_set: PluginSet, one_per_family: list[DeviceCapabilities]
) -> None:
    """The same question gets the same source, which names no path."""
    for caps in one_per_family:
        for problem in map(_problem, PROBLEMS):
            first, again = (_sources(problem, caps, plugin_set) for _ in range(2))
            assert first == again
            assert not re.search(r'["\s]/(usr|home|tmp|root|opt)/', "".join(first))


def test_unsupported_problems_are_refused(
    plugin_set: PluginSet, one_per_family: list[DeviceCapabilities]
) -> None:
    """What a device cannot do is an UnsupportedError that says why and what is possible."""
    for caps in one_per_family:
        for problem in map(_problem, PROBLEMS):
            refusal = None
            try:
                composer.compose(problem, caps, composer.M_RANGES[0], plugin_set.registry)
            except UnsupportedError as error:
                refusal = error
            assert refusal is None or (refusal.why and refusal.possible)


def test_kernels_compile(plugin_set: PluginSet, one_per_family: list[DeviceCapabilities]) -> None:
    """What the composer chooses for the plugin's devices, the plugin's compiler accepts."""
    by_source: dict[tuple[str, str], DeviceCapabilities] = {}
    for caps in one_per_family:
        for problem in map(_problem, PROBLEMS):
            sources = _sources(problem, caps, plugin_set, M_VALUES[:1])
            by_source |= {(caps.arch, source): caps for source in sources}
    compiled = 0
    for (_, source), caps in by_source.items():
        if compile_with := _compiler(plugin_set, caps):
            headers = include_closure(source, plugin_set.registry.headers)
            assert compile_with.compile(source, headers, ENTRY, caps).data
            compiled += 1
    if not compiled:
        pytest.skip("no kernel, or no compiler, for the plugin's devices")


def test_kernels_compute(plugin: ModuleType, plugin_set: PluginSet) -> None:
    """On a present device, products agree with the reference within the bound of their types."""
    name = plugin_set.name_of(plugin)
    present = [d for d in plugin_set.devices() if d.plugin == name and d.row]
    if not present:
        pytest.skip("no device of the plugin is present")
    # Imported late: everything else here works without torch.
    import torch

    from humming import ops, packing, quantizer, reference

    if not torch.cuda.is_available():
        pytest.skip("torch does not reach the device")
    problem = _problem("int4_g128 x bf16")
    weight = quantizer.quantize(torch.randn(N, K), problem.weight)
    for device in present:
        where = torch.device("cuda", device.index)
        for m in M_VALUES:
            x = torch.randn(m, K, dtype=torch.bfloat16)
            out = ops.matmul(x.to(where), packing.pack(weight).to(where)).cpu()
            exact = reference.matmul(x, weight)
            bound = reference.error_bound(problem, x, weight)
            assert ((out.double() - exact).abs() <= bound).all(), (device, m)


def _problem(text: str) -> GemmProblem:
    return GemmProblem.parse(text, N, K)


def _sources(
    problem: GemmProblem,
    caps: DeviceCapabilities,
    plugins: PluginSet,
    m_values: tuple[int, ...] = M_VALUES,
) -> list[str]:
    """The kernels of a problem for some M, none where the device does not serve it."""
    ranges = [composer.m_range_of(m) for m in m_values]
    try:
        return [composer.compose(problem, caps, r, plugins.registry).source for r in ranges]
    except UnsupportedError:
        return []


def _compiler(plugins: PluginSet, caps: DeviceCapabilities) -> Compiler | None:
    """The compiler for a device, None where it is not installed or too old."""
    made = plugins.compiler_for(caps)
    try:
        return made if made.version >= (caps.min_compiler or (0, 0)) else None
    except CompileError:
        return None


def serves(component: Component, caps: DeviceCapabilities) -> bool:
    """Whether a device has the row or mover that a component is for."""
    if component.slot in ("mover", "producer"):
        return component.serves in caps.movers
    if component.slot == "mma":
        return any(row.key == component.serves for row in caps.mma)
    if component.slot == "mainloop":
        return component.serves in caps.instructions
    key, needed = component.serves.split(":"), []
    if component.slot in ("dequant", "convert"):
        needed = key[2:]
        if key[1] not in caps.formats(undocumented=True):
            return False
    elif component.slot in ("scale", "token_scale"):
        needed = key[1:]
    return caps.features.issuperset(needed)


def contract_source(component: Component) -> str:
    """A source that includes the component alone and holds it to its contract."""
    lines = ["#include <humming/contracts.cuh>", f"#include <{component.header}>"]
    concept, struct = CONTRACTS.get(component.slot), component.struct
    if component.slot in ("dequant", "convert"):
        lines += _dequantizer("contract", component)
        struct = "::contract::Dequant"
    if component.slot == "tokens":
        made = next(c for c in SHARED if (c.slot, c.serves) == ("dequant", "float:float16"))
        lines += [f"#include <{made.header}>", *_dequantizer("tokens", made)]
        struct = struct.format(stored_bits=8, packed_bits=8, operand_bits=16)
    if concept:
        told = f"slot {component.slot}: {component.struct} is no {concept}"
        lines.append(f'static_assert(humming::{concept}<{struct}>, "{told}");')
    lines.append('extern "C" __global__ void humming_contract() {}')
    return "\n".join(lines) + "\n"


# A type of each kind of codes, narrow enough for every operand.
_KINDS = {"int": "int3", "uint": "uint3", "float": "float4e2m1", "sign_magnitude": "float3e0m2"}


def _dequantizer(namespace: str, component: Component) -> list[str]:
    """A component of slot dequant with codes that it serves."""
    kind, operand_name, *_ = component.serves.split(":")
    kind, _, zero = kind.partition("-")
    dtype, operand = DataType.parse(_KINDS.get(kind, kind)), DataType.parse(operand_name)
    bits = 4 if operand.is_integer and operand.bits == 4 else 8 if operand.bits <= 8 else 16
    order = device_struct(dtype.bits, bits, bits, "Order")
    return dequantizer(namespace, order, dtype, component.struct, zero_point=bool(zero))
