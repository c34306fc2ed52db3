"""How entries of skip lists name modules: components of a path, stars, regular expressions."""

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import lru_cache

from humming.errors import CheckpointError


def holds_components(module: str, entry: str) -> bool:
    """Whether the components of an entry occur in a module's path, whole and in a row.

    >>> holds_components("model.layers.3.mlp.gate", "gate")
    True
    >>> holds_components("model.layers.3.mlp.gate_proj", "gate")
    False

    A star stands for any text: `model.layers.*.self_attn` takes `model.layers.3.self_attn.q_proj`.
    """
    entry = entry.strip(".")
    if "*" in entry:
        return _compiled(translate(f"*.{entry}.*")).match(f".{module}.") is not None
    return bool(entry) and f".{entry}." in f".{module}."


def is_at_or_below(module: str, entry: str) -> bool:
    """Whether a module is the one that an entry names, or is part of it; stars as in file names.

    >>> is_at_or_below("layers.1.mlp.up", "layers.1.*"), is_at_or_below("layers.10.mlp", "layers.1")
    (True, False)
    """
    if any(star in entry for star in "*?["):
        return _compiled(translate(entry)).match(module) is not None
    return module == entry or module.startswith(f"{entry}.")


def is_in_block(module: str, blocks: Iterable[str]) -> bool:
    """Whether a module belongs to the repeated blocks of a model.

    >>> is_in_block("model.layers.3.mlp.up_proj", ()), is_in_block("lm_head", ())
    (True, False)

    Args:
        module: its name.
        blocks: the lists of blocks, `model.layers`; without any, every numbered module is a block.
    """
    blocks = tuple(blocks)
    if blocks:
        return any(is_at_or_below(module, block.strip(".")) for block in blocks)
    return any(component.isdecimal() for component in module.split("."))


def matches_name(module: str, entry: str) -> bool:
    """Whether an entry names a module, or is `re:` and an expression that its name starts with."""
    if entry.startswith("re:"):
        return _compiled(entry[3:]).match(module) is not None
    return module == entry


def check_expressions(entries: Iterable[str], where: str) -> None:
    """Refuse entries whose expressions are none.

    Raises:
        CheckpointError: an entry after `re:` cannot be compiled.
    """
    for entry in entries:
        if entry.startswith("re:"):
            try:
                _compiled(entry[3:])
            except (re.error, RecursionError, OverflowError) as error:
                raise CheckpointError(
                    f"{where}: {entry!r} is no regular expression: {error}"
                ) from None


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> "re.Pattern[str]":
    return re.compile(expression)
