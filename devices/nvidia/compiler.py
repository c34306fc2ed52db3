"""Compiles composed sources with NVRTC to cubins."""

from collections.abc import Mapping

from humming.capability import DeviceCapabilities
from humming.hookspecs import Image

from .. import nvrtc


class NvrtcCompiler:
    """The NVRTC of the environment.

    It makes cubins, never PTX: a driver older than the compiler could not translate its PTX.
    Any NVRTC from 12.9 on serves; what an older one lacks is gated by `min_compiler` in the matrix.
    """

    name = "nvrtc"

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor) of the NVRTC found; CompileError if there is none."""
        return nvrtc.version()

    def options(self, caps: DeviceCapabilities) -> tuple[str, ...]:
        """Returns the options that a kernel for `caps` is compiled with."""
        return (
            f"--gpu-architecture={caps.arch}",
            *nvrtc.SHARED_OPTIONS,
            # Registers and spills go into the log.
            "--ptxas-options=-v",
        )

    def compile(
        self, source: str, headers: Mapping[str, str], entry: str, caps: DeviceCapabilities
    ) -> Image:
        """Compiles a source to a cubin; arguments and errors as `nvrtc.compile_program`."""
        options = self.options(caps)
        data, log = nvrtc.compile_program(source, headers, entry, caps.arch, options, "CUBIN")
        return Image(kind="cubin", data=data, log=log)
