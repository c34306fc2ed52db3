"""`humming devices` and `humming capabilities`: what is present, and what a device can do."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from humming.cli.options import DEFAULT_DEVICE, AsJson
from humming.cli.output import Output, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from humming.capability import DeviceCapabilities

# Field of DeviceCapabilities -> what a person calls it, and how it is printed.
_FIGURES = {
    "sms": ("SMs", "{:d}"),
    "clock_mhz": ("SM clock", "{:g} MHz"),
    "memory_bytes": ("memory", "{:,d} bytes"),
    "bandwidth_gbs": ("memory bandwidth", "{:g} GB/s"),
    "l2_bytes": ("L2", "{:,d} bytes"),
    "smem_per_sm_bytes": ("shared memory per SM", "{:,d} bytes"),
    "smem_per_block_bytes": ("shared memory per block", "{:,d} bytes"),
    "registers_per_sm": ("registers per SM", "{:,d}"),
    "max_threads_per_sm": ("threads per SM", "{:d}"),
    "max_blocks_per_sm": ("blocks per SM", "{:d}"),
}


def list_devices(
    show_all: Annotated[
        bool, typer.Option("--all", help="Also every row that the plugins bring.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the devices that are present, and plugins that are broken."""
    from humming import plugins

    present = plugins.devices()
    rows = plugins.registry().devices()
    payload: dict[str, Any] = {
        "present": [asdict(device) for device in present],
        "broken_plugins": [
            {
                "plugin": problem.plugin,
                "distribution": problem.distribution,
                "hook": problem.hook,
                "error": str(problem),
            }
            for problem in present.problems
        ],
    }
    variants = [caps.name for caps in plugins.registry().variants()]
    if show_all:
        payload["rows"] = [_summary(caps) for caps in rows]
        payload["variants"] = variants

    def render(console: "Console") -> None:
        if present:
            cells = [
                (_place(d.index), d.driver_name, d.row or None, d.plugin, "; ".join(d.notes))
                for d in present
            ]
            print_table(console, "Present", ("#", "driver name", "row", "plugin", "notes"), cells)
        else:
            console.print("No accelerator is present: plans and kernels are made, not run.")
        for problem in present.problems:
            console.print(f"broken: {problem}")
        if show_all:
            cells = [tuple(_summary(caps).values()) for caps in rows]
            console.print()
            print_table(console, "Rows", tuple(_SUMMARY), cells)
            if variants:
                console.print(f"Variants of rows, run on the CPU: {', '.join(variants)}")
        else:
            console.print(f"{len(rows)} rows are known; `humming devices --all` lists them.")

    Output(as_json).emit(payload, render)


def _place(index: int) -> str:
    return str(index) if index >= 0 else "host"


_SUMMARY = ("name", "title", "family", "arch", "SMs", "GB", "GB/s", "instructions")


def _summary(caps: "DeviceCapabilities") -> dict[str, Any]:
    return {
        "name": caps.name,
        "title": caps.title,
        "family": caps.family,
        "arch": caps.arch,
        "sms": caps.sms,
        "memory_gb": round(caps.memory_bytes / 1e9) if caps.memory_bytes else None,
        "bandwidth_gbs": caps.bandwidth_gbs,
        "instructions": ", ".join(caps.instructions),
    }


def show_capabilities(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help=f"A row; {DEFAULT_DEVICE}."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a device can do: sizes, movers, instructions and rates, with their sources."""
    from humming import plugins

    caps = plugins.capabilities(name)

    def render(console: "Console") -> None:
        console.print(f"{caps.name}: {caps.title} ({caps.vendor}, {caps.family}, {caps.arch})")
        print_table(console, "", ("what", "value", "source"), list(_figures(caps)))
        print_table(console, "Instructions", _MMA_COLUMNS, list(_mma_rows(caps)))
        for absence in caps.absent:
            types = ", ".join(operand.name for operand in absence.operands)
            console.print(f"not with {types} ({absence.instruction}): {absence.why}")
        for quirk in caps.quirks:
            console.print(f"note: {quirk}")

    Output(as_json).emit(caps.to_dict(), render)


def _figures(caps: "DeviceCapabilities") -> Iterator[tuple[str, str | None, str]]:
    for field, (label, form) in _FIGURES.items():
        value = getattr(caps, field)
        yield label, None if value is None else form.format(value), caps.sources.get(field, "")
    yield "movers", ", ".join(caps.movers), caps.sources.get("movers", "")
    yield "features", ", ".join(sorted(caps.features)), caps.sources.get("features", "")
    if caps.min_compiler:
        yield "compiler", _version(caps.min_compiler), caps.sources.get("min_compiler", "")


_MMA_COLUMNS = ("instruction", "status", "weights in", "per SM and clock", "Top/s", "compiler")


def _mma_rows(caps: "DeviceCapabilities") -> Iterator[tuple[object, ...]]:
    for row in caps.mma:
        peak = caps.peak_tops(row)
        yield (
            row.name,
            row.status,
            ", ".join(row.a_sites),
            None if row.rate is None else f"{row.rate:g}",
            None if peak is None else f"{peak:.0f}",
            _version(row.min_compiler) if row.min_compiler else None,
        )


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]} or newer"
