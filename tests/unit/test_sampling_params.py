import math

import numpy as np
import pytest

from gapless import SamplingParams
from gapless.errors import InvalidRequestError


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert params.max_tokens == 16
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.n, params.seed, params.logprobs, params.prompt_logprobs) == (1, None, None, None)
    assert params.skip_special_tokens
    assert not params.ignore_eos


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("seed", 2**64),
        ("seed", "1"),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 1]),
        ("stop", 5),
        ("stop", b"x"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 3),
        ("logprobs", -1),
        ("logprobs", True),
        ("prompt_logprobs", 0.5),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", [1]),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("n", 0),
        ("n", 100_000),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    "field", ["temperature", "top_k", "top_p", "min_p", "n", "ignore_eos", "repetition_penalty"]
)
def test_none_means_the_default(field):
    assert SamplingParams(**{field: None}) == SamplingParams()


def test_no_limit_of_new_tokens():
    assert SamplingParams(max_tokens=None, min_tokens=1000).max_tokens is None


def test_edges_that_are_right():
    params = SamplingParams(
        temperature=0,
        top_k=-1,
        top_p=0,
        min_p=1,
        seed=-1,
        stop=("a", "a"),
        stop_token_ids=[3, 3],
        logit_bias={},
    )
    assert params.top_k == 0
    assert params.stop == ("a",)
    assert params.stop_token_ids == (3,)
    assert params.logit_bias is None
    assert SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5)) == SamplingParams(
        max_tokens=3, temperature=0.5
    )


def test_parameters_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().top_k = 3
