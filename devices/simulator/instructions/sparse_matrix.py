"""Products of a warp with a sparse operand A: `mma.sp` (PTX ISA 9.7.14.6).

They are those of `mma` with A expanded; see `sparsity` for what metadata says.
"""

from ..decoder import Decoder, Step, instruction
from ..ptx_syntax import Integer, Register
from ..sparsity import Metadata
from . import forms
from .matrix import Form, product_step


def take_metadata(d: Decoder, place: int, k: int, bits: int, ordered: bool) -> Metadata:
    """Metadata and sparsity selector, which are the operands at a place and behind it.

    Args:
        d: at an instruction.
        place: of the metadata.
        k: columns of A.
        bits: of an element of A in registers.
        ordered: whether the numbers of a chunk must increase.
    """
    register, selector = d.operands[place], d.operands[place + 1]
    if not isinstance(register, Register):
        d.refuse("metadata is a register")
    value = selector.value if isinstance(selector, Integer) else -1
    metadata = Metadata(d.source(register, "u32"), k, bits, ordered, value)
    if not 0 <= value < metadata.selectors:
        choice = ", ".join(str(f) for f in range(metadata.selectors))
        d.refuse(f"the sparsity selector is a constant, for this shape and type one of {choice}")
    return metadata


@instruction("mma.sp.sync.aligned", "mma.sp::ordered_metadata.sync.aligned", together="warp")
def multiply_sparse(d: Decoder) -> Step:
    """PTX ISA 9.7.14.6.3."""
    modifiers = d.modifiers
    ordered = "::ordered_metadata" in d.opcode
    shape = modifiers.one_of(*(f"m16n8k{k}" for k in (8, 16, 32, 64, 128)))
    modifiers.one_of("row")
    modifiers.one_of("col")
    if "block_scale" in modifiers.left:
        d.refuse("sparse products with block scales are those of mma.sp::ordered_metadata")
    f8f6f4, saturates = modifiers.flag("kind::f8f6f4"), modifiers.flag("satfinite")
    kinds = list(modifiers.left)
    modifiers.left.clear()
    wrong = forms.sparse_product(shape, kinds, f8f6f4=f8f6f4, saturates=saturates, ordered=ordered)
    if wrong:
        d.refuse(wrong)
    d.expect(6)
    form = Form(shape, kinds, saturates)
    # Of 8-bit floats, the ISA gives a meaning to increasing numbers alone, without the suffix too.
    metadata = take_metadata(d, 4, form.k, form.width, ordered or kinds[1] in ("e4m3", "e5m2"))
    return product_step(d, form, metadata)
