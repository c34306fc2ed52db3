"""The command line run in process, on what looks like a machine without an accelerator."""

import json
from typing import Any

import pytest

from humming import cli, plugins


class Shell:
    """Runs a command of humming and keeps what it wrote."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *words: str) -> int:
        self._capsys.readouterr()
        status = cli.main(words)
        self.out, self.err = self._capsys.readouterr()
        return status

    def json(self, *words: str, status: int = 0) -> dict[str, Any]:
        """The object that a command prints; fails if stdout holds anything else."""
        assert self(*words, "--json") == status, self.err
        loaded = json.loads(self.out)
        assert isinstance(loaded, dict)
        return loaded


@pytest.fixture
def humming(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """`humming(*words)` is the exit status; tests may put devices in place afterwards."""
    host = plugins.PresentDevice(-1, "CPU", "sim:a100_80gb", plugin="simulator")
    monkeypatch.setattr(plugins, "devices", lambda: plugins.PresentDevices([host], []))
    monkeypatch.setattr(plugins.installed(), "devices", lambda: plugins.devices())
    return Shell(capsys)
