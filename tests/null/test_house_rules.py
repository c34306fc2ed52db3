"""The house rules that a machine can check, over every source file of the repository."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_FOLDERS = ("humming", "devices", "kernels")
ALL_FOLDERS = (*SOURCE_FOLDERS, "tests", "benchmarks", "examples", "docs", "changelog.d", ".ci")
TEXT_SUFFIXES = {".py", ".cuh", ".cu", ".md", ".yaml", ".yml", ".toml", ".in", ""}


def _files(folders: tuple[str, ...], *suffixes: str) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
    )


PYTHON = _files(SOURCE_FOLDERS, ".py")
DEVICE_CODE = _files(SOURCE_FOLDERS, ".cuh", ".cu")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


def _code_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of device code without its comments."""

    def blank(comment: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", comment.group())

    text = re.sub(r"/\*.*?\*/|//[^\n]*", blank, path.read_text(), flags=re.DOTALL)
    yield from enumerate(text.splitlines(), 1)


# --- capabilities, not identities ------------------------------------------------------------

IDENTITY_WORDS = re.compile(r"is_ppu|sm_version|__CUDA_ARCH__|get_device_capability")
IDENTITY_ALLOWED = ("devices/", "humming/registry.py", "kernels/arch.cuh")
IDENTITY_FIELDS = {"vendor", "family", "arch", "driver_names"}


def _is_identity(node: ast.expr) -> bool:
    """An expression that names who the device is: `caps.vendor`, `row["arch"]`, `family`."""
    if isinstance(node, ast.Attribute):
        return node.attr in IDENTITY_FIELDS
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value in IDENTITY_FIELDS
    return isinstance(node, ast.Name) and node.id in IDENTITY_FIELDS


def _compared(node: ast.AST) -> list[ast.expr]:
    """The expressions that a node compares with something."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.Match):
        return [node.subject]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [node.func.value] if node.func.attr in {"startswith", "endswith"} else []
    return []


def _identity_comparisons(path: Path) -> Iterator[int]:
    for node in _nodes(path):
        if any(_is_identity(side) for side in _compared(node)):
            yield node.lineno


@pytest.mark.parametrize("path", [*PYTHON, *DEVICE_CODE], ids=_name)
def test_capabilities_not_identities(path: Path) -> None:
    if _name(path).startswith(IDENTITY_ALLOWED):
        return
    lines = [
        number
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if IDENTITY_WORDS.search(line)
    ]
    if path.suffix == ".py":
        lines += _identity_comparisons(path)
    assert not lines, f"asks who the device is, not what it can do, in lines {lines}"


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("if caps.vendor == 'x': pass", True),
        ("if arch.startswith('sm_9'): pass", True),
        ("if 'x' in row['family']: pass", True),
        ("match caps.arch:\n    case _: pass", True),
        ("options = f'-arch={caps.arch}'", False),
        ("if caps.supports('tma'): pass", False),
    ],
)
def test_the_identity_check_can_fail(tmp_path: Path, source: str, caught: bool) -> None:
    file = tmp_path / "sample.py"
    file.write_text(source)
    assert bool(list(_identity_comparisons(file))) is caught


# --- names, includes, instruction text ---------------------------------------------------------


def test_no_file_is_named_after_nothing() -> None:
    vague = {"utils", "util", "helpers", "helper", "base", "common", "misc"}
    found = [_name(p) for p in _files(ALL_FOLDERS, ".py", ".cuh", ".cu") if p.stem in vague]
    assert not found, "name the subject"


def test_reserved_module_names_stay_free() -> None:
    reserved = {"layer", "schema", "forward", "transform", "tune", "config", "device", "utils"}
    present = {path.stem for path in (ROOT / "humming").iterdir()}
    assert not reserved & present, "these are the import surface of existing engine integrations"


def test_no_module_shadows_a_public_function() -> None:
    import humming

    modules = {path.stem for path in (ROOT / "humming").iterdir() if path.suffix == ".py"}
    assert not modules & set(humming._EXPORTS)


@pytest.mark.parametrize("path", DEVICE_CODE, ids=_name)
def test_inline_ptx_lives_with_its_wrappers(path: Path) -> None:
    if re.match(r"kernels/ptx/|devices/\w+/kernels/", _name(path)):
        return
    found = [n for n, line in _code_lines(path) if re.search(r"\basm\b", line)]
    assert not found, f"inline PTX in lines {found}: write a wrapper in kernels/ptx/"


@pytest.mark.parametrize("path", DEVICE_CODE, ids=_name)
def test_device_code_includes_only_humming(path: Path) -> None:
    includes = [line.strip() for _, line in _code_lines(path) if re.match(r"\s*#\s*include", line)]
    wrong = [i for i in includes if not re.fullmatch(r"#include <humming/[\w/]+\.cuh>", i)]
    assert not wrong, "the cache hashes the closure of <humming/...> includes only"


@pytest.mark.parametrize("path", DEVICE_CODE, ids=_name)
def test_architecture_is_switched_in_one_header(path: Path) -> None:
    if _name(path) == "kernels/arch.cuh":
        return
    found = [
        line for _, line in _code_lines(path) if re.match(r"\s*#\s*(if|ifdef|ifndef|elif)\b", line)
    ]
    assert not found, "a variant is another file and another row"


# --- environment -------------------------------------------------------------------------------

ENVIRONMENT_READERS = {"humming/env.py": "HUMMING_", "devices/thead_ppu/": "PPU_SDK"}


def _reads_environment(path: Path) -> list[int]:
    return [
        node.lineno
        for node in _nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {"environ", "getenv"} & {alias.name for alias in node.names}
        )
    ]


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_environment_is_read_in_one_place(path: Path) -> None:
    if not _name(path).startswith(tuple(ENVIRONMENT_READERS)):
        assert not _reads_environment(path), "read it in humming/env.py"


def test_plugins_read_no_variable_but_their_own() -> None:
    for path in _files(("devices",), ".py"):
        names = {
            node.value
            for node in _nodes(path)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+", node.value)
        }
        if _reads_environment(path):
            assert names <= {"PPU_SDK"}, f"{_name(path)} reads {names}"


def test_environment_page_is_complete() -> None:
    from humming import env

    page = (ROOT / "docs/environment.md").read_text()
    documented = set(re.findall(r"\bHUMMING_[A-Z_]+\b", page))
    assert documented == set(env.VARIABLES)
    assert "PPU_SDK" in page


def test_env_declares_what_it_reads() -> None:
    from humming import env

    source = (ROOT / "humming/env.py").read_text()
    assert set(re.findall(r"\bHUMMING_[A-Z_]+\b", source)) == set(env.VARIABLES)


# --- prose ---------------------------------------------------------------------------------------


def _prose() -> list[Path]:
    top = [p for p in ROOT.iterdir() if p.is_file() and p.suffix in TEXT_SUFFIXES]
    top = [p for p in top if p.name != ".git"]  # a file in a worktree
    return [p for p in (*top, *_files(ALL_FOLDERS, *TEXT_SUFFIXES)) if "results" not in p.parts]


def test_no_path_of_somebodys_machine() -> None:
    private = re.compile(r"(?<![\w./:<-])/(?:home|root|work|Users)/[\w.]")
    found = [
        f"{_name(path)}:{number}"
        for path in _prose()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if private.search(line)
    ]
    assert not found


@pytest.mark.parametrize("path", [p for p in _prose() if p.suffix == ".md"], ids=_name)
def test_links_of_a_document_lead_into_the_repository(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http:", "https:", "mailto:")):
            resolved = (path.parent / target).resolve()
            assert resolved.is_relative_to(ROOT), f"{target} leaves the repository"
            assert resolved.exists(), f"{target} does not exist"


def test_changelog_fragments_are_named_for_towncrier() -> None:
    kinds = {"added", "changed", "fixed", "removed"}
    for path in (ROOT / "changelog.d").glob("*.md"):
        if path.name != "README.md":
            match = re.fullmatch(r"\+[\w-]+\.(\w+)\.md", path.name)
            assert match, f"{path.name}: call it +SUBJECT.KIND.md"
            assert match.group(1) in kinds, f"{path.name}: KIND is one of {sorted(kinds)}"


# --- layout of the text --------------------------------------------------------------------------


def _narrows_a_type(test: ast.expr) -> bool:
    """`x is not None` or `isinstance(x, T)`: said to the type checker, not to a user."""
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.IsNot)
    return isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance"


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_user_input_is_not_asserted(path: Path) -> None:
    if _name(path).startswith("humming/testing/"):
        return  # its asserts are the tests of somebody's plugin
    asserts = [node for node in _nodes(path) if isinstance(node, ast.Assert)]
    found = [node.lineno for node in asserts if not _narrows_a_type(node.test)]
    assert not found, "assert vanishes under -O; raise a HummingError"


@pytest.mark.parametrize("path", PYTHON, ids=_name)
def test_the_library_never_prints(path: Path) -> None:
    if _name(path).startswith("humming/cli/"):
        return
    found = [
        node.lineno
        for node in _nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not found


def test_index_lists_every_document() -> None:
    index = (ROOT / "docs/index.md").read_text()
    listed = set(re.findall(r"\]\((\w+\.md)\)", index)) | {"index.md"}
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}
