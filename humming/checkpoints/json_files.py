"""JSON files that others wrote."""

import json
from pathlib import Path
from typing import Any

from humming.errors import CheckpointError

_MOST_BYTES = 1 << 28


def read_json(path: Path) -> Any:
    """The value that a JSON file holds.

    Raises:
        CheckpointError: it cannot be read, is no JSON, or says one key of an object twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{path}: the key {twice!r} stands twice in one object")
        return found

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{path} has more than {_MOST_BYTES >> 20} MiB: no configuration")
        return json.loads(path.read_text("utf-8"), object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        how = "a folder, a *.safetensors or *.gguf file, or a configuration in JSON"
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; possible: {how}") from error
