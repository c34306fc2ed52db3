"""The kernel cache: what a compiled kernel depends on, and where its image is kept.

A key is made of contents only: the source, the headers that it includes, the compiler with its
version and its options. No path and no time enters it: a cache filled on one host serves a fleet,
hosts with an older compiler or none included.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from humming import env
from humming.dtypes import suggest
from humming.errors import CompileError, warn_once

Version = tuple[int, int]

_LOG = logging.getLogger(__name__)

# Any spelling that could pull in a file, and the only one that is allowed.
_ANY_INCLUDE = re.compile(r"^\s*(?:#|%:)\s*(?:include|include_next|import|embed)\b")
_OUR_INCLUDE = re.compile(r"^#include <(humming/[\w.\-/]+)>\s*(?://.*)?$")

_MAGIC = b"humming kernel 1\n"
_DIGEST_CHARS = hashlib.sha256().digest_size * 2
_KEY = re.compile(rf"[0-9a-f]{{{_DIGEST_CHARS}}}-\d+\.\d+")


def include_closure(
    source: str, headers: Mapping[str, Path], *, name: str = "the composed source"
) -> dict[str, str]:
    """Returns the text of every header that `source` includes, directly or not, by include name.

    Args:
        source: CUDA source; `#include <humming/PATH>` is the only spelling allowed in it.
        headers: file of every header by include name, as the registry has them.
        name: what errors call `source`.

    Raises:
        CompileError: another spelling, or an unknown header; the message says file and line.
    """
    closure: dict[str, str] = {}
    pending = [(name, source)]
    while pending:
        includer, text = pending.pop()
        for include, line in _includes(includer, text):
            if include in closure:
                continue
            if include not in headers:
                raise CompileError(
                    f"{includer}:{line}: <{include}> is in no include folder. "
                    + suggest(include, headers)
                )
            closure[include] = headers[include].read_text(encoding="utf-8")
            pending.append((include, closure[include]))
    return dict(sorted(closure.items()))


def _includes(includer: str, text: str) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if _ANY_INCLUDE.match(line) is None:
            continue
        match = _OUR_INCLUDE.match(line)
        if match is None:
            raise CompileError(
                f"{includer}:{number}: `{line.strip()}` is not allowed, because the cache hashes "
                "what a kernel includes; write `#include <humming/PATH>`"
            )
        yield match.group(1), number


def kernel_recipe(
    source: str,
    headers: Mapping[str, str],
    *,
    entry: str,
    compiler: str,
    options: Sequence[str],
) -> str:
    """Returns a digest (64 hexadecimal digits) of all that a kernel is made of and by.

    The compiler's version is left out: kernels of one recipe do the same, whichever version made
    them, and `kernel_key` tells them apart.

    Args:
        source: the composed source.
        headers: the include closure, text by include name.
        entry: name of the kernel.
        compiler: name of the compiler.
        options: the options given to it; they carry the architecture.
    """
    digest = hashlib.sha256(_MAGIC)
    fields = [compiler, entry, *options, "source", source]
    for include, text in sorted(headers.items()):
        fields += [include, text]
    for field in fields:
        data = field.encode()
        # The length in front of each field keeps two lists of fields from running together.
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def kernel_key(recipe: str, version: Version) -> str:
    """Returns the cache key of a recipe's kernel made by a version of its compiler."""
    return f"{recipe}-{dotted(version)}"


def key_version(key: str) -> Version:
    """Returns the compiler version, (major, minor), that a cache key names."""
    major, minor = key.rpartition("-")[2].split(".")
    return int(major), int(minor)


def dotted(version: Version) -> str:
    """Returns a version as people write it."""
    return f"{version[0]}.{version[1]}"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One compiled kernel as it is kept.

    Attributes:
        key: its cache key.
        entry: name of the kernel in the image.
        kind: kind of the image, such as "cubin".
        data: the image.
        log: what the compiler said.
    """

    key: str
    entry: str
    kind: str
    data: bytes
    log: str

    def to_bytes(self) -> bytes:
        """Returns the entry as a file: a magic line, a checksum line, a JSON line, the image."""
        header = {"key": self.key, "entry": self.entry, "kind": self.kind, "log": self.log}
        body = json.dumps(header).encode() + b"\n" + self.data
        return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, raw: bytes) -> "CacheEntry":
        """Reads back what `to_bytes` wrote; ValueError says what is wrong with it."""
        if not raw.startswith(_MAGIC):
            raise ValueError("no kernel of this format")
        body_at = len(_MAGIC) + _DIGEST_CHARS + 1
        checksum, body = raw[len(_MAGIC) : body_at - 1], raw[body_at:]
        if hashlib.sha256(body).hexdigest().encode() != checksum:
            raise ValueError("the checksum does not match")
        header, _, data = body.partition(b"\n")
        return cls(**json.loads(header), data=data)


class KernelCache:
    """A directory of compiled kernels that processes share.

    Files are named by key, written whole or not at all, readable by their owner alone, and checked
    when read: a damaged one is reported through `logging` and built again.

    Args:
        root: the folder in whose subfolder `kernels` the entries lie, as `HUMMING_CACHE_DIR` names
            one; by default that of the environment. It is made on the first write.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.directory = (env.cache_dir() if root is None else Path(root)) / "kernels"

    def path(self, key: str) -> Path:
        """Returns the file that holds, or would hold, the kernel of that key."""
        return self.directory / f"{key}.kernel"

    def load(self, key: str) -> CacheEntry | None:
        """Returns the kernel of that key, or None if it is absent or cannot be used."""
        path = self.path(key)
        try:
            entry = CacheEntry.from_bytes(path.read_bytes())
            if entry.key != key:
                raise ValueError(f"it holds the kernel {entry.key}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            warn_once(_LOG, f"cached kernel {path} cannot be used ({error})")
            return None
        return entry

    def find(self, recipe: str, version: Version | None) -> CacheEntry | None:
        """Returns a recipe's kernel that makes compiling needless, or None.

        That is the one made by this version of the compiler, else by the newest that is newer: a
        folder prepared with a new compiler serves hosts that have an older one, while a compiler
        that was updated makes its kernels anew. It must be of the same major version, because
        drivers load what any minor version made. A host without a compiler takes what there is.

        Args:
            recipe: as `kernel_recipe` returns it.
            version: of the compiler of this host; None if it has none.
        """
        if version and (exact := self.load(kernel_key(recipe, version))):
            return exact
        try:
            names = [path.stem for path in self.directory.glob(f"{recipe}-*.kernel")]
        except OSError:
            return None  # a folder that cannot be read; whoever writes to it says so
        keys = [name for name in names if _KEY.fullmatch(name)]
        if version:
            end = (version[0] + 1, 0)
            keys = [key for key in keys if version < key_version(key) < end]
        # Without a compiler nothing says which major version the driver is of.
        newest_first = sorted(keys, key=key_version, reverse=True)
        return next((entry for key in newest_first if (entry := self.load(key))), None)

    def others(self, keys: Iterable[str]) -> list[Path]:
        """Returns the files of all kernels but those of some keys."""
        known = set(keys)
        return sorted(p for p in self.directory.glob("*.kernel") if p.stem not in known)

    def store(self, entry: CacheEntry) -> None:
        """Writes a kernel so that a reader sees all of it or nothing, even after a crash."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # mkstemp creates with mode 0600.
        descriptor, temporary = tempfile.mkstemp(prefix=".kernel-", dir=self.directory)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(entry.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path(entry.key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def load_or_build(self, key: str, build: Callable[[], CacheEntry]) -> tuple[CacheEntry, bool]:
        """Returns the kernel of that key, built if it is absent, and whether it was cached.

        Of several processes that ask for the same key, one builds and the others wait for it.
        A directory that cannot be written costs a warning, not the kernel.
        """
        if (cached := self.load(key)) is not None:
            return cached, True
        with self._lock(key):
            if (cached := self.load(key)) is not None:
                return cached, True
            entry = build()
            try:
                self.store(entry)
            except OSError as error:
                self._warn_unwritable(error)
            return entry, False

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        # A few shared lock files instead of one a kernel: they are never removed, since removing a
        # lock that another process is about to take would let two of them in.
        locks = self.directory / "locks"
        try:
            # One by one: of several new directories mkdir would give only the last one the mode.
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            for directory in (self.directory, locks):
                directory.mkdir(mode=0o700, exist_ok=True)
            lock = FileLock(locks / f"{key[:2]}.lock", mode=0o600)
            lock.acquire()
        except OSError as error:
            self._warn_unwritable(error)
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def _warn_unwritable(self, error: OSError) -> None:
        # Each file in it has an error of its own, and they all have one cause.
        why = error.strerror or str(error)
        warn_once(
            _LOG,
            f"the kernel cache {self.directory} cannot be written ({why}), so each process "
            "compiles for itself; set HUMMING_CACHE_DIR to a writable directory",
        )
