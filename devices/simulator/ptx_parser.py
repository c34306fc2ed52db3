"""Parses PTX: the text of a module in, its variables and functions out.

It takes all that NVRTC writes. Names are resolved here, through the nested scopes that inline
assembly and call sequences make, so that every register, variable and label is unique afterwards.
"""

from dataclasses import dataclass, field, replace
from typing import NoReturn

from .errors import PtxSyntaxError, Where
from .ptx_syntax import (
    TYPE_BITS,
    Address,
    FloatBits,
    Function,
    Guard,
    Instruction,
    Integer,
    Label,
    Module,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from .ptx_tokens import BINARY, Token, number_of, tokens_of

_SPACES = {".global", ".const", ".shared", ".local", ".param"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_LINE_DIRECTIVES = {".file", ".loc"}
_SKIPPED_FUNCTION_DIRECTIVES = {".noreturn", ".abi_preserve", ".abi_preserve_control", ".unified"}
_CONSTANTS = {"WARP_SZ": 32}


def parse(text: str) -> Module:
    """Parses the text of a PTX module.

    Raises:
        PtxSyntaxError: text that is no PTX, or a directive that is not known; with its line.
    """
    return _Parser(text).module()


@dataclass(slots=True)
class _Scope:
    """Names that are visible in a `{ }` block; inner blocks hide those of outer ones."""

    outer: "_Scope | None" = None
    suffix: str = ""
    names: dict[str, Register | Variable | Label | Vector] = field(default_factory=dict)

    def find(self, name: str) -> "Register | Variable | Label | Vector | None":
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = tokens_of(text)
        self._at = 0
        self._module = Module(lines=text.splitlines())
        self._function = Function("", False)
        self._scopes = 0
        self._pending: list[tuple[Instruction, _Scope]] = []

    # -- tokens ---------------------------------------------------------------------------------

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self, text: str | None = None) -> Token:
        token = self._tokens[self._at]
        if token.kind == "end":
            self._refuse("the text ends in the middle of something", token)
        if text is not None and token.text != text:
            self._refuse(f"expected {text!r}, found {token.text!r}", token)
        self._at += 1
        return token

    def _accept(self, *texts: str) -> Token | None:
        if self._next.text in texts and self._next.kind != "string":
            return self._take()
        return None

    def _word(self) -> str:
        token = self._take()
        if token.kind != "word":
            self._refuse(f"expected a name, found {token.text!r}", token)
        return token.text

    def _refuse(self, what: str, token: Token | None = None) -> NoReturn:
        line = (token or self._next).line
        text = self._module.lines[line - 1].strip() if line <= len(self._module.lines) else ""
        raise PtxSyntaxError(what, Where(line, text, listing=self._module.listing(line)))

    def _skip_line(self) -> None:
        line = self._next.line
        while self._next.line == line and self._next.kind != "end":
            self._at += 1

    def _skip_to(self, text: str) -> None:
        while self._take().text != text:
            pass

    def _skip_block(self) -> None:
        self._skip_to("{")
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(self._take().text, 0)

    # -- module ---------------------------------------------------------------------------------

    def module(self) -> Module:
        while self._next.kind != "end":
            self._module_statement()
        return self._module

    def _module_statement(self) -> None:
        name = self._next.text
        if name == ".version":
            self._take()
            major, _, minor = self._take().text.partition(".")
            self._module.version = (int(major), int(minor or 0))
        elif name == ".target":
            self._take()
            self._module.target = self._word()
            while self._accept(","):
                self._take()
        elif name == ".address_size":
            self._take()
            self._module.address_bits = int(self._take().text)
        elif name in _LINE_DIRECTIVES:
            self._skip_line()
        elif name == ".section":
            self._skip_block()
        elif name in (".pragma", ".alias"):
            self._skip_to(";")
        else:
            self._declaration()

    def _declaration(self) -> None:
        linkage = set()
        while token := self._accept(*_LINKAGE):
            linkage.add(token.text)
        if self._next.text in (".entry", ".func"):
            self._function_declaration(self._take().text == ".entry")
        elif self._next.text in _SPACES:
            for variable in self._variables(".extern" in linkage):
                self._module.variables[variable.name] = variable
        else:
            self._refuse(f"{self._next.text!r} starts no statement of a module")

    # -- variables ------------------------------------------------------------------------------

    def _variables(self, extern: bool = False) -> list[Variable]:
        """The variables of one declaration, up to its semicolon."""
        space = self._take().text[1:]
        align, kind, count = self._type()
        found = [self._declarator(space, align, kind, count, extern)]
        while self._accept(","):
            found.append(self._declarator(space, align, kind, count, extern))
        self._take(";")
        return found

    def _type(self) -> tuple[int, str, int]:
        """Alignment, element type and elements of a vector type, of a declaration."""
        align, kind, count = 0, "", 1
        while self._next.kind == "directive":
            token = self._take()
            name = token.text[1:]
            if name == "align":
                align = int(self._take().text)
            elif name in ("v2", "v4", "v8"):
                count = int(name[1:])
            elif name == "attribute":
                self._skip_to(")")
            elif name == "ptr" or f".{name}" in _SPACES:
                pass  # what a pointer parameter points to
            elif name in TYPE_BITS and not kind:
                kind = name
            else:
                self._refuse(f"{token.text} is no part of a declaration", token)
        if not kind:
            self._refuse("a declaration without a type")
        return align or max(1, TYPE_BITS[kind] // 8) * count, kind, count

    def _declarator(self, space: str, align: int, kind: str, count: int, extern: bool) -> Variable:
        name = self._word()
        element = max(1, TYPE_BITS[kind] // 8)
        size: int | None = element * count
        while self._accept("["):
            if self._accept("]"):
                size = None
                continue
            extent = self._expression()
            size = None if size is None else size * extent
            self._take("]")
        values: tuple[int | Symbol, ...] = ()
        if self._accept("="):
            values = tuple(self._initializer())
            if size is None:
                size = element * len(values)
        return Variable(name, space, kind, align, size, values, extern)

    def _initializer(self) -> list[int | Symbol]:
        if not self._accept("{"):
            return [self._initial_value()]
        found: list[int | Symbol] = []
        while not self._accept("}"):
            found += self._initializer()
            self._accept(",")
        return found

    def _initial_value(self) -> int | Symbol:
        if self._accept("generic"):
            self._take("(")
            value = self._initial_value()
            self._take(")")
            return value
        if self._next.kind == "word" and self._next.text not in _CONSTANTS:
            name = self._word()
            return Symbol(name, self._offset())
        if self._next.kind == "number":
            value_of = number_of(self._next.text)
            if isinstance(value_of, FloatBits):
                self._take()
                return value_of.bits
        return self._expression()

    def _offset(self) -> int:
        total = 0
        while sign := self._accept("+", "-"):
            value = self._expression(9)
            total += value if sign.text == "+" else -value
        return total

    def _expression(self, least: int = 0) -> int:
        """The value of a constant expression (PTX ISA 4.5.4)."""
        value = self._unary()
        while (found := BINARY.get(self._next.text)) and found[0] > least:
            self._take()
            value = int(found[1](value, self._expression(found[0])))
        if least == 0 and self._accept("?"):
            chosen = self._expression()
            self._take(":")
            other = self._expression()
            return chosen if value else other
        return value

    def _unary(self) -> int:
        token = self._take()
        if token.text == "-":
            return -self._unary()
        if token.text == "+":
            return self._unary()
        if token.text == "~":
            return ~self._unary()
        if token.text == "!":
            return int(not self._unary())
        if token.text == "(":
            if self._accept(".s64", ".u64"):
                self._take(")")
                return self._unary()
            value = self._expression()
            self._take(")")
            return value
        if token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        if token.kind == "number":
            number = number_of(token.text)
            if isinstance(number, Integer):
                return number.value
        self._refuse(f"expected an integer constant, found {token.text!r}", token)

    # -- functions ------------------------------------------------------------------------------

    def _function_declaration(self, is_entry: bool) -> None:
        results: tuple[Variable, ...] = ()
        line = self._next.line
        if self._next.kind == "directive":  # .func .attribute(...)
            self._skip_to(")")
        if not is_entry and self._next.text == "(":
            results = self._params()
        name = self._word()
        params = self._params() if self._next.text == "(" else ()
        function = Function(name, is_entry, params, results, line=line)
        while self._next.kind == "directive":
            self._limit(function)
        known = self._module.functions.get(name)
        if self._accept(";"):
            if known is None:
                self._module.functions[name] = function
            return
        function.defined = True
        self._module.functions[name] = function
        self._body(function)

    def _params(self) -> tuple[Variable, ...]:
        self._take("(")
        found: list[Variable] = []
        while not self._accept(")"):
            space = self._take(".param" if self._next.text != ".reg" else ".reg").text[1:]
            if space == "reg":
                self._refuse("functions with parameters in registers are not supported")
            align, kind, count = self._type()
            found.append(self._declarator("param", align, kind, count, False))
            self._accept(",")
        return tuple(found)

    def _limit(self, function: Function) -> None:
        token = self._take()
        name = token.text[1:]
        if token.text in _SKIPPED_FUNCTION_DIRECTIVES:
            while self._next.kind == "number":
                self._take()
        elif name == "pragma":
            self._skip_to(";")
        elif name in (
            "maxntid",
            "reqntid",
            "minnctapersm",
            "maxnctapersm",
            "maxnreg",
            "reqnctapercluster",
            "maxclusterrank",
            "explicitcluster",
            "blocksareclusters",
        ):
            values = []
            while self._next.kind == "number":
                values.append(int(self._take().text))
                self._accept(",")
            function.limits[name] = tuple(values)
        else:
            self._refuse(f"{token.text} is no directive of a function that is known", token)

    def _body(self, function: Function) -> None:
        self._function, self._pending, self._scopes = function, [], 0
        scope = _Scope()
        for variable in (*function.params, *function.results):
            self._declare(scope, variable)
        self._take("{")
        self._block(scope)
        function.body = [self._resolved(instruction, scope) for instruction, scope in self._pending]

    def _block(self, scope: _Scope) -> None:
        """Statements up to the closing brace."""
        while not self._accept("}"):
            self._statement(scope)

    def _statement(self, scope: _Scope) -> None:
        token = self._next
        if token.text == "{":
            self._take()
            self._scopes += 1
            self._block(_Scope(scope, f"#{self._scopes}"))
        elif token.text == ".reg":
            self._registers(scope)
        elif token.text in _SPACES:
            for variable in self._variables():
                self._declare(scope, variable)
        elif token.text in _LINE_DIRECTIVES:
            self._skip_line()
        elif token.text == ".pragma":
            self._skip_to(";")
        elif token.text in (".extern", ".visible"):
            self._take()
        elif token.text == ".section":
            self._skip_block()
        elif token.text == ";":
            self._take()
        elif token.kind == "word" and self._tokens[self._at + 1].text == ":":
            self._label(scope)
        elif token.kind == "word" or token.text == "@":
            self._instruction(scope)
        else:
            self._refuse(f"{token.text!r} starts no statement of a function")

    def _declare(self, scope: _Scope, variable: Variable) -> None:
        unique = replace(variable, name=variable.name + scope.suffix)
        if unique.name in self._function.variables:
            unique = replace(unique, name=f"{unique.name}#{len(self._function.variables)}")
        scope.names[variable.name] = unique
        self._function.variables[unique.name] = unique

    def _registers(self, scope: _Scope) -> None:
        self._take(".reg")
        _, kind, count = self._type()
        if count != 1:
            self._refuse("registers of vector types are not supported")
        while True:
            name = self._word()
            names = [name]
            if self._accept("<"):
                names = [f"{name}{number}" for number in range(self._expression(7))]
                self._take(">")
            for each in names:
                register = Register(each + scope.suffix, kind)
                scope.names[each] = register
                self._function.registers[register.name] = register
            if not self._accept(","):
                break
        self._take(";")

    def _label(self, scope: _Scope) -> None:
        token = self._take()
        self._take(":")
        if self._accept(".branchtargets"):
            names = [Symbol(self._word())]
            while self._accept(","):
                names.append(Symbol(self._word()))
            self._take(";")
            scope.names[token.text] = Vector(tuple(names))
        elif self._next.text in (".callprototype", ".calltargets"):
            self._skip_to(";")
        else:
            if isinstance(scope.names.get(token.text), Label):
                self._refuse(f"the label {token.text} is defined twice", token)
            index = len(self._pending)
            scope.names[token.text] = Label(token.text + scope.suffix, index)
            self._function.labels.setdefault(index, []).append(token.text)

    # -- instructions ---------------------------------------------------------------------------

    def _instruction(self, scope: _Scope) -> None:
        line = self._next.line
        guard = None
        if self._accept("@"):
            negated = self._accept("!") is not None
            name = self._word()
            register = scope.find(name)
            if not isinstance(register, Register) or register.type != "pred":
                self._refuse(f"the guard {name} is no predicate register")
            guard = Guard(register, negated)
        opcode = self._word()
        while self._next.kind == "directive":  # `mma.sync .aligned`: blanks between modifiers
            opcode += self._take().text
        operands: list[Operand] = []
        while not self._accept(";"):
            operands.append(self._operand(opcode.startswith("call")))
            if self._next.text != ";":
                self._take(",")
        text = self._module.lines[line - 1].strip()
        instruction = Instruction(opcode, tuple(operands), guard, line, text)
        self._pending.append((instruction, scope))

    def _operand(self, in_call: bool = False) -> Operand:
        first = self._single(in_call)
        if self._accept("|"):
            return Pair(first, self._single(in_call))
        return first

    def _single(self, in_call: bool) -> Operand:
        token = self._next
        if token.text == "[":
            return self._address()
        if token.text == "{":
            return self._list("{", "}")
        if token.text == "(" and in_call:
            return self._list("(", ")")
        if token.text == "_":
            self._take()
            return Sink()
        if token.text == "!" and self._tokens[self._at + 1].kind == "word":
            self._take()
            return Not(self._named())
        if token.kind == "word" and token.text not in _CONSTANTS:
            return self._named()
        return self._constant()

    def _named(self) -> Operand:
        name = self._word()
        return Symbol(name, self._offset())

    def _constant(self) -> Operand:
        negative = self._next.text == "-" and self._tokens[self._at + 1]
        token = negative or self._next
        if token.kind == "number" and isinstance(number := number_of(token.text), FloatBits):
            self._at += 2 if negative else 1
            sign = 1 << (number.width - 1) if negative else 0
            return FloatBits(number.bits ^ sign, number.width)
        return Integer(self._expression(3))  # `|` separates two results

    def _list(self, opening: str, closing: str) -> Vector:
        self._take(opening)
        items: list[Operand] = []
        while not self._accept(closing):
            items.append(self._operand())
            self._accept(",")
        return Vector(tuple(items))

    def _address(self) -> Address:
        self._take("[")
        base: Operand
        if self._next.kind == "word" and self._next.text not in _CONSTANTS:
            base = Symbol(self._word())
            offset = self._offset()
        else:
            base, offset = Integer(0), self._expression()
        extra: list[Operand] = []
        while self._accept(","):
            extra.append(self._operand())
        self._take("]")
        return Address(base, offset, tuple(extra))

    # -- names ----------------------------------------------------------------------------------

    def _resolved(self, instruction: Instruction, scope: _Scope) -> Instruction:
        is_call = instruction.opcode.startswith("call")
        operands = tuple(
            self._resolve(operand, scope, instruction, is_call) for operand in instruction.operands
        )
        return replace(instruction, operands=operands)

    def _resolve(
        self, operand: Operand, scope: _Scope, instruction: Instruction, is_call: bool
    ) -> Operand:
        def again(inner: Operand) -> Operand:
            return self._resolve(inner, scope, instruction, is_call)

        if isinstance(operand, Symbol):
            return self._meaning(operand, scope, instruction, is_call)
        if isinstance(operand, Address):
            base = again(operand.base)
            offset = operand.offset
            if isinstance(base, Symbol):  # a variable: one offset instead of two
                base, offset = replace(base, offset=0), offset + base.offset
            return Address(base, offset, tuple(again(item) for item in operand.extra))
        if isinstance(operand, Vector):
            return Vector(tuple(again(item) for item in operand.items))
        if isinstance(operand, Pair):
            return Pair(again(operand.first), again(operand.second))
        if isinstance(operand, Not):
            return Not(again(operand.operand))
        return operand

    def _meaning(
        self, symbol: Symbol, scope: _Scope, instruction: Instruction, is_call: bool
    ) -> Operand:
        found = scope.find(symbol.name)
        if isinstance(found, (Register, Label)) and symbol.offset == 0:
            return found
        if isinstance(found, Vector):  # the labels of a branch table
            labels = [self._meaning(s, scope, instruction, False) for s in _symbols(found)]
            return Vector(tuple(labels))
        if isinstance(found, Variable):
            return Symbol(found.name, symbol.offset)
        if found is None and symbol.name.startswith("%"):
            return Special(symbol.name)
        known = self._module.variables, self._module.functions
        if found is None and (is_call or any(symbol.name in names for names in known)):
            return symbol
        where = Where(
            instruction.line, instruction.text, listing=self._module.listing(instruction.line)
        )
        raise PtxSyntaxError(f"the name {symbol.name!r} is not declared", where)


def _symbols(table: Vector) -> list[Symbol]:
    return [item for item in table.items if isinstance(item, Symbol)]
