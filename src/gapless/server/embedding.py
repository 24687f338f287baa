"""Texts as vectors, whichever API asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams
from gapless.server.messages import Whole
from gapless.server.service import PromptOrIds, Service
from gapless.server.stream import Stream

MAX_INPUTS = 2048


def open_embedding(
    service: Service, inputs: Sequence[PromptOrIds], dimensions: int | None, request_id: str
) -> Stream:
    """A stream with one chunk for each input. InvalidRequestError if the vectors have fewer dimensions."""
    facts = service.require_ready()
    if dimensions is not None and not 1 <= dimensions <= facts.hidden_size:
        raise InvalidRequestError(
            f"dimensions is {dimensions}; this model has vectors of {facts.hidden_size}.", param="dimensions"
        )
    return service.open(inputs, SamplingParams(), request_id=request_id, is_embedding=True)


def embedding_inputs(given: Any) -> list[PromptOrIds]:
    """One text or many, or token ids, as prompts. InvalidRequestError for none, and for too many."""
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequestError(
            f"input has {len(inputs)} texts; 1 to {MAX_INPUTS} are taken.", param="input"
        )
    return [Whole(one) if isinstance(one, str) else one for one in inputs]


def shortened(data: bytes, dimensions: int | None) -> Any:
    """A vector [hidden_size] as float32 [dimensions], of length 1: models trained for it allow the cut."""
    vector = np.frombuffer(data, np.float32)
    if dimensions is None or dimensions >= len(vector):
        return vector
    cut = vector[:dimensions]
    norm = float(np.linalg.norm(cut))
    return cut / norm if norm else cut
