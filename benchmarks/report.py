"""Writes the measured tables of the README and of docs/benchmarks.md from the recorded results.

Charts of the comparison with other libraries, docs/measured/*.svg, are written from the same.

python benchmarks/report.py            # rewrite both
python benchmarks/report.py --check    # exit status 1 if they say something else
"""

import json
import sys
from pathlib import Path
from typing import Any

import regimes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
README_SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192), (7168, 2048))
README_TOKENS = (1, 8, 16)
FORMAT_TOKENS = (1, 16, 64, 256, 1024, 4096)
BF16_ROUNDOFF, FP16_ROUNDOFF = 2.0**-8, 2.0**-11


def main() -> int:
    """Rewrite or check the tables."""
    dense, formats = load("h200_dense.json"), load("h200_formats.json")
    # Above, kernels have changed since the other shapes were measured.
    dense["dense"] = [row for row in dense["dense"] if row["m"] <= max(README_TOKENS)]
    activations, real = load("h200_activations.json"), load("h200_real_weights.json")
    peers = load("h200_peers.json") if (RESULTS / "h200_peers.json").exists() else None
    page_text = page(dense, formats, activations, real)
    readme_text = readme(dense, formats, real)
    written = {}
    if peers:
        page_text += "\n\n" + "\n".join(regimes.page(peers))
        readme_text += "\n\n" + "\n".join(regimes.readme(peers))
        written = regimes.charts(peers)
    if (RESULTS / "h200_chain.json").exists():
        page_text += "\n\n" + "\n".join(chain_table(load("h200_chain.json")))
    if (RESULTS / "h200_language_model.json").exists():
        page_text += "\n\n" + "\n".join(model_table(load("h200_language_model.json")))
    for name, text in (("README.md", readme_text), ("docs/benchmarks.md", page_text)):
        path = ROOT / name
        before = path.read_text() if path.exists() else f"{BEGIN}\n{END}\n"
        head, rest = before.split(BEGIN)
        written[name] = f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"
    stale = []
    for name, after in written.items():
        path = ROOT / name
        if not path.exists() or path.read_text() != after:
            stale.append(name)
            if "--check" not in sys.argv:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(after)
    print("stale:" if stale else "up to date", *stale)
    return int(bool(stale) and "--check" in sys.argv)


def load(name: str) -> dict[str, Any]:
    """One file of recorded results."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def machine(result: dict[str, Any]) -> str:
    """What a result was measured with."""
    about = result["environment"]
    return (
        f"{about['card']}, torch {about['versions']['torch']}, {about['compiler']}, {about['date']}"
    )


def readme(dense: dict[str, Any], formats: dict[str, Any], real: dict[str, Any]) -> str:
    """The README's tables: small batches beside cuBLAS and the floor, formats, real weights."""
    lines = [
        f"int4_g128 x bf16 on one {machine(dense)}: µs a call, in CUDA graphs over",
        "weights that do not fit in L2; how many times faster than cuBLAS bf16 in the same run;",
        "and the time of a kernel that only reads the same bytes (with dependent launch, as ours).",
        "",
        "| N x K | " + " | ".join(f"M = {m}" for m in README_TOKENS) + " | reading alone |",
        "|---|" + "---|" * (len(README_TOKENS) + 1),
    ]
    rows = {(r["n"], r["k"], r["m"]): r for r in dense["dense"]}
    for n, k in README_SHAPES:
        cells = [
            f"{rows[n, k, m]['us']:.1f} ({rows[n, k, m]['over_cublas']:.2f}x)"
            for m in README_TOKENS
        ]
        floor = rows[n, k, README_TOKENS[0]]["floor_dependent_us"]
        lines.append(f"| {n} x {k} | " + " | ".join(cells) + f" | {floor:.1f} |")
    lines += [
        "",
        "Kernels have changed since this table was measured: launches of small products overlap",
        "now, and two parts of K are summed in the shared memory of a cluster. The next table has",
        "both; a few of its kernels for 1, 16 and 256 tokens have been given other tiles since.",
        "",
        *format_table(formats),
    ]
    models = {row["model"]: row["matrices"] for row in real["real_weights"]}
    told = " and ".join(f"{count} matrices of {model}" for model, count in models.items())
    outside = sum(row["over_bound"] for row in real["real_weights"]) or "no"
    lines += [
        "",
        f"Real weights: {told}",
        "through `QuantLinear`, 1, 16 and 200 tokens: the largest relative error of a product",
        f"against float64, where rounding the output may alone cost {BF16_ROUNDOFF:.1e} (bf16) or",
        f"{FP16_ROUNDOFF:.1e} (fp16). Outside the bound that the types imply lie {outside} values.",
        "",
        "| model | format | bf16 | fp16 |",
        "|---|---|---|---|",
    ]
    errors = {(r["model"], r["format"], r["activation"]): r["error"] for r in real["real_weights"]}
    for model, name in dict.fromkeys((r["model"], r["format"]) for r in real["real_weights"]):
        found = [errors.get((model, name, dtype)) for dtype in ("bfloat16", "float16")]
        cells = " | ".join("" if error is None else f"{error:.1e}" for error in found)
        lines.append(f"| {model} | {name} | {cells} |")
    return "\n".join(lines)


def format_table(formats: dict[str, Any]) -> list[str]:
    """One row for each format, all of one shape."""
    rows = {(row["format"], row["m"]): row for row in formats["dense"]}
    ((n, k),) = {(row["n"], row["k"]) for row in formats["dense"]}
    lines = [
        f"Formats, {n} x {k}, {machine(formats)}: µs a call (times faster than cuBLAS",
        "bf16). Quantized activations are quantized before, which is timed apart.",
        "",
        "| format | " + " | ".join(f"M = {m}" for m in FORMAT_TOKENS) + " | reading alone |",
        "|---|" + "---|" * (len(FORMAT_TOKENS) + 1),
    ]
    for name in dict.fromkeys(row["format"] for row in formats["dense"]):
        found = [rows[name, m] for m in FORMAT_TOKENS]
        cells = " | ".join(f"{row['us']:.1f} ({row['over_cublas']:.2f}x)" for row in found)
        floor = found[0]["floor_dependent_us"]
        lines.append(f"| {short(name)} | {cells} | {floor:.1f} |")
    return lines


def short(name: str) -> str:
    """A product's name with the short names of 16-bit activations."""
    return name.replace("bfloat16", "bf16").replace("float16", "fp16")


def page(
    dense: dict[str, Any],
    formats: dict[str, Any],
    activations: dict[str, Any],
    real: dict[str, Any],
) -> str:
    """The whole of what was measured."""
    lines = [
        f"## Dense products\n\n{machine(dense)}.",
        "",
        *dense_table(dense["dense"]),
        "",
        f"## Formats\n\n{machine(formats)}. cuBLAS multiplies bfloat16, or float16 where the",
        "activations are; quantized activations are quantized before.",
        "",
        *dense_table(formats["dense"]),
        "",
        f"## Quantizing activations\n\n{machine(activations)}. From bfloat16, beside torch's copy",
        "of as many bytes as are read and written.",
        "",
        *activation_table(activations["activations"]),
    ]
    host, packing = formats["host"], formats["packing"]
    lines += [
        "",
        "## Beside the products",
        "",
        f"- Packing {packing['n']} x {packing['k']} {packing['format']}: {packing['ms']:.1f} ms.",
        f"- Host time of an eager call at M = 1, {host['n']} x {host['k']}: `QuantLinear` "
        f"{host['quant_linear_us']:.1f} µs, with activations quantized to int8 or fp8 in the call "
        f"{host['quant_linear_int8_us']:.1f} and {host['quant_linear_fp8_us']:.1f} µs, "
        f"`torch.nn.Linear` {host['torch_linear_us']:.1f} µs.",
        "- Compiling a kernel, without a cache, in a run before results left in one pass, which",
        "  has since halved what large tiles take:",
        "",
        "| M | tile | seconds |",
        "|---|---|---|",
    ]
    for kernel in formats["compile"]:
        low, high = kernel["m_range"]
        lines.append(f"| {low} to {high or '...'} | {kernel['tile']} | {kernel['seconds']:.2f} |")
    lines += [
        "",
        f"## Real weights\n\n{machine(real)}. Relative errors are of the largest of all products;",
        "the bound is what the types imply; the last column is what quantizing cost the weights.",
        "",
        "| model | format | activations | matrices | error | bound | values over it | weights |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in real["real_weights"]:
        lines.append(
            f"| {row['model']} | {row['format']} | {row['activation']} | {row['matrices']} "
            f"| {row['error']:.2e} | {row['bound']:.2e} | {row['over_bound']} "
            f"| {row['weight_error']:.3f} |"
        )
    return "\n".join(lines)


def dense_table(rows: list[dict[str, Any]]) -> list[str]:
    """Every row of the grid."""
    lines = [
        "| N x K | format | M | µs | cuBLAS µs | times faster | reading alone µs "
        "| the same, dependent launch | error | tile |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['n']} x {row['k']} | {row['format']} | {row['m']} | {row['us']:.2f} "
            f"| {row['cublas_us']:.2f} | {row['over_cublas']:.2f} | {row['floor_us']:.2f} "
            f"| {row['floor_dependent_us']:.2f} | {row['relative_error']:.1e} | {row['tile']} |"
        )
    return lines


def chain_table(result: dict[str, Any]) -> list[str]:
    """A decoder's linear layers as chains."""
    lines = [
        f"## Chains of products\n\n{machine(result)}. The linear layers of a decoder, each reading",
        "what the one before wrote: µs a layer.",
        "",
        "| model | format | M | plain | dependent launch | cuBLAS | times faster | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["chains"]:
        lines.append(
            f"| {row['model']} | {row['format']} | {row['m']} | {row['plain_us']:.1f} "
            f"| {row['dependent_us']:.1f} | {row['cublas_us']:.1f} "
            f"| {row['cublas_us'] / row['dependent_us']:.2f} | {row['relative_error']:.1e} |"
        )
    return lines


def model_table(result: dict[str, Any]) -> list[str]:
    """A language model in each format, beside the same weights dequantized."""
    rows, tokens = result["language_model"], result["text"]["tokens"]
    version = result["environment"]["versions"]["transformers"]
    speeds = [key for key in rows[0] if "_per_s" in key]
    lines = [
        f"## A language model\n\n{machine(result)}, transformers",
        f"{version}. SmolLM2-135M-Instruct: its GGUF file,",
        "dequantized, and quantized anew while it is loaded. Perplexity of",
        f"{tokens} tokens, read at once, and of the first ones, one by one; and of four",
        "continuations the tokens before the first that is another than that of the same weights",
        "dequantized, whose activations are not quantized.",
        "",
        f"| {' | '.join(('format', 'products', 'at once', 'one by one', 'equal', *speeds))} |",
        f"|---|---|---|---|---|{'---|' * len(speeds)}",
    ]
    for row in rows:
        equal = ", ".join(map(str, row.get("equal_to_dequantized", ())))
        cells = [
            *(row["format"], row["runs"], f"{row['perplexity']:.3f}"),
            f"{row['perplexity_by_steps']:.3f} ({row['steps']})",
            f"{equal} of {row['new_tokens']}" if equal else "",
            *(f"{row[key]:.0f}" for key in speeds),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def activation_table(rows: list[dict[str, Any]]) -> list[str]:
    """Every row of the quantization of activations."""
    lines = [
        "| format | M | K | µs | copy µs | of the copy's bandwidth | GB/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['format']} | {row['m']} | {row['k']} | {row['us']:.2f} "
            f"| {row['copy_us']:.2f} | {row['of_copy']:.2f} | {row['gb_per_s']:.0f} |"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
