"""Compiles composed sources with NVRTC to PTX, the form that the simulator executes."""

from collections.abc import Mapping

from humming.capability import DeviceCapabilities
from humming.hookspecs import Image

from .. import nvrtc
from .availability import presented


class PtxCompiler:
    """The NVRTC of the environment; it stops at PTX, so no assembler looks at inline assembly.

    That is what lets it serve devices whose assembler is another vendor's.
    """

    name = "nvrtc-ptx"

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor) of the NVRTC found; CompileError if there is none."""
        return nvrtc.version()

    def options(self, caps: DeviceCapabilities) -> tuple[str, ...]:
        """Returns the options that a kernel for `caps` is compiled with."""
        virtual = _arch(caps).replace("sm_", "compute_")
        return (f"--gpu-architecture={virtual}", *nvrtc.SHARED_OPTIONS)

    def compile(
        self, source: str, headers: Mapping[str, str], entry: str, caps: DeviceCapabilities
    ) -> Image:
        """Compiles a source to PTX; arguments and errors as `nvrtc.compile_program`."""
        options = self.options(caps)
        data, log = nvrtc.compile_program(source, headers, entry, _arch(caps), options, "PTX")
        return Image(kind="ptx", data=data.rstrip(b"\0"), log=log)


def _arch(caps: DeviceCapabilities) -> str:
    return presented(caps.arch)
