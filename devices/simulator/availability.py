"""Which architectures know an instruction: NVRTC does not check inline assembly, ptxas would.

The rows are what ptxas 13.5 takes (one-instruction kernels, assembled for every target); an
instruction that no row names is known everywhere. A target must be in the set of each row that
matches. `a` targets have what the architecture alone has, `f` targets what its family shares.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from humming.capability import DeviceCapabilities


def _from(number: int) -> Callable[[str], bool]:
    return lambda target: int(target.rstrip("af") or 0) >= number


def _only(*targets: str) -> Callable[[str], bool]:
    return lambda target: target in targets


def _both(numbers: str) -> tuple[str, ...]:
    """The `a` and the `f` target of each number."""
    return tuple(number + suffix for number in numbers.split() for suffix in "af")


_SETS: dict[str, tuple[Callable[[str], bool], str]] = {
    "75": (_from(75), "sm_75 and later"),
    "80": (_from(80), "sm_80 and later"),
    "89": (_from(89), "sm_89 and later"),
    "90": (_from(90), "sm_90 and later"),
    "100": (_from(100), "sm_100 and later"),
}


def _named(name: str, *targets: str) -> None:
    _SETS[name] = _only(*targets), ", ".join(f"sm_{target}" for target in targets)


_named("hopper", "90a")
_named("datacenter", *_both("100 103 107 110"))
_named("datacenter a", "100a", "103a", "107a", "110a")
_named("datacenter but 110", *_both("100 103 107"))
_named("datacenter a but 110", "100a", "103a", "107a")
_named("from 103", *_both("103 107 110"))
_named("rubin", *_both("107"))
_named("i8", "100a", "110a")
_named("consumer", *_both("120 121"))
_named("consumer a", "120a", "121a")
_named("blackwell", *_both("100 103 107 110 120 121"))
_named("blackwell a", "100a", "103a", "107a", "110a", "120a", "121a")
_named("hopper and blackwell", "90a", *_both("100 103 107 110 120 121"))
_named("rubin and consumer", *_both("107 120 121"))
_named("none")
# What PPUs tell a CUDA driver that they are.
_named("ppu_10", "80")
_named("ppu_15", "89")


@dataclass(frozen=True, slots=True)
class _Row:
    """Forms of an opcode that some targets have.

    Attributes:
        opcode: what it begins with, whole parts.
        parts: for each entry, one of its alternatives (`a|b`) is a part of the opcode, or, with
            `!` ahead, none is.
        where: which set of targets.
        operands: only with so many operands; 0 for any number.
    """

    opcode: str
    parts: tuple[str, ...]
    where: str
    operands: int = 0

    def matches(self, opcode: str, parts: frozenset[str], operands: int) -> bool:
        if self.operands not in (0, operands) or not f"{opcode}.".startswith(f"{self.opcode}."):
            return False
        for entry in self.parts:
            wanted = not parts.isdisjoint(entry.lstrip("!").split("|"))
            if wanted == entry.startswith("!"):
                return False
        return True


_FP8, _FP6_4 = "e4m3|e5m2", "e3m2|e2m3|e2m1"
_SMALL = "e2m3x2|e3m2x2|e2m1x2|ue8m0x2"
_ROWS = """
mma         m16n8k16|m16n8k32|m16n8k64|m16n8k128|m16n8k256|m16n8k4      80
mma         bf16|tf32|f64                                               80
mma         f64 m16n8k4|m16n8k8|m16n8k16                                90
mma         and popc                                                    80
mma         FP8 !kind::f8f6f4|kind::mxf8f6f4                            89
mma         kind::f8f6f4                                                blackwell
mma         kind::f8f6f4 FP6_4                                          consumer
mma         kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4                    consumer
mma.sp      _                                                           80
mma.sp::ordered_metadata _                                              80
mma.sp::ordered_metadata f16 FP8                                        consumer
mma.sp::ordered_metadata kind::mxf4|kind::mxf4nvf4                      consumer_a
wmma        bf16                                                        80
wgmma       _                                                           hopper
tcgen05     _                                                           datacenter
tcgen05.ld.red _                                                        from_103
tcgen05.shift _                                                         datacenter_a
tcgen05.mma scale_vec::1X|scale_vec::2X|scale_vec::4X                   datacenter_a
tcgen05.mma.sp kind::mxf4nvf4                                           datacenter_a
tcgen05.mma kind::i8                                                    i8
tcgen05.mma kind::ti16                                                  rubin
tcgen05.mma decompress::lut::b                                          rubin
tcgen05.mma collector::a::fill collector::b::fill                       rubin
ldmatrix    m16n16                                                      blackwell
ldmatrix    b8x16                                                       blackwell
ldmatrix    s8                                                          hopper_and_blackwell
stmatrix    _                                                           90
stmatrix    m16n8                                                       blackwell
cp.async    _                                                           80
cp.async.bulk _                                                         90
cp.async.bulk.tensor cta_group::2                                       datacenter
cp.async.bulk.tensor tile::gather4                                      100
cp.async.bulk.tensor tile::gather4 shared::cluster                      datacenter
cp.async.bulk.tensor tile::scatter4                                     datacenter
cp.reduce.async.bulk _                                                  90
mbarrier    _                                                           80
mbarrier    try_wait|expect_tx|complete_tx                              90
mbarrier.arrive|mbarrier.arrive_drop !expect_tx !noComplete              90          3
fence.proxy.async _                                                     90
fence.proxy.async::generic _                                            90
fence.mbarrier_init _                                                   90
tensormap.replace _                                                     hopper_and_blackwell
st.async    _                                                           90
st.bulk     _                                                           100
red.async   _                                                           90
barrier.cluster _                                                       90
mapa        _                                                           90
getctarank  _                                                           90
clusterlaunchcontrol _                                                  100
clusterlaunchcontrol multicast::cluster::all                            blackwell
setmaxnreg  _                                                           hopper_and_blackwell
griddepcontrol _                                                        90
elect       _                                                           90
redux       _                                                           80
redux       f32                                                         datacenter_but_110
multimem    _                                                           90
fma         bf16|bf16x2                                                 80
fma         relu                                                        80
mul|add|sub bf16|bf16x2                                                 90
min|max     f16|f16x2                                                   80
min|max|abs|neg bf16|bf16x2                                             80
add|sub|mul|fma f32x2                                                   100
add|sub|fma f32 f16|bf16                                                100
min|max     f32                                                         100          4
ex2         bf16|bf16x2                                                 90
add|sub|min|max u16x2|s16x2                                             90
add         u8x4                                                        rubin_and_consumer
ld|st       v8                                                          100
ld          L2::256B                                                    80
red|atom    bf16|bf16x2                                                 90
red         v2|v4|v8                                                    90
cvt         e4m3x2|e5m2x2                                               89
cvt         e4m3x2|e5m2x2 bf16x2                                        blackwell
cvt         SMALL                                                       blackwell
cvt         e4m3x4|e5m2x4|e2m1x4                                        datacenter_a_but_110
cvt         s2f6x2                                                      blackwell_a
cvt         ue5m3x2                                                     rubin
cvt         f16x2|bf16x2 f32                                            80
cvt         rna tf32                                                    80
cvt         rn tf32                                                     90
ppu.mma     _                                                           ppu_10
ppu.tc02    _                                                           ppu_15
"""


def _rows() -> Iterator[_Row]:
    names = {"FP8": _FP8, "FP6_4": _FP6_4, "SMALL": _SMALL}
    for line in _ROWS.strip().splitlines():
        opcodes, *parts = line.split()
        operands = int(parts.pop()) if parts[-1] in ("3", "4") else 0
        where = parts.pop().replace("_", " ") if parts[-1] not in _SETS else parts.pop()
        entries = tuple(
            "|".join(names.get(name, name) for name in part.split("|"))
            for part in parts
            if part != "_"
        )
        for opcode in opcodes.split("|"):
            yield _Row(opcode, entries, where, operands)


_BY_FIRST: dict[str, list[_Row]] = {}
for _row in _rows():
    _BY_FIRST.setdefault(_row.opcode.split(".")[0].split("::")[0], []).append(_row)

_CLUSTER_REGISTERS = re.compile(r"%(cluster|nclusterid|is_explicit_cluster)")


_PRESENTED = {"ppu_10": "sm_80", "ppu_15": "sm_89"}
"""What PPUs tell a CUDA driver that they are; their own instructions are text in the PTX."""
_NUMBERS = (
    *(50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90),
    *(100, 103, 107, 110, 120, 121),
)
_TARGET = re.compile(r"sm_(\d+)([af]?)")


def presented(arch: str) -> str:
    """The architecture that a device of this one presents to compilers and drivers."""
    return _PRESENTED.get(arch, arch)


def target_refusal(target: str, device: DeviceCapabilities | None) -> str:
    """Why a driver would not load a module for a target; empty if it would.

    A plain target runs on its architecture and later ones, an `f` target on later ones of its
    family, an `a` target on its architecture alone (PTX ISA 11.1.2). Without a device it has to be
    one that there is.
    """
    match = _TARGET.fullmatch(target.replace("sm_101", "sm_110"))
    if match is None or int(match[1]) not in _NUMBERS:
        return f"there is no target {target}" if target else "it has no .target"
    if device is None:
        return ""
    wanted, own = int(match[1]), number_of(target_of(presented(device.arch)))
    told = f"it is for {target}, and {device.name} is {presented(device.arch)}: "
    if match[2] == "a" and wanted != own:
        return f"{told}an `a` target runs on its own architecture alone"
    if match[2] == "f" and (wanted // 10 != own // 10 or wanted > own):
        return f"{told}an `f` target runs on its architecture and later ones of its family"
    return f"{told}a target runs on its architecture and later ones" if wanted > own else ""


def number_of(target: str) -> int:
    """The number of a target: 100 for `100a`."""
    return int(target.rstrip("af") or 0)


def target_of(name: str) -> str:
    """The target of a PTX module without its prefix: `100a` for sm_100a."""
    match = re.search(r"sm_(\d+[af]?)", name)
    # sm_101 is the former name of sm_110.
    return match.group(1).replace("101", "110") if match else ""


def refusal(opcode: str, operands: int, target: str) -> str:
    """Why a target does not have an instruction; empty if it does."""
    parts = opcode.split(".")
    known = frozenset(parts)
    for row in _BY_FIRST.get(parts[0].split("::")[0], ()):
        if row.matches(opcode, known, operands):
            reason = missing(row.where, target)
            if reason:
                return reason
    return ""


def device_refusal(opcode: str, device: DeviceCapabilities) -> str:
    """Why a device does not have an instruction of its vendor's own; empty if it does.

    To compilers such devices say that they are others.
    """
    if opcode.startswith("ppu.") and not device.arch.startswith("ppu"):
        return f"{device.name} has no instructions ppu.*"
    return ""


def missing(where: str, target: str) -> str:
    """Why a target is not in a set of them; empty if it is."""
    has, told = _SETS[where]
    if not target or has(target):
        return ""
    return f"the assembler does not take this for sm_{target}; it does for {told}"


def register_refusal(name: str, target: str) -> str:
    """Why a target does not have a special register; empty if it does."""
    return missing("90", target) if _CLUSTER_REGISTERS.match(name) else ""
