"""Parts of a weight for ranks that share it: which they are, and when there are none."""

import torch

from humming.errors import UnsupportedError, check_type
from humming.quantized import QuantizedWeight

_MOST_RANKS = 64


def part_of(
    weight: QuantizedWeight | torch.Tensor, rank: int, world: int, dim: str
) -> tuple[int, int]:
    """First and last + 1 of the rows or columns of a rank.

    Raises:
        UnsupportedError: the ranks have no equal parts, or these cut what a scale covers.
    """
    if dim not in ("n", "k"):
        raise UnsupportedError(f"a part along {dim!r}", "there is no such dimension", "Use n or k.")
    axis = "nk".index(dim)
    size, what = weight.shape[axis], ("rows", "columns")[axis]
    unit = weight.scale_extent[axis] if isinstance(weight, QuantizedWeight) else 1
    asked = f"part {rank} of {world} of {size} {what}"
    if isinstance(weight, QuantizedWeight):
        asked = f"{asked} of a weight {weight.spec}"
    for value in (rank, world):
        check_type(asked, "a rank or their number", value, int, "Pass ints.")
    if world < 1:
        raise UnsupportedError(asked, "that is nothing to share", "There are 1 or more ranks.")
    if not 0 <= rank < world:
        raise UnsupportedError(asked, "ranks count from 0", f"Give 0 to {world - 1}.")

    def is_whole(parts: int) -> bool:
        return size % parts == 0 and (size // parts % unit == 0 or unit % (size // parts) == 0)

    if not is_whole(world):
        possible = [str(parts) for parts in range(1, _MOST_RANKS + 1) if is_whole(parts)]
        why = f"parts of {size / world:g} {what} are no whole ones"
        if size % world == 0:
            why = f"parts of {size // world} {what} cut scales that cover {unit}"
        raise UnsupportedError(asked, why, f"Possible numbers of parts: {', '.join(possible)}.")
    return rank * (size // world), (rank + 1) * (size // world)


def slice_of(
    weight: QuantizedWeight | torch.Tensor,
    n: tuple[int, int] | None = None,
    k: tuple[int, int] | None = None,
) -> QuantizedWeight | torch.Tensor:
    """Rows and columns of a weight, quantized or not."""
    if isinstance(weight, QuantizedWeight):
        return weight.slice(n, k)
    rows, columns = (slice(None) if part is None else slice(*part) for part in (n, k))
    return weight[rows, columns].contiguous()


def columns_of(
    weight: QuantizedWeight, permutation: torch.Tensor, inputs: tuple[int, int], asked: str
) -> torch.Tensor:
    """The columns that belong to some inputs, in their order; they are whole groups.

    Args:
        weight: the weight.
        permutation: int64 [K], the input of each column.
        inputs: first and last + 1.
        asked: what errors begin with.

    Raises:
        UnsupportedError: they are not.
    """
    mine = (permutation >= inputs[0]) & (permutation < inputs[1])
    columns = mine.nonzero().flatten()
    k, group = weight.shape[1], weight.scale_extent[1]
    groups = columns // group
    found, counts = torch.unique_consecutive(groups, return_counts=True)
    whole = torch.full_like(counts, group)
    whole[found == (k - 1) // group] = k - (k - 1) // group * group
    if group < k and not torch.equal(counts, whole):
        at = int((counts != whole).nonzero()[0])
        raise UnsupportedError(
            f"{asked} in act-order",
            f"of the {int(whole[at])} columns of group {int(found[at])} {int(counts[at])} belong "
            "to inputs of this rank",
            "Split it along n, or give every rank all inputs.",
        )
    return columns
