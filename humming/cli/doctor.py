"""`humming doctor`: what works on this machine, and what to do about the rest."""

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import typer

from humming.cli.exits import ENVIRONMENT
from humming.cli.options import AsJson
from humming.cli.output import Output
from humming.errors import HummingError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

    from humming.capability import DeviceCapabilities

OK, NOTE, FAULT = "ok", "note", "fault"
"""Works; works, with something to know; does not work."""

_OLDEST_PYTHON = (3, 10)
_PACKAGES = ("numpy", "pluggy", "PyYAML", "safetensors", "cuda-bindings", "rich", "typer")
_PROBE = 'extern "C" __global__ void probe() {}'


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at.
        state: `OK`, `NOTE` or `FAULT`.
        found: what was seen.
        advice: what to do, empty if nothing.
    """

    subject: str
    state: str
    found: str
    advice: str = ""


def examine(as_json: AsJson = False) -> None:
    """Check toolchain, driver, plugins and cache; status 3 if something does not work."""
    findings: list[Finding] = []
    out = Output(as_json)
    with out.progress("examine", len(_EXAMINATIONS)) as step:
        for subject, look in _EXAMINATIONS.items():
            step(subject)
            findings += _guarded(subject, look)
    healthy = all(finding.state != FAULT for finding in findings)
    payload = {"healthy": healthy, "findings": [asdict(finding) for finding in findings]}
    out.emit(payload, lambda console: _render(console, findings))
    if not healthy:
        raise typer.Exit(ENVIRONMENT)


def _guarded(subject: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of a look; a look that breaks is itself a finding, the others go on."""
    found: list[Finding] = []
    try:
        found.extend(look())
    except UnsupportedError as error:
        found.append(Finding(subject, FAULT, f"{error.asked}: {error.why}", error.possible))
    except Exception as error:
        found.append(Finding(subject, FAULT, f"{type(error).__name__}: {error}"))
    return found


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} ({sys.executable}) on {platform.platform()}"
    if sys.version_info[:2] < _OLDEST_PYTHON:
        yield Finding("python", FAULT, found, "Use Python 3.10 or newer.")
    else:
        yield Finding("python", OK, found)


def _packages() -> Iterator[Finding]:
    versions, missing = [], []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        yield Finding("packages", FAULT, f"missing: {', '.join(missing)}", advice)
    yield Finding("packages", OK, ", ".join(versions))


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        advice = "pip install torch; without it plans and kernels are made, but nothing is run."
        yield Finding("torch", FAULT, f"torch cannot be imported: {error}", advice)
        return
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    found = f"torch {torch.__version__}, built for {built}"
    if torch.cuda.is_available():
        yield Finding("torch", OK, f"{found}; it sees {torch.cuda.device_count()} device(s)")
        return
    from humming import plugins

    if any(device.index >= 0 for device in plugins.devices()):
        advice = "Install a build of torch for the driver's CUDA version."
        yield Finding(
            "torch", FAULT, f"{found}; it does not see the device that is present", advice
        )
    else:
        yield Finding("torch", OK, f"{found}; it sees no device")


def _driver() -> Iterator[Finding]:
    absent = "Kernels can be planned and compiled here, and run in the simulator (sim:ROW)."
    try:
        # Untyped: its bindings bring no stubs.
        driver: Any = import_module("cuda.bindings.driver")
        status, number = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        yield Finding("driver", NOTE, f"no CUDA driver ({reason})", absent)
        return
    if int(status) or not number:
        yield Finding("driver", NOTE, "no CUDA driver", absent)
    else:
        yield Finding("driver", OK, f"CUDA {number // 1000}.{number % 1000 // 10}")


def _devices() -> Iterator[Finding]:
    from humming import plugins

    present = plugins.devices()
    for device in present:
        place = device.index if device.index >= 0 else "host"
        found = f"{place}: {device.driver_name} ({device.row or 'no row'})"
        state = FAULT if not device.row else NOTE if device.notes else OK
        advice = "; ".join(device.notes)
        if device.index < 0 and not device.row:
            advice += " HUMMING_SIMULATE names the row that the CPU simulates."
        yield Finding("devices", state, found, advice)
    if not present:
        yield Finding("devices", NOTE, "no accelerator is present")
    for problem in present.problems:
        who = f" {problem.distribution}" if problem.distribution else ""
        advice = f"Repair, update or uninstall{who or ' the plugin'}; its devices cannot be used."
        yield Finding("plugins", FAULT, str(problem), advice)
    names = sorted(name for name, _ in plugins.manager().list_name_plugin())
    rows = len(plugins.registry().devices())
    yield Finding("plugins", OK, f"{', '.join(names)}: {rows} rows")


def _compilers() -> Iterator[Finding]:
    from humming import plugins

    by_arch: dict[str, list[DeviceCapabilities]] = {}
    for caps in plugins.registry().devices():
        by_arch.setdefault(caps.arch, []).append(caps)
    findings = [_compiler_of(devices) for devices in by_arch.values()]
    if all(finding.state != OK for finding in findings):
        found = "no architecture of any device can be built"
        yield Finding("compiler", FAULT, found, "See the reasons below.")
    yield from findings


def _compiler_of(devices: "list[DeviceCapabilities]") -> Finding:
    """What building for an architecture comes to, tried with an empty kernel."""
    from humming import plugins
    from humming.compiler import identity, version_of

    caps = devices[0]
    subject = f"compiler {caps.arch}"
    names = ", ".join(device.name for device in devices)
    try:
        compiler = plugins.compiler_for(caps)
        (name, _), version = identity(compiler, caps), version_of(compiler, caps)
        with plugins.calling("humming_compiler", caps):
            compiler.compile(_PROBE, {}, "probe", caps)
    except HummingError as error:
        return Finding(subject, NOTE, f"cannot build for {names}", str(error).splitlines()[0])
    needed = [d.min_compiler for d in devices if d.min_compiler] + [
        row.min_compiler for device in devices for row in device.mma if row.min_compiler
    ]
    newest, told = max(needed, default=(0, 0)), f"{name} {version[0]}.{version[1]}"
    if version < newest:
        advice = f"Some of their instructions need {newest[0]}.{newest[1]}; the others work."
        return Finding(subject, NOTE, f"{told} builds for {names}", advice)
    return Finding(subject, OK, f"{told} builds for {names}")


def _cache() -> Iterator[Finding]:
    from humming import env
    from humming.cache import KernelCache

    jobs = env.compile_jobs()
    if not env.cache_enabled():
        advice = "Every process compiles anew; unset HUMMING_DISABLE_CACHE."
        yield Finding("cache", NOTE, "off", advice)
        return
    folder = KernelCache().directory
    files = list(folder.glob("*.kernel")) if folder.is_dir() else []
    size = sum(file.stat().st_size for file in files)
    found = f"{folder}: {len(files)} kernels, {size / 1e6:.1f} MB; {jobs} compile at a time"
    # The folder is made on the first write: what counts is its nearest ancestor that exists.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        if not os.access(existing, os.W_OK):
            raise PermissionError
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError:
        advice = "It cannot be written, so every process compiles anew: set HUMMING_CACHE_DIR."
        yield Finding("cache", NOTE, found, advice)
        return
    yield Finding("cache", OK, found)


def _records() -> Iterator[Finding]:
    from humming import env, plugins, tuned

    if env.records() is None:
        yield Finding("records", NOTE, "off", "Unset HUMMING_RECORDS to heed tuned records.")
        return
    rows = {device.row for device in plugins.devices() if device.row}
    for row in sorted({tuned.row_of(row) for row in rows}):
        files = tuned.records_for(row).files
        for file in files:
            for why in file.refused:
                yield Finding("records", NOTE, why, "Correct or remove it, or tune again.")
            yield Finding("records", OK, f"{row}: {len(file.entries)} entries in {file.path}")
        if not files:
            yield Finding("records", OK, f"{row}: none; the cost model chooses every kernel")


_EXAMINATIONS: dict[str, Callable[[], Iterator[Finding]]] = {
    "python": _python,
    "packages": _packages,
    "torch": _torch,
    "driver": _driver,
    "devices": _devices,
    "compilers": _compilers,
    "cache": _cache,
    "records": _records,
}


def _render(console: "Console", findings: list[Finding]) -> None:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        console.print(f"{finding.state:<6}{finding.subject:<{width}}  {finding.found}")
        if finding.advice:
            console.print(f"{'':<6}{'':<{width}}  -> {finding.advice}")
    faults = sum(finding.state == FAULT for finding in findings)
    console.print(f"{faults} fault(s)" if faults else "All that is needed works.")
