"""The measured tables of the documents are those of the recorded results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def test_documents_say_what_was_measured():
    script = ROOT / "benchmarks" / "report.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_results_name_card_versions_and_date(path):
    about = json.loads(path.read_text())["environment"]
    assert about["card"]
    assert about["compiler"]
    assert about["versions"]["torch"]
    assert about["date"].count("-") == 2
