"""A short soak: the whole one is `python benchmarks/soak.py MODEL`."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.models
def test_a_few_hundred_requests_in_a_tiny_cache(model_path):
    command = [sys.executable, SOAK, model_path("smollm2-135m"), "--requests", "250", "--templates", "40"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr
