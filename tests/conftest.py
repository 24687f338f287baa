"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gapless.hub import models_directory

# How long an example takes says nothing here: CI machines are shared, and pytest has a timeout of its own.
settings.register_profile("gapless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gapless")

MODEL_FILES = {
    "smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3-270m": "gemma-3-270m.Q4_K_M.gguf",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
}


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """Finds a real model by its name, or skips the test."""
    chosen = os.environ.get("GAPLESS_TEST_MODELS")
    defaults = [models_directory(), Path.home() / ".cache" / "gapless-test-models"]
    folders = [Path(chosen)] if chosen else defaults

    def find(name: str) -> Path:
        for path in (folder / MODEL_FILES[name] for folder in folders):
            if path.is_file():
                return path
        pytest.skip(f"{name} is not there; fetch it with `make models`, or set GAPLESS_TEST_MODELS")

    return find
