"""GGUF files against a reading value by value, and against the package of those who define them."""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from humming.checkpoints.gguf import Gguf, GgufFile
from humming.checkpoints.gguf_blocks import BLOCK_TYPES, weight_of_blocks
from humming.errors import CheckpointError
from humming.quantized import QuantizedWeight
from humming.reference import dequantize

NUMBER = {kind.name: number for number, kind in BLOCK_TYPES.items()}
READ = [kind.name for kind in BLOCK_TYPES.values() if kind.weight]
# Where the float16 numbers of a block are.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "TQ2_0": (64,),
    "MXFP4": (),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def random_rows(name: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Bytes of rows in which every scale is a finite number."""
    kind = BLOCK_TYPES[NUMBER[name]]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, blocks, kind.size), dtype=np.uint8)
    for at in HALVES[name]:
        halves = rng.normal(size=(rows, blocks, 1)).astype(np.float16)
        data[..., at : at + 2] = halves.view(np.uint8)
    if name == "MXFP4":
        data[..., 0] = rng.integers(1, 255, (rows, blocks))
    if name == "TQ2_0":
        digits = rng.integers(0, 3, (rows, blocks, 64, 4))
        data[..., :64] = (digits << np.array([0, 2, 4, 6])).sum(-1)
    return data.reshape(rows, blocks * kind.size)


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def nibble(block: bytes, start: int, place: int) -> int:
    """Code `place` of 32: the low nibbles of 16 bytes come before the high ones."""
    byte = block[start + place % 16]
    return byte >> 4 if place >= 16 else byte & 15


def bit(block: bytes, start: int, place: int) -> int:
    return block[start + place // 8] >> place % 8 & 1


def six_bits(block: bytes, index: int) -> tuple[int, int]:
    """The scale and the minimum of a group of Q4_K and Q5_K."""
    packed = block[4:16]
    if index < 4:
        return packed[index] & 63, packed[index + 4] & 63
    last = packed[index + 4]
    scale = last & 15 | (packed[index - 4] >> 6) << 4
    return scale, last >> 4 | (packed[index] >> 6) << 4


def value(name: str, block: bytes, i: int) -> float:
    """Value i of a block, one at a time, as the format is described."""
    chunk, inside = divmod(i, 128)
    shift, byte = 2 * (inside // 32), inside % 32
    match name:
        case "Q4_0":
            return half(block, 0) * (nibble(block, 2, i) - 8)
        case "Q4_1":
            return half(block, 0) * nibble(block, 4, i) + half(block, 2)
        case "Q5_0":
            return half(block, 0) * ((nibble(block, 6, i) | bit(block, 2, i) << 4) - 16)
        case "Q5_1":
            code = nibble(block, 8, i) | bit(block, 4, i) << 4
            return half(block, 0) * code + half(block, 2)
        case "Q8_0":
            return half(block, 0) * int(np.int8(np.uint8(block[2 + i])))
        case "IQ4_NL":
            return half(block, 0) * IQ4[nibble(block, 2, i)]
        case "IQ4_XS":
            group = i // 32
            low = block[4 + group // 2] >> 4 * (group % 2) & 15
            high = int.from_bytes(block[2:4], "little") >> 2 * group & 3
            scale = (low | high << 4) - 32
            return half(block, 0) * scale * IQ4[nibble(block, 8 + 16 * group, i % 32)]
        case "MXFP4":
            code = nibble(block, 1, i)
            number = E2M1[code & 7] * 2.0 ** (block[0] - 127)
            return -number if code & 8 else number
        case "TQ2_0":
            return half(block, 64) * ((block[32 * chunk + byte] >> shift & 3) - 1)
        case "Q2_K":
            both = block[i // 16]
            code = block[16 + 32 * chunk + byte] >> shift & 3
            return half(block, 80) * (both & 15) * code - half(block, 82) * (both >> 4)
        case "Q3_K":
            code = block[32 + 32 * chunk + byte] >> shift & 3
            code -= 0 if block[byte] >> (i // 32) & 1 else 4
            group, packed = i // 16, block[96:108]
            low = packed[group % 8] >> 4 * (group // 8) & 15
            high = packed[8 + group % 4] >> 2 * (group // 4) & 3
            return half(block, 108) * ((low | high << 4) - 32) * code
        case "Q4_K":
            scale, minimum = six_bits(block, i // 32)
            code = block[16 + 32 * (i // 64) + byte] >> 4 * (i // 32 % 2) & 15
            return half(block, 0) * scale * code - half(block, 2) * minimum
        case "Q5_K":
            scale, minimum = six_bits(block, i // 32)
            code = block[48 + 32 * (i // 64) + byte] >> 4 * (i // 32 % 2) & 15
            code |= (block[16 + byte] >> (i // 32) & 1) << 4
            return half(block, 0) * scale * code - half(block, 2) * minimum
        case "Q6_K":
            low = block[64 * chunk + inside % 64] >> 4 * (inside // 64) & 15
            high = block[128 + 32 * chunk + byte] >> shift & 3
            scale = int(np.int8(np.uint8(block[192 + i // 16])))
            return half(block, 208) * scale * ((low | high << 4) - 32)
    raise AssertionError(name)


def slow_values(name: str, data: np.ndarray) -> np.ndarray:
    kind = BLOCK_TYPES[NUMBER[name]]
    rows = data.reshape(data.shape[0], -1, kind.size)
    return np.array(
        [
            [value(name, block.tobytes(), i) for block in row for i in range(kind.values)]
            for row in rows
        ]
    )


def check_close(name: str, weight: QuantizedWeight, expected: np.ndarray) -> None:
    """Exact, but for zero points: -minimum / scale is rounded to float32 once."""
    found = dequantize(weight).numpy()
    if weight.zeros is None:
        np.testing.assert_array_equal(found, expected)
        return
    minima = (weight.zeros.double() * weight.scales.double()).abs()
    groups = weight.spec.scale_group(weight.shape[1])
    # The division rounds once in float32; so does the product that made the minimum.
    bound = minima.repeat_interleave(groups, 1).numpy() * 2.0**-23
    assert (np.abs(found - expected) <= bound).all(), name


@pytest.mark.parametrize("name", READ)
def test_blocks_value_by_value(name: str) -> None:
    kind = BLOCK_TYPES[NUMBER[name]]
    data = random_rows(name, 3, 2, seed=1)
    weight = weight_of_blocks(kind, torch.from_numpy(data), 2 * kind.values)
    check_close(name, weight, slow_values(name, data))


@pytest.mark.parametrize("name", READ)
def test_blocks_against_the_package_of_the_format(name: str) -> None:
    quants = pytest.importorskip("gguf.quants", reason="the package gguf is not installed")
    kind = BLOCK_TYPES[NUMBER[name]]
    data = random_rows(name, 16, 5, seed=2)
    if name == "MXFP4":  # whose decoder there loses subnormal halves of scales
        data.reshape(16, 5, -1)[..., 0] |= 64
        data.reshape(16, 5, -1)[..., 0] &= 127
    weight = weight_of_blocks(kind, torch.from_numpy(data), 5 * kind.values)
    number = quants.GGMLQuantizationType(NUMBER[name])
    expected = quants.dequantize(data, number).astype(np.float64)
    if weight.zeros is None:
        np.testing.assert_array_equal(dequantize(weight).numpy(), expected)
    else:  # which rounds each value to float32
        spread = np.abs(expected).max()
        assert np.abs(dequantize(weight).numpy() - expected).max() <= 2.0**-22 * spread


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q4_K"])
def test_groups_of_one_value_keep_it(name: str) -> None:
    kind = BLOCK_TYPES[NUMBER[name]]
    data = random_rows(name, 2, 1, seed=3)
    data[:, 0:2] = 0
    weight = weight_of_blocks(kind, torch.from_numpy(data), kind.values)
    np.testing.assert_array_equal(dequantize(weight).numpy(), slow_values(name, data))


# -- files ------------------------------------------------------------------------------------

Entry = tuple[str, str, tuple[int, ...], bytes]


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def written(tensors: list[Entry], pairs: tuple[bytes, ...] = (), alignment: int = 32) -> bytes:
    """A file of tensors (name, type, shape from N to K, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    body = b""
    for name, kind, shape, data in tensors:
        body += b"\0" * (-len(body) % alignment)
        head += string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in shape[::-1])
        head += struct.pack("<IQ", NUMBER[kind], len(body))
        body += data
    return head + b"\0" * (-len(head) % alignment) + body


def a_file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def architecture(name: str) -> bytes:
    return string("general.architecture") + struct.pack("<I", 8) + string(name)


def test_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    quantized = random_rows("Q4_0", 6, 4, seed=5)
    experts = random_rows("Q6_K", 3 * 4, 1, seed=6)
    norm = rng.normal(size=7).astype(np.float32)
    plain = rng.normal(size=(5, 3)).astype(np.float16)
    bias = rng.normal(size=6).astype(np.float32)
    odd = string("some.numbers") + struct.pack("<IIQ", 9, 4, 3) + struct.pack("<3I", 1, 2, 3)
    path = a_file(
        tmp_path,
        written(
            [
                ("blk.0.norm.weight", "F32", (7,), norm.tobytes()),
                ("blk.0.attn_q.weight", "Q4_0", (6, 128), quantized.tobytes()),
                ("blk.0.attn_q.bias", "F32", (6,), bias.tobytes()),
                ("blk.0.ffn_up_exps.weight", "Q6_K", (3, 4, 256), experts.tobytes()),
                ("output.weight", "F16", (5, 3), plain.tobytes()),
                ("blk.1.attn_q.weight", "IQ1_S", (1, 256), bytes(50)),
            ],
            (architecture("llama"), odd),
        ),
    )
    file = GgufFile(path)
    assert file.metadata["some.numbers"] == (1, 2, 3)
    assert file.shape("blk.0.attn_q.weight") == (6, 72)
    method = Gguf(file.config, str(path))

    def read(module: str) -> tuple[object, np.ndarray, tuple[str, ...]]:
        linear = method.read(module, method.decide(module), file)
        if isinstance(linear.weight, QuantizedWeight):
            return linear.bias, dequantize(linear.weight).numpy(), linear.notes
        return linear.bias, linear.weight.double().numpy(), linear.notes

    found_bias, found, notes = read("blk.0.attn_q")
    np.testing.assert_array_equal(found, slow_values("Q4_0", quantized))
    assert torch.equal(found_bias, torch.from_numpy(bias))  # type: ignore[arg-type]
    assert any("rotary" in note for note in notes)
    np.testing.assert_array_equal(read("blk.0.ffn_up_exps.1")[1], slow_values("Q6_K", experts[4:8]))
    np.testing.assert_array_equal(read("output")[1], plain.astype(np.float64))
    assert method.decide("output").action == "plain"
    refused = method.decide("blk.1.attn_q")
    assert refused.action == "refused"
    assert "codebook" in refused.why
    assert "Q4_K" in refused.why
    for module in ("blk.0.ffn_up_exps.3", "blk.1.attn_q", "blk.9.attn_q", "blk.0.norm"):
        with pytest.raises(CheckpointError, match="blk"):
            read(module)


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("Q4_0", lambda data: data.__setitem__(slice(0, 2), b"\x00\x7e"), "no finite number"),
        ("MXFP4", lambda data: data.__setitem__(0, 255), "no finite number"),
    ],
)
def test_scales_that_are_no_numbers(
    tmp_path: Path, name: str, damage: Callable[[bytearray], None], told: str
) -> None:
    data = bytearray(random_rows(name, 1, 2, seed=7).tobytes())
    damage(data)
    file = GgufFile(a_file(tmp_path, written([("a.weight", name, (1, 64), bytes(data))])))
    method = Gguf(file.config, file.where)
    with pytest.raises(CheckpointError, match=told):
        method.read("a", method.decide("a"), file)


def test_files_of_the_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    writer = gguf.GGUFWriter(str(tmp_path / "its.gguf"), "qwen3")
    weight = np.random.default_rng(8).normal(size=(8, 256)).astype(np.float32)
    expected = {}
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ2_0", "MXFP4"):
        kind = gguf.GGMLQuantizationType[name]
        blocks = gguf.quants.quantize(weight, kind)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(blocks, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "its.gguf")
    method = Gguf(file.config, file.where)
    for name, values in expected.items():
        read = method.read(name, method.decide(name), file).weight
        assert isinstance(read, QuantizedWeight)
        found = dequantize(read).numpy()
        bound = 0.0 if read.zeros is None else 2.0**-22 * np.abs(values).max()
        assert np.abs(found - values).max() <= bound, name


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_damaged_files(tmp_path: Path, data: st.DataObject) -> None:
    blocks = random_rows("Q4_K", 2, 1, seed=9).tobytes()
    whole = bytearray(
        written(
            [("a.weight", "Q4_K", (2, 256), blocks), ("b.weight", "F32", (1, 2), bytes(8))],
            (architecture("llama"),),
        )
    )
    header = len(whole) - len(blocks) - 32
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header))
        whole[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(whole)))
    with suppress(CheckpointError):
        file = GgufFile(a_file(tmp_path, bytes(whole[:end])))
        method = Gguf(file.config, file.where)
        for name in file.names:
            module = name.removesuffix(".weight")
            method.read(module, method.decide(module), file)
