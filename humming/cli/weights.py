"""The matrices that `humming run` works on: tensors of safetensors files, or random ones."""

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from humming.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch

FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_Layout = tuple[str, tuple[int, ...]]  # a tensor's safetensors dtype and shape
_Layouts = dict[str, _Layout]


@dataclass(frozen=True, slots=True)
class MatrixSource:
    """A matrix that can be loaded when its turn comes.

    Attributes:
        name: what the output calls it.
        shape: (N, K): out features, in features.
        load: returns the matrix, [N, K] of a floating type, on the CPU.
    """

    name: str
    shape: tuple[int, int]
    load: Callable[[], "torch.Tensor"]


def parse_shape(text: str) -> tuple[int, int]:
    """`NxK` as two positive integers.

    Raises:
        UnsupportedError: the text has another form.
    """
    match = re.fullmatch(r"\s*(\d{1,18})\s*[xX]\s*(\d{1,18})\s*", text)
    if match is None or 0 in (shape := (int(match[1]), int(match[2]))):
        raise UnsupportedError(
            f"the shape {text!r}",
            "it is not NxK with two positive integers of at most 18 digits",
            "N is the number of out features and K of in features, e.g. 4096x11008.",
        )
    return shape


_MOST_RANDOM_VALUES = 1 << 32


def random_matrix(text: str, seed: int) -> MatrixSource:
    """A normally distributed matrix of shape `NxK`, scaled as an initialized layer is."""
    n, k = parse_shape(text)
    if n * k > _MOST_RANDOM_VALUES:
        raise UnsupportedError(
            f"a random matrix of {n} x {k}",
            f"its values take {4 * n * k / 1e9:.3g} GB",
            f"Ask for at most {_MOST_RANDOM_VALUES} values, or name a tensor of a file.",
        )

    def load() -> "torch.Tensor":
        import torch

        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, k, generator=generator) / math.sqrt(k)

    return MatrixSource(f"random {n}x{k}", (n, k), load)


def file_matrices(arguments: Sequence[str]) -> tuple[list[MatrixSource], list[str]]:
    """The tensors that `FILE.safetensors::TENSOR` arguments name, and notes on what is left out.

    TENSOR may be a glob: it takes the matrices of a floating type among the tensors that it
    matches. A tensor that is named in full must be one.

    Raises:
        UnsupportedError: an argument has another form, or names nothing that can be quantized.
        CheckpointError: a file cannot be read.
    """
    found: list[MatrixSource] = []
    notes: list[str] = []
    for argument in arguments:
        path, separator, pattern = argument.rpartition("::")
        if not separator or not path or not pattern:
            raise UnsupportedError(
                f"the weight {argument!r}",
                "it does not say which tensor of which file",
                "Write FILE.safetensors::TENSOR, FILE.safetensors::'*' for all of its matrices, "
                "or --random NxK.",
            )
        layouts = _read_layouts(Path(path))
        names, left_out = _matching(path, pattern, layouts)
        found += [_matrix(Path(path), name, layouts[name]) for name in names]
        if left_out:
            notes.append(f"{argument}: {left_out} tensors that are no matrices of floats left out")
    return found, notes


def _matching(path: str, pattern: str, layouts: _Layouts) -> tuple[list[str], int]:
    """Names of the matrices that a pattern takes, and how many other tensors it matches."""
    if pattern in layouts:
        return [pattern], 0
    matched = [name for name in layouts if fnmatchcase(name, pattern)]
    matrices = [name for name in matched if _why_not(layouts[name]) is None]
    if matrices:
        return matrices, len(matched) - len(matrices)
    why = "the file has no such tensor"
    if matched:
        why = f"{len(matched)} tensors match, none of them a matrix of a floating type"
    raise UnsupportedError(f"{pattern!r} of {path}", why, _offer(layouts, pattern))


def _read_layouts(path: Path) -> _Layouts:
    """Tensor name -> (safetensors dtype, shape), from the file's header alone."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        why = "is a folder; name a file in it" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {why}; possible: FILE.safetensors::PATTERN, or --random NxK")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error


def _why_not(layout: _Layout) -> str | None:
    dtype, shape = layout
    if len(shape) != 2 or 0 in shape:
        return f"its shape {list(shape)} is not that of a matrix"
    if dtype not in FLOAT_TYPES:
        return f"its type {dtype} is not one that is quantized ({', '.join(FLOAT_TYPES)})"
    return None


def _matrix(path: Path, name: str, layout: _Layout) -> MatrixSource:
    if why := _why_not(layout):
        raise UnsupportedError(f"{name!r} of {path}", why, "Choose a matrix of a floating type.")

    def load() -> "torch.Tensor":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    n, k = layout[1]
    return MatrixSource(name, (n, k), load)


def _offer(layouts: _Layouts, asked: str) -> str:
    matrices = [name for name, layout in layouts.items() if _why_not(layout) is None]
    if not matrices:
        return "The file has no matrix of a floating type."
    nearest = difflib.get_close_matches(asked, matrices, n=3, cutoff=0.3) or matrices[:3]
    return f"It has {len(matrices)} matrices of a floating type, e.g. {', '.join(nearest)}."
