"""Device code that only NVIDIA's architectures need; what is shared is in `humming.components`."""

from humming.components import Component

COMPONENTS: tuple[Component, ...] = ()
"""The components of `devices/nvidia/kernels`."""
