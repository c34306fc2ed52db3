"""The worker that times humming-kernels, which owns the import name `humming` too."""

import contextlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
import worker
from graphs import copies_beyond_l2

# Its own names of the same formats: weights, and activations where they are quantized. Scales are
# bfloat16 where none are named (float32 of blocks), one per token of quantized activations.
INT4 = {"dtype": "int4"}
MXFP4 = {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"}
NVFP4 = {
    "dtype": "float4e2m1",
    "group_size": 16,
    "scale_dtype": "float8e4m3",
    "scale_2_type": "tensor",
}
INT8, FP8 = {"dtype": "int8"}, {"dtype": "float8e4m3"}
FP8_GROUPS, FP8_BLOCKS = {**FP8, "group_size": 128}, {**FP8, "group_size": 128, "group_size_n": 128}
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int4_g128 x bf16": ({**INT4, "group_size": 128}, {}),
    "int4_g128_sbf16 x bf16": ({**INT4, "group_size": 128}, {}),
    "int4 x bf16": (INT4, {}),
    "int8 x bf16": (INT8, {}),
    "int8_g128 x bf16": ({**INT8, "group_size": 128}, {}),
    "int3_g128 x bf16": ({"dtype": "int3", "group_size": 128}, {}),
    "int2_g128 x bf16": ({"dtype": "int2", "group_size": 128}, {}),
    "fp8 x bf16": (FP8, {}),
    "mxfp4 x bf16": (MXFP4, {}),
    "nvfp4 x bf16": (NVFP4, {}),
    "int8 x int8": (INT8, INT8),
    "fp8 x fp8": (FP8, FP8),
    "int4 x int8": (INT4, INT8),
    "int4 x fp8": (INT4, FP8),
    "mxfp4 x fp8": (MXFP4, FP8),
    "fp8_block128 x fp8_g128": (FP8_BLOCKS, FP8_GROUPS),
}
TENSORS = ("weight", "weight_scale", "weight_scale_2", "zero_point", "locks")


class HummingKernels(worker.Peer):
    """A layer of its own, quantized and transformed by itself, with the tiles that it chooses."""

    distributions = ("torch", "humming-kernels", "triton")

    def __init__(self) -> None:
        from humming.kernel.humming import HummingKernel

        from humming import forward, layer, transform, tune

        self._layer, self._forward, self._tune = layer, forward, tune
        self._transform, self._kernel = transform, HummingKernel
        self._copies: list[dict[str, torch.Tensor]] = []

    def versions(self) -> dict[str, str]:
        # Where this project is installed beside it, the first distribution found is the other's.
        found = super().versions()
        for distribution in importlib.metadata.distributions():
            files = distribution.files or ()
            if any(str(file).startswith("humming/tune/") for file in files):
                found["humming-kernels"] = distribution.version
        return found

    def _make(self, name: str, n: int, k: int) -> Any:
        if name not in FORMATS:
            raise worker.NoSuchFormatError(f"no format of its own for {name}")
        weight, activation = FORMATS[name]
        return self._layer.HummingLayer(
            shape_n=n,
            shape_k=k,
            weight_config=dict(weight),
            input_config=dict(activation),
            torch_dtype=torch.bfloat16,
        )

    def compile(self, name: str, n: int, k: int, tokens: list[int]) -> bool:
        layer = self._make(name, n, k)
        config = self._transform.prepare_layer_config(
            shape_n=n,
            shape_k=k,
            weight_schema=layer.weight_schema,
            input_schema=layer.input_schema,
            torch_dtype=torch.bfloat16,
            device=0,
        )
        self._kernel.prepare_kernels(config.to_str(), device=0)
        return True

    def load(self, name: str, n: int, k: int, tokens: list[int]) -> None:
        layer = self._make(name, n, k).cuda()
        dense = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
        layer.load_from_unquantized(dense)
        del dense
        values = layer.weight_schema.dequant_tensors(dict(layer.state_dict()))
        self._sampled = worker.SampledWeight.of(n, values.__getitem__)
        del values
        worker.release_memory()
        layer.transform()
        self._config = layer.humming_config
        tensors = {name: getattr(layer, name, None) for name in TENSORS}
        first = {name: part.data for name, part in tensors.items() if part is not None}
        copies = copies_beyond_l2(
            sum(part.numel() * part.element_size() for part in first.values())
        )
        self._copies = [first] + [
            {name: part.clone() for name, part in first.items()} for _ in range(copies - 1)
        ]

    def drop(self) -> None:
        self._copies = []

    def products(self, m: int) -> dict[str, Callable[[], worker.Product]]:
        return {"humming-kernels": lambda: self._product(m)}

    def _product(self, m: int) -> worker.Product:
        config, copies = self._config, self._copies
        k = config.shape_k
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        at = worker.sample_tokens(m).cuda()
        inputs, scale = self._forward.may_quant_input(config, x)
        values = inputs[at].float().double()
        if scale is not None:
            scales = scale.reshape(m, -1)[at].double()
            group = config.input_scale_group_size or k
            values = values * scales.repeat_interleave(group, 1)[:, :k]
        out = torch.empty(m, config.shape_n, device="cuda", dtype=torch.bfloat16)

        def multiply(i: int) -> torch.Tensor:
            self._forward.humming_forward(
                config, inputs=inputs, input_scale=scale, outputs=out, **copies[i % len(copies)]
            )
            return out

        note = ""
        with contextlib.suppress(Exception):  # which tile it takes is told where it can be asked
            chosen = self._tune.get_heuristics_config(config, shape_m=m)
            note = (
                f"{chosen['mma_type']} {chosen['block_shape']}, {chosen.get('num_stages')} stages"
            )
        return worker.Product(multiply, values, self._sampled, note)


if __name__ == "__main__":
    worker.main(HummingKernels)
