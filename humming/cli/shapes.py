"""The matrices of a model, from its `config.json`: what a serving engine will ask to multiply."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from humming.cli.weights import parse_shape
from humming.errors import CheckpointError, UnsupportedError

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer's weight: `n` out features, `k` in features, and where it stands."""

    name: str
    n: int
    k: int


def parse_tokens(doing: str, text: str) -> tuple[int, ...]:
    """Numbers of tokens, separated by commas.

    Raises:
        UnsupportedError: they are no whole numbers; `doing` is what they are for.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise UnsupportedError(
            f"{doing} for m = {text!r}",
            "it is no list of whole numbers",
            "Separate them by commas: -m 1,16,64.",
        )
    return tuple(map(int, parts))


def listed_shapes(text: str) -> list[LinearShape]:
    """Shapes from `NxK,NxK,...`.

    Raises:
        UnsupportedError: a part has another form.
    """
    shapes = [parse_shape(part) for part in text.split(",") if part.strip()]
    if not shapes:
        raise UnsupportedError("an empty list of shapes", "it asks for nothing", "Write NxK,NxK.")
    return [LinearShape(f"{n}x{k}", n, k) for n, k in shapes]


def wanted_shapes(
    command: str, n: int | None, k: int | None, shapes: str | None, model: Path | None
) -> tuple[list[LinearShape], list[str]]:
    """The matrices that a command is asked for, each size once, and notes on what is left out.

    Raises:
        UnsupportedError: sizes are given in no way or in several, or by halves.
    """
    ways = [n is not None or k is not None, shapes is not None, model is not None]
    if sum(ways) != 1:
        raise UnsupportedError(
            command,
            "it must be told the sizes of the layers in one way",
            "Give -n and -k, or --shapes NxK,NxK, or --model FOLDER.",
        )
    notes: list[str] = []
    if shapes is not None:
        found = listed_shapes(shapes)
    elif model is not None:
        found, notes = model_shapes(model)
    elif n is None or k is None:
        raise UnsupportedError(command, "a matrix has two sizes", "Give both -n and -k.")
    else:
        found = [LinearShape(f"{n}x{k}", n, k)]
    return list(_merged(found)), notes


def _merged(shapes: Iterable[LinearShape]) -> Iterable[LinearShape]:
    names: dict[tuple[int, int], list[str]] = {}
    for shape in shapes:
        names.setdefault((shape.n, shape.k), []).append(shape.name)
    return (LinearShape(", ".join(names[size]), *size) for size in names)


def model_shapes(model: Path) -> tuple[list[LinearShape], list[str]]:
    """The linear layers of a decoder model, and notes on what is left out.

    Fused projections (query-key-value, gate-up), as engines build them, stand beside single ones.

    Args:
        model: a model's folder, or its `config.json`.

    Raises:
        CheckpointError: there is no readable `config.json`.
        UnsupportedError: it lacks the sizes of a decoder's layers.
    """
    path = model / "config.json" if model.is_dir() else model
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; possible: a model's folder with config.json")
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a model's config: {error}") from error
    # A multimodal model keeps the decoder's sizes one level down.
    config = loaded.get("text_config", loaded) if isinstance(loaded, dict) else {}
    try:
        attention, notes = _attention(config, path)
        mlp, mlp_notes = _mlp(config, path)
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        told = f"{path} is no config of a decoder: a size in it is no number ({error})"
        raise CheckpointError(told) from error
    return attention + mlp, notes + mlp_notes


def _attention(config: Mapping[str, Any], path: Path) -> tuple[list[LinearShape], list[str]]:
    if config.get("kv_lora_rank"):
        return [], ["attention is left out: its projections are of low rank; give them by --shapes"]
    hidden = _size(config, "hidden_size", path)
    heads = _size(config, "num_attention_heads", path)
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    q, kv = heads * head, kv_heads * head
    return [
        LinearShape("q_proj", q, hidden),
        LinearShape("k_proj, v_proj", kv, hidden),
        LinearShape("qkv_proj (fused)", q + 2 * kv, hidden),
        LinearShape("o_proj", hidden, q),
    ], []


def _mlp(config: Mapping[str, Any], path: Path) -> tuple[list[LinearShape], list[str]]:
    experts = next((config[key] for key in _EXPERT_COUNTS if config.get(key)), 0)
    if experts:
        return [], [f"the {experts} experts are left out: only dense layers are compiled so far"]
    hidden = _size(config, "hidden_size", path)
    inner = _size(config, "intermediate_size", path)
    return [
        LinearShape("gate_proj, up_proj", inner, hidden),
        LinearShape("gate_up_proj (fused)", 2 * inner, hidden),
        LinearShape("down_proj", hidden, inner),
    ], []


def _size(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedError(
            f"the linear layers of {path}",
            f"it gives no positive {key}",
            "Give the layers by --shapes NxK,NxK.",
        )
    return value
