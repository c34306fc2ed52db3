"""The environment variables of humming: the only module that reads them.

Every function reads the environment when it is called, so a change takes effect without a restart.
An unset variable and one set to the empty string mean the same: the default.
"""

import os
from pathlib import Path

from humming.errors import UnsupportedError

VARIABLES: dict[str, str] = {
    "HUMMING_CACHE_DIR": "Folder of compiled kernels and the user's tuned records; "
    "default: `humming` in the user's cache folder (`~/.cache/humming` on Linux).",
    "HUMMING_DISABLE_CACHE": "1: compile every kernel anew, without reading or writing the cache; "
    "default: 0.",
    "HUMMING_COMPILE_JOBS": "Number of kernels compiled at the same time, at least 1; "
    "default: the number of processors this process may use.",
    "HUMMING_RECORDS": "File of tuned records, or folder with one per device, that goes before the "
    "user's and the shipped ones; off: no records at all; default: none beside these.",
    "HUMMING_DEPENDENT_LAUNCH": "0: products wait for all that is before them on their stream, "
    "weights included, rather than copy their first weights ahead; read when a kernel is first "
    "used; default: 1.",
    "HUMMING_STRICT_PLUGINS": "1: raise at once when a device plugin is broken, "
    "instead of when one of its devices is asked for; default: 0.",
    "HUMMING_SIMULATE": "Name of the device that the CPU simulates where no accelerator is "
    "present, e.g. t4 or sim:t4; default: a100_80gb.",
    "HUMMING_TRACE_PLUGINS": "1: log each call of a plugin hook with its result; default: 0.",
}
"""Each variable with one line on its meaning and default, as docs/environment.md lists them."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def cache_dir() -> Path:
    """Folder for compiled kernels and the user's tuned records (`HUMMING_CACHE_DIR`).

    It is absolute, and not created here.
    """
    if configured := _path("HUMMING_CACHE_DIR"):
        return configured
    # Imported late: most processes that import humming never touch the cache.
    from platformdirs import user_cache_path

    return user_cache_path("humming", appauthor=False)


def cache_enabled() -> bool:
    """Whether compiled kernels are kept and reused (not `HUMMING_DISABLE_CACHE`)."""
    return not _flag("HUMMING_DISABLE_CACHE")


def compile_jobs() -> int:
    """Number of kernels to compile at the same time (`HUMMING_COMPILE_JOBS`), at least 1.

    Raises:
        UnsupportedError: the variable is no positive whole number.
    """
    text = os.environ.get("HUMMING_COMPILE_JOBS", "").strip()
    if not text:
        return _usable_processors()
    if not (text.isascii() and text.isdigit() and len(text) < 10) or int(text) < 1:
        raise UnsupportedError(
            f"HUMMING_COMPILE_JOBS={text}",
            "it is not a whole number of at least 1",
            "Unset it to use every processor, or set it to e.g. 4.",
        )
    return int(text)


def records() -> tuple[Path, ...] | None:
    """Files or folders of tuned records that go before the user's (`HUMMING_RECORDS`).

    None is no records at all.
    """
    if os.environ.get("HUMMING_RECORDS", "").strip().lower() in _FALSE:
        return None
    configured = _path("HUMMING_RECORDS")
    return (configured,) if configured else ()


def dependent_launch() -> bool:
    """Whether kernels may start before those ahead of them end (`HUMMING_DEPENDENT_LAUNCH`)."""
    return _flag("HUMMING_DEPENDENT_LAUNCH", default=True)


def strict_plugins() -> bool:
    """Whether a broken plugin raises at once (`HUMMING_STRICT_PLUGINS`)."""
    return _flag("HUMMING_STRICT_PLUGINS")


def simulated_device() -> str:
    """Name of the row that the CPU stands in for (`HUMMING_SIMULATE`)."""
    return os.environ.get("HUMMING_SIMULATE", "").strip() or "a100_80gb"


def trace_plugins() -> bool:
    """Whether calls of plugin hooks are logged (`HUMMING_TRACE_PLUGINS`)."""
    return _flag("HUMMING_TRACE_PLUGINS")


def _path(name: str) -> Path | None:
    configured = os.environ.get(name, "").strip()
    if not configured:
        return None
    try:
        return Path(configured).expanduser().absolute()
    except RuntimeError as error:
        raise UnsupportedError(
            f"{name}={configured}", str(error), "Give a path without ~."
        ) from error


def _flag(name: str, default: bool = False) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if not text:
        return default
    if text in _FALSE:
        return False
    if text in _TRUE:
        return True
    raise UnsupportedError(
        f"{name}={text}",
        "it is neither true nor false",
        f"True is spelled {', '.join(_TRUE)}; false {', '.join(_FALSE)}.",
    )


def _usable_processors() -> int:
    # In a container the affinity mask is smaller than the machine, and the mask is what counts.
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1
