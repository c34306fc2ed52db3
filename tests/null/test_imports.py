"""Who may import whom: the layers of the host runtime, checked on every import statement."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A module imports from the lines above its own, and within its line as long as there is no circle.
LAYERS = (
    ("errors", "env", "progress"),
    ("dtypes",),
    ("format_names", "formats"),
    ("problem", "layout"),
    ("capability",),
    ("components", "hookspecs", "matrix", "registry", "plugins"),
    (
        *("tiles", "source", "instruction_counts", "lowering", "tile_cost", "overlap", "cost"),
        *("decision", "tuned", "composer", "quantize_kernel", "mapped"),
    ),
    ("cache", "compiler"),
    ("runtime", "graphs", "timing", "places"),
    ("quantized", "quantizer", "reference", "packing"),
    ("activations",),
    ("quantized_ops",),
    ("ops", "layer_inputs", "absent_weight"),
    ("nn", "tuner", "measurer"),
    ("checkpoints",),
    ("model_quantizer",),
    ("integrations",),
    ("cli", "testing"),
    ("__main__",),
)
LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}
FIRST_WITH_TORCH = LEVEL["runtime"]
FIRST_WITH_NUMPY = LEVEL["dtypes"]
# Plugins know what can be described and how they are asked; nothing that composes or runs.
LAST_FOR_PLUGINS = LEVEL["plugins"]

# Package -> the modules of humming (and folders of the repository) that may import it.
ONLY_IN = {
    "yaml": {"humming.registry", "humming.hookspecs", "humming.plugins"},
    "pluggy": {"humming.registry", "humming.hookspecs", "humming.plugins"},
    # The doctor reports the driver's version even where every plugin is broken.
    "cuda": {"devices", "humming.cli.doctor"},
    "typer": {"humming.cli"},
    "rich": {"humming.cli"},
    "safetensors": {"humming.cli", "humming.checkpoints"},
    "transformers": {"humming.integrations"},
    "platformdirs": {"humming.env"},
    "filelock": {"humming.cache", "humming.tuned"},
}


def _modules(folder: str) -> dict[str, Path]:
    """Dotted module name -> file, for each Python file of a source folder."""
    names = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = _modules("humming")
PLUGIN_MODULES = _modules("devices")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _imports(path: Path, module: str) -> Iterator[str]:
    """Every module that a file imports, at any depth, as an absolute dotted name."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                kept = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*kept, *([origin] if origin else [])])
            for alias in node.names:
                yield f"{origin}.{alias.name}"


def _layer_of(imported: str) -> str | None:
    """The layered module behind a dotted name: humming.dtypes.DataType -> dtypes."""
    parts = imported.split(".")
    if parts[0] != "humming" or len(parts) < 2:
        return None
    if parts[1] in LEVEL:
        return parts[1]
    # `from humming import quantize`: the public name stands for the module that defines it.
    import humming

    origin = humming._EXPORTS.get(parts[1], "")
    return origin.split(".")[1] if origin else None


def _below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_every_module_has_its_layer() -> None:
    top_level = {name.split(".")[1] for name in MODULES if "." in name}
    assert top_level <= set(LEVEL), "say in LAYERS where the new module stands"


@pytest.mark.parametrize("module", [m for m in MODULES if "." in m])
def test_module_imports_only_from_its_left(module: str) -> None:
    level = LEVEL[module.split(".")[1]]
    wrong = [
        imported
        for imported in _imports(MODULES[module], module)
        if (layer := _layer_of(imported)) and LEVEL[layer] > level
    ]
    assert not wrong, f"{module} imports from its right: {wrong}"


@pytest.mark.parametrize("layer", [names for names in LAYERS if len(names) > 1], ids="-".join)
def test_no_circle_within_a_layer(layer: tuple[str, ...]) -> None:
    graph = {
        name: {
            found
            for imported in _imports(MODULES[f"humming.{name}"], f"humming.{name}")
            if (found := _layer_of(imported)) in layer and found != name
        }
        for name in layer
        if f"humming.{name}" in MODULES
    }
    while leaves := [name for name, needs in graph.items() if not needs & set(graph)]:
        for name in leaves:
            del graph[name]
    assert not graph, f"these import each other in a circle: {graph}"


@pytest.mark.parametrize("module", PLUGIN_MODULES)
def test_plugin_uses_the_left_half_of_the_host(module: str) -> None:
    imports = list(_imports(PLUGIN_MODULES[module], module))
    right = [i for i in imports if (layer := _layer_of(i)) and LEVEL[layer] > LAST_FOR_PLUGINS]
    assert not right, f"{module} imports from the composing or running half: {right}"
    own_names = [i for i in imports if _below(i, "kernels") or _below(i, "humming.devices")]
    assert not own_names, f"{module}: relative imports inside a plugin, please: {own_names}"


@pytest.mark.parametrize("package", ONLY_IN)
def test_dependency_is_imported_only_where_it_belongs(package: str) -> None:
    wrong = [
        module
        for module, path in {**MODULES, **PLUGIN_MODULES}.items()
        if any(_below(imported, package) for imported in _imports(path, module))
        and not any(_below(module, allowed) for allowed in ONLY_IN[package])
    ]
    assert not wrong, f"{package} is imported in {wrong}"


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_heavy_dependency_starts_at_its_layer(package: str) -> None:
    first = FIRST_WITH_TORCH if package == "torch" else FIRST_WITH_NUMPY
    # A plugin stands where the last layer stands that it may import.
    levels = {module: LEVEL.get(module.split(".")[1], -1) for module in MODULES if "." in module}
    levels |= {"humming": -1} | dict.fromkeys(PLUGIN_MODULES, LAST_FOR_PLUGINS)
    wrong = [
        module
        for module, path in {**MODULES, **PLUGIN_MODULES}.items()
        if any(_below(imported, package) for imported in _imports(path, module))
        and levels[module] < first
    ]
    assert not wrong, f"{package} is imported left of its layer, in {wrong}"


def test_host_names_no_plugin() -> None:
    named = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("humming.devices.")
    ]
    named += [
        module
        for module, path in MODULES.items()
        if any(_below(imported, "humming.devices") for imported in _imports(path, module))
    ]
    assert not named, f"plugins come through the entry points; named in {named}"


def _loaded_after(statement: str, blocked: tuple[str, ...] = ()) -> set[str]:
    code = (
        f"import sys, json\nsys.modules.update(dict.fromkeys({blocked!r}))\n{statement}\n"
        "print(json.dumps([m for m, v in sys.modules.items() if v is not None]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in json.loads(done.stdout)}


def test_importing_humming_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "cuda", "yaml", "pluggy", "typer", "rich", "safetensors"}
    assert not _loaded_after("import humming") & heavy


def test_the_left_half_works_without_torch_and_cuda() -> None:
    left = [m for m in LEVEL if LEVEL[m] < FIRST_WITH_TORCH and f"humming.{m}" in MODULES]
    statement = "\n".join(f"import humming.{module}" for module in left)
    loaded = _loaded_after(statement, blocked=("torch", "cuda"))
    assert "humming" in loaded


def test_the_registry_works_without_torch_and_cuda() -> None:
    statement = """
from humming.plugins import registry
for row in registry().devices():
    assert row.to_dict()
"""
    _loaded_after(statement, blocked=("torch", "cuda"))
