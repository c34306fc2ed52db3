"""Faults planted around tensor memory and its products: each is found, named and located."""

import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensor_kernels as tk

import humming

errors = importlib.import_module("humming.devices.simulator.errors")

N, COLUMNS = 32, 48
PLAIN = tk.instruction_descriptor("f16", "bf16", "bf16", "f32", 128, N)
FP8 = tk.instruction_descriptor("f8f6f4", "e4m3", "e4m3", "f32", 128, N)


def product(
    *,
    issue: str = "",
    a: int | None = None,
    b: int | None = None,
    idesc: int = PLAIN,
    d: int = 0,
    kind: str = "f16",
    operands: str = "ss",
    enable: int = 0,
    **more: Any,
) -> np.ndarray:
    """Runs a product of 128 x 32; arguments replace parts of what is right."""
    data = np.zeros((128, 32), np.uint8)
    image, desc = tk.k_major(data, 32)
    b = desc if b is None else b
    a = (40 if operands == "ts" else desc) if a is None else a
    filled = np.zeros((128, COLUMNS), np.uint32)
    issue = issue or f"{tk.mma(kind, operands)} COMMIT"
    return tk.run(issue, image, filled, [a, b, idesc, d, enable, 0, 0], allocated=64, **more)


def fault_of(run: Callable[[], Any], kind: str, match: str) -> Any:
    """The error of a run, with its place."""
    with pytest.raises(getattr(errors, kind), match=match) as caught:
        run()
    return caught.value


def without(pattern: str, which: int | None = None) -> Callable[[str], str]:
    """An edit that takes an instruction out: all that match, or one of them."""

    def edit(text: str) -> str:
        found = list(re.finditer(pattern, text))
        assert found, pattern
        for match in [found[which]] if which is not None else reversed(found):
            text = text[: match.start()] + text[match.end() :]
        return text

    return edit


def replacing(pattern: str, instead: str) -> Callable[[str], str]:
    """An edit that puts other instructions in the place of some."""
    return lambda text: re.sub(pattern, instead, text)


def test_nothing_is_wrong() -> None:
    for operands in ("ss", "ts"):
        assert (product(operands=operands)[0, :, :N] == 0).all()


NO_WAIT = (r"mbarrier\.try_wait[^;]*;", "setp.eq.u32 p, 0, 0;")
BEFORE, AFTER = (rf"tcgen05\.fence::{name}_thread_sync;" for name in ("before", "after"))
ORDER = [
    ("no wait for the commit", NO_WAIT, "ss", "AsyncHazardError", "no wait for a commit covers"),
    ("no fence behind the wait", (AFTER, 2), "ss", "AsyncHazardError", "fence::after_thread_sync"),
    ("no wait for the stores", (r"tcgen05\.wait::st\S*;", 0), "ts", "AsyncHazardError", "wait::st"),
    ("no fence ahead of the barrier", (BEFORE, 1), "ts", "RaceError", "nothing orders them"),
    ("no fence behind the barrier", (AFTER, 1), "ts", "RaceError", "nothing orders them"),
    ("no proxy fence", (r"fence\.proxy\.async\S*;", 0), "ss", "AsyncHazardError", "fence.proxy"),
    ("no wait for the loads", (r"tcgen05\.wait::ld\S*;", 0), "ss", "PoisonError", "undefined"),
    (
        "no deallocation",
        (r"tcgen05\.dealloc[^;]*;", 0),
        "ss",
        "TensorMemoryError",
        "ends with 64 columns",
    ),
]


@pytest.mark.parametrize(
    ("edit", "operands", "kind", "match"), [o[1:] for o in ORDER], ids=[o[0] for o in ORDER]
)
def test_order(edit: Any, operands: str, kind: str, match: str) -> None:
    """9.7.16.6: what the canonical patterns of synchronization need."""
    pattern, instead = edit
    change = (replacing if isinstance(instead, str) else without)(pattern, instead)
    error = fault_of(lambda: product(operands=operands, edit=change), kind, match)
    assert error.where is not None
    assert error.where.line > 0
    assert error.where.cta == (0, 0, 0)


def test_the_same_faults_are_found_in_random_schedules() -> None:
    for seed in range(3):
        change = without(BEFORE, 1)
        with pytest.raises(errors.RaceError):
            product(operands="ts", edit=change, seed=seed)


def test_shared_memory_that_a_product_may_still_read_is_not_overwritten() -> None:
    late = 'asm volatile("st.shared.u32 [%0], %1;" :: "r"(smem + 64), "r"(5) : "memory");'
    fault_of(
        lambda: product(issue=f"{tk.mma('f16')} {late} COMMIT"),
        "AsyncHazardError",
        "a store to shared memory that an asynchronous operation may still read",
    )


def test_operands_that_a_copy_may_still_write_are_not_read() -> None:
    copy = (
        'asm volatile("cp.async.ca.shared.global [%0], [%1], 16;"'
        ' :: "r"(smem + 64), "l"(image) : "memory");'
    )
    fault_of(
        lambda: product(issue=f"{copy} {tk.mma('f16')} COMMIT"),
        "AsyncHazardError",
        "while an asynchronous copy may still write it",
    )


def test_a_product_needs_a_commit() -> None:
    fault_of(lambda: product(issue=tk.mma("f16")), "DeadlockError", "no thread can go on")


def test_an_arrival_on_memory_that_is_no_barrier() -> None:
    edit = without(r"mbarrier\.init[^;]*;", 0)
    fault_of(lambda: product(edit=edit), "BarrierError", "no initialized mbarrier")


def test_undefined_accumulators_are_found() -> None:
    """Columns that nobody has written: their sum is undefined, and must not leave the kernel."""
    data = np.zeros((128, 32), np.uint8)
    image, desc = tk.k_major(data, 32)
    unwritten = without(r"tcgen05\.st\.sync[^;]*;", 0)
    with pytest.raises(errors.PoisonError, match="an undefined value is stored"):
        tk.run(
            f"{tk.mma('f16')} COMMIT",
            image,
            np.zeros((128, N), np.uint32),
            [desc, desc, PLAIN, 0, 1],
            allocated=64,
            edit=unwritten,
        )


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"d": 2**32 - 32}, "TensorMemoryError", "column 416 .* is not allocated"),
        ({"d": 48}, "BoundsError", "do not all exist"),
        ({"d": 16 << 16}, "TensorMemoryError", "cannot begin at lane 16"),
        ({"operands": "ts", "a": 40 | 16 << 16}, "UndefinedBehaviorError", "A begins at lane 16"),
        ({"a": 1 << 14 | 1 << 46}, "UndefinedBehaviorError", "reserved bits of the descriptor"),
        ({"a": 0}, "UndefinedBehaviorError", "bits 46 to 48"),
        ({"b": 3 << 61 | 1 << 46}, "UndefinedBehaviorError", "swizzling mode 3"),
        ({"b": 1 << 49 | 1 << 46}, "UndefinedBehaviorError", "base offset"),
        ({"a": tk.descriptor(128, 0, 1024, 128)}, "AlignmentError", "not in the first row"),
        ({"a": tk.descriptor(1 << 16, 16, 128)}, "BoundsError", "lies in no variable"),
        ({"idesc": PLAIN | 1 << 29}, "UndefinedBehaviorError", "bit 29"),
        ({"idesc": PLAIN | 1 << 2}, "UndefinedBehaviorError", "sparse"),
        ({"idesc": PLAIN | 1 << 23}, "UndefinedBehaviorError", "bit 23"),
        ({"idesc": PLAIN | 1 << 3}, "UndefinedBehaviorError", "do not saturate"),
        ({"idesc": PLAIN | 3 << 7}, "UndefinedBehaviorError", "no type of A"),
        ({"idesc": PLAIN ^ 7 << 17}, "UndefinedBehaviorError", "N a multiple of 16"),
        ({"idesc": PLAIN ^ 24 << 24}, "UndefinedBehaviorError", "there is no product"),
        ({"kind": "f8f6f4", "idesc": FP8 | 1 << 29}, "UndefinedBehaviorError", "sm_107"),
        ({"kind": "f8f6f4", "idesc": FP8 | 0x8280}, "UndefinedBehaviorError", "less than 8"),
    ],
)
def test_operands_that_mean_nothing(change: dict[str, Any], kind: str, match: str) -> None:
    fault_of(lambda: product(**change), kind, match)


def test_one_thread_issues() -> None:
    whole = tk.SOURCE.replace("if (thread == 0 && cta == 0)", "if (warp == 0)")
    source = whole.replace("GROUP", "1").replace("CLUSTER", "__syncthreads();")
    source = source.replace("ISSUE", f"{tk.mma('f16')} {tk.COMMIT}").replace("ALLOCATED", "64")
    text = tk.ptx_of(source.replace("MASK", "0xFFFFFFFF"), "sm_100a")
    image, desc = tk.k_major(np.zeros((128, 32), np.uint8), 32)
    buffers = {
        "image": image,
        "filled": np.zeros((128, N), np.uint32),
        "out": np.zeros((128, N), np.uint32),
        "args": np.array([desc, desc, PLAIN, 0, 0], np.uint64),
    }
    words = ["image", len(image) // 4, "filled", N, "out", "args"]
    with pytest.raises(errors.UndefinedBehaviorError, match=r"32 threads of a warp issue"):
        tk.launch(text, buffers, words, smem_bytes=len(image))


def test_groups_of_ctas_are_not_mixed() -> None:
    edit = replacing("commit.cta_group::1", "commit.cta_group::2")
    fault_of(lambda: product(edit=edit), "UndefinedBehaviorError", "uses .cta_group::1 and")


def test_a_pair_needs_a_cluster() -> None:
    edit = replacing("cta_group::1", "cta_group::2")
    error = fault_of(lambda: product(edit=edit), "UndefinedBehaviorError", "has no peer")
    assert None not in (error.where.cta, error.where.warp, error.where.lane)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (r"\], 64;", "], 48;", "in powers of two from 32"),
        (r"(dealloc.*), 64;", r"\1, 32;", "are freed; allocated are 64 at column"),
        (
            r"(tcgen05.)alloc(.cta_group::1)",
            r"\1relinquish_alloc_permit\2.sync.aligned;\n \1alloc\2",
            "after tcgen05.relinquish_alloc_permit",
        ),
        (r"(tcgen05.dealloc[^;]*;)", r"\1 \1", "are freed; allocated are nothing"),
    ],
)
def test_allocation(old: str, new: str, match: str) -> None:
    """9.7.16.7."""
    fault_of(lambda: product(edit=replacing(old, new)), "TensorMemoryError", match)


def test_too_many_columns_are_a_deadlock() -> None:
    fault_of(
        lambda: product(
            edit=lambda t: re.sub(r"(tcgen05.alloc[^;]*), 64;", r"\1, 512; \1, 32;", t)
        ),
        "DeadlockError",
        "tcgen05.alloc",
    )


def test_a_warp_has_its_quarter_of_the_lanes() -> None:
    fault_of(
        lambda: product(edit=replacing(r"\b21;", "22;")),
        "BoundsError",
        "warp 1 can access lanes 32 to 63",
    )


# -- architectures and devices --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arch"),
    [
        ("i8", "sm_103a"),
        ("i8", "sm_107a"),
        ("i8", "sm_100f"),
        ("f16", "sm_120a"),
        ("f16", "sm_90a"),
    ],
)
def test_targets(kind: str, arch: str) -> None:
    """NVRTC takes any inline assembly; the assembler would refuse this."""
    fault_of(
        lambda: product(kind=kind, arch=arch, idesc=PLAIN),
        "UnknownInstructionError",
        "the assembler does not take this",
    )


def scaled(kind: str, idesc: int, **more: Any) -> np.ndarray:
    data = np.zeros((128, 32), np.uint8)
    image, desc = tk.k_major(data, 32)
    filled = more.pop("filled", np.zeros((128, COLUMNS), np.uint32))
    args = [desc, desc, idesc, 0, 0, 32, 40]
    return tk.run(f"{tk.scaled_mma(kind)} COMMIT", image, filled, args, allocated=64, **more)


MX8 = tk.scaled_descriptor("mxf8f6f4", "e4m3", "e4m3", "ue8m0", 128, N)
NV4 = tk.scaled_descriptor("mxf4nvf4", "e2m1", "e2m1", "ue4m3", 128, N)
MX = "mxf8f6f4.block_scale"
NV = "mxf4nvf4.block_scale.block16"


@pytest.mark.parametrize(
    ("kind", "idesc", "error", "match"),
    [
        (MX, MX8 & ~(1 << 23), "UndefinedBehaviorError", "ue8m0 scales, not ue4m3"),
        (MX, MX8 | 1 << 31, "UndefinedBehaviorError", "64 on sm_107"),
        (NV, NV4 | 1 << 31, "UndefinedBehaviorError", "K 96"),
        (NV, NV4 | 1 << 3, "UndefinedBehaviorError", "128 on sm_107"),
        (NV, NV4 | 1 << 29, "UndefinedBehaviorError", "data id 1"),
        (NV, NV4 | 1 << 15, "UndefinedBehaviorError", "bits 15 to 16"),
        ("mxf4nvf4.block_scale", NV4, "UndefinedBehaviorError", "needs a block size"),
        (f"{MX}.block16", MX8, "UndefinedBehaviorError", "cannot have .block16"),
        (f"{MX}.scale_vec::2X", MX8, "UndefinedBehaviorError", "cannot have .scale_vec::2X"),
        ("mxf4nvf4.block_scale.block32", NV4, "UndefinedBehaviorError", "ue8m0 scales, not"),
        (MX, MX8 & ~(3 << 27), "UndefinedBehaviorError", "there is no product"),
    ],
)
def test_descriptors_of_scaled_products(kind: str, idesc: int, error: str, match: str) -> None:
    fault_of(lambda: scaled(kind, idesc), error, match)


def test_scales_are_the_same_in_all_quarters(rng: Any) -> None:
    filled = np.zeros((128, COLUMNS), np.uint32)
    filled[rng.integers(32, 128), 33] = 1
    fault_of(lambda: scaled(MX, MX8, filled=filled), "UndefinedBehaviorError", "lanes.*differ")


def test_spellings_of_family_targets() -> None:
    fault_of(
        lambda: scaled("mxf8f6f4.block_scale.scale_vec::1X", MX8, arch="sm_100f"),
        "UnknownInstructionError",
        "the assembler does not take this for sm_100f",
    )
    scaled("mxf8f6f4.block_scale.block32", MX8, arch="sm_100f")


E3M4 = tk.scaled_descriptor("mxf8f6f4", "e3m4", "e4m3", "ue8m0", 128, N)
E0M3 = tk.scaled_descriptor("mxf4nvf4", "e0m3", "e2m1", "ue4m3", 128, N)


def rubin() -> Any:
    names = [d.name for d in humming.plugins.registry().devices() if "107" in d.arch]
    return humming.capabilities(names[0])


@pytest.mark.parametrize(("kind", "idesc", "name"), [(MX, E3M4, "e3m4"), (NV, E0M3, "e0m3")])
def test_undocumented_formats_are_illegal_where_no_row_has_them(
    kind: str, idesc: int, name: str
) -> None:
    caps = rubin()
    fault_of(
        lambda: scaled(kind, idesc, arch="sm_107a", device=caps),
        "IllegalInstructionError",
        f"{caps.name} does not execute {name}",
    )
    fault_of(lambda: scaled(kind, idesc, arch="sm_107a"), "IllegalInstructionError", "is not known")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tcgen05.shift.cta_group::1.down [%0];", "whether tcgen05.shift moves rows"),
        ("tcgen05.cp.cta_group::1.64x128b [%0], %1;", "goes with"),
        ("tcgen05.cp.cta_group::1.128x256b.b4x16_p64 [%0], %1;", "both formats"),
    ],
)
def test_forms_that_are_refused(text: str, match: str) -> None:
    issue = f'asm volatile("{text}" :: "r"(tmem), "l"(args[0]));'
    fault_of(lambda: product(issue=issue), "UnknownInstructionError", match)
