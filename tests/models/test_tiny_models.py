"""Every kind of network, as a small random checkpoint, gives the logits that transformers gives."""

from __future__ import annotations

import numpy as np
import pytest

from helpers_models import NAMES, TINY, expected, reference_logits, relative_error

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


def test_every_architecture_has_a_tiny_model() -> None:
    from gapless.models import architectures

    covered = {name.partition("-")[0] for name in NAMES}
    assert covered == {architecture.name for architecture in architectures()}
