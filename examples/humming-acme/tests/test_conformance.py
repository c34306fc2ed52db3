"""humming's conformance kit on this plugin: the imported tests run with the fixture below."""

from types import ModuleType

import humming_acme
import pytest

from humming.testing.conformance import *  # noqa: F403


@pytest.fixture
def plugin() -> ModuleType:
    return humming_acme
