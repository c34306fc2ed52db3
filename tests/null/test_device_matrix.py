"""The bundled rows: who is in, what the figures multiply out to, and what distinguishes devices."""

from functools import cache

import pytest

from humming.capability import DeviceCapabilities, MmaRow
from humming.dtypes import DataType, float4e0m3, float8e3m4, int8
from humming.errors import UnsupportedError
from humming.plugins import PluginSet

BUNDLED = ("nvidia", "thead_ppu")
NAMES = (
    *("t4", "rtx2080ti", "a100_40gb", "a100_80gb", "a100", "a10", "a800", "rtx3090", "l4", "l40s"),
    *("rtx4090", "h100", "h100_pcie", "h20", "h200", "b200", "b300", "rtx5090", "rtx_pro_6000"),
    *("gb10", "thor", "rubin", "zw810e", "m890"),
)
# Dense 10^12 operations per second that vendors and press give, independently of the rates.
PUBLISHED: dict[str, dict[str, float]] = {
    "t4": {"f16": 65, "int8": 130, "int4": 260},
    "rtx2080ti": {"f16": 53.8, "f16_f16acc": 107.6, "int8": 215.2, "int4": 430.3},
    "a100": {"f16": 312, "int8": 624, "int4": 1248},
    "a800": {"f16": 312, "int8": 624},
    "a10": {"f16": 125, "int8": 250, "int4": 500},
    "rtx3090": {"f16": 71, "f16_f16acc": 142},
    "l4": {"f16": 121, "fp8": 242.5, "int8": 242.5},
    "l40s": {"f16": 362, "fp8": 733, "int8": 733},
    "rtx4090": {"f16": 165.2, "f16_f16acc": 330.3, "fp8": 330.3, "int8": 660.6, "int4": 1321.2},
    "h100": {"f16": 989, "fp8": 1979, "int8": 1979},
    "h100_pcie": {"f16": 756, "fp8": 1513, "int8": 1513},
    "h20": {"f16": 148, "fp8": 296, "int8": 296},
    "h200": {"f16": 989, "fp8": 1979, "int8": 1979},
    "b200": {"f16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000},
    "gb200": {"f16": 2500, "fp8": 5000, "fp4": 10000},
    "b300": {"f16": 2250, "fp8": 4500, "int8": 153.5, "fp4": 14000},
    "gb300": {"f16": 2500, "fp8": 5000, "int8": 165, "fp4": 15000},
    "rtx5090": {"f16": 209.5, "f16_f16acc": 419, "fp8": 419, "int8": 838, "fp4": 1676},
    "rtx_pro_6000": {"f16": 503.8, "fp8": 1007.6, "int8": 1007.6, "fp4": 2015},
    "gb10": {"f16": 125, "fp8": 250, "int8": 250, "fp4": 500},
    "thor": {"f16": 258.5, "fp4": 1035},
    "rubin": {"fp8": 17500, "fp4": 35000},
    "zw810e": {"f16": 118.7, "int8": 237},
    "m890": {"f16": 600},
}


@cache
def plugins() -> PluginSet:
    """The bundled plugins alone, whatever else is installed."""
    installed = PluginSet.of_environment().manager
    return PluginSet.of_modules(**{name: installed.get_plugin(name) for name in BUNDLED})


def caps_of(name: str) -> DeviceCapabilities:
    return plugins().capabilities(name)


DEVICES = [caps.name for caps in plugins().registry.devices()]


def native(caps: DeviceCapabilities) -> list[MmaRow]:
    return [row for row in caps.mma if not row.emulated and not row.undocumented]


# -- who is in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_device_has_a_row(name: str) -> None:
    assert caps_of(name).title


def test_nothing_is_wrong_with_the_bundled_plugins() -> None:
    assert plugins().problems == ()


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_has_a_source(name: str) -> None:
    caps = caps_of(name)
    figures = (
        *("sms", "smem_per_sm_bytes", "smem_per_block_bytes", "registers_per_sm"),
        *("max_threads_per_sm", "max_blocks_per_sm", "l2_bytes", "memory_bytes"),
        *("bandwidth_gbs", "clock_mhz", "min_compiler"),
    )
    for field in figures:
        assert (getattr(caps, field) is not None) == bool(caps.sources.get(field)), field
    assert all(row.source for row in caps.mma)
    if any(row.rate for row in caps.mma):
        assert caps.sources.get("rates") or caps.sources.get("peak_tops_by_class")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_multiplies_16_bit_floats(name: str) -> None:
    assert caps_of(name).supports("fp16")
    assert caps_of(name).supports("bf16") is (name not in ("t4", "rtx2080ti"))


# -- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rate_class"), [(name, c) for name, figures in PUBLISHED.items() for c in figures]
)
def test_peak_is_what_is_published(name: str, rate_class: str) -> None:
    caps = caps_of(name)
    peaks = {caps.peak_tops(row) for row in native(caps) if row.rate_class == rate_class}
    assert max(p for p in peaks if p) == pytest.approx(PUBLISHED[name][rate_class], rel=0.025)


def test_h20_has_a_quarter_of_the_rate_of_its_relatives() -> None:
    rates = {
        name: {r.rate_class: r.rate for r in caps_of(name).mma if r.instruction == "wgmma"}
        for name in ("h20", "h200")
    }
    assert {c: 4 * (rate or 0) for c, rate in rates["h20"].items()} == rates["h200"]


@pytest.mark.parametrize("name", ["rtx2080ti", "rtx3090", "rtx4090", "rtx5090"])
def test_geforce_halves_the_rate_of_f32_accumulation(name: str) -> None:
    rates = {row.rate_class: row.rate for row in native(caps_of(name))}
    assert 2 * (rates["f16"] or 0) == rates["f16_f16acc"]


@pytest.mark.parametrize(
    ("name", "smem_kib", "blocks"),
    [("t4", 64, 16), ("a100", 163, 32), ("l4", 99, 24), ("h200", 227, 32), ("rubin", 327, 16)],
)
def test_limits_of_a_family(name: str, smem_kib: int, blocks: int) -> None:
    caps = caps_of(name)
    assert (caps.smem_per_block_bytes, caps.max_blocks_per_sm) == (smem_kib * 1024, blocks)


# -- instructions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("t4", ("mma_sync",)),
        ("a100", ("mma_sync",)),
        ("h20", ("wgmma", "mma_sync")),
        ("b300", ("tcgen05", "mma_sync")),
        ("rubin", ("tcgen05", "mma_sync")),
        ("thor", ("tcgen05", "mma_sync")),
        ("rtx5090", ("mma_sync_block_scaled", "mma_sync")),
        ("gb10", ("mma_sync_block_scaled", "mma_sync")),
        ("zw810e", ("ppu_mma", "mma_sync")),
        ("m890", ("ppu_tc02_mma", "ppu_tc02_mma_mx")),
    ],
)
def test_instructions_of_a_device(name: str, expected: tuple[str, ...]) -> None:
    assert caps_of(name).instructions == expected


@pytest.mark.parametrize(
    ("name", "movers"),
    [
        ("t4", ("plain",)),
        ("a10", ("cp_async", "plain")),
        ("h200", ("tma", "bulk", "cp_async", "plain")),
        ("zw810e", ("cp_async", "plain")),
    ],
)
def test_movers_of_a_device(name: str, movers: tuple[str, ...]) -> None:
    assert caps_of(name).movers == movers


@pytest.mark.parametrize("name", DEVICES)
def test_int8_on_tcgen05_is_where_ptxas_takes_it(name: str) -> None:
    caps = caps_of(name)
    found = any(row.instruction == "tcgen05" and row.a == int8 for row in caps.mma)
    assert found is (caps.family in ("blackwell_dc", "thor"))
    if "tcgen05" in caps.instructions and not found:
        assert "sm_100a and sm_110a only" in (caps.why_absent(int8, "tcgen05") or "")


def test_b300_runs_int8_on_the_legacy_instruction_alone() -> None:
    b200, b300 = caps_of("b200"), caps_of("b300")
    rows = [row for row in native(b300) if row.a == int8]
    assert rows
    assert {(row.instruction, row.status) for row in rows} == {("mma_sync", "legacy")}
    fastest = max(b200.peak_tops(row) or 0 for row in native(b200) if row.a == int8)
    assert fastest / (b300.peak_tops(rows[0]) or 1) == pytest.approx(29, rel=0.05)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("operand", [float8e3m4, float4e0m3], ids=str)
def test_hidden_formats_are_where_they_were_seen_to_run(name: str, operand: DataType) -> None:
    caps = caps_of(name)
    rows = [row for row in caps.mma if operand in (row.a, row.b)]
    seen = ("blackwell_dc", "blackwell_ultra", "blackwell_consumer", "gb10")
    assert bool(rows) is (caps.family in seen)
    assert all(row.undocumented for row in rows)


def test_e0m3_takes_groups_of_16_only() -> None:
    for name in DEVICES:
        rows = [row for row in caps_of(name).mma if float4e0m3 in (row.a, row.b)]
        assert {group for row in rows for _, group in row.block_scale} <= {16}
        assert all(row.block_scale for row in rows)


@pytest.mark.parametrize("operand", [float8e3m4, float4e0m3], ids=str)
def test_rubin_says_why_it_has_no_hidden_formats(operand: DataType) -> None:
    assert "illegal instruction" in (caps_of("rubin").why_absent(operand) or "")
    assert any("illegal instruction" in quirk for quirk in caps_of("rubin").quirks)


@pytest.mark.parametrize(
    ("name", "emulated"),
    [("rtx4090", set()), ("a100", set()), ("h200", {"int4", "fp8"}), ("rtx5090", {"int4"})],
)
def test_what_the_assembler_emulates_is_marked(name: str, emulated: set[str]) -> None:
    rows = [row for row in caps_of(name).mma if row.emulated]
    assert {row.rate_class.removesuffix("_f16acc") for row in rows} == emulated
    assert all(row.note and row.rate is None for row in rows)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("rtx5090", ("float8e8m0", 16)), ("rtx5090", ("float8ue4m3", 16)), ("b200", None)],
)
def test_ue8m0_groups_of_16_need_a_newer_compiler(name: str, scale: tuple[str, int]) -> None:
    rows = [
        row
        for row in caps_of(name).mma
        if scale and [(d.name, g) for d, g in row.block_scale] == [scale]
    ]
    wanted = {(13, 1)} if scale == ("float8e8m0", 16) else {None} if rows else set()
    assert {row.min_compiler for row in rows} == wanted


@pytest.mark.parametrize(
    ("name", "first"),
    [("rubin", (13, 4)), ("thor", (13, 0)), ("b200", (12, 8)), ("t4", None)],
)
def test_first_compiler_of_a_device(name: str, first: tuple[int, int] | None) -> None:
    assert caps_of(name).min_compiler == first


def test_first_compiler_of_a_feature() -> None:
    assert caps_of("h200").feature_min_compiler == {"ldmatrix_s4_s8": (13, 4)}


def test_wgmma_reads_weights_from_registers_and_tcgen05_from_tensor_memory() -> None:
    sites = {row.instruction: row.a_sites for n in ("h200", "b200") for row in caps_of(n).mma}
    assert sites == {
        "mma_sync": ("register",),
        "wgmma": ("register", "shared"),
        "tcgen05": ("shared", "tensor_memory"),
    }


# -- driver names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver_name", "row"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA A100 80GB PCIe", "a100_80gb_pcie"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20-3e", "h20_3e"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx_pro_6000"),
        ("NVIDIA Thor", "thor"),
        ("PPU-ZW810E", "zw810e"),
        ("PPU-ZW810", "zw810"),
        ("ZW-M890P", "m890"),
    ],
)
def test_driver_name_leads_to_its_row(driver_name: str, row: str) -> None:
    assert plugins().registry.match(driver_name).name == row


@pytest.mark.parametrize(
    "driver_name",
    ["NVIDIA H2", "NVIDIA H20-4x", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "PPU-ZW610", "ZW-M530"],
)
def test_unlisted_variants_are_not_guessed(driver_name: str) -> None:
    with pytest.raises(UnsupportedError, match="nothing is guessed"):
        plugins().registry.match(driver_name)
