"""The same network comes out of both file kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers_gguf_models import convert
from helpers_models import TINY, expected, reference_logits, relative_error

# What GGUF of that kind cannot say, or other readers ignore: windows of Llama-likes and Qwen, Gemma's scale.
CONVERTIBLE = ["llama", "llama-odd", "qwen3", "phi3"]


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_gguf_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    convert(TINY / name, tmp_path / "model.gguf")
    tokens, logits = expected(name)
    assert relative_error(reference_logits(tmp_path / "model.gguf", [tokens]), logits) < 2e-5


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_gguf_without_windows_agrees_inside_the_window(name: str, tmp_path: Path) -> None:
    convert(TINY / name, tmp_path / "model.gguf")
    tokens, logits = expected(name)
    found = reference_logits(tmp_path / "model.gguf", [tokens])
    assert relative_error(found[:12], logits[:12]) < 2e-5
    assert relative_error(found, logits) > 1e-3


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gguf_of_gemma_scales_by_head_size(name: str, tmp_path: Path) -> None:
    """The tiny models have another scale in order to test it; set to what GGUF implies, all else is equal."""
    folder = tmp_path / "hf"
    folder.mkdir()
    text = (TINY / name / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace('"query_pre_attn_scalar": 24', '"query_pre_attn_scalar": 32')
    )
    (folder / "model.safetensors").symlink_to(TINY / name / "model.safetensors")
    convert(folder, tmp_path / "model.gguf")
    tokens, _ = expected(name)
    found = reference_logits(tmp_path / "model.gguf", [tokens])
    assert relative_error(found, reference_logits(folder, [tokens])) < 2e-5


def test_optional_keys_have_the_defaults_of_the_format(tmp_path: Path) -> None:
    """head_dim from hidden size and heads, key-value heads as heads, rope base 10000."""
    from gapless.loading import open_checkpoint
    from gapless.models import describe

    without = ("rope.freq_base", "attention.key_length", "attention.value_length", "rope.dimension_count")
    convert(TINY / "llama", tmp_path / "model.gguf", without)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        config = describe(checkpoint).config
    assert (config.head_dim, config.rope.base, config.rope.rotary_dim) == (16, 10000.0, 16)
