"""Parses PTX: the text of a module in, its variables and functions out.

It takes all that NVRTC writes. Names are resolved here, through the nested scopes that inline
assembly and call sequences make, so that every register, variable and label is unique afterwards.
"""

from dataclasses import replace

from .ptx_cursor import CONSTANTS, Cursor
from .ptx_names import Scope, resolved
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
    Symbol,
    Variable,
    Vector,
)

IN_REGISTER = "%register"
"""Behind the names of variables that stand for parameters in registers."""

_SPACES = {".global", ".const", ".shared", ".local", ".param"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_MOST_REGISTERS = 1 << 20
"""Registers of one declaration `%r<N>`."""
_LINE_DIRECTIVES = {".file", ".loc"}
_SKIPPED_FUNCTION_DIRECTIVES = {".noreturn", ".abi_preserve", ".abi_preserve_control", ".unified"}


def parse(text: str) -> Module:
    """Parses the text of a PTX module.

    Raises:
        PtxSyntaxError: text that is no PTX, or a directive that is not known; with its line.
    """
    return _Parser(text).module()


class _Parser(Cursor):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._module = Module(lines=self.lines)
        self._function = Function("", False)
        self._scopes = 0
        self._pending: list[tuple[Instruction, Scope]] = []

    # -- module ---------------------------------------------------------------------------------

    def module(self) -> Module:
        while self.next.kind != "end":
            self._module_statement()
        return self._module

    def _module_statement(self) -> None:
        name = self.next.text
        if name == ".version":
            self.take()
            token = self.take()
            major, _, minor = token.text.partition(".")
            if not (major.isdecimal() and minor.isdecimal()):
                self.refuse(f"{token.text!r} is no version", token)
            self._module.version = (int(major), int(minor))
        elif name == ".target":
            self.take()
            self._module.target = self.word()
            while self.accept(","):
                self.take()
        elif name == ".address_size":
            self.take()
            self._module.address_bits = self.integer()
        elif name in _LINE_DIRECTIVES:
            self.skip_line()
        elif name == ".section":
            self.skip_block()
        elif name in (".pragma", ".alias"):
            self.skip_to(";")
        else:
            self._declaration()

    def _declaration(self) -> None:
        linkage = set()
        while token := self.accept(*_LINKAGE):
            linkage.add(token.text)
        if self.next.text in (".entry", ".func"):
            self._function_declaration(self.take().text == ".entry")
        elif self.next.text in _SPACES:
            for variable in self._variables(".extern" in linkage):
                self._module.variables[variable.name] = variable
        else:
            self.refuse(f"{self.next.text!r} starts no statement of a module")

    # -- variables ------------------------------------------------------------------------------

    def _variables(self, extern: bool = False) -> list[Variable]:
        """The variables of one declaration, up to its semicolon."""
        space = self.take().text[1:]
        align, kind, count = self._type()
        found = [self._declarator(space, align, kind, count, extern)]
        while self.accept(","):
            found.append(self._declarator(space, align, kind, count, extern))
        self.take(";")
        return found

    def _type(self) -> tuple[int, str, int]:
        """Alignment, element type and elements of a vector type, of a declaration."""
        align, kind, count = 0, "", 1
        while self.next.kind == "directive":
            token = self.take()
            name = token.text[1:]
            if name == "align":
                align = self.integer()
            elif name in ("v2", "v4", "v8"):
                count = int(name[1:])
            elif name == "attribute":
                self.skip_to(")")
            elif name == "ptr" or f".{name}" in _SPACES:
                pass  # what a pointer parameter points to
            elif name in TYPE_BITS and not kind:
                kind = name
            else:
                self.refuse(f"{token.text} is no part of a declaration", token)
        if not kind:
            self.refuse("a declaration without a type")
        return align or max(1, TYPE_BITS[kind] // 8) * count, kind, count

    def _declarator(self, space: str, align: int, kind: str, count: int, extern: bool) -> Variable:
        name = self.word()
        element = max(1, TYPE_BITS[kind] // 8)
        size: int | None = element * count
        while self.accept("["):
            if self.accept("]"):
                size = None
                continue
            extent = self.expression()
            size = None if size is None else size * extent
            self.take("]")
        values: tuple[int | Symbol, ...] = ()
        if self.accept("="):
            values = tuple(self._initializer())
            if size is None:
                size = element * len(values)
        return Variable(name, space, kind, align, size, values, extern)

    def _initializer(self) -> list[int | Symbol]:
        if not self.accept("{"):
            return [self._initial_value()]
        found: list[int | Symbol] = []
        while not self.accept("}"):
            found += self._initializer()
            self.accept(",")
        return found

    def _initial_value(self) -> int | Symbol:
        if self.accept("generic"):
            self.take("(")
            value = self._initial_value()
            self.take(")")
            offset = self.offset()
            if isinstance(value, Symbol):
                return replace(value, offset=value.offset + offset)
            return value + offset
        if self.next.kind == "word" and self.next.text not in CONSTANTS:
            name = self.word()
            return Symbol(name, self.offset())
        if self.next.kind == "number":
            value_of = self.number(self.next)
            if isinstance(value_of, FloatBits):
                self.take()
                return value_of.bits
            if self.tokens[self.at + 1].text == "(":
                return self._byte_of_address(value_of.value)
        return self.expression()

    def _byte_of_address(self, mask: int) -> Symbol:
        """`0xFF00(name)`: the byte of an address that a mask selects."""
        token = self.take()
        shift = mask.bit_length() - 8
        if shift % 8 or mask != 0xFF << shift or shift > 56:
            self.refuse(f"the mask {token.text} selects no byte of an address", token)
        self.take("(")
        value = self._initial_value()
        self.take(")")
        if not isinstance(value, Symbol):
            self.refuse("a mask selects a byte of the address of a variable", token)
        return replace(value, shift=shift)

    # -- functions ------------------------------------------------------------------------------

    def _function_declaration(self, is_entry: bool) -> None:
        results: tuple[Variable, ...] = ()
        line = self.next.line
        if self.next.kind == "directive":  # .func .attribute(...)
            self.skip_to(")")
        if not is_entry and self.next.text == "(":
            results = self._params()
        name = self.word()
        params = self._params() if self.next.text == "(" else ()
        function = Function(name, is_entry, params, results, line=line)
        while self.next.kind == "directive":
            self._limit(function)
        known = self._module.functions.get(name)
        if self.accept(";"):
            if known is None:
                self._module.functions[name] = function
            return
        function.defined = True
        self._module.functions[name] = function
        self._body(function)

    def _params(self) -> tuple[Variable, ...]:
        self.take("(")
        found: list[Variable] = []
        while not self.accept(")"):
            space = self.take(".param" if self.next.text != ".reg" else ".reg").text[1:]
            align, kind, count = self._type()
            parameter = self._declarator("param", align, kind, count, False)
            # A register is passed in a variable of its own, whose name tells.
            name = parameter.name + (IN_REGISTER if space == "reg" else "")
            found.append(replace(parameter, name=name))
            self.accept(",")
        return tuple(found)

    def _limit(self, function: Function) -> None:
        token = self.take()
        name = token.text[1:]
        if token.text in _SKIPPED_FUNCTION_DIRECTIVES:
            while self.next.kind == "number":
                self.take()
        elif name == "pragma":
            self.skip_to(";")
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
            while self.next.kind == "number":
                values.append(self.integer())
                self.accept(",")
            function.limits[name] = tuple(values)
        else:
            self.refuse(f"{token.text} is no directive of a function that is known", token)

    def _body(self, function: Function) -> None:
        self._function, self._pending, self._scopes = function, [], 0
        scope = Scope()
        for variable in (*function.params, *function.results):
            self._declare(scope, variable)
            if variable.name.endswith(IN_REGISTER):
                name = variable.name.removesuffix(IN_REGISTER)
                scope.names[name] = self._register(name, variable.type)
        for variable in function.params:
            if variable.name.endswith(IN_REGISTER):
                register = Symbol(variable.name.removesuffix(IN_REGISTER))
                self._copy("ld.param", variable, register, scope, None)
        self.take("{")
        self._block(scope)
        self._copy_results(scope, None)
        function.body = [resolved(inst, names, self._module) for inst, names in self._pending]

    def _copy(
        self, opcode: str, variable: Variable, operand: Operand, scope: Scope, guard: Guard | None
    ) -> None:
        """Appends a load of a parameter into a register, or a store of an operand into one."""
        line = self.next.line
        bits = TYPE_BITS[variable.type]
        address = Address(Symbol(variable.name))
        loads = opcode == "ld.param"
        operands = (operand, address) if loads else (address, operand)
        text = self._module.lines[line - 1].strip()
        pending = Instruction(f"{opcode}.b{bits}", operands, guard, line, text)
        self._pending.append((pending, scope))

    def _copy_results(self, scope: Scope, guard: Guard | None) -> None:
        """Ahead of a return: results in registers go to where the caller looks for them."""
        for variable in self._function.results:
            if variable.name.endswith(IN_REGISTER):
                register = Symbol(variable.name.removesuffix(IN_REGISTER))
                self._copy("st.param", variable, register, scope, guard)

    def _block(self, scope: Scope) -> None:
        """Statements up to the closing brace."""
        while not self.accept("}"):
            self._statement(scope)

    def _statement(self, scope: Scope) -> None:
        token = self.next
        if token.text == "{":
            self.take()
            self._scopes += 1
            self._block(Scope(scope, f"#{self._scopes}"))
        elif token.text == ".reg":
            self._registers(scope)
        elif token.text in _SPACES:
            for variable in self._variables():
                self._declare(scope, variable)
        elif token.text in _LINE_DIRECTIVES:
            self.skip_line()
        elif token.text == ".pragma":
            self.skip_to(";")
        elif token.text in (".extern", ".visible"):
            self.take()
        elif token.text == ".section":
            self.skip_block()
        elif token.text == ";":
            self.take()
        elif token.kind == "word" and self.tokens[self.at + 1].text == ":":
            self._label(scope)
        elif token.kind == "word" or token.text == "@":
            self._instruction(scope)
        else:
            if token.kind == "end":
                self.take()
            self.refuse(f"{token.text!r} starts no statement of a function")

    def _declare(self, scope: Scope, variable: Variable) -> None:
        unique = replace(variable, name=variable.name + scope.suffix)
        if unique.name in self._function.variables:
            unique = replace(unique, name=f"{unique.name}#{len(self._function.variables)}")
        scope.names[variable.name] = unique
        self._function.variables[unique.name] = unique

    def _registers(self, scope: Scope) -> None:
        self.take(".reg")
        _, kind, count = self._type()
        while True:
            name = self.word()
            names = [name]
            if self.accept("<"):
                count_of = self.expression(7)
                if not 0 < count_of <= _MOST_REGISTERS:
                    self.refuse(f"{count_of} registers of one name")
                names = [f"{name}{number}" for number in range(count_of)]
                self.take(">")
            for each in names:
                if count == 1:
                    scope.names[each] = self._register(each + scope.suffix, kind)
                    continue
                # A vector stands for its elements, which `name.x` and so on are, too.
                parts = [self._register(f"{each}.{a}{scope.suffix}", kind) for a in "xyzw"[:count]]
                scope.names[each] = Vector(tuple(parts))
                for letters in ("xyzw", "rgba"):
                    for letter, part in zip(letters, parts, strict=False):
                        scope.names[f"{each}.{letter}"] = part
            if not self.accept(","):
                break
        self.take(";")

    def _register(self, name: str, kind: str) -> Register:
        register = Register(name, kind)
        self._function.registers[name] = register
        return register

    def _label(self, scope: Scope) -> None:
        token = self.take()
        self.take(":")
        if self.accept(".branchtargets"):
            names = [Symbol(self.word())]
            while self.accept(","):
                names.append(Symbol(self.word()))
            self.take(";")
            scope.names[token.text] = Vector(tuple(names))
        elif self.next.text in (".callprototype", ".calltargets"):
            self.skip_to(";")
        else:
            if isinstance(scope.names.get(token.text), Label):
                self.refuse(f"the label {token.text} is defined twice", token)
            index = len(self._pending)
            scope.names[token.text] = Label(token.text + scope.suffix, index)
            self._function.labels.setdefault(index, []).append(token.text)

    # -- instructions ---------------------------------------------------------------------------

    def _instruction(self, scope: Scope) -> None:
        line = self.next.line
        guard = None
        if self.accept("@"):
            negated = self.accept("!") is not None
            name = self.word()
            register = scope.find(name)
            if not isinstance(register, Register) or register.type != "pred":
                self.refuse(f"the guard {name} is no predicate register")
            guard = Guard(register, negated)
        opcode = self.word()
        while self.next.kind == "directive":  # `mma.sync .aligned`: blanks between modifiers
            opcode += self.take().text
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self._operand(opcode.startswith("call")))
            if self.next.text != ";":
                self.take(",")
        text = self._module.lines[line - 1].strip()
        if opcode.split(".")[0] == "ret":
            self._copy_results(scope, guard)
        after: list[tuple[Variable, Operand]] = []
        if opcode.split(".")[0] == "call":
            operands, after = self._passed(operands, scope, guard)
        instruction = Instruction(opcode, tuple(operands), guard, line, text)
        self._pending.append((instruction, scope))
        for variable, operand in after:
            self._copy("ld.param", variable, operand, scope, guard)

    def _passed(
        self, operands: list[Operand], scope: Scope, guard: Guard | None
    ) -> tuple[list[Operand], list[tuple[Variable, Operand]]]:
        """The operands of a call with variables in place of registers and constants.

        Arguments are stored ahead of the call; the results to load behind it are returned, too.
        """
        lists = [place for place, operand in enumerate(operands) if isinstance(operand, Vector)]
        # The name stands behind the results and ahead of the arguments.
        name = next((p for p, o in enumerate(operands) if not isinstance(o, Vector)), 0)
        callee = operands[name]
        known = self._module.functions.get(callee.name if isinstance(callee, Symbol) else "")
        loads: list[tuple[Variable, Operand]] = []
        for place in lists:
            vector = operands[place]
            assert isinstance(vector, Vector)
            formal = () if known is None else known.results if place < name else known.params
            items: list[Operand] = []
            for number, item in enumerate(vector.items):
                found = scope.find(item.name) if isinstance(item, Symbol) else None
                if isinstance(found, Variable):
                    items.append(item)
                    continue
                kind = formal[number].type if number < len(formal) else ""
                if isinstance(found, Register):
                    kind = found.type
                if not kind:
                    self.refuse("the type of an argument of this call is not known")
                size = max(1, TYPE_BITS[kind] // 8)
                name_of = f"passed{len(self._function.variables)}{IN_REGISTER}"
                variable = Variable(name_of, "param", kind, size, size)
                self._declare(scope, variable)
                items.append(Symbol(name_of))
                if place < name:
                    if not isinstance(item, Sink):
                        loads.append((variable, item))
                else:
                    self._copy("st.param", variable, item, scope, guard)
            operands[place] = Vector(tuple(items))
        return operands, loads

    def _operand(self, in_call: bool = False) -> Operand:
        first = self._single(in_call)
        if self.accept("|"):
            return Pair(first, self._single(in_call))
        return first

    def _single(self, in_call: bool) -> Operand:
        token = self.next
        if token.text == "[":
            return self._address()
        if token.text == "{":
            return self._list("{", "}")
        if token.text == "(" and in_call:
            return self._list("(", ")")
        if token.text == "_":
            self.take()
            return Sink()
        if token.text == "!" and self.tokens[self.at + 1].kind == "word":
            self.take()
            return Not(self._named())
        if token.kind == "word" and token.text not in CONSTANTS:
            return self._named()
        return self._constant()

    def _named(self) -> Operand:
        name = self.word()
        return Symbol(name, self.offset())

    def _constant(self) -> Operand:
        negative = self.next.text == "-" and self.tokens[self.at + 1]
        token = negative or self.next
        if token.kind == "number" and isinstance(number := self.number(token), FloatBits):
            self.at += 2 if negative else 1
            sign = 1 << (number.width - 1) if negative else 0
            return FloatBits(number.bits ^ sign, number.width)
        return Integer(self.expression(3))  # `|` separates two results

    def _list(self, opening: str, closing: str) -> Vector:
        first = self.take(opening)
        items: list[Operand] = []
        while not self.accept(closing):
            items.append(self._operand())
            self.accept(",")
        if opening == "{" and not items:
            self.refuse("a vector without elements", first)
        return Vector(tuple(items))

    def _address(self) -> Address:
        self.take("[")
        base: Operand
        if self.next.kind == "word" and self.next.text not in CONSTANTS:
            base = Symbol(self.word())
            offset = self.offset()
        else:
            base, offset = Integer(0), self.expression()
        extra: list[Operand] = []
        while self.accept(","):
            extra.append(self._operand())
        self.take("]")
        return Address(base, offset, tuple(extra))
