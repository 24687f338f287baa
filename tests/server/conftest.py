"""Servers that many tests share. Tests must leave them idle, and as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers_server import RunningServer


@pytest.fixture(scope="session")
def server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """SmolLM2-135M: a chat model without fill-in-the-middle."""
    with RunningServer(model_path("smollm2-135m"), "--max-model-len", "2048") as running:
        yield running


@pytest.fixture(scope="session")
def coder_server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """Qwen2.5-Coder-0.5B: a chat model with tools and fill-in-the-middle."""
    with RunningServer(model_path("qwen2.5-coder-0.5b"), "--max-model-len", "4096") as running:
        yield running
