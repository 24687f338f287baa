"""`/v1/embeddings`, with OpenAI's client and without."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from helpers_server import RunningServer

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors(answer: Any) -> np.ndarray:
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return np.array([one.embedding for one in answer.data])


def test_texts_become_vectors_of_length_1(client: Any, server: RunningServer) -> None:
    answer = client.embeddings.create(
        model=client.models.list().data[0].id, input=["a cat", "a kitten", "tax law"]
    )
    found = vectors(answer)
    assert found.shape == (3, 576)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
    alone = vectors(client.embeddings.create(model=answer.model, input="a cat"))
    assert np.array_equal(alone[0], found[0])


def test_token_ids_and_both_encodings_give_the_same(server: RunningServer) -> None:
    ids = [504, 1012, 314]
    as_floats = server.post("/v1/embeddings", input=ids)["data"][0]["embedding"]
    of_many = server.post("/v1/embeddings", input=[ids, ids[:2]])["data"]
    as_text = server.post("/v1/embeddings", input=ids, encoding_format="base64")["data"][0]["embedding"]
    assert of_many[0]["embedding"] == as_floats
    assert of_many[1]["embedding"] != as_floats
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(as_text), "<f4"), as_floats, rtol=1e-6)


def test_dimensions_are_the_first_ones_normalised(server: RunningServer) -> None:
    whole = np.array(server.post("/v1/embeddings", input="hello")["data"][0]["embedding"])
    short = np.array(server.post("/v1/embeddings", input="hello", dimensions=64)["data"][0]["embedding"])
    np.testing.assert_allclose(short, whole[:64] / np.linalg.norm(whole[:64]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "x", "dimensions": 100_000}, "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": [49_152]}, None),
        ({"input": "word " * 3000}, None),
        ({}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused(server: RunningServer, body: Any, param: str | None) -> None:
    status, _, _ = server.request("/v1/embeddings", body)
    assert status == 400
    error = server.post("/v1/embeddings", **body)["error"]
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    server.wait_until_idle()
