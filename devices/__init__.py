"""Bundled device plugins; calling the package, `humming.devices()`, lists what is present."""

import sys
from types import ModuleType
from typing import Any


class _DevicesPackage(ModuleType):
    """Makes `humming.devices` both the package of plugins and the function of that name."""

    def __call__(self) -> Any:
        from humming.plugins import devices

        return devices()


sys.modules[__name__].__class__ = _DevicesPackage
