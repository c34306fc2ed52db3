"""Cuts PTX text into tokens, and evaluates constants and constant expressions."""

import operator
import re
from collections.abc import Callable
from typing import NamedTuple

from .errors import PtxSyntaxError, Where
from .ptx_syntax import FloatBits, Integer

_TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\f]+)
  | (?P<newline>\n)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
      |(?:\d+\.\d*|\.\d+|\d+(?=[eE][-+]?\d))(?:[eE][-+]?\d+)?|\d+U?)
  | (?P<directive>\.[A-Za-z_]\w*(?:::\w+)*)
  | (?P<word>[A-Za-z_$%][\w$]*(?:(?:\.|::)[\w$]+)*)
  | (?P<punctuation><<|>>|&&|\|\||[=!<>]=|[@!{}\[\](),;:|=<>+\-*/&^~?%])
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """A token: its kind (`word`, `directive`, `number`, `string`, `punctuation`, `end`)."""

    kind: str
    text: str
    line: int


def tokens_of(text: str) -> list[Token]:
    """Every token of a PTX text but spaces and comments, and one that marks the end.

    Raises:
        PtxSyntaxError: a character that starts no token.
    """
    found: list[Token] = []
    line, at = 1, 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        opens = text.startswith("/*", at)
        if match is None or (opens and match.lastgroup != "comment"):
            lines = text.splitlines()
            told = f"the character {text[at]!r} starts no token of PTX"
            if opens:
                told = "the text ends inside of a comment that begins here"
            raise PtxSyntaxError(
                told,
                Where(line, lines[line - 1].strip()),
            )
        kind = match.lastgroup or ""
        if kind not in ("space", "newline", "comment"):
            found.append(Token(kind, match.group(), line))
        line += match.group().count("\n")
        at = match.end()
    found.append(Token("end", "", line))
    return found


def number_of(text: str) -> Integer | FloatBits:
    """The value of a number token (PTX ISA 4.5 "Constants")."""
    lower = text.lower()
    if lower.startswith("0f") and len(text) == 10:
        return FloatBits(int(text[2:], 16), 32)
    if lower.startswith("0d") and len(text) == 18:
        return FloatBits(int(text[2:], 16), 64)
    digits = lower.removesuffix("u")
    if digits.startswith("0x"):
        return Integer(int(digits, 16))
    if digits.startswith("0b"):
        return Integer(int(digits, 2))
    if any(c in digits for c in ".e"):
        return FloatBits(float_bits(float(digits)), 64)
    if len(digits) > 1 and digits.startswith("0"):
        return Integer(int(digits, 8))
    return Integer(int(digits))


def float_bits(value: float) -> int:
    """Bits of a double."""
    import struct

    return int(struct.unpack("<Q", struct.pack("<d", value))[0])


def _quotient(a: int, b: int) -> int:
    """Towards zero; of a division by zero, which the assembler refuses, 0."""
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int) -> int:
    """Of unsigned numbers, also where they are negative (PTX ISA 4.5.6); as assemblers do it."""
    a, b = a % (1 << 64), b % (1 << 64)
    return a % b if b else 0


BINARY: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "*": (10, operator.mul),
    "/": (10, lambda a, b: _quotient(a, b)),
    "%": (10, lambda a, b: _remainder(a, b)),
    "+": (9, operator.add),
    "-": (9, operator.sub),
    "<<": (8, operator.lshift),
    ">>": (8, operator.rshift),
    "<": (7, operator.lt),
    ">": (7, operator.gt),
    "<=": (7, operator.le),
    ">=": (7, operator.ge),
    "==": (6, operator.eq),
    "!=": (6, operator.ne),
    "&": (5, operator.and_),
    "^": (4, operator.xor),
    "|": (3, operator.or_),
    "&&": (2, lambda a, b: int(bool(a) and bool(b))),
    "||": (1, lambda a, b: int(bool(a) or bool(b))),
}
"""Operators of constant expressions with their precedence (PTX ISA 4.5.4)."""
