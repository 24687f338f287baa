"""`gapless bench` over the scripted model: what each measurement prints, and how the figures are made."""

import json

import pytest
from fake_executor import FakeExecutor
from toy import running_engine, toy_llm
from typer.testing import CliRunner

import gapless.cli.bench
from gapless.bench.many_streams import ManyStreams, ManyStreamsSettings
from gapless.bench.streams import Stream, StreamGroup, token_gaps_s
from gapless.bench.token_gap import gap_figures
from gapless.cli.app import app
from gapless.engine.trace import StepRecord
from gapless.errors import EngineError, InvalidRequestError

runner = CliRunner()


@pytest.fixture
def executor(monkeypatch):
    """Eight slots of a model that never ends by itself, and takes time for a step."""
    executor = FakeExecutor(num_blocks=600, max_num_seqs=8, max_seq_len=1024, step_s=0.002)
    llms = []

    def start(config, progress, tracer):
        llm = toy_llm(executor, tracer)
        llms.append(llm)
        return llm.__enter__().runtime

    monkeypatch.setattr(gapless.cli.bench, "start", start)
    yield executor
    for llm in llms:
        llm.__exit__(None, None, None)


def bench(*arguments):
    result = runner.invoke(app, ["bench", "toy", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"] == "toy"
    assert report["peak_rss_bytes"] > 0
    return report


def test_streams(executor):
    report = bench("--streams", "1,4,8", "--prompt-tokens", "20", "--new-tokens", "10", "--repeat", "2")
    assert [result["streams"] for result in report["results"]] == [1, 4, 8]
    for result in report["results"]:
        for name in ("decode_tokens_per_s", "prefill_tokens_per_s", "output_tokens_per_s", "rss_bytes"):
            assert result[name] > 0
        assert 0 < result["ttft_p50_ms"] <= result["ttft_p90_ms"] <= result["ttft_p99_ms"]
        assert 0 < result["tpot_p50_ms"] <= result["tpot_p90_ms"] <= result["tpot_p99_ms"]
        assert 0 < result["itl_p50_ms"] <= result["itl_p99_ms"]
    assert report["settings"]["streams"] == [1, 4, 8]
    assert len(executor.admissions) == 2 * 1 + 2 * 3 * (1 + 4 + 8)


def test_streams_as_a_table(executor):
    result = runner.invoke(app, ["bench", "toy", "--streams", "2,3", "--repeat", "1"])
    lines = result.stdout.splitlines()
    assert "prompts of 128, 64 new tokens" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["streams", "2", "3"]


def test_decode_goes_on_with_the_same_prompts(executor):
    with running_engine(executor) as (engine, _):
        prompts = []
        make_request = engine.make_request
        engine.make_request = lambda prompt, params: prompts.append(prompt) or make_request(prompt, params)
        ManyStreams(engine, ManyStreamsSettings((3,), 20, 10)).prefill_and_decode(3)
    assert [len(prompt) for prompt in prompts] == [21] * 6
    assert prompts[:3] == prompts[3:]  # the first output is the prompt's first token, by the script
    assert prompts[0][20] == prompts[0][0]


def test_gap(executor, tmp_path):
    path = tmp_path / "trace.json"
    report = bench("--gap", "--streams", "8", "--new-tokens", "20", "--trace", str(path))
    for figures in (report, report["python_idle"]):
        assert figures["steps"] == 20
        assert 0 < figures["gap_p50_us"] <= figures["gap_p99_us"] <= figures["gap_max_us"]
        assert 0 < figures["busy_share"] < 1
        assert sum(figures["gap_histogram"]) == 19
    assert json.loads(path.read_text())["traceEvents"]


def test_gap_as_a_table(executor):
    result = runner.invoke(app, ["bench", "toy", "--gap", "--streams", "4", "--new-tokens", "10"])
    assert "burns the GIL" in result.stdout, result.output
    assert "gap p50, us" in result.stdout


def test_gap_figures():
    steps = [StepRecord(t, t + 0.008, t + 0.009, 4, 0, 0) for t in (0.0, 0.009010, 0.0180300, 0.028030)]
    figures = gap_figures(steps)
    assert figures.steps == 4
    assert figures.gap_p50_us == pytest.approx(20)
    assert figures.gap_max_us == pytest.approx(1000)
    assert figures.busy_share == pytest.approx(0.036 / 0.037030)
    assert figures.gap_histogram == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1]  # 10, 20 and 1000 us


def test_interference(executor):
    arguments = ("--streams", "3", "--prompt-tokens", "8", "--new-tokens", "5", "--long-prompt", "200")
    report = bench("--interference", *arguments, "--repeat", "2")
    assert report["streams"] == 3
    for name in ("itl_p50_ms", "itl_p99_ms", "loaded_itl_p50_ms", "loaded_itl_p99_ms", "itl_p99_ratio"):
        assert report[name] > 0
    assert report["long_ttft_ms"] > 0
    assert not executor.slots  # the streams were cancelled


def test_prefix(executor):
    report = bench("--prefix", "100", "--repeat", "2")
    assert report["prefix_tokens"] == 100
    assert report["first_ttft_ms"] > 0
    assert report["second_ttft_ms"] > 0
    assert report["ttft_ratio"] > 0


def test_contexts(executor):
    report = bench("--contexts", "200,50", "--new-tokens", "5")
    assert [result["context"] for result in report["results"]] == [50, 200]
    for result in report["results"]:
        assert result["prefill_tokens_per_s"] > 0
        assert result["decode_tokens_per_s"] > 0
        assert {"kv_bytes", "rss_growth_bytes"} <= result.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gap", "--prefix", "10"], "--gap and --prefix are different measurements"),
        (["--streams", "1,x"], "--streams takes positive numbers"),
        (["--contexts", "0"], "--contexts takes positive numbers"),
        (["--gap", "--streams", "1,2"], "one number of --streams"),
        (["--streams", "2", "--new-tokens", "1"], "new_tokens must be an integer of at least 2"),
    ],
)
def test_what_cannot_be_measured_is_refused(executor, arguments, message):
    result = runner.invoke(app, ["bench", "toy", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_streams_that_never_run_together_are_an_error():
    """Blocks for three streams only: one always waits."""
    executor = FakeExecutor(num_blocks=40, max_num_seqs=4, max_seq_len=600, step_s=0.002)
    with running_engine(executor) as (engine, _):
        streams = ManyStreams(engine, ManyStreamsSettings((4,), 20, 200))
        with pytest.raises(EngineError, match="the KV cache is too small"):
            streams.prefill_and_decode(4)


def test_a_group_reports_the_failure_of_the_engine(executor):
    executor.stalled = True
    with running_engine(executor) as (engine, _):
        group = StreamGroup(engine, [[1, 2, 3]], 50)
        executor.fail("out of luck")
        with pytest.raises(EngineError, match="out of luck"):
            group.wait()
        with pytest.raises(EngineError, match="out of luck"):
            group.wait_for_steps(1)


def test_a_prompt_that_does_not_fit_is_refused(executor):
    with running_engine(executor) as (engine, _), pytest.raises(InvalidRequestError):
        StreamGroup(engine, [[1] * 1100], 1)


def test_token_gaps_of_a_window():
    stream = Stream([1, 2, 3, 4], [1.0, 2.0, 4.0, 8.0])
    assert token_gaps_s(stream) == [1.0, 2.0, 4.0]
    assert token_gaps_s(stream, 2.0, 4.0) == [2.0]
