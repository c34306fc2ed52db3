"""The conformance kit on the bundled plugins; the example runs it in its own tests."""

from types import ModuleType

import pytest

from humming.plugins import manager
from humming.testing.conformance import *  # noqa: F403


@pytest.fixture(params=["nvidia", "thead_ppu"])
def plugin(request: pytest.FixtureRequest) -> ModuleType:
    module = manager().get_plugin(request.param)
    assert isinstance(module, ModuleType)
    return module
