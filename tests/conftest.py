"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

MODEL_FILES = {
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma-3-270m.Q4_K_M.gguf",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
}
GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """Finds a real model by its name, or skips the test."""
    folder = Path(os.environ.get("GAPLESS_TEST_MODELS") or Path.home() / ".cache" / "gapless-test-models")

    def find(name: str) -> Path:
        path = folder / MODEL_FILES[name]
        if not path.is_file():
            pytest.skip(f"{path} is not there; fetch it with `make models`, or set GAPLESS_TEST_MODELS")
        return path

    return find
