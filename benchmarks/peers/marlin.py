"""The worker that times Marlin and Machete, the kernels of a vLLM wheel's library.

VLLM_LIBRARY names that library: `_C_stable_libtorch.abi3.so`, or `_C.abi3.so` of older wheels. Of
the operators only the names of arguments are known here, and each is given those that it asks for.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import worker
from graphs import copies_beyond_l2

LIBRARY = "VLLM_LIBRARY"
# Bits and group size (-1: a scale per row) of the formats that both kernels have.
FORMATS = {
    "int4_g128 x bf16": (4, 128),
    "int4_g128_sbf16 x bf16": (4, 128),
    "int4 x bf16": (4, -1),
    "int8_g128 x bf16": (8, 128),
    "int8 x bf16": (8, -1),
}
# The order in which Marlin's threads read scales: of groups, and of one scale per row.
GROUP_ORDER = [row + 8 * column for row in range(8) for column in range(8)]
ROW_ORDER = [2 * row + at for row in range(4) for at in (0, 1, 8, 9, 16, 17, 24, 25)]


class Marlin(worker.Peer):
    """Codes with an offset of half their range and bfloat16 scales."""

    def __init__(self) -> None:
        path = os.environ.get(LIBRARY)
        if not path:
            raise FileNotFoundError(f"{LIBRARY} names no library of a vLLM wheel")
        torch.ops.load_library(path)
        self._path = path
        self._marlin: list[torch.Tensor] = []
        self._machete: list[torch.Tensor] = []

    def versions(self) -> dict[str, str]:
        return {**super().versions(), "library": os.path.basename(self._path)}

    def load(self, name: str, n: int, k: int, tokens: list[int]) -> None:
        if name not in FORMATS:
            raise worker.NoSuchFormatError(f"no format of its own for {name}")
        self._bits, group = FORMATS[name]
        self._group, self._shape = group, (n, k)
        size = k if group == -1 else group
        half = 2 ** (self._bits - 1)
        # [k, n] as both kernels think of weights, and scales [k / group, n].
        codes = torch.randint(0, 2 * half, (k, n), device="cuda", dtype=torch.int32)
        scales = (torch.rand(k // size, n, device="cuda") + 0.5) / (half * k**0.5)
        self._scales = scales.to(torch.bfloat16)

        def values(rows: slice) -> torch.Tensor:
            wide = self._scales[:, rows].double().repeat_interleave(size, 0)
            return ((codes[:, rows].double() - half) * wide).T

        self._sampled = worker.SampledWeight.of(n, values)
        self._words = pack(codes, self._bits)
        self._copies = copies_beyond_l2(n * k * self._bits // 8)

    def drop(self) -> None:
        self._marlin, self._machete, self._words = [], [], torch.empty(0)

    def products(self, m: int) -> dict[str, Callable[[], worker.Product]]:
        return {
            "marlin": lambda: self._product(m, self._marlin_call),
            "machete": lambda: self._product(m, self._machete_call),
        }

    def _product(
        self, m: int, call_of: Callable[[torch.Tensor], Callable[[int], torch.Tensor]]
    ) -> worker.Product:
        x = torch.randn(m, self._shape[1], device="cuda", dtype=torch.bfloat16)
        values = x[worker.sample_tokens(m).cuda()].double()
        return worker.Product(call_of(x), values, self._sampled)

    def _marlin_call(self, x: torch.Tensor) -> Callable[[int], torch.Tensor]:
        (n, k), empty = self._shape, torch.empty(0, dtype=torch.int32, device="cuda")
        sizes = {"size_m": len(x), "size_n": n, "size_k": k, "num_bits": self._bits}
        if not self._marlin:
            repacked = call_operator(
                ("gptq_marlin_repack",), {"b_q_weight": self._words, "perm": empty, **sizes}
            )
            self._marlin = [repacked] + [repacked.clone() for _ in range(self._copies - 1)]
        order = ROW_ORDER if self._group == -1 else GROUP_ORDER
        scales = self._scales.reshape(-1, len(order))[:, order].reshape(-1, n).contiguous()
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        given = {
            "a": x,
            "b_scales": scales,
            "g_idx_or_none": None,
            "perm_or_none": None,
            "workspace": torch.zeros(4 * sms, dtype=torch.int32, device="cuda"),
            "b_type_id": type_id(self._bits),
            "b_q_type_id": type_id(self._bits),
            "is_k_full": True,
            "use_atomic_add": False,
            "use_fp32_reduce": True,
            "is_zp_float": False,
            **sizes,
        }
        weights = self._marlin

        def multiply(i: int) -> torch.Tensor:
            weight = {"b_q_weight": weights[i % len(weights)]}
            return call_operator(("marlin_gemm", "gptq_marlin_gemm"), {**given, **weight})

        return multiply

    def _machete_call(self, x: torch.Tensor) -> Callable[[int], torch.Tensor]:
        if not self._machete:
            packed = call_operator(
                ("machete_prepack_B",),
                {
                    "b": self._words.t().contiguous().t(),
                    "a_type": torch.bfloat16,
                    "b_type_id": type_id(self._bits),
                    "group_scales_type": torch.bfloat16,
                    "group_scales_type_or_none": torch.bfloat16,
                },
            )
            self._machete = [packed] + [packed.clone() for _ in range(self._copies - 1)]
        given = {
            "a": x,
            "b_type_id": type_id(self._bits),
            "out_type": torch.bfloat16,
            "out_type_or_none": torch.bfloat16,
            "group_scales": self._scales,
            "group_scales_or_none": self._scales,
            "group_size": self._group,
            "group_size_or_none": self._group,
        }
        weights = self._machete

        def multiply(i: int) -> torch.Tensor:
            return call_operator(("machete_mm",), {**given, "b": weights[i % len(weights)]})

        return multiply


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [k, n] in int32 words [k * bits / 32, n], the first of k in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(codes.shape[0] // per_word, codes.shape[1], device=codes.device).long()
    for at in range(per_word):
        words |= codes[at::per_word].long() << (bits * at)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def type_id(bits: int) -> int:
    """How the library numbers unsigned codes with an offset of half their range.

    From the lowest bit: 8 bits of exponent, 8 of mantissa, the sign, 32 of the offset, whether it
    is finite only, and 1 for NaN as in IEEE 754.
    """
    return bits << 8 | 2 ** (bits - 1) << 17 | 1 << 50


def call_operator(names: tuple[str, ...], given: dict[str, Any]) -> Any:
    """Call the first operator that exists, with those arguments that it has, in its order."""
    packet = next((getattr(torch.ops._C, n) for n in names if hasattr(torch.ops._C, n)), None)
    if packet is None:
        raise LookupError(f"the library has no operator {' or '.join(names)}")
    operator, values = packet.default, []
    known = {name.lower(): value for name, value in given.items()}
    for argument in operator._schema.arguments:
        if argument.name.lower() in known:
            values.append(known[argument.name.lower()])
        elif argument.has_default_value():
            values.append(argument.default_value)
        elif "Optional" in str(argument.type):
            values.append(None)
        else:
            raise TypeError(f"{operator} asks for {argument.name}: {argument.type}")
    return operator(*values)


if __name__ == "__main__":
    worker.main(Marlin)
