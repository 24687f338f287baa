"""Which weights get which type, and how `quant` is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gapless.errors import InvalidRequestError, UnsupportedModelError
from gapless.loading import TensorType, open_checkpoint
from gapless.models import Network, describe, estimate_memory
from gapless.models.tensors import deinterleaved_rows
from gapless.quantization import QuantConfig, read_f32
from gapless.quantization.policy import choose_packing
from gapless.quantization.source import TensorSource
from helpers_gguf_models import convert
from helpers_models import TINY


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int8", QuantConfig(8, 32)),
        ("int4", QuantConfig(4, 32)),
        (" INT4:64 ", QuantConfig(4, 64)),
        ("int4:128", QuantConfig(4, 128)),
        ("int8:-1", QuantConfig(8, -1)),
        ("int8:channel", QuantConfig(8, -1)),
    ],
)
def test_parse(text: str, expected: QuantConfig) -> None:
    assert QuantConfig.parse(text) == expected


@pytest.mark.parametrize("text", ["", "int5", "q4_0", "int4:", "int4:0", "int4:48", "int4:a", "int8:64:64"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        QuantConfig.parse(text)
    assert caught.value.param == "quant"


def describe_tiny(name: str) -> Network:
    with open_checkpoint(TINY / name) as checkpoint:
        return describe(checkpoint)


def test_plain_weights_stay_as_they_are() -> None:
    network = describe_tiny("mistral")
    packings = choose_packing(network.graph, network.sources, None)
    assert {packing.type for packing in packings.values()} == {"bf16"}
    assert all(packing.quant is None for packing in packings.values())
    assert set(network.sources) - set(packings) == {name for name in network.sources if "norm" in name}


def test_int4_leaves_eight_bits_to_embedding_and_output() -> None:
    network = describe_tiny("mistral")
    packings = choose_packing(network.graph, network.sources, QuantConfig(4, 64))
    eight_bits = {name for name, packing in packings.items() if packing.quant == QuantConfig(8, 32)}
    assert eight_bits == {"embedding.weight", "output.weight"}
    assert packings["layers.0.q.weight"].quant == QuantConfig(4, 64)


def test_int8_is_for_all_matrices() -> None:
    network = describe_tiny("mistral")
    packings = choose_packing(network.graph, network.sources, QuantConfig(8, -1))
    assert {packing.quant for packing in packings.values()} == {QuantConfig(8, -1)}


def test_a_quantized_model_cannot_be_quantized_again() -> None:
    network = describe_tiny("mistral")
    sources = {
        name: _with_type(source, TensorType.Q4_K if "norm" not in name else TensorType.F32)
        for name, source in network.sources.items()
    }
    assert {packing.type for packing in choose_packing(network.graph, sources, None).values()} == {"int4"}
    with pytest.raises(UnsupportedModelError, match=r"already quantized \(Q4_K\)"):
        choose_packing(network.graph, sources, QuantConfig(4))


def test_quant_applies_to_the_plain_tensors_of_a_mixed_file() -> None:
    network = describe_tiny("mistral")
    sources = dict(network.sources)
    sources["output.weight"] = _with_type(sources["output.weight"], TensorType.Q6_K)
    packings = choose_packing(network.graph, sources, QuantConfig(4))
    assert packings["output.weight"].type == "int6"
    assert packings["output.weight"].quant is None
    assert packings["layers.0.q.weight"].type == "int4"


def _with_type(source: TensorSource, kind: TensorType) -> TensorSource:
    return replace(source, info=replace(source.info, type=kind))


def test_every_weight_type_has_a_packing() -> None:
    network = describe_tiny("mistral")
    for kind in TensorType:
        if kind.is_weight:
            sources = {name: _with_type(source, kind) for name, source in network.sources.items()}
            packing = choose_packing(network.graph, sources, None)["layers.0.q.weight"]
            assert packing.is_integer is kind.is_quantized


def test_interleaved_rows_are_put_back() -> None:
    # two heads of four: GGUF's order is 0 2 1 3, 4 6 5 7
    stored = np.array([0, 2, 1, 3, 4, 6, 5, 7])
    np.testing.assert_array_equal(stored[deinterleaved_rows(8, 4)], np.arange(8))


def test_stacked_tensors_are_taken_apart() -> None:
    with open_checkpoint(TINY / "phi3") as checkpoint:
        network = describe(checkpoint)
        parts = [read_f32(checkpoint, network.sources[f"layers.0.{part}.weight"]) for part in "qkv"]
        whole = read_f32(checkpoint, replace(network.sources["layers.0.q.weight"], row_map=None))
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_estimate(tmp_path: Path) -> None:
    convert(TINY / "qwen3", tmp_path / "model.gguf")
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        plain = estimate_memory(checkpoint)
        small = estimate_memory(checkpoint, QuantConfig(4))
    assert plain.weight_bytes == checkpoint.total_bytes
    assert small.weight_bytes < plain.weight_bytes / 3
    assert plain.kv_bytes_per_token == 2 * 3 * 2 * 32 * 2  # k and v, layers, heads, head size, f16
    assert plain.arena_bytes > 512 * 64 * 4
