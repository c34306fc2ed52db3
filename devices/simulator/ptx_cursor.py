"""Reads tokens of PTX one after the other, and constant expressions made of them."""

from typing import NoReturn

from .errors import PtxSyntaxError, Where
from .ptx_syntax import FloatBits, Integer, listing
from .ptx_tokens import BINARY, Token, number_of, tokens_of

CONSTANTS = {"WARP_SZ": 32}
"""Names that stand for numbers."""


class Cursor:
    """A place in the tokens of a text.

    Attributes:
        lines: of the text.
    """

    def __init__(self, text: str) -> None:
        self.tokens = tokens_of(text)
        self.at = 0
        self.lines = text.splitlines()

    @property
    def next(self) -> Token:
        """The token at the place."""
        return self.tokens[self.at]

    def take(self, text: str | None = None) -> Token:
        """Takes the next token, which must be of a certain text if one is given."""
        token = self.tokens[self.at]
        if token.kind == "end":
            opened = self._open_brace()
            if opened is not None:
                self.refuse("the text ends, and nothing closes this brace", opened)
            self.refuse("the text ends in the middle of something", token)
        if text is not None and token.text != text:
            self.refuse(f"expected {text!r}, found {token.text!r}", token)
        self.at += 1
        return token

    def _open_brace(self) -> Token | None:
        """The last opening brace that no closing one belongs to."""
        opened: list[Token] = []
        for token in self.tokens[: self.at]:
            if token.text == "{":
                opened.append(token)
            elif token.text == "}" and opened:
                opened.pop()
        return opened[-1] if opened else None

    def accept(self, *texts: str) -> Token | None:
        """Takes the next token if it is one of these."""
        if self.next.text in texts and self.next.kind != "string":
            return self.take()
        return None

    def word(self) -> str:
        """Takes a name."""
        token = self.take()
        if token.kind != "word":
            self.refuse(f"expected a name, found {token.text!r}", token)
        return token.text

    def refuse(self, what: str, token: Token | None = None) -> NoReturn:
        """Raises PtxSyntaxError at a token, by default the next."""
        line = (token or self.next).line
        text = self.lines[line - 1].strip() if line <= len(self.lines) else ""
        raise PtxSyntaxError(what, Where(line, text, listing=listing(self.lines, line)))

    def skip_line(self) -> None:
        """Skips what is left of a line."""
        line = self.next.line
        while self.next.line == line and self.next.kind != "end":
            self.at += 1

    def skip_to(self, text: str) -> None:
        """Skips everything up to a token, and it."""
        while self.take().text != text:
            pass

    def skip_block(self) -> None:
        """Skips the next block in braces."""
        self.skip_to("{")
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self.take().text, 0)

    def number(self, token: Token) -> Integer | FloatBits:
        """The value of a number token."""
        try:
            return number_of(token.text)
        except ValueError:
            self.refuse(f"{token.text!r} is no number", token)

    def integer(self) -> int:
        """Takes a number without a fraction."""
        token = self.take()
        found = self.number(token) if token.kind == "number" else None
        if not isinstance(found, Integer):
            self.refuse(f"expected an integer, found {token.text!r}", token)
        return found.value

    def offset(self) -> int:
        """The value of `+ a - b ...`, 0 if there is nothing of the kind."""
        total = 0
        while sign := self.accept("+", "-"):
            value = self.expression(9)
            total += value if sign.text == "+" else -value
        return total

    def expression(self, least: int = 0) -> int:
        """The value of a constant expression (PTX ISA 4.5.4)."""
        value = self._unary()
        while (found := BINARY.get(self.next.text)) and found[0] > least:
            token = self.take()
            other = self.expression(found[0])
            if not _has_result(token.text, other):
                self.refuse(f"the constant expression {value} {token.text} {other}", token)
            value = int(found[1](value, other))
        # An operand is no sequence, and `|` joins two results: it begins above these operators.
        if least in (0, 3) and self.accept("?"):
            chosen = self.expression()
            self.take(":")
            other = self.expression()
            return chosen if value else other
        return value

    def _unary(self) -> int:
        token = self.take()
        if token.text == "-":
            return -self._unary()
        if token.text == "+":
            return self._unary()
        if token.text == "~":
            return ~self._unary()
        if token.text == "!":
            return int(not self._unary())
        if token.text == "(":
            if self.accept(".s64", ".u64"):
                self.take(")")
                return self._unary()
            value = self.expression()
            self.take(")")
            return value
        if token.text in CONSTANTS:
            return CONSTANTS[token.text]
        if token.kind == "number":
            number = self.number(token)
            if isinstance(number, Integer):
                return number.value
        self.refuse(f"expected an integer constant, found {token.text!r}", token)


def _has_result(operator: str, second: int) -> bool:
    """Whether an operator of constant expressions has one with this second operand."""
    if operator in ("<<", ">>"):
        return 0 <= second < 64
    return second != 0 or operator not in ("/", "%")
