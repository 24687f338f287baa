"""Every kind of network, as a small random checkpoint, gives the logits that transformers gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from helpers_models import NAMES, TINY, expected, read_tensors, reference_logits, relative_error

# The order of additions is all that differs between the two.
REFERENCE_TOLERANCE = 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_definition_agrees_with_transformers(name: str) -> None:
    tokens, logits = expected(name)
    assert relative_error(reference_logits(TINY / name, [tokens]), logits) < REFERENCE_TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_fused_graph_agrees_with_transformers_in_any_steps(name: str) -> None:
    tokens, logits = expected(name)
    steps = np.split(tokens, [7, 8, 9, 30])
    assert relative_error(reference_logits(TINY / name, steps, fused=True), logits) < REFERENCE_TOLERANCE


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_network_of_a_multimodal_model(prefix: str, tmp_path: Path) -> None:
    text_config = json.loads((TINY / "gemma3" / "config.json").read_text())
    config = {"model_type": "gemma3", "text_config": text_config, "vision_config": {"hidden_size": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", prefix, 1): values for name, values in read_tensors(TINY / "gemma3").items()
    }
    tensors["vision_tower.weight"] = np.zeros(1, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    tokens, logits = expected("gemma3")
    assert relative_error(reference_logits(tmp_path, [tokens]), logits) < REFERENCE_TOLERANCE


def test_every_architecture_has_a_tiny_model() -> None:
    from gapless.models import architectures

    covered = {name.partition("-")[0] for name in NAMES}
    assert covered == {architecture.name for architecture in architectures()}
