"""Instructions, and the targets for which ptxas 13.5 assembles them."""


def _both(*numbers: int) -> tuple[str, ...]:
    return tuple(f"{number}{suffix}" for number in numbers for suffix in "af")


ALL = (
    *("75", "80", "86", "89", "90", "90a"),
    *(f"{n}{suffix}" for n in (100, 103, 107, 110, 120, 121) for suffix in ("", "a", "f")),
)


def _from(number: int) -> tuple[str, ...]:
    return tuple(arch for arch in ALL if int(arch.rstrip("af")) >= number)


DATACENTER = _both(100, 103, 107, 110)
DATACENTER_A = ("100a", "103a", "107a", "110a")
CONSUMER = _both(120, 121)
CONSUMER_A = ("120a", "121a")
BLACKWELL = (*DATACENTER, *CONSUMER)

_MMA = "mma.sync.aligned.{}.row.col.{} {{{}}}, {{{}}}, {{{}}}, {{{}}};"


def _mma(shape: str, types: str, d: int, a: int, b: int, kind: str = "") -> str:
    def registers(count: int, letter: str = "r") -> str:
        return ", ".join(f"{letter}{i}" for i in range(count))

    letter = "f" if types.startswith("f32") else "r"
    text = _MMA.format(
        shape, types, registers(d, letter), registers(a), registers(b), registers(d, letter)
    )
    return text.replace("aligned.", f"aligned.{kind}.") if kind else text


def _sparse(shape: str, types: str, d: int, a: int, b: int, ordered: bool = False) -> str:
    kind, _, rest = types.partition(".") if types.startswith("kind") else ("", "", types)
    suffix = "::ordered_metadata" if ordered else ""
    text = _mma(shape, rest, d, a, b, kind).replace("mma.sync", f"mma.sp{suffix}.sync")
    return text.replace(";", ", r0, 0;")


_SCALED = "mma.sync.aligned.kind::{}.block_scale.scale_vec::{}.{}.row.col.f32.{}.f32.{} "
_SCALED += "{{f0, f1, f2, f3}}, {{r0, r1, r2, r3}}, {{r0, r1}}, {{f0, f1, f2, f3}}, r0, "
_SCALED += "{{h0, h0}}, r1, {{h0, h0}};"
_SPARSE_SCALED = "mma.sp::ordered_metadata.sync.aligned.m16n8k{}.row.col.kind::{}.block_scale"
_SPARSE_SCALED += ".scale_vec::{}.f32.{}.f32.{} {{f0, f1, f2, f3}}, {{r0, r1, r2, r3}}, "
_SPARSE_SCALED += "{{r0, r1, r2, r3}}, {{f0, f1, f2, f3}}, r0, 0, r0, {{h0, h0}}, r1, {{h0, h0}};"
_WGMMA = "wgmma.mma_async.sync.aligned.m64n8k{}.{} {{{}}}, d0, d0, p, 1, 1{};"
_F4 = "f0, f1, f2, f3"
_TMMA = "tcgen05.mma.cta_group::{}.kind::{} [r0], d0, d0, r1, {}p;"
_BULK = "cp.async.bulk"
_BYTES = "mbarrier::complete_tx::bytes"

ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # mma
    (_mma("m16n8k8", "f16.f16.f16.f16", 2, 2, 1), ALL),
    (_mma("m16n8k16", "f16.f16.f16.f16", 2, 4, 2), _from(80)),
    (_mma("m16n8k8", "f32.f16.f16.f32", 4, 2, 1), ALL),
    (_mma("m16n8k16", "f32.f16.f16.f32", 4, 4, 2), _from(80)),
    (_mma("m16n8k8", "f32.bf16.bf16.f32", 4, 2, 1), _from(80)),
    (_mma("m16n8k16", "f32.bf16.bf16.f32", 4, 4, 2), _from(80)),
    (_mma("m16n8k4", "f32.tf32.tf32.f32", 4, 2, 1), _from(80)),
    (_mma("m16n8k8", "f32.tf32.tf32.f32", 4, 4, 2), _from(80)),
    (_mma("m8n8k16", "s32.s8.s8.s32", 2, 1, 1), ALL),
    (_mma("m16n8k16", "s32.s8.u8.s32", 4, 2, 1), _from(80)),
    (_mma("m16n8k32", "s32.u8.s8.s32", 4, 4, 2), _from(80)),
    (_mma("m8n8k32", "s32.s4.u4.s32", 2, 1, 1), ALL),
    (_mma("m16n8k32", "s32.u4.u4.s32", 4, 2, 1), _from(80)),
    (_mma("m16n8k64", "s32.s4.s4.s32", 4, 4, 2), _from(80)),
    (_mma("m16n8k16", "f32.e4m3.e4m3.f32", 4, 2, 1), _from(89)),
    (_mma("m16n8k32", "f32.e4m3.e5m2.f32", 4, 4, 2), _from(89)),
    (_mma("m16n8k32", "f16.e5m2.e5m2.f16", 2, 4, 2), _from(89)),
    (_mma("m16n8k32", "f32.e4m3.e5m2.f32", 4, 4, 2, "kind::f8f6f4"), BLACKWELL),
    (_mma("m16n8k32", "f16.e4m3.e4m3.f16", 2, 4, 2, "kind::f8f6f4"), BLACKWELL),
    (_mma("m16n8k32", "f32.e4m3.e2m1.f32", 4, 4, 2, "kind::f8f6f4"), CONSUMER),
    (_mma("m16n8k32", "f32.e3m2.e2m3.f32", 4, 4, 2, "kind::f8f6f4"), CONSUMER),
    (_SCALED.format("mxf8f6f4", "1X", "m16n8k32", "e4m3.e2m1", "ue8m0"), CONSUMER),
    (_SCALED.format("mxf4", "2X", "m16n8k64", "e2m1.e2m1", "ue8m0"), CONSUMER),
    (_SCALED.format("mxf4nvf4", "4X", "m16n8k64", "e2m1.e2m1", "ue4m3"), CONSUMER),
    # mma.sp
    (_sparse("m16n8k32", "f32.f16.f16.f32", 4, 4, 4), _from(80)),
    (_sparse("m16n8k16", "f32.tf32.tf32.f32", 4, 4, 4, ordered=True), _from(80)),
    (_sparse("m16n8k128", "s32.s4.u4.s32", 4, 4, 4), _from(80)),
    (_sparse("m16n8k64", "f32.e4m3.e5m2.f32", 4, 4, 4), _from(89)),
    (_sparse("m16n8k64", "f16.e4m3.e5m2.f16", 2, 4, 4, ordered=True), CONSUMER),
    (_sparse("m16n8k64", "kind::f8f6f4.f32.e4m3.e4m3.f32", 4, 4, 4, ordered=True), BLACKWELL),
    (_sparse("m16n8k64", "kind::f8f6f4.f16.e4m3.e4m3.f16", 2, 4, 4, ordered=True), CONSUMER),
    (_sparse("m16n8k64", "kind::f8f6f4.f32.e4m3.e3m2.f32", 4, 4, 4, ordered=True), CONSUMER),
    (_SPARSE_SCALED.format(64, "mxf8f6f4", "1X", "e4m3.e2m1", "ue8m0"), CONSUMER),
    (_SPARSE_SCALED.format(128, "mxf4", "2X", "e2m1.e2m1", "ue8m0"), CONSUMER_A),
    (_SPARSE_SCALED.format(128, "mxf4nvf4", "4X", "e2m1.e2m1", "ue4m3"), CONSUMER_A),
    # wgmma
    (
        _WGMMA.replace("async", "async.sp")
        .replace("d0, p", "d0, r0, 0, p")
        .format(64, "f32.e4m3.e5m2", _F4, ""),
        ("90a",),
    ),
    (_WGMMA.format(16, "f32.f16.f16", _F4, ", 0, 0"), ("90a",)),
    (_WGMMA.format(16, "f32.bf16.bf16", _F4, ", 0, 0"), ("90a",)),
    (_WGMMA.format(32, "f32.e4m3.e5m2", _F4, ""), ("90a",)),
    ("wgmma.fence.sync.aligned;", ("90a",)),
    ("wgmma.commit_group.sync.aligned;", ("90a",)),
    # tcgen05
    ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [r0], 32;", DATACENTER),
    (_TMMA.format(1, "f16", ""), DATACENTER),
    (_TMMA.format(2, "f8f6f4", ""), DATACENTER),
    (_TMMA.format(1, "i8", ""), ("100a", "110a")),
    (_TMMA.format(1, "mxf8f6f4.block_scale", "[r2], [r3], "), DATACENTER),
    (_TMMA.format(1, "mxf8f6f4.block_scale.scale_vec::1X", "[r2], [r3], "), DATACENTER_A),
    (_TMMA.format(1, "mxf4nvf4.block_scale.block16", "[r2], [r3], "), DATACENTER),
    (_TMMA.format(1, "mxf4nvf4.block_scale.scale_vec::4X", "[r2], [r3], "), DATACENTER_A),
    (_TMMA.format(1, "f16", "").replace("p;", "p, 1;"), _both(100, 103, 107)),
    ("tcgen05.cp.cta_group::1.128x256b [r0], d0;", DATACENTER),
    ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {r0}, [r1];", DATACENTER),
    ("tcgen05.st.sync.aligned.32x32b.x1.b32 [r1], {r0};", DATACENTER),
    ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {r0, r1}, r2, [r3];", _both(103, 107, 110)),
    ("tcgen05.fence::before_thread_sync;", DATACENTER),
    # matrices in shared memory
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {r0}, [r1];", ALL),
    ("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [r1], {r0};", _from(90)),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {r0, r1}, [r2];", BLACKWELL),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b4x16_p64 {r0}, [r2];", BLACKWELL),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.s8.s4 {r0}, [r2];", ("90a", *BLACKWELL)),
    ("stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [r1], {r0};", BLACKWELL),
    ("movmatrix.sync.aligned.m8n8.trans.b16 r0, r1;", ALL),
    # asynchronous copies and barriers
    ("cp.async.ca.shared.global [r0], [d0], 4;", _from(80)),
    ("cp.async.cg.shared.global [r0], [d0], 16, r1;", _from(80)),
    ("cp.async.commit_group;", _from(80)),
    ("cp.async.mbarrier.arrive.noinc.shared.b64 [r0];", _from(80)),
    ("mbarrier.init.shared.b64 [r0], 1;", _from(80)),
    ("mbarrier.test_wait.shared.b64 p, [r0], d0;", _from(80)),
    ("mbarrier.try_wait.parity.shared.b64 p, [r0], 0;", _from(90)),
    ("mbarrier.arrive.expect_tx.shared.b64 d0, [r0], 16;", _from(90)),
    ("mbarrier.arrive.shared.b64 d0, [r0];", _from(80)),
    ("mbarrier.arrive.shared.b64 d0, [r0], 2;", _from(90)),
    ("mbarrier.arrive_drop.shared.b64 d0, [r0], 2;", _from(90)),
    ("mbarrier.arrive.noComplete.shared.b64 d0, [r0], 2;", _from(80)),
    (f"{_BULK}.shared::cluster.global.{_BYTES} [r0], [d0], 16, [r1];", _from(90)),
    (f"{_BULK}.global.shared::cta.bulk_group [d0], [r0], 16;", _from(90)),
    (
        f"{_BULK}.shared::cluster.global.{_BYTES}.multicast::cluster [r0], [d0], 16, [r1], h0;",
        _from(90),
    ),
    (f"{_BULK}.tensor.2d.shared::cluster.global.{_BYTES} [r0], [d0, {{r2, r3}}], [r1];", _from(90)),
    (f"{_BULK}.tensor.2d.global.shared::cta.bulk_group [d0, {{r2, r3}}], [r0];", _from(90)),
    ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [d0], [r0], 16;", _from(90)),
    ("fence.proxy.async;", _from(90)),
    ("fence.mbarrier_init.release.cluster;", _from(90)),
    ("tensormap.replace.tile.rank.global.b1024.b32 [d0], 1;", ("90a", *BLACKWELL)),
    (f"st.async.shared::cluster.{_BYTES}.b32 [r0], r1, [r2];", _from(90)),
    (f"red.async.relaxed.cluster.shared::cluster.{_BYTES}.add.u32 [r0], r1, [r2];", _from(90)),
    # clusters and scheduling
    ("barrier.cluster.arrive; barrier.cluster.wait;", _from(90)),
    ("mapa.shared::cluster.u32 r0, r1, 0;", _from(90)),
    ("mov.u32 r0, %cluster_ctarank;", _from(90)),
    (f"clusterlaunchcontrol.try_cancel.async.shared::cta.{_BYTES}.b128 [r0], [r1];", _from(100)),
    (
        f"clusterlaunchcontrol.try_cancel.async.shared::cta.{_BYTES}.multicast::cluster::all.b128 "
        "[r0], [r1];",
        BLACKWELL,
    ),
    ("setmaxnreg.inc.sync.aligned.u32 232;", ("90a", *BLACKWELL)),
    ("griddepcontrol.wait;", _from(90)),
    ("elect.sync r0|p, 0xFFFFFFFF;", _from(90)),
    ("redux.sync.add.u32 r0, r1, 0xFFFFFFFF;", _from(80)),
    ("redux.sync.max.f32 f0, f1, 0xFFFFFFFF;", _both(100, 103, 107)),
    # arithmetic
    ("fma.rn.f16x2 r0, r1, r2, r3;", ALL),
    ("fma.rn.bf16x2 r0, r1, r2, r3;", _from(80)),
    ("mul.rn.bf16x2 r0, r1, r2;", _from(90)),
    ("add.rn.bf16x2 r0, r1, r2;", _from(90)),
    ("sub.rn.bf16x2 r0, r1, r2;", _from(90)),
    ("fma.rn.relu.f16x2 r0, r1, r2, r3;", _from(80)),
    ("max.bf16x2 r0, r1, r2;", _from(80)),
    ("max.f16x2 r0, r1, r2;", _from(80)),
    ("abs.bf16x2 r0, r1;", _from(80)),
    ("fma.rn.f32x2 d0, d1, d2, d3;", _from(100)),
    ("mul.rn.f32x2 d0, d1, d2;", _from(100)),
    ("prmt.b32 r0, r1, r2, 0x3210;", ALL),
    ("lop3.b32 r0, r1, r2, r3, 0xE8;", ALL),
    ("dp4a.s32.s32 r0, r1, r2, r3;", ALL),
    ("max.f32 f0, f1, f2, f3;", _from(100)),
    ("add.u16x2 r0, r1, r2;", _from(90)),
    ("ld.global.v8.b32 {r0, r1, r2, r3, r4, r5, r6, r7}, [d0];", _from(100)),
    ("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {r0, r1, r2, r3}, [d0];", _from(80)),
    ("red.global.add.noftz.bf16x2 [d0], r0;", _from(90)),
    ("red.global.add.noftz.f16x2 [d0], r0;", ALL),
    ("red.global.v4.f32.add [d0], {f0, f1, f2, f3};", _from(90)),
    # conversions
    ("cvt.rn.satfinite.e4m3x2.f32 h0, f0, f1;", _from(89)),
    ("cvt.rn.satfinite.e5m2x2.f16x2 h0, r0;", _from(89)),
    ("cvt.rn.f16x2.e4m3x2 r0, h0;", _from(89)),
    ("cvt.rn.f16x2.e3m2x2 r0, h0;", BLACKWELL),
    ("cvt.rn.bf16x2.ue8m0x2 r0, h0;", BLACKWELL),
    ("cvt.rp.satfinite.ue8m0x2.f32 h0, f0, f1;", BLACKWELL),
    ("cvt.rn.f16x2.f32 r0, f0, f1;", _from(80)),
    ("cvt.rn.bf16x2.f32 r0, f0, f1;", _from(80)),
    ("cvt.rna.tf32.f32 r0, f0;", _from(80)),
    ("{.reg .b8 e; cvt.rn.satfinite.e2m1x2.f32 e, f0, f1;}", BLACKWELL),
    ("{.reg .b8 e; mov.b16 h0, 0; cvt.u8.u16 e, h0; cvt.rn.f16x2.e2m1x2 r0, e;}", BLACKWELL),
    # PPUs
    (
        "ppu.mma.sync.aligned.m16n16k16.row.col.f32.f16.f16.f32 {f0, f1, f2, f3, f4, f5, f6, f7}, "
        "{r0, r1, r2, r3}, {r4, r5, r6, r7}, {f0, f1, f2, f3, f4, f5, f6, f7};",
        ("80",),
    ),
    (
        "ppu.tc02.mma.sync.aligned.m16n16k16.row.col.f32.f16.f16.f32 "
        "{f0, f1, f2, f3, f4, f5, f6, f7}, "
        "{r0, r1, r2, r3}, {r4, r5, r6, r7}, {f0, f1, f2, f3, f4, f5, f6, f7};",
        ("89",),
    ),
)
