"""The definitions, computed in numpy over dequantized GGUF weights, against PyTorch: no kernels involved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers_golden import GOLDEN
from helpers_models import log_softmax, reference_logits

pytestmark = pytest.mark.models

MAX_TOKENS = 40  # numpy is slow
TOLERANCE = 5e-4  # nats; found: up to 1e-4


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b"])
def test_prompt_logprobs(name: str, model_path: Callable[[str], Path]) -> None:
    cases = json.loads((GOLDEN / f"{name}-dev.json").read_text())["cases"]
    short = [case for case in cases.values() if len(case["token_ids"]) <= MAX_TOKENS]
    for case in short[1:3]:
        ids = case["token_ids"]
        logprobs = log_softmax(reference_logits(model_path(name), [np.array(ids)], fused=True))
        found = logprobs[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found, case["prompt_logprobs"][1:], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(
            logprobs[-1][case["last_top_ids"]], case["last_top_logprobs"], rtol=0, atol=TOLERANCE
        )
