"""What a launch must keep to, and what warpgroups and dependent grids must."""

import importlib
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import humming
from humming import plugins
from humming.errors import HummingError
from humming.hookspecs import Buffer, Image

errors = importlib.import_module("humming.devices.simulator.errors")
launch_shape = importlib.import_module("humming.devices.simulator.launch_shape")
runtime = importlib.import_module("humming.devices.simulator.runtime")


def launch(
    body: str,
    device: str | None,
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    smem_bytes: int = 0,
    directives: str = "",
    target: str = "sm_80",
    **more: Any,
) -> None:
    caps = None if device is None else plugins.capabilities(device)
    simulator = runtime.SimulatorRuntime(launch_shape.Options(device=caps))
    text = f".version 9.4\n.target {target}\n.address_size 64\n.visible .entry test() {directives}"
    text += f"\n{{\n{body}\nret;\n}}\n"
    kernel = simulator.load(Image("ptx", text.encode()), "test", smem_bytes)
    kernel.launch(grid, block, b"", **more)


STATIC = ".shared .align 16 .b8 tile[1024]; .reg .b32 s; mov.u32 s, tile;"
H200 = {"target": "sm_90a"}


@pytest.mark.parametrize(
    ("device", "most"), [("t4", 65536), ("a100_80gb", 166912), ("h200", 232448), (None, None)]
)
def test_shared_memory(device: str | None, most: int | None) -> None:
    target = {"t4": "sm_75", "h200": "sm_90"}.get(device or "", "sm_80")
    if most is None:
        launch(STATIC, device, smem_bytes=10**6)
        return
    launch(STATIC, device, smem_bytes=most - 1024, target=target)
    with pytest.raises(HummingError, match=f"{most + 1} bytes .*{device} has at most {most}"):
        launch(STATIC, device, smem_bytes=most - 1023, target=target)


@pytest.mark.parametrize(
    ("block", "grid"),
    [((1056, 1, 1), (1, 1, 1)), ((1, 1, 65), (1, 1, 1)), ((32, 1, 1), (1, 65536, 1))],
)
def test_threads_and_ctas(block: Any, grid: Any) -> None:
    with pytest.raises(HummingError, match=r"a100_80gb has at most (1024 threads|\(2147)"):
        launch("", "a100_80gb", block=block, grid=grid)
    launch("", "a100_80gb", block=(1, 1, 64), grid=(1, 2, 3))


def test_clusters() -> None:
    launch("", "h200", grid=(16, 1, 1), cluster=(8, 1, 1), **H200)
    launch("", "h200", grid=(16, 1, 1), cluster=(16, 1, 1), non_portable=True, **H200)
    with pytest.raises(HummingError, match="clusters of 16 CTAs: h200 has at most 8, or 16"):
        launch("", "h200", grid=(16, 1, 1), cluster=(16, 1, 1), **H200)
    with pytest.raises(HummingError, match="clusters of 32"):
        launch("", "h200", grid=(32, 1, 1), cluster=(32, 1, 1), non_portable=True, **H200)
    with pytest.raises(HummingError, match="clusters of 2 CTAs: a100_80gb has none"):
        launch("", "a100_80gb", grid=(2, 1, 1), cluster=(2, 1, 1))
    with pytest.raises(HummingError, match="sm_80 has none"):
        launch("", None, grid=(2, 1, 1), cluster=(2, 1, 1))
    required = {"directives": ".explicitcluster .reqnctapercluster 2, 1, 1", **H200}
    launch("", "h200", grid=(4, 1, 1), **required)  # takes what the kernel requires
    with pytest.raises(HummingError, match="no multiple of the cluster"):
        launch("", "h200", grid=(3, 1, 1), **required)
    with pytest.raises(HummingError, match="needs clusters of"):
        launch("", "h200", grid=(4, 1, 1), cluster=(4, 1, 1), **required)


# -- waves ----------------------------------------------------------------------------------------

SPIN = """
  .reg .b32 t, c, n, v; .reg .b64 base, at; .reg .pred p, q;
  ld.param.u64 base, [p0]; mov.u32 c, %ctaid.x; mov.u32 n, %nctaid.x; sub.u32 n, n, 1;
  setp.eq.u32 p, c, n; mad.wide.u32 at, c, 4, base;
  mov.u32 t, %tid.x; setp.ne.u32 q, t, 0; @q exit;
  @p bra LAST;
WAIT: ld.acquire.gpu.global.u32 v, [at+4]; setp.eq.u32 q, v, 0; @q bra WAIT;
LAST: st.release.gpu.global.u32 [at], 1;
"""


@pytest.mark.parametrize("seed", [None, 1])
def test_a_cta_waits_for_one_of_a_later_wave(run_ptx: Callable[..., Any], seed: Any) -> None:
    """Legal where the device holds all of them at the same time."""
    flags = np.zeros(132, np.uint32)
    device = plugins.capabilities("h200")
    options = {"block": 1024, "seed": seed, "target": "sm_90a"}
    body = SPIN.replace("mov.u32 t, %tid.x;", "mov.u32 t, %tid.x; bar.sync 0;")
    run_ptx(body, {"flags": flags[:8]}, grid=8, device=device, **options)
    assert flags[:8].all()


def test_a_cta_waits_for_one_that_does_not_fit(run_ptx: Callable[..., Any]) -> None:
    flags = np.zeros(300, np.uint32)
    device = plugins.capabilities("h200")
    options = {"grid": 265, "block": 1024, "target": "sm_90a"}
    with pytest.raises(errors.DeadlockError):
        run_ptx(SPIN, {"flags": flags}, device=device, **options)


# -- registers of warpgroups ----------------------------------------------------------------------

SPLIT = """
  .reg .b32 t; .reg .pred p; mov.u32 t, %tid.x; setp.ge.u32 p, t, 256; @p bra PRODUCER;
  setmaxnreg.inc.sync.aligned.u32 {}; bra END;
PRODUCER: setmaxnreg.dec.sync.aligned.u32 {};
END:
"""
THREE = {"block": (384, 1, 1), "directives": ".maxntid 384, 1, 1", **H200}


def test_warpgroups_share_registers() -> None:
    launch(SPLIT.format(232, 40), "h200", **THREE)
    launch(SPLIT.format(240, 24), "h200", **THREE)


@pytest.mark.parametrize(
    ("grown", "kept", "kind", "match"),
    [
        (240, 40, "DeadlockError", "setmaxnreg.inc"),
        (160, 40, "UndefinedBehaviorError", "the warp has more, 168"),
        (232, 176, "UndefinedBehaviorError", "the warp has less, 168"),
        (236, 40, "UnknownInstructionError", "a multiple of 8"),
        (232, 16, "UnknownInstructionError", "from 24 to 256"),
    ],
)
def test_registers_that_are_not_there(grown: int, kept: int, kind: str, match: str) -> None:
    with pytest.raises(getattr(errors, kind), match=match) as caught:
        launch(SPLIT.format(grown, kept), "h200", **THREE)
    assert "setmaxnreg" in caught.value.where.text


def test_registers_of_half_a_warpgroup() -> None:
    body = SPLIT.format(232, 40).replace("256", "320")
    with pytest.raises(errors.DivergenceError, match=r"wait in vain|warpgroup"):
        launch(body, "h200", **THREE)


def test_registers_of_a_kernel_that_says_no_number() -> None:
    with pytest.raises(errors.UndefinedBehaviorError, match=r"\.maxntid"):
        launch(SPLIT.format(232, 40), "h200", block=(384, 1, 1), **H200)


# -- dependent grids ------------------------------------------------------------------------------

READ = """
  .reg .b32 t, v; .reg .b64 base, at; .reg .pred p; ld.param.u64 base, [p0];
  mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; mad.wide.u32 at, t, 4, base;
"""


TILE = ".shared .align 16 .b8 tile[512]; .shared .align 8 .b8 obj[8]; .reg .b32 s, o;"
TILE += "mov.u32 s, tile; mov.u32 o, obj;"
COPY = f"{TILE} mad.lo.u32 s, t, 4, s; cp.async.ca.shared.global [s], [at], 4; cp.async.wait_all;"
BULK = f"{TILE} @!p bra END; mbarrier.init.shared.b64 [o], 1; fence.proxy.async; "
BULK += "mbarrier.arrive.expect_tx.shared.b64 _, [o], 64; cp.async.bulk.shared::cluster.global"
BULK += ".mbarrier::complete_tx::bytes [s], [base], 64, [o]; W: "
BULK += "mbarrier.try_wait.parity.shared.b64 p, [o], 0; @!p bra W; END:"


@pytest.mark.parametrize(
    ("body", "legal"),
    [
        ("griddepcontrol.wait; ld.global.u32 v, [at];", True),
        ("@p griddepcontrol.wait; bar.sync 0; ld.global.u32 v, [at];", True),
        ("ld.global.u32 v, [at]; griddepcontrol.wait;", False),
        ("griddepcontrol.launch_dependents; ld.global.u32 v, [at];", False),
        (f"griddepcontrol.wait; {COPY}", True),
        (f"{COPY} griddepcontrol.wait;", False),
        (BULK, False),
        ("setp.lt.u32 p, t, 32; @p griddepcontrol.wait; ld.global.u32 v, [at];", False),
    ],
)
def test_what_the_launch_before_may_still_write(body: str, legal: bool) -> None:
    data = np.zeros(64, np.uint32)
    text = ".version 9.4\n.target sm_90a\n.address_size 64\n.visible .entry test(.param .u64 p0) {"
    text += f"\n{READ}\n{body}\nret;\n}}\n"
    kernel = runtime.SimulatorRuntime().load(Image("ptx", text.encode()), "test", 0)
    params = struct.pack("<Q", data.ctypes.data)

    def run(pdl: bool, awaited: bool) -> None:
        buffer = Buffer(data.ctypes.data, data.nbytes, "x", awaited=awaited)
        kernel.launch((1, 1, 1), (64, 1, 1), params, pdl=pdl, buffers=[buffer])

    run(False, True)
    run(True, False)
    if legal:
        run(True, True)
        return
    with pytest.raises(errors.AsyncHazardError, match=r"no griddepcontrol\.wait") as caught:
        run(True, True)
    assert caught.value.where.cta == (0, 0, 0)
    assert caught.value.where.lane is not None


def test_our_products_wait_for_the_launch_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launch before may write is marked, and the kernel waits before it reads it."""
    import torch

    seen: list[Any] = []
    original = runtime.SimulatedKernel.launch

    def spy(self: Any, *args: Any, **more: Any) -> None:
        seen.append((args[4], more["buffers"]))
        original(self, *args, **more)

    monkeypatch.setattr(runtime.SimulatedKernel, "launch", spy)
    weight = humming.pack(humming.quantize(torch.randn(32, 128), "int4_g64"))
    x, bias = torch.randn(2, 128).half(), torch.randn(32).half()
    humming.matmul(x, weight, bias=bias, device="sim:h200")
    quantized = humming.quantize_activation(x, "nvfp4", second_scale=torch.ones(1))
    narrow = humming.pack(humming.quantize(torch.randn(32, 128), "int4_g64"), activation="nvfp4")
    humming.matmul(quantized, narrow, device="sim:h200")
    products = [
        {b.name for b in buffers if b.awaited} for pdl, buffers in seen if pdl and len(buffers) > 3
    ]
    assert products[0] == {"x", "bias"}
    assert products[-1] == {"x", "x_scales", "x_second"}


@pytest.mark.parametrize(
    ("device", "target", "told"),
    [
        ("t4", "sm_75", ""),
        ("t4", "sm_70", ""),
        ("t4", "sm_80", "t4 is sm_75: a target runs on its architecture and later ones"),
        ("t4", "sm_90a", "an `a` target runs on its own architecture alone"),
        ("h200", "sm_80", ""),
        ("h200", "sm_90a", ""),
        ("b300", "sm_90a", "b300 is sm_103a: an `a` target runs on its own architecture alone"),
        ("b300", "sm_100a", "an `a` target runs on its own architecture alone"),
        ("b300", "sm_100f", ""),
        ("b300", "sm_103a", ""),
        ("b300", "sm_120", "a target runs on its architecture and later ones"),
        ("b200", "sm_103f", "an `f` target runs on its architecture and later ones of its family"),
        ("rtx5090", "sm_100f", "an `f` target runs on its architecture and later ones of its"),
        ("zw810e", "sm_80", ""),
        ("zw810e", "sm_90", "zw810e is sm_80: a target runs on"),
        ("h200", "sm_999", "there is no target sm_999"),
        (None, "sm_999", "there is no target sm_999"),
        (None, "compute_90", "there is no target compute_90"),
        (None, "sm_101a", ""),
    ],
)
def test_targets(device: str | None, target: str, told: str) -> None:
    """PTX ISA 11.1.2: what a driver loads on which device."""
    if told:
        with pytest.raises(HummingError, match=f"cannot be loaded: .*{re.escape(told)}"):
            launch("", device, target=target)
    else:
        launch("", device, target=target)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (".target sm_80\n.address_size 64\n", "begin with .version"),
        (".version 8.0\n.address_size 64\n", "it has no .target"),
    ],
)
def test_directives_that_a_module_needs(text: str, told: str) -> None:
    image = Image("ptx", f"{text}.visible .entry test()\n{{\nret;\n}}\n".encode())
    with pytest.raises(HummingError, match=told):
        runtime.SimulatorRuntime().load(image, "test", 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("seed", value) for value in (-1, "a", 1.5, True)),
        *(("sums_seed", value) for value in (-1, "a")),
        *(("sums", value) for value in ("x", 5, -1.01, float("nan"), None)),
        *(("patience", value) for value in (0, -3, 2.0)),
        *(("max_basic_blocks", value) for value in (0, -1, None)),
        *(("wave_warps", value) for value in (0, "1")),
        ("races", 1),
        ("device", "h200"),
    ],
)
def test_options_that_mean_nothing(name: str, value: Any) -> None:
    with pytest.raises(HummingError, match=rf"^Options\({name}=.*\): {name} is "):
        launch_shape.Options(**{name: value})


COPY = """
  .reg .u64 a, b; .reg .u32 t, v; ld.param.u64 a, [from]; ld.param.u64 b, [to];
  mov.u32 t, %tid.x; mad.wide.u32 a, t, 4, a; mad.wide.u32 b, t, 4, b;
  ld.global.u32 v, [a]; st.global.u32 [b], v;
"""


class TestViews:
    """Memory that is registered inside of other memory."""

    @pytest.fixture
    def memory(self) -> Any:
        self.simulator = runtime.SimulatorRuntime()
        self.x, self.y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
        return self.simulator

    def copy(self, source: np.ndarray, to: np.ndarray, **more: Any) -> None:
        text = ".version 8.0\n.target sm_80\n.address_size 64\n"
        text += f".visible .entry test(.param .u64 from, .param .u64 to)\n{{{COPY} ret;\n}}\n"
        kernel = self.simulator.load(Image("ptx", text.encode()), "test", 0)
        params = struct.pack("<2Q", source.ctypes.data, to.ctypes.data)
        kernel.launch((1, 1, 1), (len(source), 1, 1), params, **more)

    def put(self, array: np.ndarray, name: str, **more: Any) -> None:
        self.simulator.register(array.ctypes.data, array.nbytes, name, **more)

    def test_a_view_leaves_its_parent(self, memory: Any) -> None:
        for array, name in ((self.x, "x"), (self.x[16:32], "part of x"), (self.y, "y")):
            self.put(array, name)
        self.copy(self.x, self.y)
        assert (self.y == self.x).all()
        memory.forget(self.x[16:].ctypes.data, 64)
        self.copy(self.x, self.y)

    def test_a_parent_may_come_later(self, memory: Any) -> None:
        for array, name in ((self.x[16:32], "part of x"), (self.x, "x"), (self.y, "y")):
            self.put(array, name)
        self.copy(self.x, self.y)
        assert (self.y == self.x).all()

    def test_a_view_may_be_undefined_or_defined(self, memory: Any) -> None:
        self.put(self.y, "y")
        self.put(self.x, "x", undefined=True)
        self.put(self.x[:32], "half of x")
        self.copy(self.x[:32], self.y[:32])
        with pytest.raises(errors.PoisonError):
            self.copy(self.x, self.y)
        self.put(self.x, "x")
        self.put(self.x[:32], "half of x", undefined=True)
        self.copy(self.x[32:], self.y[32:])
        with pytest.raises(errors.PoisonError):
            self.copy(self.x, self.y)

    def test_what_a_launch_brings_leaves_what_is_registered(self, memory: Any) -> None:
        self.put(self.x, "x")
        self.put(self.y, "y")
        view, whole = self.x[16:32], self.x
        for array in (view, whole):
            brought = Buffer(array.ctypes.data, array.nbytes, "brought")
            self.copy(self.x, self.y, buffers=[brought])
        self.copy(self.x, self.y)
        with pytest.raises(errors.BoundsError):
            self.copy(np.arange(64, dtype=np.uint32), self.y)
