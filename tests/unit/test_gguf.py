"""GGUF files: what is read, and that every way of being malformed ends in a typed error."""

from __future__ import annotations

import re
import struct
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import FormatError, LoadError, UnsupportedModelError
from gapless.loading import CheckpointKind, StringArray, TensorType, open_checkpoint
from gapless.loading.gguf import GgufFile, parse_gguf
from helpers_gguf import GgufBuilder, Kind, text

F32, Q4_K, Q8_0 = TensorType.F32.value, TensorType.Q4_K.value, TensorType.Q8_0.value


def parse(builder: GgufBuilder | bytes) -> GgufFile:
    data = builder if isinstance(builder, bytes) else builder.build()
    return parse_gguf(memoryview(data), "test.gguf")


def rejects(builder: GgufBuilder | bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        parse(builder)
    assert "test.gguf" in str(caught.value)


def small() -> GgufBuilder:
    return (
        GgufBuilder()
        .key("general.architecture", Kind.STRING, "llama")
        .array("tokenizer.ggml.tokens", Kind.STRING, ["a", "bc", ""])
        .array("tokenizer.ggml.scores", Kind.F32, [0.5, -1.0, 0.0])
        .tensor("output.weight", [32, 2], Q8_0, bytes(range(68)))
        .tensor("norm.weight", [3], F32, struct.pack("<3f", 1, 2, 3))
    )


# What is read


@pytest.mark.parametrize("version", [2, 3])
def test_reads_metadata_and_tensors(tmp_path: Path, version: int) -> None:
    path = tmp_path / "model.gguf"
    builder = small()
    builder.version = version
    path.write_bytes(builder.build())
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.kind is CheckpointKind.GGUF
        assert checkpoint.path == path
        assert checkpoint.directory is None
        assert checkpoint.metadata["general.architecture"] == "llama"
        assert list(checkpoint.metadata["tokenizer.ggml.tokens"]) == ["a", "bc", ""]
        assert checkpoint.metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0, 0.0]
        info = checkpoint.tensors["output.weight"]
        assert (info.type, info.shape, info.nbytes) == (TensorType.Q8_0, (2, 32), 68)
        assert bytes(checkpoint.raw("output.weight")) == bytes(range(68))
        assert checkpoint.raw("norm.weight").view("<f4").tolist() == [1, 2, 3]
        assert checkpoint.total_bytes == 68 + 12


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Kind.U8, 255),
        (Kind.I8, -128),
        (Kind.U16, 65535),
        (Kind.I16, -32768),
        (Kind.U32, 2**32 - 1),
        (Kind.I32, -(2**31)),
        (Kind.U64, 2**64 - 1),
        (Kind.I64, -(2**63)),
        (Kind.F32, 0.25),
        (Kind.F64, 0.1),
        (Kind.BOOL, True),
        (Kind.STRING, "grüße 🦙"),
    ],
)
def test_every_type_of_value(kind: Kind, value: object) -> None:
    parsed = parse(GgufBuilder().key("one", kind, value).array("many", kind, [value, value]))
    assert parsed.metadata["one"] == value
    assert type(parsed.metadata["one"]) is type(value)
    assert list(parsed.metadata["many"]) == [value, value]
    assert parsed.kinds == {"one": kind.name.lower(), "many": f"{kind.name.lower()}[]"}


def test_values_are_read_only(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small().build())
    with open_checkpoint(path) as checkpoint:
        for values in (checkpoint.raw("norm.weight"), checkpoint.metadata["tokenizer.ggml.scores"]):
            with pytest.raises(ValueError, match="read-only"):
                values[0] = 1


def test_views_outlive_the_checkpoint_and_released_pages(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    data = np.arange(65536, dtype=np.float32).tobytes()
    path.write_bytes(GgufBuilder().tensor("w", [65536], F32, data).build())
    checkpoint = open_checkpoint(path)
    raw = checkpoint.raw("w")
    checkpoint.release("w")
    checkpoint.close()
    checkpoint.close()
    assert bytes(raw) == data


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small().build())
    with open_checkpoint(path) as checkpoint, pytest.raises(LoadError, match="'lm_head'"):
        checkpoint.raw("lm_head")


def test_no_tensors_and_empty_arrays() -> None:
    parsed = parse(GgufBuilder().array("none", Kind.STRING, []).array("zero", Kind.F32, []))
    assert parsed.tensors == {}
    assert list(parsed.metadata["none"]) == []
    assert len(parsed.metadata["zero"]) == 0


def test_alignment_moves_the_data() -> None:
    builder = GgufBuilder(alignment=256).key("general.alignment", Kind.U32, 256)
    parsed = parse(builder.tensor("a", [1], F32, b"aaaa").tensor("b", [1], F32, b"bbbb"))
    assert parsed.tensors["b"].offset - parsed.tensors["a"].offset == 256
    assert parsed.tensors["a"].offset % 256 == 0


def test_indices_beside_weights_are_listed() -> None:
    parsed = parse(GgufBuilder().tensor("gpu_idx", [4], TensorType.I32.value, bytes(16)))
    assert parsed.tensors["gpu_idx"].type is TensorType.I32
    assert not TensorType.I32.is_weight


def test_token_bytes_that_are_not_utf8_survive() -> None:
    tokens = parse(GgufBuilder().array("t", Kind.STRING, [b"\xff\xc3", b"ok"])).metadata["t"]
    assert tokens.bytes_at(0) == b"\xff\xc3"
    assert tokens[0].encode("utf-8", "surrogateescape") == b"\xff\xc3"
    assert [token.encode("utf-8", "surrogateescape") for token in tokens] == [b"\xff\xc3", b"ok"]


def test_a_text_value_that_is_not_utf8_stays_printable() -> None:
    assert (
        parse(GgufBuilder().key("general.name", Kind.STRING, b"caf\xe9")).metadata["general.name"] == "caf�"
    )


@given(st.lists(st.text()))
def test_string_array_is_a_sequence(strings: list[str]) -> None:
    array = parse(GgufBuilder().array("s", Kind.STRING, strings)).metadata["s"]
    assert isinstance(array, StringArray)
    assert len(array) == len(strings)
    assert list(array) == [array[i] for i in range(len(array))] == strings
    assert array[::-2] == strings[::-2]
    assert array[-1:] == strings[-1:]
    for index in (len(strings), -len(strings) - 1):
        with pytest.raises(IndexError):
            array[index]


def test_a_large_vocabulary_is_read_quickly() -> None:
    tokens = [f"token {i}" for i in range(262_144)]
    merges = [f"{i} {i + 1}" for i in range(500_000)]
    builder = GgufBuilder().array("tokenizer.ggml.tokens", Kind.STRING, tokens)
    builder.array("tokenizer.ggml.merges", Kind.STRING, merges)
    data = builder.array("tokenizer.ggml.scores", Kind.F32, [0.0] * len(tokens)).build()
    times_s = []
    for _ in range(3):
        begin_s = time.perf_counter()
        parsed = parse(data)
        times_s.append(time.perf_counter() - begin_s)
    assert min(times_s) < 1.0  # 0.25 s on an idle machine
    assert parsed.metadata["tokenizer.ggml.tokens"][-1] == tokens[-1]


# What is rejected: the start


@pytest.mark.parametrize("size", [4, 7, 8, 15, 16, 23])
def test_cut_off_in_the_counts(size: int) -> None:
    rejects(small().build()[:size], "remain")


def test_every_truncation_is_an_error() -> None:
    data = small().build()
    for size in range(len(data)):
        with pytest.raises(FormatError):
            parse(data[:size])


def test_wrong_magic() -> None:
    rejects(b"GGUE" + small().build()[4:], "not a GGUF file")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (struct.pack("<I", 1), "version 1"),
        (struct.pack("<I", 4), "version 4"),
        (struct.pack(">I", 3), "big-endian"),
        (struct.pack(">I", 2), "big-endian"),
    ],
)
def test_versions_that_exist_but_are_not_read(version: bytes, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        parse(b"GGUF" + version + bytes(16))


@pytest.mark.parametrize("version", [0, 2**31, 2**32 - 1])
def test_versions_that_do_not_exist(version: int) -> None:
    rejects(b"GGUF" + struct.pack("<I", version) + bytes(16), "does not exist")


# What is rejected: counts and lengths


@pytest.mark.parametrize("count", [10**6, 2**32, 2**63, 2**64 - 1])
def test_counts_beyond_the_file(count: int) -> None:
    rejects(GgufBuilder(num_keys=count), "key-values cannot fit")
    rejects(GgufBuilder(num_tensors=count), "tensors cannot fit")
    rejects(GgufBuilder().array("tokens", Kind.STRING, ["a"], count), "strings of 'tokens' cannot fit")
    rejects(GgufBuilder().array("scores", Kind.F32, [0.0], count), "values of 'scores' cannot fit")


def test_too_many_entries() -> None:
    head = struct.pack("<IQQ", 3, 0, 10**6)
    rejects(b"GGUF" + head + bytes(14 * 10**6), "1000000 key-values, at most")


@pytest.mark.parametrize("length", [100, 2**32, 2**63, 2**64 - 1])
def test_string_lengths_beyond_the_file(length: int) -> None:
    rejects(
        GgufBuilder().raw_key(text("k") + struct.pack("<I", Kind.STRING) + text("v", length)), "'k' needs"
    )
    one = struct.pack("<IIQ", Kind.ARRAY, Kind.STRING, 1)
    rejects(GgufBuilder().raw_key(text("k") + one + text("v", length)), "string 0 of 'k' needs")
    rejects(GgufBuilder().raw_key(text("key", length) + bytes(20)), "key 0")


def test_values_may_not_be_all_text() -> None:
    """Text in memory can be four times its size in the file."""
    builder = GgufBuilder()
    for number in range(5):
        builder.key(f"k{number}", Kind.STRING, "x" * (16 << 20))
    rejects(builder, "'k4' of 16777216 bytes, at most 0")


@pytest.mark.parametrize(
    ("kind", "values"),
    [(Kind.STRING, [b""] * 50_000), (Kind.U8, bytes(400_000)), (Kind.BOOL, bytes(400_000))],
    ids=["empty strings", "numbers", "bools"],
)
def test_arrays_take_no_more_memory_than_in_the_file(kind: Kind, values: Sequence[object]) -> None:
    data = GgufBuilder().array("k", kind, values).build()
    tracemalloc.start()
    parse(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < len(data) + 16384


def test_a_string_array_that_ends_early() -> None:
    entry = text("k") + struct.pack("<IIQ", Kind.ARRAY, Kind.STRING, 2) + text("12345678")
    rejects(GgufBuilder().raw_key(entry), "cut off at string 1 of 2")


# What is rejected: keys and values


def test_keys() -> None:
    rejects(GgufBuilder().key("a", Kind.U8, 1).key("a", Kind.U8, 1), "'a' appears twice")
    rejects(GgufBuilder().key("", Kind.U32, 1), "key 0 is empty")
    rejects(GgufBuilder().key("k" * 65536, Kind.U8, 1), "key 0 of 65536 bytes")
    rejects(GgufBuilder().key(b"\xff\xfe", Kind.U8, 1), "key 0 is not UTF-8")


@pytest.mark.parametrize("number", [13, 100, 2**32 - 1])
def test_unknown_value_types(number: int) -> None:
    rejects(GgufBuilder().raw_key(text("k") + struct.pack("<IQ", number, 0)), f"unknown type {number}")
    entry = text("k") + struct.pack("<IIQ", Kind.ARRAY, number, 0)
    rejects(GgufBuilder().raw_key(entry), f"unknown element type {number}")


def test_nested_arrays() -> None:
    entry = text("k") + struct.pack("<IIQ", Kind.ARRAY, Kind.ARRAY, 1) + bytes(12)
    rejects(GgufBuilder().raw_key(entry), "array of arrays")


def test_bools_other_than_0_and_1() -> None:
    rejects(GgufBuilder().raw_key(text("k") + struct.pack("<IB", Kind.BOOL, 2)), "bool of value 2")
    rejects(GgufBuilder().array("k", Kind.BOOL, [0, 1, 255]), "bool of value 255")


@pytest.mark.parametrize("alignment", [0, 7, 24, 2**32 - 1])
def test_alignment_must_be_a_power_of_two(alignment: int) -> None:
    rejects(
        GgufBuilder().key("general.alignment", Kind.U32, alignment), f"{alignment}, it must be a power of two"
    )


@pytest.mark.parametrize("kind", [Kind.U8, Kind.I32, Kind.U64, Kind.F32, Kind.STRING, Kind.BOOL])
def test_alignment_must_be_u32(kind: Kind) -> None:
    value = "32" if kind == Kind.STRING else 1
    rejects(GgufBuilder().key("general.alignment", kind, value), "'general.alignment' must be u32")


@pytest.mark.parametrize(
    ("key", "kind", "values"),
    [
        ("tokenizer.ggml.scores", Kind.U8, [1]),
        ("tokenizer.ggml.scores", Kind.F64, [1]),
        ("tokenizer.ggml.token_type", Kind.F32, [1]),
        ("tokenizer.ggml.tokens", Kind.I32, [1]),
        ("tokenizer.ggml.merges", Kind.U8, [1]),
        ("general.architecture", Kind.STRING, ["llama"]),
    ],
)
def test_element_types_of_known_arrays(key: str, kind: Kind, values: list[object]) -> None:
    builder = GgufBuilder()
    if key != "tokenizer.ggml.tokens":
        builder.array("tokenizer.ggml.tokens", Kind.STRING, ["a"])
    rejects(builder.array(key, kind, values), f"'{key}' must be .* declares {kind.name.lower()}")


@pytest.mark.parametrize("key", ["tokenizer.ggml.bos_token_id", "tokenizer.ggml.pre", "general.architecture"])
def test_types_of_known_scalars(key: str) -> None:
    rejects(GgufBuilder().key(key, Kind.F32, 1.0), f"'{key}' must be")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_score_for_each_token(count: int) -> None:
    builder = GgufBuilder().array("tokenizer.ggml.tokens", Kind.STRING, ["a", "b"])
    rejects(builder.array("tokenizer.ggml.scores", Kind.F32, [0.0] * count), f"{count} values for 2 tokens")


# What is rejected: tensors


@pytest.mark.parametrize("num_dimensions", [0, 5, 2**32 - 1])
def test_number_of_dimensions(num_dimensions: int) -> None:
    entry = text("w") + struct.pack("<I", num_dimensions) + bytes(64)
    builder = GgufBuilder()
    builder.tensors.append(entry)
    rejects(builder, f"{num_dimensions} dimensions")


@pytest.mark.parametrize("dimension", [0, 2**63, 2**64 - 1])  # the last is -1 to whoever reads it as signed
def test_dimensions_of_zero_or_less(dimension: int) -> None:
    rejects(GgufBuilder().tensor("w", [4, dimension], F32, bytes(16)), f"dimension of {dimension}")


def test_products_of_dimensions_that_overflow() -> None:
    rejects(GgufBuilder().tensor("w", [2**32, 2**32], F32, bytes(16)), "too many values")
    rejects(GgufBuilder().tensor("w", [2**16] * 4, F32, bytes(16)), "too many values")
    rejects(GgufBuilder().tensor("w", [2**62], F32, bytes(16)), "ends at byte")


def test_unknown_tensor_types() -> None:
    for number in (41, 1000, 2**32 - 1):
        rejects(GgufBuilder().tensor("w", [32], number, bytes(64)), f"'w' has unknown type {number}")


@pytest.mark.parametrize(("number", "name"), [(16, "IQ2_XXS"), (31, "Q4_0_4_4"), (39, "MXFP4"), (4, "Q4_2")])
def test_known_tensor_types_that_are_not_read(number: int, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'w' is stored as {name},"):
        parse(GgufBuilder().tensor("w", [256], number, bytes(512)))


@pytest.mark.parametrize(("width", "kind"), [(896, Q4_K), (576, Q4_K), (31, Q8_0), (33, Q8_0)])
def test_rows_must_be_whole_blocks(width: int, kind: int) -> None:
    rejects(GgufBuilder().tensor("w", [width, 256], kind, bytes(width * 256)), f"rows of {width} values")


def test_tensor_names() -> None:
    rejects(
        GgufBuilder().tensor("w", [1], F32, bytes(4)).tensor("w", [1], F32, bytes(4)), "'w' appears twice"
    )
    rejects(GgufBuilder().tensor(b"\xff", [1], F32, bytes(4)), "name of tensor 0 is not UTF-8")
    rejects(GgufBuilder().tensor("", [1], F32, bytes(4)), "name of tensor 0 is empty")


@pytest.mark.parametrize("offset", [1, 31, 2**64 - 1])
def test_offsets_must_be_aligned(offset: int) -> None:
    rejects(GgufBuilder().tensor("w", [1], F32, bytes(64), offset), "no multiple of the alignment 32")


@pytest.mark.parametrize("offset", [32, 2**40, 2**64 - 32])
def test_data_must_lie_in_the_file(offset: int) -> None:
    rejects(GgufBuilder().tensor("w", [1], F32, bytes(4), offset), "ends at byte")


def test_tensors_must_not_overlap() -> None:
    builder = GgufBuilder().tensor("a", [16], F32, bytes(64)).tensor("b", [16], F32, bytes(64), offset=32)
    rejects(builder, "'a' and 'b' overlap")


# Split files


def write_set(folder: Path, count: int = 3) -> list[Path]:
    paths = []
    for number in range(count):
        builder = GgufBuilder().key("split.no", Kind.U16, number).key("split.count", Kind.U16, count)
        builder.key("split.tensors.count", Kind.I32, count)
        if number == 0:
            builder.key("general.architecture", Kind.STRING, "llama")
        builder.tensor(f"blk.{number}", [1], F32, struct.pack("<f", number))
        paths.append(folder / f"m-{number + 1:05}-of-{count:05}.gguf")
        paths[-1].write_bytes(builder.build())
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_a_set_is_opened_at_any_shard(tmp_path: Path, opened: int) -> None:
    with open_checkpoint(write_set(tmp_path)[opened]) as checkpoint:
        assert checkpoint.metadata["general.architecture"] == "llama"
        values = [float(checkpoint.raw(f"blk.{number}").view("<f4")[0]) for number in range(3)]
        assert values == [0, 1, 2]
        checkpoint.release("blk.2")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[0].unlink()
    with pytest.raises(LoadError, match=re.escape("m-00001-of-00003.gguf")):
        open_checkpoint(paths[1])


def test_a_renamed_shard(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    with pytest.raises(LoadError, match=re.escape("must end in -00002-of-00003.gguf")):
        open_checkpoint(paths[1].rename(tmp_path / "model.gguf"))
    with pytest.raises(LoadError, match=re.escape("must end in -00003-of-00003.gguf")):
        open_checkpoint(paths[2].rename(paths[1]))


def test_shards_of_different_models(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(FormatError, match=r"split\.no 2"):
        open_checkpoint(paths[0])
    builder = GgufBuilder().key("split.no", Kind.U16, 1).key("split.count", Kind.U16, 3)
    paths[1].write_bytes(builder.tensor("blk.0", [1], F32, bytes(4)).build())
    with pytest.raises(FormatError, match=r"'blk.0' is also in .*00001"):
        open_checkpoint(paths[0])
    builder = GgufBuilder().key("split.no", Kind.U16, 1).key("split.count", Kind.U16, 3)
    paths[1].write_bytes(builder.build())
    with pytest.raises(FormatError, match="hold 2 tensors"):
        open_checkpoint(paths[0])


def test_a_corrupt_shard_is_named(tmp_path: Path) -> None:
    paths = write_set(tmp_path)
    paths[1].write_bytes(b"")
    with pytest.raises(FormatError, match=r"00002-of-00003.gguf is empty"):
        open_checkpoint(paths[0])


# Paths


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        open_checkpoint(tmp_path / "absent.gguf")
    for hopeless in ("x" * 5000, "nul\0", str(tmp_path / "f" / "g")):
        with pytest.raises(LoadError):
            open_checkpoint(hopeless)
    with pytest.raises(LoadError, match="not a regular file"):
        open_checkpoint("/dev/null")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(FormatError, match="empty"):
        open_checkpoint(tmp_path / "empty.gguf")


@pytest.mark.parametrize(
    ("name", "start", "error", "message"),
    [
        ("notes.txt", b"hello there", FormatError, "is not a model"),
        ("x.gguf", b"G", FormatError, "is not a model"),
        ("old.bin", b"tjgg\1\0\0\0", UnsupportedModelError, "before GGUF"),
        ("model.pt", b"PK\x03\x04....", UnsupportedModelError, "pickled"),
        ("pytorch_model.bin", b"\x80\x02cx", UnsupportedModelError, "pickled"),
        ("model.safetensors", bytes(16), UnsupportedModelError, "folder"),
    ],
)
def test_files_that_are_something_else(
    tmp_path: Path, name: str, start: bytes, error: type[LoadError], message: str
) -> None:
    (tmp_path / name).write_bytes(start)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path / name)
