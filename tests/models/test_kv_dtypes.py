"""The types of the KV cache: accuracy, equal bits however a prompt is cut, bytes, and what can't be had."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from gapless import LLM, SamplingParams, _native
from gapless.config import KV_DTYPES, EngineConfig
from gapless.errors import InvalidRequestError
from gapless.loading import open_checkpoint
from gapless.models import estimate_memory, kv_cache, load_model
from gapless.models.kv_cache import kv_bytes_per_token, layer_kv_dtypes
from helpers_golden import GOLDEN
from helpers_models import NAMES, TINY, expected, log_softmax, relative_error
from helpers_native_models import native_logprobs

# bf16 rounds 8 times as coarsely as f16, whose limit is 1e-3 (test_native_models.py). Found: up to 5e-3 and
# 1.3e-2; the random weights of tiny models are the worst case.
TINY_LIMITS = {"bf16": 8e-3, "int8": 2e-2}

# Mean and largest absolute difference in nats. Found with bf16 0.0040 and 0.18 (Qwen), with int8 0.0079 and
# 0.21; int8 activations alone have a mean of up to 0.022.
GOLDEN_LIMITS = {"bf16": (0.006, 0.3), "int8": (0.012, 0.4)}


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_stays_close(name: str, kv_dtype: str) -> None:
    tokens, logits = expected(name)
    found = native_logprobs(TINY / name, tokens, kv_dtype=kv_dtype)
    assert relative_error(found, log_softmax(logits)) < TINY_LIMITS[kv_dtype]
    assert relative_error(found, native_logprobs(TINY / name, tokens)) > 1e-5  # it is another type


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_small_steps_give_the_same_bits(name: str, kv_dtype: str) -> None:
    tokens, _ = expected(name)
    whole = native_logprobs(TINY / name, tokens, kv_dtype=kv_dtype)
    for step_tokens in (1, 7):
        parts = native_logprobs(TINY / name, tokens, kv_dtype=kv_dtype, step_tokens=step_tokens)
        np.testing.assert_array_equal(parts, whole)


def test_layers_with_large_keys_stay_f16(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    biases = {
        0: np.array([0.5, -211.0], np.float32),
        1: np.array([3.0, -35.0], np.float32),
        2: np.array([145.0, 0.0], np.float32),
    }
    assert layer_kv_dtypes("int8", 4, biases) == ("f16", "int8", "f16", "int8")
    assert layer_kv_dtypes("bf16", 4, biases) == ("bf16",) * 4

    tokens, _ = expected("qwen2")
    in_f16 = native_logprobs(TINY / "qwen2", tokens)
    monkeypatch.setattr(kv_cache, "_LARGEST_INT8_KEY_BIAS", 0.0)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(native_logprobs(TINY / "qwen2", tokens, kv_dtype="int8"), in_f16)
    assert "the layers 0, 1, 2 stays f16" in caplog.text


@pytest.mark.parametrize("kv_dtypes", [("f16",) * 3, ("bf16",) * 3, ("int8",) * 3, ("f16", "int8", "bf16")])
def test_bytes(kv_dtypes: tuple[str, ...]) -> None:
    """The cache takes what is foretold."""
    builder = _native.ProgramBuilder(
        max_tokens=4, max_logit_rows=1, vocab_size=8, kv_dtypes=kv_dtypes, num_kv_heads=2, head_dim=48
    )
    logits = builder.buffer("logit", 32, 0)
    program = builder.build(64, logits)
    executor = _native.Executor(
        program, num_blocks=5, max_num_seqs=1, max_seq_len=80, max_step_tokens=4, num_threads=1
    )
    try:
        tokens = 5 * _native.Executor.block_size
        assert executor.kv_bytes == kv_bytes_per_token(kv_dtypes, 2, 48) * tokens
    finally:
        executor.close()


def test_estimate() -> None:
    with open_checkpoint(TINY / "qwen2") as checkpoint:
        per_token = [
            estimate_memory(checkpoint, kv_dtype=kv_dtype).kv_bytes_per_token for kv_dtype in KV_DTYPES
        ]
    model = load_model(TINY / "qwen2", kv_dtype="int8")
    model.checkpoint.close()
    config = model.config
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert per_token == [2 * values, 2 * values, values + values // config.head_dim * 4]
    assert model.kv_bytes_per_token == per_token[2]


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"f16, bf16 or int8.*fp8") as error:
        EngineConfig(model="toy", kv_dtype="fp8")
    assert error.value.param == "kv_dtype"
    with pytest.raises(InvalidRequestError, match="fp8"):
        load_model(TINY / "llama", kv_dtype="fp8")
    with open_checkpoint(TINY / "llama") as checkpoint, pytest.raises(InvalidRequestError, match="fp8"):
        estimate_memory(checkpoint, kv_dtype="fp8")
    with pytest.raises(ValueError, match="fp8"):
        _native.ProgramBuilder(
            max_tokens=1, max_logit_rows=1, vocab_size=8, kv_dtypes=["fp8"], num_kv_heads=1, head_dim=16
        )


@pytest.mark.models
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"])
def test_golden_logprobs(name: str, kv_dtype: str, model_path) -> None:  # type: ignore[no-untyped-def]
    cases = json.loads((GOLDEN / f"{name}-dev.json").read_text())["cases"].values()
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    path: Path = model_path(name)
    with LLM(path, activations="a16", kv_dtype=kv_dtype, max_model_len=1024, max_num_seqs=8) as llm:
        outputs = llm.generate([case["token_ids"] for case in cases], params, use_tqdm=False)
    differences = [
        abs(entry[token_id].logprob - wanted)
        for case, output in zip(cases, outputs, strict=True)
        for token_id, wanted, entry in zip(
            case["token_ids"], case["prompt_logprobs"], output.prompt_logprobs, strict=True
        )
        if wanted is not None
    ]
    mean, largest = GOLDEN_LIMITS[kv_dtype]
    print(f"{name} {kv_dtype}: mean {np.mean(differences):.5f} max {max(differences):.4f}")
    assert np.mean(differences) <= mean
    assert max(differences) <= largest
