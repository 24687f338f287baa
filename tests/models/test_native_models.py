"""The native core computes what the definitions say: tiny models of every kind against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gapless.errors import UnsupportedModelError
from gapless.models import load_model
from helpers_gguf_models import convert
from helpers_models import NAMES, TINY, expected, log_softmax, reference_logits, relative_error
from helpers_native_models import native_logprobs


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_transformers(name: str) -> None:
    tokens, logits = expected(name)
    assert relative_error(native_logprobs(TINY / name, tokens), log_softmax(logits)) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_definition(name: str) -> None:
    """Nearly all of the distance to transformers is the rounding of keys and values to f16 in the cache."""
    tokens, _ = expected(name)
    logits = reference_logits(TINY / name, [tokens], cache_type=np.float16)
    assert relative_error(native_logprobs(TINY / name, tokens), log_softmax(logits)) < 2e-4


@pytest.mark.parametrize("name", NAMES)
def test_small_steps_give_the_same_bits(name: str) -> None:
    tokens, _ = expected(name)
    whole = native_logprobs(TINY / name, tokens)
    np.testing.assert_array_equal(native_logprobs(TINY / name, tokens, step_tokens=7), whole)


def test_gguf_with_interleaved_heads(tmp_path: Path) -> None:
    convert(TINY / "llama", tmp_path / "model.gguf")
    tokens, logits = expected("llama")
    assert relative_error(native_logprobs(tmp_path / "model.gguf", tokens), log_softmax(logits)) < 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("quant", "activations", "tolerance"),
    [("int8", "a16", 0.02), ("int8", "a8", 0.03), ("int4", "a16", 0.3), ("int4:64", "a8", 0.35)],
)
def test_instant_quant_stays_close(name: str, quant: str, activations: str, tolerance: float) -> None:
    """Random weights are the worst case: nothing averages out over 64 values and three layers."""
    tokens, logits = expected(name)
    found = native_logprobs(TINY / name, tokens, quant=quant, activations=activations)
    distance = np.abs(found - log_softmax(logits)).mean() / np.abs(log_softmax(logits)).mean()
    assert distance < tolerance


def test_progress_and_report() -> None:
    seen: list[tuple[int, int]] = []
    model = load_model(
        TINY / "mistral", quant="int4", progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (model.checkpoint.total_bytes,) * 2
    assert set(model.weight_types) == {"int4", "int8"}
    assert model.program.weight_bytes == sum(model.weight_types.values())
    assert model.config.context_length == 128
    assert model.architecture == "mistral"


@pytest.mark.models
def test_quantized_checkpoints_are_not_quantized_again(model_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnsupportedModelError, match="already quantized"):
        load_model(model_path("smollm2-135m"), quant="int8")
