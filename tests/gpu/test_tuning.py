"""Tuning on the present card."""

import json
from pathlib import Path

import pytest
import torch

import humming
from humming import cli, plugins, reference, tuned
from humming.composer import plan
from humming.problem import GemmProblem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("text", ["int4_g128 x bf16", "int4 x int8"])
def test_what_was_tuned_is_used_and_right(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print(f"torch.manual_seed({torch.seed()})")
    caps = plugins.capabilities()
    record = tmp_path / f"{caps.name}.json"
    n, k = 1040, 1152
    words = ("tune", text, "--n", f"{n}", "--k", f"{k}", "--m", "1,64,1024", "--candidates", "6")
    assert cli.main([*words, "--seconds", "60", "--output", str(record), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert [found["m"] for found in told["ranges"]] == [[1], [64], [1024]]
    for found in told["ranges"]:
        assert not found["wrong"]
        assert not found["failed"]
        # Neither nothing nor an age: a million weights at up to 1024 tokens.
        assert all(0.2 < us < 10_000 for timed in found["timed"] for us in timed["us"].values())
    monkeypatch.setenv("HUMMING_RECORDS", str(tmp_path))
    tuned.forget()
    problem = GemmProblem.parse(text, n, k)
    weight = humming.quantize(torch.randn(n, k, device="cuda"), problem.weight)
    packed = humming.pack(weight, activation=problem.activation)
    for m, found in zip((1, 64, 1024), told["ranges"], strict=True):
        made = plan(problem, m=m)
        assert made.decision.record
        assert made.lowering.name == found["chosen"]["lowering"]
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        spec = problem.activation
        given = humming.quantize_activation(x, spec) if spec.dtype.is_narrow else x
        values = given.dequantize() if spec.dtype.is_narrow else x
        out = humming.matmul(given, packed, out_dtype=torch.bfloat16)
        exact = reference.matmul(values, weight)
        bound = reference.error_bound(problem, values, weight, **made.roundings, certain=False)
        assert bool(((out.double() - exact).abs() <= bound).all())
    tuned.forget()
