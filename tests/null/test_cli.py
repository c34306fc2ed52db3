"""The command line as a program: start, help, documentation, small commands, what goes wrong."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from humming import plugins
from humming.errors import CompileError, PluginError, UnsupportedError

PAGE = (Path(__file__).parents[2] / "docs/cli.md").read_text()
COMMANDS = ("devices", "capabilities", "explain", "run", "compile", "doctor")
Shell = Any  # of conftest.py, which tests do not import


# --- as a program ------------------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from humming.cli import main; main(['run', '--help'])\n"
        "print(sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(re.findall(r"\w+", done.stderr))
    assert not loaded & {"torch", "numpy", "cuda", "yaml", "pluggy", "safetensors"}
    assert "typer" in loaded


def test_installed_command_is_this_one() -> None:
    program = shutil.which("humming", path=str(Path(sys.executable).parent))
    assert program, "the entry point is not installed"
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"humming \d+\.\d+\.\d+\S*\n", done.stdout)


def test_no_command_shows_the_help(humming: Shell) -> None:
    humming()  # the status depends on the version of typer
    text = humming.out + humming.err
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_page_has_every_option(humming: Shell, command: str) -> None:
    assert humming(command, "--help") == 0
    section = PAGE.partition(f"\n## humming {command}")[2].partition("\n## ")[0]
    assert section, f"docs/cli.md has no section on {command}"
    options = set(re.findall(r"^ +(--?[\w-]+)", humming.out, re.MULTILINE))
    missing = {o for o in options - {"--help", "--json"} if o not in section}
    assert not missing, f"docs/cli.md does not explain {missing}"


def test_page_has_every_exit_status() -> None:
    from humming.cli import exits

    statuses = {value for value in vars(exits).values() if isinstance(value, int)}
    assert statuses <= {int(found) for found in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}


@pytest.mark.parametrize("line", re.findall(r"^humming explain .+$", PAGE, re.MULTILINE))
def test_examples_of_the_page_work(humming: Shell, line: str) -> None:
    assert humming(*shlex.split(line)[1:]) == 0, humming.err


# --- devices, capabilities, explain ------------------------------------------------------------


def test_devices_lists_every_row(humming: Shell) -> None:
    told = humming.json("devices", "--all")
    names = [row["name"] for row in told["rows"]]
    assert names == [caps.name for caps in plugins.registry().devices()]
    assert [found["row"] for found in told["present"]] == ["sim:a100_80gb"]
    assert told["variants"] == sorted(f"sim:{name}" for name in names)
    assert humming("devices", "--all") == 0
    assert all(name in humming.out for name in names)


def test_devices_shows_present_and_broken(humming: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    present = plugins.PresentDevice(0, "Some Card", "h200", plugin="nvidia", notes=("129 SMs",))
    problem = plugins.Problem("acme", "acme 1.0", "loading", PluginError("acme: no module x"))
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([present], [problem]))
    told = humming.json("devices")
    assert told["present"][0]["row"] == "h200"
    assert told["broken_plugins"] == [
        {
            "plugin": "acme",
            "distribution": "acme 1.0",
            "hook": "loading",
            "error": "acme: no module x",
        }
    ]
    assert "rows" not in told
    assert humming("devices") == 0
    for text in ("Some Card", "129 SMs", "acme: no module x"):
        assert text in humming.out


@pytest.mark.parametrize("name", ["t4", "h20", "b300", "rubin", "zw810e"])
def test_capabilities_in_both_forms(humming: Shell, name: str) -> None:
    caps = plugins.capabilities(name)
    assert humming.json("capabilities", name) == json.loads(json.dumps(caps.to_dict()))
    assert humming("capabilities", name) == 0
    assert all(row.name in humming.out for row in caps.mma)
    assert all(quirk in humming.out for quirk in caps.quirks)


def test_explain_in_both_forms(humming: Shell) -> None:
    sizes = ("-n", "1024", "-k", "512", "-m", "7")
    told = humming.json("explain", "w4a16", "--device", "a100", *sizes)
    assert (told["n"], told["k"], told["m"]) == (1024, 512, 7)
    assert told["chosen"]
    assert humming("explain", "w4a16", "--device", "a100", *sizes) == 0
    assert told["chosen"] in humming.out
    assert "Rejected" in humming.out


def test_explain_opts_into_undocumented(humming: Shell) -> None:
    def names(*more: str) -> str:
        told = humming.json("explain", "e3m4", "--device", "b200", *more)
        return " ".join(option["name"] for option in [*told["ready"], *told["missing"]])

    assert "e3m4 x e3m4" not in names()
    assert "e3m4 x e3m4" in names("--allow-undocumented")


def test_explain_names_the_nearest_group_that_fits(humming: Shell) -> None:
    words = ("int4_g48 x bf16", "--device", "h200", "-n", "512", "-k", "4800")
    assert "int4_g32 x bfloat16 is possible" in humming.json("explain", *words)["possible"]
    assert humming("explain", *words) == 0
    assert "int4_g32 x bfloat16 is possible" in humming.out
    assert humming.json("explain", "w4a16", "--device", "h200")["possible"] is None


# --- what goes wrong ---------------------------------------------------------------------------

WRONG = {
    "unknown-device": (("explain", "w4a16", "--device", "h30"), "h20"),
    "unknown-format": (("explain", "int4_q128 x fp16", "--device", "h20"), "q128"),
    "unknown-weight": (("run", "--random", "64x64", "--weight", "int44"), "int4"),
    "bad-shape": (("run", "--random", "64"), "NxK"),
    "empty-shape": (("run", "--random", "0x64"), "positive"),
    "nothing-to-run": (("run",), "--random"),
    "endless-shape": (("run", "--random", f"64x{'9' * 5000}"), "18 digits"),
    "large-k": (("explain", "w4a16", "--device", "h20", "-k", str(2**31)), "k is beyond"),
    "large-n": (("compile", "w4a16", "--device", "h20", "--shapes", f"{2**40}x64"), "n is beyond"),
    "both-to-run": (("run", "a.safetensors::b", "--random", "4x4"), "either"),
    "no-tensor-named": (("run", "model.safetensors"), "::TENSOR"),
    "no-such-file": (("run", "nowhere.safetensors::x"), "nowhere.safetensors"),
    "no-lowering": (("run", "--random", "64x70", "--weight", "int5_g7"), "7 values of K"),
    "no-sizes": (("compile", "w4a16", "--device", "h20"), "--shapes"),
    "half-a-size": (("compile", "w4a16", "--device", "h20", "-n", "64"), "both -n and -k"),
    "no-shapes": (("compile", "w4a16", "--device", "h20", "--shapes", ","), "NxK"),
    "no-model": (("compile", "w4a16", "--device", "h20", "--model", "nowhere"), "nowhere"),
}


@pytest.mark.parametrize(("words", "hint"), WRONG.values(), ids=WRONG)
def test_wrong_request(humming: Shell, words: tuple[str, ...], hint: str) -> None:
    assert humming(*words) == 2
    assert humming.out == ""
    assert humming.err.startswith("error: ")
    assert hint in humming.err
    assert "Traceback" not in humming.err
    told = humming.json(*words, status=2)
    assert told["error"]["message"] in humming.err


@pytest.mark.parametrize(
    "words", [("explain",), ("run", "--no-such"), ("run", "-m", "-1"), ("fly",)]
)
def test_mistake_in_the_command_line(humming: Shell, words: tuple[str, ...]) -> None:
    assert humming(*words, "--json") == 2
    assert humming.out == ""
    assert "Traceback" not in humming.err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CompileError("libnvrtc was not found"), 3),
        (PluginError("plugin acme: loading: no module x"), 3),
        (UnsupportedError("a", "b", "C."), 2),
        (ImportError("No module named 'torch'", name="torch"), 3),
        (ImportError("No module named 'humming.x'", name="humming.x"), 70),
        (RuntimeError("a defect"), 70),
        (KeyError(), 70),
        (MemoryError("no room"), 3),
        (type("OutOfMemoryError", (RuntimeError,), {})("no room on the card"), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_status_tells_whose_turn_it_is(
    humming: Shell, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(plugins, "capabilities", fail)
    assert humming("capabilities", "h200") == status
    assert str(error) in humming.err
    assert ("Traceback" in humming.err) == (status == 70)
    told = humming.json("capabilities", "h200", status=status)["error"]
    assert told["type"] == type(error).__name__
    assert told["message"]
    assert str(error) in told["message"]
    assert ("Traceback" in humming.err) == (status == 70)


def test_json_that_fails_midway_is_one_object(
    humming: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever breaks before the result is whole, no part of it may have been written.
    monkeypatch.setattr(plugins, "capabilities", lambda name: Unprintable())
    told = humming.json("capabilities", "h200", status=70)
    assert told["error"]["message"] == "beyond words"


class Unprintable:
    """Capabilities whose JSON cannot be made."""

    def to_dict(self) -> dict[str, Any]:
        return {"name": "h200", "sms": self}

    def __str__(self) -> str:
        raise RuntimeError("beyond words")


@pytest.mark.parametrize(
    "words",
    [
        ("devices", "--all"),
        ("devices", "--all", "--json"),
        ("devices",),
        ("capabilities", "h200"),
        ("explain", "w4a16", "--device", "nowhere", "--json"),
        ("run", "--help"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("errors_too", [False, True], ids=["stdout", "and-stderr"])
def test_reader_that_has_left_ends_a_command_quietly(
    words: tuple[str, ...], errors_too: bool
) -> None:
    code = "import sys; from humming.cli import main; sys.exit(main())"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            stdout=write,
            stderr=write if errors_too else subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(write)
    assert done.returncode == 141
    assert "Traceback" not in (done.stderr or "")
    assert "Exception" not in (done.stderr or "")


def test_json_has_no_nan() -> None:
    from humming.cli.output import to_json

    text = to_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


def test_a_machine_without_any_device_says_what_to_name(
    humming: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([], []))
    monkeypatch.setattr(plugins.installed(), "_seen", None)
    assert humming("capabilities") == 2
    assert "--device" in humming.err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--random", "1000000x1000000"),
        ("run", "--random", "64x64", "--seed", str(2**64)),
        ("run", "--random", "64x64", "-m", "99999999999"),
    ],
    ids=["matrix", "seed", "tokens"],
)
def test_sizes_beyond_reason_are_refused(humming: Shell, words: tuple[str, ...]) -> None:
    assert humming(*words) == 2
    assert "Traceback" not in humming.err


def test_a_home_that_is_not_there_is_no_defect(
    humming: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUMMING_CACHE_DIR", "~nobody_of_that_name/x")
    assert humming("compile", "w4a16", "-n", "64", "-k", "64", "--device", "h20") == 2
    assert "HUMMING_CACHE_DIR" in humming.err
