"""A block of a language model through transformers, with every product in the simulator.

The sizes are those of SmolLM2-135M; there is one block of its thirty, and fewer words.
"""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import humming
from humming import QuantLinear, plan, reference
from humming.activations import quantize_activation
from humming.formats import ActivationSpec
from humming.problem import GemmProblem

transformers = pytest.importorskip("transformers")
ours = pytest.importorskip("humming.integrations.transformers", exc_type=ImportError)

BLOCK = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
PROMPT, NEW_TOKENS = 5, 2
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights that is not quantized."""
    path = tmp_path_factory.mktemp("block")
    config = transformers.LlamaConfig(**BLOCK, initializer_range=0.05, eos_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).save_pretrained(path)
    return path


def _numbers(spec: ActivationSpec, x: torch.Tensor) -> torch.Tensor:
    """What activations are quantized to, in float64."""
    made = quantize_activation(x, spec)
    parts = made.codes, made.scales, made.zeros, made.second_scale
    return reference.dequantize_activation(spec, x.shape[-1], *parts)


def _check_products(layer: QuantLinear, device: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Hold what a layer returned against float64, within the bound of its kernel's arithmetic."""
    rows, weight = x.flatten(0, -2), humming.unpack(layer.packed)
    spec = layer.activation_spec or ActivationSpec.parse("bf16")
    problem = GemmProblem(layer.out_features, layer.in_features, weight.spec, spec, "bf16")
    numbers = rows if layer.activation_spec is None else _numbers(spec, rows)
    exact = reference.matmul(numbers, weight)
    roundings = plan(problem, device, m=len(rows)).roundings
    bound = reference.error_bound(problem, numbers, weight, **roundings)
    assert ((out.flatten(0, -2).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("formats", "device"),
    [(("int4_g64", None), "h200"), (("mxfp4", None), "a100_80gb"), (("int8", "int8"), "t4")],
    ids=["int4_g64-h200", "mxfp4-a100", "int8-int8-t4"],
)
def test_block_generates_as_its_dequantized_weights_do(
    formats: tuple[str, str | None],
    device: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HUMMING_SIMULATE", device)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=ours.HummingConfig(*formats)
    )
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == 7
    checked = []

    def check(layer: QuantLinear, inputs: tuple[Any, ...], out: torch.Tensor) -> None:
        _check_products(layer, device, inputs[0], out)
        checked.append(out.shape[-2])

    for layer in layers:
        layer.register_forward_hook(check)
    prompt = torch.randint(0, BLOCK["vocab_size"], (1, PROMPT))
    made = model.generate(
        prompt,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    # All the layers once for the whole prompt, and once for each token but the last.
    assert checked == [PROMPT] * len(layers) + [1] * len(layers) * (NEW_TOKENS - 1)
    found = torch.stack(made.logits, 1)[0].double()
    # The same tokens through the dequantized weights, in bfloat16 and without rounding between.
    tokens = made.sequences[:, :-1]
    dense = model.dequantize()
    if formats[1] is not None:
        for module in dense.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(
                    partial(_rounded, ActivationSpec.parse(formats[1]))
                )
    with torch.no_grad():
        rounded = dense(tokens).logits[0, PROMPT - 1 :].double()
        exact = dense.double()(tokens).logits[0, PROMPT - 1 :]
    # Each product is rounded once here as there, and is summed up no worse before: errors are of
    # one size, but not the same.
    assert (found - exact).norm() <= 2 * (rounded - exact).norm()


def _rounded(
    spec: ActivationSpec, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Activations as the numbers that they are quantized to."""
    x = inputs[0]
    numbers = _numbers(spec, x.flatten(0, -2) if x.dtype == BF16 else x.flatten(0, -2).float())
    return numbers.view(x.shape).to(x.dtype)


def test_examples_of_the_documents_work_as_pasted_in_turn(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    text = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) > 1
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(examples)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "7 linear layers quantized, 1 left\n  lm_head: 'lm_head' is to be skipped" in done.stdout
    assert re.search(r"tensor\(\[\[ *1, *2, *3, ", done.stdout)
