"""humming on ACME X1 accelerators: one row and a probe.

The X1 runs CUDA binaries for sm_80 through a CUDA driver, so that compiler, runtime and kernels are
those that humming has for its family.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from humming.hookspecs import PresentDevice, hookimpl

# The ACME driver shows a folder per card here, named by its index, with files of one line each.
_SYSFS = "/sys/class/acme"


@hookimpl
def humming_matrix() -> Path:
    return Path(__file__).parent / "matrix.yaml"


@hookimpl
def humming_probe() -> Iterable[PresentDevice]:
    cards = Path(os.environ.get("ACME_SYSFS", _SYSFS))
    if not cards.is_dir():
        return []
    return [_card(folder) for folder in sorted(cards.iterdir())]


def _card(folder: Path) -> PresentDevice:
    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8").strip()

    return PresentDevice(
        index=int(folder.name),
        driver_name=read("name"),
        sms=int(read("units")),
        memory_bytes=int(read("memory_bytes")),
    )
