"""The process that times one library: told by JSON lines what to do, it answers in JSON lines.

A worker imports one library only, because two of them own the same import name. It is told

    {"do": "hello"}                                          imports the library; -> versions
    {"do": "compile", "format", "n", "k", "tokens"}          compiles ahead, on the CPU
    {"do": "load", "format", "n", "k", "tokens"}             quantizes and packs a weight
    {"do": "capture", "m", "calls"}                          records a graph for each way it has;
                                                             -> products: name -> error, note
    {"do": "replay", "replays"}                              -> us: name -> a time per replay

and each answer holds "failed", the reason, where that could not be done; "absent" where the library
has no such format. Every product is compared
with the same product in float64 on some rows and tokens, so that a wrong use cannot pass for speed.
"""

import importlib.metadata
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TextIO

import graphs
import torch

SAMPLE_ROWS, SAMPLE_TOKENS = 128, 64
LONGEST_REASON = 400


def sample_rows(n: int) -> list[slice]:
    """The first, a middle and the last 128 rows of a weight, from multiples of 128."""
    blocks = max(1, n // SAMPLE_ROWS)
    firsts = sorted({0, blocks // 2 * SAMPLE_ROWS, (blocks - 1) * SAMPLE_ROWS})
    return [slice(first, min(first + SAMPLE_ROWS, n)) for first in firsts if first < n]


def sample_tokens(m: int) -> torch.Tensor:
    """Some tokens: all of a few, else evenly spaced ones with the first and the last."""
    return torch.linspace(0, m - 1, min(m, SAMPLE_TOKENS)).round().long()


class NoSuchFormatError(Exception):
    """The library has no format of its own for the one that is asked for."""


@dataclass(frozen=True)
class SampledWeight:
    """Rows of a weight as numbers: `values` [rows, k] in float64, and where they are."""

    rows: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, n: int, values_of: Callable[[slice], torch.Tensor]) -> "SampledWeight":
        """The sampled rows of a weight, each slice from `values_of`."""
        slices = sample_rows(n)
        rows = torch.cat([torch.arange(part.start, part.stop) for part in slices])
        values = [values_of(part).to(torch.float64) for part in slices]
        return cls(rows, torch.cat(values))


@dataclass(frozen=True)
class Product:
    """One way in which a library multiplies.

    Attributes:
        call: enqueues product number i, each with another copy of the weight; returns [m, n].
        tokens: the sampled tokens' values as the library reads them, float64.
        weight: the sampled rows of the weight likewise.
        note: what is chosen or particular about it.
    """

    call: Callable[[int], torch.Tensor]
    tokens: torch.Tensor
    weight: SampledWeight
    note: str = ""

    def relative_error(self) -> float:
        """The Frobenius norm of the sampled outputs' error over that of the exact ones."""
        out = self.call(0)
        at = sample_tokens(out.shape[0]).to(out.device)
        got = out[at][:, self.weight.rows.to(out.device)].to(torch.float64)
        exact = self.tokens @ self.weight.values.T
        return float((got - exact).norm() / exact.norm())


class Peer(ABC):
    """A library that multiplies; a subclass imports it in its `__init__`."""

    distributions: tuple[str, ...] = ("torch",)

    def versions(self) -> dict[str, str]:
        """Versions of what takes part."""
        return {name: importlib.metadata.version(name) for name in self.distributions}

    def details(self) -> dict[str, Any]:
        """What else belongs to the results, as JSON."""
        return {}

    def compile(self, name: str, n: int, k: int, tokens: list[int]) -> bool:
        """Compile the kernels of a weight for another process, through a cache; False: cannot."""
        return False

    @abstractmethod
    def load(self, name: str, n: int, k: int, tokens: list[int]) -> None:
        """Make a weight [n, k] of a format; raise NoSuchFormatError if it has none."""

    @abstractmethod
    def products(self, m: int) -> dict[str, Callable[[], Product]]:
        """The ways to multiply m tokens with the weight; each may fail on its own."""

    @abstractmethod
    def drop(self) -> None:
        """Forget the weight."""


class Worker:
    """Carries out what it is told with one peer.

    Args:
        make: makes the peer.
        recorder: has `capture` and `replay` as the module `graphs` does.
    """

    def __init__(self, make: Callable[[], Peer], recorder: Any = graphs) -> None:
        self._make, self._recorder = make, recorder
        self._peer: Peer | None = None
        self._graphs: dict[str, Any] = {}
        self._calls = 1

    def answer(self, told: dict[str, Any]) -> dict[str, Any]:
        """What comes of one command."""
        arguments = {key: value for key, value in told.items() if key != "do"}
        try:
            done: dict[str, Any] = getattr(self, f"do_{told['do']}")(**arguments)
        except Exception as error:
            return {"failed": reason(error)}
        return done

    def do_hello(self) -> dict[str, Any]:
        self._peer = self._make()
        return {"versions": self._peer.versions(), **self._peer.details()}

    def do_compile(self, format: str, n: int, k: int, tokens: list[int]) -> dict[str, Any]:
        return {"compiled": self._ready().compile(format, n, k, tokens)}

    def do_load(self, format: str, n: int, k: int, tokens: list[int]) -> dict[str, Any]:
        self._graphs.clear()
        peer = self._ready()
        peer.drop()
        release_memory()
        try:
            peer.load(format, n, k, tokens)
        except NoSuchFormatError as error:
            return {"absent": str(error)}
        return {}

    def do_capture(self, m: int, calls: int) -> dict[str, Any]:
        self._graphs.clear()
        release_memory()
        self._calls, found = calls, {}
        for name, make in self._ready().products(m).items():
            try:
                product = make()
                found[name] = {"relative_error": product.relative_error(), "note": product.note}
                self._graphs[name] = self._recorder.capture(product.call, calls)
            except Exception as error:
                found[name] = {"failed": reason(error)}
        return {"products": found}

    def do_replay(self, replays: int) -> dict[str, Any]:
        us: dict[str, list[float]] = {name: [] for name in self._graphs}
        for index in range(replays + 1):
            for name, graph in self._graphs.items():
                time = self._recorder.replay(graph) / self._calls
                if index:  # the first finds clocks and caches as another process left them
                    us[name].append(time)
        return {"us": us}

    def _ready(self) -> Peer:
        if self._peer is None:
            raise RuntimeError("hello comes first")
        return self._peer


def reason(error: Exception) -> str:
    """An error in one line."""
    told = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {told}"[:LONGEST_REASON]


def release_memory() -> None:
    """Give what torch keeps back to the device, which several processes share."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def serve(worker: Worker, commands: Iterable[str], answers: TextIO) -> None:
    """Answer each line until there is none."""
    for line in commands:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


def main(make: Callable[[], Peer], recorder: Any = graphs) -> None:
    """Be the worker of a peer on standard input and output."""
    # Libraries and their compilers print; only answers may come out where answers are read.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Worker(make, recorder), sys.stdin, answers)
