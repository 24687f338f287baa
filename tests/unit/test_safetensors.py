"""Safetensors files and Hugging Face folders: what is read, and what is refused how."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gapless.errors import FormatError, LoadError, UnsupportedModelError
from gapless.loading import CheckpointKind, TensorInfo, TensorType, open_checkpoint
from gapless.loading.dequantize import dequantize
from gapless.loading.safetensors import parse_safetensors
from helpers_gguf import safetensors


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def parse(data: bytes) -> dict[str, TensorInfo]:
    return parse_safetensors(memoryview(data), "test.safetensors")


def rejects(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        parse(data)
    assert "test.safetensors" in str(caught.value)


# What is read


def test_reads_where_tensors_are() -> None:
    header = {
        "b": entry("BF16", [2, 3], [0, 12]),
        "a": entry("F32", [], [12, 16]),
        "none": entry("F16", [0], [16, 16]),
    }
    tensors = parse(safetensors(header, bytes(16)))
    base = 8 + len(json.dumps(header))
    assert tensors["b"] == TensorInfo("b", TensorType.BF16, (2, 3), 12, base)
    assert tensors["a"] == TensorInfo("a", TensorType.F32, (), 4, base + 12)
    assert tensors["none"].nbytes == 0


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}])
def test_metadata_may_be_empty_and_is_no_tensor(metadata: dict[str, str]) -> None:
    assert parse(safetensors({"__metadata__": metadata})) == {}
    assert list(parse(safetensors({"__metadata__": metadata, "w": entry()}, bytes(8)))) == ["w"]


def test_header_may_be_padded_with_spaces() -> None:
    assert list(parse(safetensors(json.dumps({"w": entry()}).encode() + b"   ", bytes(8)))) == ["w"]


@pytest.mark.parametrize("name", ["F64", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"])
def test_other_types_are_listed_and_refused_as_weights(name: str) -> None:
    kind = TensorType[name]
    data = bytes(4 * kind.block_bytes)
    tensors = parse(safetensors({"mask": entry(name, [4], [0, len(data)])}, data))
    assert tensors["mask"].type is kind
    assert not kind.is_weight
    with pytest.raises(UnsupportedModelError, match=name):
        dequantize(kind, np.zeros(len(data), np.uint8), (4,))


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float16]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0),
        elements=st.floats(width=16, allow_nan=False),
    ),
    st.text(min_size=1),
)
def test_round_trip_of_the_official_writer(array: np.ndarray[Any, Any], name: str) -> None:
    official = pytest.importorskip("safetensors.numpy")
    data = official.save({name: array, f"{name}.other": np.ones(3, np.float32)})
    info = parse(data)[name]
    raw = np.frombuffer(data, np.uint8, info.nbytes, info.offset)
    assert info.shape == array.shape
    np.testing.assert_array_equal(dequantize(info.type, raw, info.shape), array.astype(np.float32))


# What is rejected: the header


@pytest.mark.parametrize("data", [b"\x02", bytes(7)])
def test_shorter_than_the_length(data: bytes) -> None:
    rejects(data, f"has {len(data)} bytes")


def test_header_longer_than_the_file() -> None:
    rejects(safetensors({}, length=3), "a header of 3 bytes, longer than the file of 10")
    rejects(safetensors({}, length=99_999_999), "longer than the file")


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
def test_header_too_large(length: int) -> None:
    rejects(safetensors({}, length=length), f"a header of {length} bytes, at most")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{} {}", "not valid JSON"),
        (b'{"a": \xff}', "not UTF-8"),
        (b"[]", "must be a JSON object, it is a list"),
        (b"1", "must be a JSON object, it is a int"),
        (b"null", "must be a JSON object"),
        (b'{"\\ud800": 1}', "surrogates"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply|not valid JSON"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "a number of 100000 digits"),
        (b'{"a": [' + b"{}," * 1_100_000 + b"0]}", "too many entries"),
        (b'{"a": [' + b"0," * 1_100_000 + b"0]}", "too many entries"),
    ],
)
def test_header_that_is_no_json_object(header: bytes, message: str) -> None:
    rejects(safetensors(header), message)


def test_duplicate_keys() -> None:
    one = json.dumps(entry())
    rejects(safetensors(f'{{"w": {one}, "w": {one}}}'.encode(), bytes(8)), "'w' appears twice")
    twice = '{"w": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    rejects(safetensors(twice.encode(), bytes(8)), "'dtype' appears twice")


@pytest.mark.parametrize("metadata", [[], None, "x", {"a": 1}, {"a": None}, {"a": {}}])
def test_metadata_must_map_to_strings(metadata: Any) -> None:
    rejects(safetensors({"__metadata__": metadata}), "__metadata__ must map")


# What is rejected: entries


@pytest.mark.parametrize("value", [1, None, [], {}, {"dtype": "F32"}, {**entry(), "more": 1}])
def test_entry_of_the_wrong_form(value: Any) -> None:
    rejects(safetensors({"w": value}, bytes(8)), "'w' must have dtype, shape and data_offsets")


@pytest.mark.parametrize("dtype", ["f32", "", "FLOAT", "Q4_K", "F32 ", 1, None, ["F32"], {}])
def test_unknown_dtype(dtype: Any) -> None:
    rejects(safetensors({"w": entry(dtype)}, bytes(8)), "dtype")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64"])
def test_dtypes_that_are_not_read(dtype: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"'w' is stored as {dtype}"):
        parse(safetensors({"w": entry(dtype, [8])}, bytes(8)))


@pytest.mark.parametrize("shape", [2, "2", None, {}, [2.0], ["2"], [True, 2], [None], [[2]]])
def test_shape_of_the_wrong_form(shape: Any) -> None:
    rejects(safetensors({"w": entry(shape=shape)}, bytes(8)), "it must be a list of integers")


@pytest.mark.parametrize("dimension", [-1, -2, 2**63, 2**64, 10**29])
def test_dimensions_out_of_range(dimension: int) -> None:
    rejects(safetensors({"w": entry(shape=[dimension])}, bytes(8)), f"dimension of {dimension}")


def test_shapes_too_large() -> None:
    rejects(safetensors({"w": entry(shape=[2**32, 2**32])}, bytes(8)), "too many values")
    rejects(safetensors({"w": entry(shape=[1] * 33)}, bytes(8)), "33 dimensions")


@pytest.mark.parametrize("offsets", [None, 8, [], [8], [0, 4, 8], [0, 8.0], [0, "8"], [False, 8], {}])
def test_offsets_of_the_wrong_form(offsets: Any) -> None:
    rejects(safetensors({"w": entry(offsets=offsets)}, bytes(8)), "they must be two integers")


@pytest.mark.parametrize("offsets", [[-8, 0], [8, 0], [-1, -1]])
def test_offsets_that_descend(offsets: list[int]) -> None:
    rejects(safetensors({"w": entry(offsets=offsets)}, bytes(8)), "ascending")


@pytest.mark.parametrize("offsets", [[0, 4], [0, 7], [0, 12], [0, 0], [0, 10**29]])
def test_span_must_match_shape_and_type(offsets: list[int]) -> None:
    rejects(safetensors({"w": entry(offsets=offsets)}, bytes(8)), r"F32 \[2\] has 8 bytes, data_offsets span")


@pytest.mark.parametrize("offsets", [[1, 9], [8, 16], [10**29, 10**29 + 8]])
def test_end_past_the_file(offsets: list[int]) -> None:
    rejects(safetensors({"w": entry(offsets=offsets)}, bytes(8)), "'w' ends at byte")


def test_overlaps_and_holes() -> None:
    rejects(safetensors({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "'a' and 'b' overlap")
    rejects(safetensors({"a": entry(), "b": entry()}, bytes(8)), "overlap")
    rejects(
        safetensors({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "4 bytes in front of tensor 'b'"
    )
    rejects(safetensors({"a": entry()}, bytes(9)), "1 bytes at the end")


def test_every_truncation_is_an_error() -> None:
    data = safetensors({"__metadata__": {}, "a": entry(), "b": entry(offsets=[8, 16])}, bytes(16))
    for size in range(len(data)):
        with pytest.raises(FormatError):
            parse(data[:size])


# Folders


def write_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(safetensors({"w": entry()}, struct.pack("<2f", 1, 2)))
    return folder


def write_shards(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for number, name in enumerate(["a", "b"], start=1):
        data = safetensors({name: entry()}, struct.pack("<2f", number, number))
        (folder / f"model-{number:05}-of-00002.safetensors").write_bytes(data)
    write_index(folder, {name: f"model-{i:05}-of-00002.safetensors" for i, name in enumerate("ab", start=1)})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_opens_a_folder(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.kind is CheckpointKind.HF
        assert checkpoint.directory == tmp_path
        assert checkpoint.metadata == {"model_type": "llama"}
        assert checkpoint.generation_config == {}
        assert checkpoint.raw("w").view("<f4").tolist() == [1, 2]
        assert checkpoint.total_bytes == 8


def test_reads_the_generation_config(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.generation_config == {"eos_token_id": [1, 106]}


def test_opens_shards(tmp_path: Path) -> None:
    with open_checkpoint(write_shards(tmp_path)) as checkpoint:
        assert checkpoint.raw("a").view("<f4").tolist() == [1, 1]
        assert checkpoint.raw("b").view("<f4").tolist() == [2, 2]


def test_opens_shards_that_are_links_out_of_the_folder(tmp_path: Path) -> None:
    blobs, snapshot = write_shards(tmp_path / "blobs"), tmp_path / "snapshot"
    snapshot.mkdir()
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(blob)
    with open_checkpoint(snapshot) as checkpoint:
        assert set(checkpoint.tensors) == {"a", "b"}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (write_shards(tmp_path) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoadError, match=r"lacks 1 of 2 weight files: 'model-00002-of-00002.safetensors'"):
        open_checkpoint(tmp_path)


def test_a_shard_without_its_tensor(tmp_path: Path) -> None:
    write_index(write_shards(tmp_path), {"a": "model-00002-of-00002.safetensors"})
    with pytest.raises(FormatError, match="no tensor 'a'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/../../x", "..", "", ".", "..\\x", "C:x", "x\0"]
)
def test_index_must_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    write_index(write_shards(tmp_path), {"a": name})
    with pytest.raises(FormatError, match="not inside the folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", {"a": 1}, {"a": ["x"]}, {"a": None}])
def test_malformed_index(tmp_path: Path, weight_map: Any) -> None:
    write_index(write_shards(tmp_path), weight_map)
    with pytest.raises(FormatError, match="weight_map"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "\ud800", "sub/absent"])
def test_index_with_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    write_index(write_shards(tmp_path), {"a": name})
    with pytest.raises(LoadError) as caught:
        open_checkpoint(tmp_path)
    str(caught.value).encode()  # printable


def test_incomplete_folders(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(LoadError, match=r"give the path of one of them, such as .*x\.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"]
)
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(UnsupportedModelError, match="Convert them once"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b'{"a": 1, "a": 2}'])
def test_malformed_configs(tmp_path: Path, file: str, content: bytes) -> None:
    (write_folder(tmp_path) / file).write_bytes(content)
    with pytest.raises(FormatError, match=file):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_directories_in_place_of_files(tmp_path: Path, file: str) -> None:
    (write_folder(tmp_path) / file).unlink()
    (tmp_path / file).mkdir()
    with pytest.raises(LoadError, match="not a regular file"):
        open_checkpoint(tmp_path)
