"""The server against its own description: nothing that a client can send makes it fail."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

from helpers_server import RunningServer

pytestmark = pytest.mark.models

# So that what is valid is quick. Each API has its own names; the others' are ignored.
FEW_TOKENS = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 1}

few_examples = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode))
def test_nothing_makes_the_server_fail(server: RunningServer, mode: schemathesis.GenerationMode) -> None:
    schema = schemathesis.openapi.from_dict(server.get("/openapi.json"))
    model = server.get("/v1/models")["data"][0]["id"]
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 5
    for operation in operations:
        if mode.is_negative and not operation.body:
            continue  # any text may stand in a path

        @few_examples
        @given(case=operation.as_strategy(mode))
        def exercise(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body = _quick(case.body, model)
            case.call_and_validate(base_url=server.url, checks=[not_a_server_error], timeout=60)

        exercise()
    server.wait_until_idle()


def _quick(body: dict[str, Any], model: str) -> dict[str, Any]:
    """The body, with few tokens to generate, and for the model that is served. What is invalid stays so."""
    few = {name: few for name, few in FEW_TOKENS.items() if isinstance(body.get(name), int | float | None)}
    quick = {**body, **few}
    if isinstance(body.get("options"), dict | None):
        quick["options"] = {**(body.get("options") or {}), "num_predict": 2}
    if isinstance(body.get("model"), str | None):
        quick["model"] = model
    return quick
