"""What a launch must keep to: limits of the device, and of the kernel's own directives."""

import math

from humming.capability import DeviceCapabilities
from humming.errors import HummingError

from . import availability
from .launch_shape import Dim, Shape
from .program import Program

_BLOCK: Dim = (1024, 1024, 64)
_GRID: Dim = (2**31 - 1, 65535, 65535)
_THREADS = 1024
PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16
_REGISTERS = 65536


def static_smem_bytes(program: Program) -> int:
    """Shared memory of the kernel's own variables."""
    return sum(size for _, size in program.shared.values())


def check_launch(
    program: Program,
    device: DeviceCapabilities | None,
    grid: Dim,
    shape: Shape,
    *,
    non_portable: bool = False,
) -> None:
    """Refuses what no device, or not this one, would launch.

    Raises:
        HummingError: the kernel, what was asked, the limit and whose it is.
    """
    name = program.entry.name
    who = "a device" if device is None else device.name
    block, cluster = shape.block, shape.cluster

    def refuse(what: str, why: str) -> HummingError:
        return HummingError(f"{name} cannot run {what}: {why}")

    if min(*grid, *block, *cluster) < 1:
        raise refuse(f"with grid {grid}, block {block} and cluster {cluster}", "they are empty")
    if any(size > most for size, most in zip(grid, _GRID, strict=True)):
        raise refuse(f"with grid {grid}", f"{who} has at most {_GRID} CTAs in x, y and z")
    if shape.threads > _THREADS or any(s > m for s, m in zip(block, _BLOCK, strict=True)):
        told = f"{who} has at most {_THREADS} threads a CTA, {_BLOCK} in x, y and z"
        raise refuse(f"with block {block}", told)
    most = device.smem_per_block_bytes if device is not None else None
    needed = shape.smem_bytes + static_smem_bytes(program)
    if most is not None and needed > most:
        told = f"{who} has at most {most} a CTA"
        raise refuse(f"with {needed} bytes of shared memory", told)
    if shape.cluster_size > 1:
        what, why = f"in clusters of {shape.cluster_size} CTAs", ""
        target = availability.number_of(availability.target_of(program.module.target))
        has = "clusters" in device.features if device is not None else target >= 90
        if not has:
            why = f"{program.module.target if device is None else who} has none"
        elif shape.cluster_size > (LARGEST_CLUSTER if non_portable else PORTABLE_CLUSTER):
            why = f"{who} has at most {PORTABLE_CLUSTER}, or {LARGEST_CLUSTER} where a launch asks "
            why += "for sizes that are not portable"
        if why:
            raise refuse(what, why)
    if any(size % part for size, part in zip(grid, cluster, strict=True)):
        raise HummingError(f"the grid {grid} is no multiple of the cluster {cluster}")
    registers = program.entry.limits.get("maxnreg")
    if registers and registers[0] * shape.threads > _REGISTERS:
        told = f"{who} has at most {_REGISTERS} registers a CTA"
        raise refuse(f"with {registers[0]} registers in {shape.threads} threads", told)


def check_directives(program: Program, shape: Shape) -> None:
    """Refuses what the kernel's own directives exclude.

    Raises:
        HummingError: the directive and what was asked.
    """
    name, limits, block = program.entry.name, program.entry.limits, shape.block
    most = limits.get("maxntid")
    if most and shape.threads > math.prod(most):
        raise HummingError(f"{name} has at most {most} threads, and is launched with {block}")
    needed = limits.get("reqntid")
    if needed and (*needed, 1, 1)[:3] != block:
        raise HummingError(f"{name} needs {needed} threads, and is launched with {block}")
    wanted = limits.get("reqnctapercluster")
    if wanted and math.prod(wanted) and (*wanted, 1, 1)[:3] != shape.cluster:
        told = f"{name} needs clusters of {wanted} CTAs, and is launched with {shape.cluster}"
        raise HummingError(told)
    rank = limits.get("maxclusterrank")
    if rank and shape.cluster_size > rank[0]:
        told = f"{name} has clusters of at most {rank[0]} CTAs, and is launched with"
        raise HummingError(f"{told} {shape.cluster}")


def required_cluster(program: Program) -> Dim:
    """CTAs of a cluster that a kernel's own directives ask for; single ones without such."""
    wanted = program.entry.limits.get("reqnctapercluster")
    x, y, z = (*(wanted or ()), 1, 1, 1)[:3]
    return (x, y, z) if x * y * z else (1, 1, 1)


def resident_clusters(program: Program, device: DeviceCapabilities | None, shape: Shape) -> int:
    """How many clusters a device holds at the same time; many if that is not known."""
    if device is None or device.sms is None:
        return 1 << 30
    each = [device.max_blocks_per_sm or 1]
    if device.max_threads_per_sm:
        each.append(device.max_threads_per_sm // (32 * shape.cta_warps))
    smem = shape.smem_bytes + static_smem_bytes(program)
    if device.smem_per_sm_bytes and smem:
        each.append(device.smem_per_sm_bytes // smem)
    return max(1, device.sms * max(1, min(each)) // shape.cluster_size)
