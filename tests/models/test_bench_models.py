"""`gapless bench` and its trace on a real model, in small."""

import json

import pytest
from typer.testing import CliRunner

from gapless.cli.app import app
from helpers_trace import Trace

pytestmark = pytest.mark.models
runner = CliRunner()


@pytest.fixture
def bench(model_path):
    def run(*arguments):
        model = str(model_path("smollm2-135m"))
        result = runner.invoke(app, ["bench", model, *arguments, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return run


def test_streams_decode_together(bench):
    report = bench("--streams", "1,4", "--prompt-tokens", "32", "--new-tokens", "8", "--repeat", "1")
    assert [result["streams"] for result in report["results"]] == [1, 4]
    assert all(result["decode_tokens_per_s"] > 0 for result in report["results"])


def test_gap_and_the_loops_own_times(bench, tmp_path):
    path = tmp_path / "trace.json"
    report = bench("--gap", "--streams", "4", "--new-tokens", "12", "--trace", str(path))
    assert report["steps"] == report["python_idle"]["steps"] == 12
    assert 0 < report["gap_p50_us"] <= report["gap_p99_us"]
    assert 0.5 < report["busy_share"] < 1
    trace = Trace(path)
    steps = trace.check_lanes()
    assert sum(args["prefill_rows"] for *_, args in steps) == 4 * 16
    assert [reason for _, reason in trace.ends()] == ["abort"] * 4  # when the windows are over
    assert trace.slots == ["slot 0", "slot 1", "slot 2", "slot 3"]


def test_kv_cache_is_as_large_as_inspect_says(bench, model_path):
    report = bench("--contexts", "64,256", "--new-tokens", "4")
    inspected = json.loads(runner.invoke(app, ["inspect", str(model_path("smollm2-135m")), "--json"]).stdout)
    per_token = inspected["memory"]["kv_bytes_per_1k_tokens"] / 1024
    assert [result["kv_bytes"] for result in report["results"]] == [68 * per_token, 260 * per_token]
