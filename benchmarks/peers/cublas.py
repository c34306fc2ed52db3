"""The worker that times cuBLAS through torch: 16-bit floats for any format, and fp8 for fp8."""

from collections.abc import Callable

import torch
import worker
from graphs import copies_beyond_l2

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128
# Formats beside which cuBLAS multiplies fp8 by fp8, and with which scales.
FP8_SCALES = {"fp8 x fp8": ("tensor", "row"), "fp8_block128 x fp8_g128": ("block",)}


class Cublas(worker.Peer):
    """A dense weight in bfloat16 (float16 where activations are), and in fp8 where asked."""

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "cuda": str(torch.version.cuda)}

    def load(self, name: str, n: int, k: int, tokens: list[int]) -> None:
        self._dtype = torch.float16 if name.endswith((" fp16", " float16")) else torch.bfloat16
        dense = torch.randn(n, k, device="cuda", dtype=self._dtype) * k**-0.5
        self._dense = [dense] + [dense.clone() for _ in range(copies_beyond_l2(2 * n * k) - 1)]
        self._sampled = worker.SampledWeight.of(n, lambda rows: dense[rows])
        self._fp8 = {scales: Fp8Weight(dense, scales) for scales in FP8_SCALES.get(name, ())}

    def drop(self) -> None:
        self._dense, self._fp8 = [], {}

    def products(self, m: int) -> dict[str, Callable[[], worker.Product]]:
        dense = self._dense
        x = torch.randn(m, dense[0].shape[1], device="cuda", dtype=self._dtype)
        values = x[worker.sample_tokens(m).cuda()].double()

        def multiply(i: int) -> torch.Tensor:
            return torch.mm(x, dense[i % len(dense)].t())

        width = "bf16" if self._dtype == torch.bfloat16 else "fp16"
        found = {f"cublas {width}": lambda: worker.Product(multiply, values, self._sampled)}
        for scales, weight in self._fp8.items():
            # Blocks are always summed in float32.
            for fast in (False,) if scales == "block" else (False, True):
                name = f"cublas fp8 {scales}" + (" fast" if fast else "")
                found[name] = weight.product(x, fast)
        return found


class Fp8Weight:
    """A weight in fp8 with scales per tensor, per row or per 128 x 128 block, in copies."""

    def __init__(self, dense: torch.Tensor, scales: str) -> None:
        n, k = dense.shape
        self._scales = scales
        codes, self._weight_scales, values = quantize(dense, scales, rows=BLOCK)
        self._sampled = worker.SampledWeight.of(n, values)
        copies = copies_beyond_l2(n * k)
        self._codes = [codes] + [codes.clone() for _ in range(copies - 1)]

    def product(self, x: torch.Tensor, fast: bool) -> Callable[[], worker.Product]:
        """The product of tokens, which are quantized here."""

        def make() -> worker.Product:
            codes, scales, values = quantize(x, self._scales, rows=1)
            tokens = torch.cat(
                [values(slice(t, t + 1)) for t in worker.sample_tokens(len(x)).tolist()]
            )
            x_scales, weight_scales = scales, self._weight_scales
            if self._scales == "block":
                # Of tokens the column is contiguous, of weights the row, padded to 4.
                m, columns = scales.shape
                x_scales = torch.empty_strided((m, columns), (1, m), device=x.device)
                x_scales.copy_(scales)
                padded = weight_scales.new_zeros(weight_scales.shape[0], -(-columns // 4) * 4)
                padded[:, :columns] = weight_scales
                weight_scales = padded[:, :columns]

            def multiply(i: int) -> torch.Tensor:
                return torch._scaled_mm(
                    codes,
                    self._codes[i % len(self._codes)].t(),
                    scale_a=x_scales,
                    scale_b=weight_scales.t(),
                    out_dtype=torch.bfloat16,
                    use_fast_accum=fast,
                )

            return worker.Product(multiply, tokens, self._sampled)

        return make


def quantize(
    x: torch.Tensor, granularity: str, rows: int
) -> tuple[torch.Tensor, torch.Tensor, Callable[[slice], torch.Tensor]]:
    """fp8 codes, float32 scales, and what gives rows of them as numbers.

    Args:
        x: [r, k].
        granularity: `tensor`, `row`, or `block` of `rows` x 128.
        rows: 1 or 128.
    """
    r, k = x.shape
    if granularity == "tensor":
        scales = (x.abs().amax().float() / FP8_MAX).reshape(1, 1)
        high, wide = r, k
    elif granularity == "row":
        scales = x.abs().amax(1, keepdim=True).float() / FP8_MAX
        high, wide = 1, k
    else:
        blocks = x.abs().view(r // rows, rows, k // BLOCK, BLOCK)
        scales = blocks.amax((1, 3)).float() / FP8_MAX
        high, wide = rows, BLOCK

    def spread(part: slice) -> torch.Tensor:
        some = scales[part.start // high : -(-part.stop // high)] if high < r else scales
        count = 1 if high >= r else high
        return some.repeat_interleave(count, 0).repeat_interleave(wide, 1)

    codes = torch.empty(r, k, dtype=FP8, device=x.device)
    step = max(BLOCK, 2**27 // k // BLOCK * BLOCK)
    for first in range(0, r, step):
        part = slice(first, min(first + step, r))
        units = x[part].float() / spread(part)
        codes[part] = units.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes, scales, lambda part: codes[part].double() * spread(part).double()


if __name__ == "__main__":
    worker.main(Cublas)
