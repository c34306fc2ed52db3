"""The peers as processes: where each finds its library, how it is started and spoken with."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

PEERS = Path(__file__).parent
BENCHMARKS = PEERS.parent
# Loading compiles kernels, with one library for a minute and more.
PATIENCE_S = 420.0


@dataclass(frozen=True)
class PeerSpec:
    """How a peer is run.

    Attributes:
        name: as it is named on the command line and in results.
        wheels: distributions that are installed for it alone, if their wheels are at hand.
        compiles_ahead: whether a second process may compile kernels while others are timed.
        is_alone: whether it must not see what is installed for this project.
    """

    name: str
    wheels: tuple[str, ...] = ()
    compiles_ahead: bool = False
    is_alone: bool = True

    @property
    def script(self) -> Path:
        return PEERS / f"{self.name.replace('-', '_')}.py"


SPECS = {
    spec.name: spec
    for spec in (
        PeerSpec("ours", is_alone=False),
        PeerSpec("cublas"),
        PeerSpec("humming-kernels", ("humming_kernels", "tabulate", "tqdm"), compiles_ahead=True),
        PeerSpec("deepgemm", ("sgl_deep_gemm", "apache_tvm_ffi")),
        PeerSpec("marlin"),
    )
}


def install(spec: PeerSpec, wheels: Path, target: Path, python: str = sys.executable) -> Path:
    """A folder with a peer's distributions, installed from wheels if it is not there yet.

    Wheels of several Python versions may lie together: pip is asked for each by name and takes the
    one that suits.
    """
    folder = target / spec.name
    names = [name for name in spec.wheels if any(wheels.glob(f"{name}-*.whl"))]
    if folder.is_dir() or not names:
        return folder
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-compile", "--find-links", str(wheels), "--target", str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"pip could not install {names} from {wheels}: {done.stderr[-600:]}")
    # humming-kernels keys its cache by the times of its headers: the same after each installation.
    for path in folder.rglob("*.cuh"):
        os.utime(path, (0, 0))
    return folder


def environment_of(spec: PeerSpec, installed: Path, caches: Path) -> dict[str, str]:
    """The environment of a peer's process: its own path and caches."""
    found = dict(os.environ)
    path = [str(BENCHMARKS)]
    if spec.wheels:
        path.insert(0, str(installed))
    for entry in filter(None, found.get("PYTHONPATH", "").split(os.pathsep)):
        if not spec.is_alone or not (Path(entry) / "humming").exists():
            path.append(entry)
    found["PYTHONPATH"] = os.pathsep.join(path)
    if spec.is_alone:
        # Settings of this project would be taken for those of the library that shares its name.
        for name in [name for name in found if name.startswith("HUMMING_")]:
            del found[name]
        found["HUMMING_CACHE_DIR"] = str(caches / "humming-kernels")
        found["DG_JIT_CACHE_DIR"] = str(caches / "deepgemm")
    return found


@dataclass
class Process:
    """A worker; it is started when it is first asked, and again if it has ended."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: TextIO | None = None
    patience_s: float = PATIENCE_S
    hello: dict[str, Any] = field(default_factory=dict)
    _child: subprocess.Popen[str] | None = None
    _answers: "queue.Queue[str]" = field(default_factory=queue.Queue)

    def start(self) -> dict[str, Any]:
        """Start it and have it import its library; the answer, with "failed" if it could not."""
        self._answers = answers = queue.Queue()
        self._child = child = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=dict(self.environment),
            text=True,
        )

        def listen() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                answers.put(line)
            answers.put("")

        threading.Thread(target=listen, daemon=True).start()
        self.hello = self.ask({"do": "hello"})
        return self.hello

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command; `hear` has its answer."""
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(command) + "\n")
            self._child.stdin.flush()
        except OSError:
            self._answers.put("")

    def hear(self) -> dict[str, Any]:
        """The next answer; a process that ends or says nothing in time has failed."""
        try:
            line = self._answers.get(timeout=self.patience_s)
        except queue.Empty:
            self.stop()
            return {"failed": f"no answer within {self.patience_s:.0f} s"}
        if not line:
            self.stop()
            status = self._child.returncode if self._child else None
            return {"failed": f"the process ended with status {status}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to a command."""
        self.tell(command)
        return self.hear()

    def stop(self) -> None:
        """End it: by its input's end, else by force."""
        if self._child is None:
            return
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def process_of(
    spec: PeerSpec, installed: Path, caches: Path, python: str, log: TextIO | None
) -> Process:
    """The process of a peer that is run by an interpreter."""
    environment = environment_of(spec, installed, caches)
    return Process(spec.name, [python, str(spec.script)], environment, log)
