"""The examples of docs/simulator.md work as pasted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/simulator.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# What shows that the example of an instruction has been understood.
PARITY = """
from humming.devices.simulator import simulate
y = np.zeros(32, np.uint32)
simulate('''.version 8.0
.target sm_80
.address_size 64
.visible .entry test(.param .u64 y) {
  .reg .b64 %a; .reg .b32 %t, %v; ld.param.u64 %a, [y]; mov.u32 %t, %tid.x;
  parity.b32 %v, %t; mad.wide.u32 %a, %t, 4, %a; st.global.u32 [%a], %v; ret;
}''', [y], device="a100_80gb")
assert y.tolist() == [bin(i).count("1") & 1 for i in range(32)]
"""


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_examples_work_as_pasted(place: int, tmp_path: Path) -> None:
    block = BLOCKS[place] + (PARITY if '"parity"' in BLOCKS[place] else "")
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("ld.param" in done.stdout) == ("print(" in block)
