"""Configurations as published files spell them, and what happens to those that cannot be run."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapless.errors import FormatError, InvalidRequestError, UnsupportedModelError
from gapless.loading import Checkpoint, CheckpointKind, TensorInfo, TensorType, open_checkpoint
from gapless.models import ModelConfig, architectures, describe
from gapless.models.registry import find_architecture, read_config
from gapless.models.rope import RopeConfig
from gapless.sampling import Pooling
from helpers_models import TINY

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
}


def checkpoint(kind: CheckpointKind, metadata: dict[str, Any], *tensors: TensorInfo) -> Checkpoint:
    """A checkpoint of which only names and metadata matter."""
    named = {f"filler.{index}": tensor("", (1,)) for index in range(100)}
    named.update({info.name: info for info in tensors})
    return Checkpoint(Path("model"), kind, metadata, named, [])


def tensor(name: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, TensorType.F32, shape, 0, 0)


def hf(config: dict[str, Any], **changes: Any) -> ModelConfig:
    opened = checkpoint(CheckpointKind.HF, {**config, **changes})
    return read_config(opened, find_architecture(opened))


def gguf(metadata: dict[str, Any], *tensors: TensorInfo) -> ModelConfig:
    embedding = tensor("token_embd.weight", (1000, 64))
    opened = checkpoint(CheckpointKind.GGUF, metadata, embedding, *tensors)
    return read_config(opened, find_architecture(opened))


def gguf_metadata(arch: str, **changes: Any) -> dict[str, Any]:
    values = {
        "block_count": 2,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    values.update({key.replace("__", "."): value for key, value in changes.items()})
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in values.items()}}


@pytest.mark.parametrize(
    ("stated", "pooling"),
    [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last")],
)
def test_pooling_of_gguf(stated: int | None, pooling: str) -> None:
    changes = {} if stated is None else {"pooling_type": stated}
    assert gguf(gguf_metadata("llama", **changes)).pooling is Pooling(pooling)


@pytest.mark.parametrize(
    ("stated", "pooling"),
    [
        ({}, "last"),
        ({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": False}, "last"),
        ({"pooling_mode": "mean", "embedding_dimension": 64}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_of_sentence_transformers(stated: dict[str, Any], pooling: str, tmp_path: Path) -> None:
    shutil.copytree(TINY / "llama", tmp_path / "model")
    if stated:
        (tmp_path / "model" / "1_Pooling").mkdir()
        (tmp_path / "model" / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    with open_checkpoint(tmp_path / "model") as opened:
        assert describe(opened).config.pooling is Pooling(pooling)


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"pooling_mode_max_tokens": True}, "'max'"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "'mean+cls'"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "'mean_sqrt_len'"),
        ({"pooling_mode": "weightedmean"}, "'weightedmean'"),
    ],
)
def test_a_pooling_that_gapless_lacks_is_no_pooling(
    stated: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened = replace(checkpoint(CheckpointKind.HF, LLAMA), pooling_config=stated)
    assert read_config(opened, find_architecture(opened)).pooling is None
    assert gguf(gguf_metadata("llama", pooling_type=4)).pooling is None  # a reranker
    assert named in caplog.text
    assert "pooling 4" in caplog.text


@pytest.mark.parametrize("stated", [{"pooling_mode": 3}, {"pooling_mode_cls_token": "yes"}])
def test_malformed_pooling(stated: dict[str, Any]) -> None:
    opened = replace(checkpoint(CheckpointKind.HF, LLAMA), pooling_config=stated)
    with pytest.raises(FormatError, match="1_Pooling"):
        read_config(opened, find_architecture(opened))
    with pytest.raises(FormatError, match="pooling_type"):
        gguf(gguf_metadata("llama", pooling_type="mean"))


def test_networks_that_are_not_causal_are_refused() -> None:
    assert hf(LLAMA, is_causal=True).hidden_size == 2048
    for read in (
        lambda: hf(LLAMA, is_causal=False),
        lambda: gguf(gguf_metadata("llama", attention__causal=False)),
    ):
        with pytest.raises(UnsupportedModelError, match="causal"):
            read()


@pytest.mark.parametrize(
    ("changes", "window"), [({}, 4096), ({"sliding_window": None}, 0), ({"sliding_window": 8}, 8)]
)
def test_window_of_mistral(changes: dict[str, Any], window: int) -> None:
    config = hf({**LLAMA, "model_type": "mistral"}, **changes)
    assert config.sliding_window == window  # type: ignore[attr-defined]


def test_llama3_rope_scaling() -> None:
    """Llama-3.2-1B: pairs 0 to 14 unchanged, 15 to 17 blended, 18 to 31 divided by 32."""
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    factors = hf(LLAMA, rope_theta=500000.0, rope_scaling=scaling).rope.factors
    assert factors is not None
    assert factors[:15] == (1.0,) * 15
    assert all(1 < factor < 32 for factor in factors[15:18])
    np.testing.assert_allclose(factors[18:], 32)


def test_rope_parameters_of_transformers_5_mean_the_same() -> None:
    old = hf(LLAMA, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    new = hf(LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0})
    assert old == new
    assert old.rope == RopeConfig(5e5, 64, (4.0,) * 32)


def test_head_dim_is_a_key_of_its_own() -> None:
    config = hf(
        {**LLAMA, "model_type": "qwen3"}, hidden_size=1024, num_attention_heads=16, head_dim=128
    )  # Qwen3-0.6B: q is wider than the residual stream
    assert config.head_dim * config.num_heads == 2048


def test_gemma3_4b_as_published_leaves_out_much() -> None:
    text_config = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": text_config,
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.context_length, config.tied_embeddings) == (262208, 131072, True)
    assert config.rope == RopeConfig(1e6, 256, (8.0,) * 128)  # ÷8 on global layers only
    assert config.local_rope == RopeConfig(1e4, 256)  # type: ignore[attr-defined]
    windows = config.layer_windows  # type: ignore[attr-defined]
    assert windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)


@pytest.mark.parametrize(
    ("arch", "num_layers", "heads", "head_dim", "scalar"),
    [("gemma2", 46, 32, 128, 144), ("gemma2", 26, 8, 256, 256), ("gemma3", 62, 32, 128, 168)],
)
def test_gemma_27b_scales_scores_by_hidden_size_over_heads(
    arch: str, num_layers: int, heads: int, head_dim: int, scalar: int
) -> None:
    metadata = gguf_metadata(arch, block_count=num_layers, embedding_length=scalar * heads)
    metadata |= {f"{arch}.attention.head_count": heads, f"{arch}.attention.key_length": head_dim}
    metadata |= {f"{arch}.attention.value_length": head_dim}
    assert gguf(metadata).attention_scale == scalar**-0.5  # type: ignore[attr-defined]


def test_phi3_chooses_frequencies_by_the_context_in_use() -> None:
    short, long = [1.0] * 48, [2.0] * 48
    config = hf(
        {**LLAMA, "model_type": "phi3"},
        hidden_size=3072,
        num_attention_heads=32,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": short, "long_factor": long},
    )
    assert config.rope.magnitude == pytest.approx(1.1902380714)  # sqrt(1 + ln 32 / ln 4096)
    few, many = config.rope.table(4096), config.rope.table(4097)
    np.testing.assert_allclose(np.array(few.inv_freq) / np.array(many.inv_freq), 2)
    assert config.rope.table(131072) == many


@pytest.mark.parametrize(
    ("changes", "is_tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({}, True),  # neither the key nor the tensor
    ],
)
def test_tied_embeddings(changes: dict[str, Any], is_tied: bool) -> None:
    assert hf(LLAMA, **changes).tied_embeddings is is_tied


def test_gguf_is_tied_if_it_has_no_output() -> None:
    assert gguf(gguf_metadata("llama")).tied_embeddings
    assert not gguf(gguf_metadata("llama"), tensor("output.weight", (1000, 64))).tied_embeddings


def test_vocabulary_size_of_gguf_is_that_of_its_embedding() -> None:
    assert gguf(gguf_metadata("llama", vocab_size=999)).vocab_size == 1000


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "max_position_embeddings", "vocab_size"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(FormatError, match=key):
        hf({name: value for name, value in LLAMA.items() if name != key})
    with pytest.raises(FormatError, match=key):
        hf(LLAMA, **{key: None})


def test_a_missing_gguf_key_is_named() -> None:
    metadata = gguf_metadata("qwen2")
    del metadata["qwen2.attention.head_count"]
    with pytest.raises(FormatError, match=r"qwen2\.attention\.head_count"):
        gguf(metadata)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": "2048"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_key_value_heads": 5}, "heads"),
        ({"head_dim": 33}, "33"),
        ({"head_dim": 2**30}, "head_dim"),
        ({"hidden_size": 2**30, "num_attention_heads": 1}, "head_dim"),
        ({"model_type": "phi3", "partial_rotary_factor": 1e9}, "partial_rotary_factor"),
        ({"rope_theta": 1e300}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "long_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor"),
    ],
)
def test_malformed_values(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(FormatError, match=word):
        hf(LLAMA, **changes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "xielu"}, "xielu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["linear"]}, "layer_types"),
    ],
)
def test_known_but_unsupported_values(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        hf(LLAMA, **changes)


def test_unsupported_gguf_values() -> None:
    with pytest.raises(UnsupportedModelError, match="expert_count"):
        gguf(gguf_metadata("llama", expert_count=8))
    with pytest.raises(UnsupportedModelError, match="head_count_kv"):
        gguf(gguf_metadata("llama", attention__head_count_kv=np.array([4, 2])))
    with pytest.raises(UnsupportedModelError, match="yarn"):
        gguf(gguf_metadata("llama", rope__scaling__type="yarn"))


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"mamba.*Known: gemma2, gemma3, .*qwen3"):
        hf(LLAMA, model_type="mamba")
    with pytest.raises(UnsupportedModelError, match=r"clip.*Known: gemma2, gemma3, llama"):
        gguf(gguf_metadata("clip"))
    with pytest.raises(FormatError, match="model_type"):
        hf({})


def test_keys_that_are_not_used_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hf(
        LLAMA,
        mystery=1,
        torch_dtype="bfloat16",
        rope_scaling={"rope_type": "linear", "factor": 2.0, "odd": 1},
    )
    assert [record.message for record in caplog.records] == [
        "model: keys that are not used: mystery, rope_scaling.odd"
    ]


def test_names_of_files_are_names_of_models() -> None:
    folder = Path(__file__).parents[2] / "src" / "gapless" / "models"
    for architecture in architectures():
        assert (folder / f"{architecture.name}.py").exists()
        assert architecture.name in architecture.hf_types


def altered(tmp_path: Path, name: str, **changes: Any) -> Path:
    """A tiny model with another configuration."""
    config = json.loads((TINY / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "model.safetensors").symlink_to(TINY / name / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_hidden_layers": 4}, "layers.3.input_layernorm.*missing"),
        ({"intermediate_size": 128}, r"gate_proj.weight.*shape \[96, 64\].*\[128, 64\]"),
        ({"vocab_size": 300}, r"embed_tokens.*\[256, 64\].*\[300, 64\]"),
        ({"tie_word_embeddings": False, "model_type": "mistral", "num_key_value_heads": 4}, "k_proj"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration(
    changes: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with (
        open_checkpoint(altered(tmp_path, "llama", **changes)) as opened,
        pytest.raises(FormatError, match=word),
    ):
        describe(opened)


def test_redundant_output_layer_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with open_checkpoint(altered(tmp_path, "llama", tie_word_embeddings=True)) as opened:
        network = describe(opened)
    assert "output.weight" not in network.sources
    assert any("lm_head.weight" in record.message for record in caplog.records)


def test_max_model_len(tmp_path: Path) -> None:
    with open_checkpoint(TINY / "phi3") as opened:
        assert describe(opened, 32).config.context_length == 32
        for length in (0, 129):
            with pytest.raises(InvalidRequestError, match="128"):
                describe(opened, length)
