"""Valid little model files, and ways of breaking them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from enum import Enum

from gapless.loading import TensorType
from helpers_gguf import GgufBuilder, Kind, safetensors


class Format(Enum):
    """What a file claims to be."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    INDEX = "index"


INTEGERS = [0, 1, 2, 4, 5, 7, 9, 13, 31, 32, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
INTEGERS += [2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]
TOKENS = rb'{ } [ ] : , " \ \u \ud800 null true NaN -1 1e9 0.5 9223372036854775808'.split()
TOKENS += rb'"__metadata__":{}, "F32" "F8_E4M3" "shape" "dtype":"I64", "data_offsets":[0,0],'.split()
TOKENS += [b"9" * 40, b"[" * 50, b"\xff", b"\0", b" "]


def gguf_seeds() -> list[bytes]:
    tokens = ["<s>", "</s>", "a", "", "Ġthe", "🦙"]
    full = GgufBuilder().key("general.architecture", Kind.STRING, "llama")
    full.key("general.alignment", Kind.U32, 32).key("llama.rope.freq_base", Kind.F32, 1e4)
    full.key("tokenizer.ggml.add_bos_token", Kind.BOOL, 1).key("big", Kind.U64, 2**40)
    full.array("tokenizer.ggml.tokens", Kind.STRING, tokens)
    full.array("tokenizer.ggml.scores", Kind.F32, [0.0] * 6)
    full.array("tokenizer.ggml.token_type", Kind.I32, [3, 3, 1, 1, 1, 1])
    full.array("tokenizer.ggml.merges", Kind.STRING, ["a b", "b c"]).array("flags", Kind.BOOL, [0, 1])
    for kind in (TensorType.F32, TensorType.Q8_0, TensorType.Q4_K, TensorType.I32):
        full.tensor(f"{kind.name}.weight", [kind.block_size, 2], kind.value, bytes(2 * kind.block_bytes))
    values = GgufBuilder()
    for scalar in Kind:
        if scalar not in (Kind.ARRAY, Kind.STRING):
            values.key(scalar.name, scalar, 1).array(f"{scalar.name}s", scalar, [1, 0])
    small = (
        GgufBuilder().key("general.alignment", Kind.U32, 8).tensor("w", [1], TensorType.F32.value, bytes(4))
    )
    return [*(builder.build() for builder in (full, values, small, GgufBuilder())), split_gguf(1)]


def split_gguf(number: int) -> bytes:
    """One of three parts."""
    builder = GgufBuilder(version=2).key("split.no", Kind.U16, number).key("split.count", Kind.U16, 3)
    builder.key("split.tensors.count", Kind.I32, 3)
    return builder.tensor(f"w{number}", [2, 1, 3, 1], TensorType.F16.value, bytes(12)).build()


def safetensors_seeds() -> list[bytes]:
    def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    several = {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": entry("BF16", [4, 2], 0, 16),
        "lm_head.weight": entry("F32", [2, 2, 1], 16, 32),
        "mask": entry("BOOL", [], 32, 33),
        "none": entry("I64", [0, 3], 33, 33),
    }
    return [
        safetensors(several, bytes(33)),
        safetensors({"w": entry("F16", [3], 0, 6)}, bytes(6)),
        safetensors({"__metadata__": {}}),
        safetensors({}),
    ]


def index_seeds() -> list[bytes]:
    return [
        b'{"metadata": {"total_size": 14}, "weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}',
        b'{"weight_map": {"w": "a.safetensors"}}',
    ]


Mutation = Callable[[random.Random, bytearray, bytes], None]


def place(rng: random.Random, data: bytearray) -> int:
    return rng.randrange(len(data) + 1)


def flip_bit(rng: random.Random, data: bytearray, other: bytes) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def set_bytes(rng: random.Random, data: bytearray, other: bytes) -> None:
    begin = place(rng, data)
    for index in range(begin, min(begin + rng.choice((1, 1, 2, 4, 8)), len(data))):
        data[index] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def set_integer(rng: random.Random, data: bytearray, other: bytes) -> None:
    """Overwrites a length, count, type or offset, which a zero byte behind it tends to give away."""
    begin = place(rng, data)
    for _ in range(16):
        if data[begin + 1 : begin + 4] == b"\0\0\0":
            break
        begin = place(rng, data)
    size = rng.choice((4, 8))
    old = int.from_bytes(data[begin : begin + size], "little")
    value = rng.choice((rng.choice(INTEGERS), old + 1, old - 1, len(data) - begin, 2 * old))
    data[begin : begin + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def truncate(rng: random.Random, data: bytearray, other: bytes) -> None:
    del data[place(rng, data) :]


def extend(rng: random.Random, data: bytearray, other: bytes) -> None:
    data += rng.choice((bytes(rng.randrange(200)), rng.randbytes(rng.randrange(64))))


def delete(rng: random.Random, data: bytearray, other: bytes) -> None:
    begin = place(rng, data)
    del data[begin : begin + rng.randrange(32)]


def repeat(rng: random.Random, data: bytearray, other: bytes) -> None:
    begin = place(rng, data)
    data[begin:begin] = data[begin : begin + rng.randrange(100)]


def splice(rng: random.Random, data: bytearray, other: bytes) -> None:
    begin = rng.randrange(len(other) + 1)
    data[place(rng, data) :] = other[begin:]


def insert_token(rng: random.Random, data: bytearray, other: bytes) -> None:
    begin = place(rng, data)
    data[begin : begin + rng.choice((0, 0, 1, 2, 5))] = rng.choice(TOKENS)


MUTATIONS: list[Mutation] = [flip_bit, set_bytes, set_integer, set_integer, truncate, extend, delete, repeat]
MUTATIONS += [splice, insert_token, insert_token]


def mutate(rng: random.Random, seeds: list[bytes], has_length: bool) -> bytes:
    """`has_length`: the file begins with the length of its header."""
    data = bytearray(rng.choice(seeds))
    header_bytes = int.from_bytes(data[:8], "little")
    size = len(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        rng.choice(MUTATIONS)(rng, data, rng.choice(seeds))
    if has_length and len(data) >= 8 and rng.random() < 0.7:
        # Most changes would only break the length; repair it, so that they reach what lies behind it.
        data[:8] = struct.pack("<Q", max(0, header_bytes + len(data) - size))
    return bytes(data)


def all_seeds() -> dict[Format, list[bytes]]:
    return {
        Format.GGUF: gguf_seeds(),
        Format.SAFETENSORS: safetensors_seeds(),
        Format.INDEX: index_seeds(),
    }
