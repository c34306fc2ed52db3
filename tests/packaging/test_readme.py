"""The README is true: its example works as pasted, its commands are those that CI runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from humming import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci/run").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_two_commands_do_everything() -> None:
    commands = [block.strip() for block in _blocks("sh")]
    assert len(commands) == 2
    assert all("\n" not in command for command in commands)
    setup, tests = commands
    assert setup.startswith("python3 -m venv .venv && ")
    assert tests == ".venv/bin/python -m pytest"


def test_main_command_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(_blocks("sh")[0])
    command = words[words.index(".venv/bin/humming") + 1 :]
    assert "--check" in command
    assert cli.main(command) == 0
    assert "check: ok" in capsys.readouterr().out


@pytest.mark.parametrize("block", _blocks("python"), ids=lambda block: block.split("\n")[0])
def test_python_example_works_as_pasted(block: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([16, 256])" in done.stdout
    assert "Choice" in done.stdout


def test_commands_of_the_readme_exist() -> None:
    commands = set(re.findall(r"^humming (\w+)", "".join(_blocks("text")), re.MULTILINE))
    known = {command.name for command in cli.app.registered_commands}
    assert commands == known


@pytest.mark.parametrize("number", [1, 2])
def test_ci_takes_its_commands_from_the_readme(number: int) -> None:
    (function,) = re.findall(r"^readme_block\(\) .+$", CI, re.MULTILINE)
    script = f"{function}\nreadme_block {number}"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == _blocks("sh")[number - 1]
    assert f'"$(readme_block {number})"' in CI
