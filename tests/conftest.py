"""What every test shares: the `gpu` marker, and a kernel cache of the run's own."""

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

# Before torch is loaded: processes of a parallel run would fight over the processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_CACHE_VARIABLE = "HUMMING_CACHE_DIR"
_OWN_CACHE = pytest.StashKey[Path]()


@cache
def _accelerator_present() -> bool:
    # Asked only when a gpu test is about to run: importing torch costs seconds.
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests out of the user's cache, and their verdicts free of the machine's speed."""
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    # What the cost model chooses is tested, not what somebody measured.
    os.environ.setdefault("HUMMING_RECORDS", "off")
    # pytest-xdist's workers inherit the choice.
    if _CACHE_VARIABLE not in os.environ:
        config.stash[_OWN_CACHE] = Path(tempfile.mkdtemp(prefix="humming-tests-"))
        os.environ[_CACHE_VARIABLE] = str(config.stash[_OWN_CACHE])


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache that `pytest_configure` made."""
    if own := config.stash.get(_OWN_CACHE, None):
        os.environ.pop(_CACHE_VARIABLE, None)
        shutil.rmtree(own, ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is no accelerator."""
    if item.get_closest_marker("gpu") and not _accelerator_present():
        pytest.skip("no accelerator present")
