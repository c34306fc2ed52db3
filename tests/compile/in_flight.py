"""Machine code that writes registers which a warpgroup's product under way may still read."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_PRODUCT = re.compile(r"[QHI]GMMA\.\S+ R\d+, R(\d+),")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d+)")
_BRANCH = re.compile(r"BRA.*(\.L_x_\d+)")
_PREDICATE = re.compile(r"^@!?U?P\w+ ")
# What writes no register of a lane, or none that its first operand names.
_NO_TARGET = re.compile(
    r"(ST|RED|BAR|SYNCS\.ARR|BRA|EXIT|WARPGROUP|MEMBAR|UTMA|[QHI]GMMA|NOP|U[A-Z]|R2UR|ISETP|FSETP|"
    r"PLOP3|DEPBAR|ACQBULK|PREEXIT|CCTL|ERRBAR)"
)
_State = tuple[int, tuple[frozenset[int], ...], frozenset[int]]


def disassembler() -> str | None:
    """Path of nvdisasm, of a toolkit or of a wheel."""
    if found := shutil.which("nvdisasm"):
        return found
    wheels = (path for root in sys.path for path in Path(root).glob("nvidia/*/bin/nvdisasm"))
    return next((str(path) for path in wheels), None)


def overwritten(cubin: Path, tool: str) -> list[str]:
    """Instructions that write A registers of products that no wait has covered, on any path."""
    run = subprocess.run([tool, str(cubin)], capture_output=True, text=True, check=True)
    lines = [
        re.sub(r"\s*/\*[0-9a-f]+\*/\s*", "", line).strip().rstrip(" ;")
        for line in run.stdout.split("\n")
    ]
    code = [line for line in lines if re.match(r"(\.L_x_\d+:|@!?U?P\w+ |[A-Z])", line)]
    labels = {line[:-1]: at for at, line in enumerate(code) if line.endswith(":")}
    found: dict[str, None] = {}
    seen: set[_State] = set()
    ways: list[_State] = [(0, (), frozenset())]
    while ways:
        found |= dict.fromkeys(_walk(code, labels, ways.pop(), seen, ways))
    return list(found)


def _walk(
    code: list[str], labels: dict[str, int], state: _State, seen: set[_State], ways: list[_State]
) -> Iterator[str]:
    """One path from a state on; branches that may be taken are added to `ways`."""
    at, groups, opened = state
    while at < len(code):
        line = code[at]
        if line.endswith(":"):
            if (at, groups, opened) in seen:
                return
            seen.add((at, groups, opened))
        plain = _PREDICATE.sub("", line)
        if product := _PRODUCT.match(plain):
            first = int(product[1])
            opened |= frozenset(range(first, first + 4))
            if "gsb0" in line:
                groups, opened = (*groups, opened), frozenset()
        elif wait := _WAIT.match(plain):
            pending = int(wait[1], 16)
            groups = groups[max(0, len(groups) - pending) :] if pending else ()
        elif _written(plain) & opened.union(*groups):
            yield f"{at}: {line}"
        if branch := _BRANCH.match(plain):
            target = labels.get(branch[1])
            if line.startswith("@"):
                if target is not None:
                    ways.append((target, groups, opened))
            elif target is None:
                return
            else:
                at = target
                continue
        if plain.startswith("EXIT") and not line.startswith("@"):
            return
        at += 1


def _written(line: str) -> frozenset[int]:
    target = re.match(r"(\S+) (?:U?P\w+, )*R(\d+)\b", line)
    if target is None or _NO_TARGET.match(line):
        return frozenset()
    operation, first = target[1], int(target[2])
    wide = ".64" in operation or "CS2R" in operation or "WIDE" in operation
    return frozenset(range(first, first + (4 if ".128" in operation else 2 if wide else 1)))
