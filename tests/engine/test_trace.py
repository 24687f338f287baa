"""The trace file: valid, one lane per slot, no overlaps, an end for every request."""

import pytest
from fake_executor import FakeExecutor
from toy import running_engine
from typer.testing import CliRunner

import gapless.cli.run
from gapless.cli.app import app
from gapless.config import EngineConfig
from gapless.engine.trace import Tracer
from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams
from helpers_trace import Trace


def test_every_request_has_its_spans_and_its_end(tmp_path):
    path = tmp_path / "trace.json"
    executor = FakeExecutor(max_num_seqs=2)
    with running_engine(executor, tracer=Tracer(path)) as (engine, _):
        params = SamplingParams(max_tokens=5, temperature=0)
        handles = [engine.submit([i] * 20, params, request_id=f"r{i}") for i in range(6)]
        for handle in handles:
            assert handle.result(10).outputs[0].finish_reason == "length"
    trace = Trace(path)
    assert trace.content["otherData"]["note"] == "complete"
    steps = trace.check_lanes()
    assert trace.ends() == [(f"r{i}", "length") for i in range(6)]
    assert trace.slots == ["slot 0", "slot 1"]
    spans = [span for lane in trace.slots for span in trace.spans[lane]]
    prefills = {args["request"]: args for _, _, name, args in spans if name == "prefill"}
    decodes = {args["request"]: args for _, _, name, args in spans if name == "decode"}
    assert prefills.keys() == decodes.keys() == {f"r{i}" for i in range(6)}
    assert {args["tokens"] for args in prefills.values()} == {20}
    assert {args["new_tokens"] for args in decodes.values()} == {5}
    assert sum(args["prefill_rows"] for *_, args in steps) == 6 * 20
    assert sum(args["decode_rows"] for *_, args in steps) == 6 * 4
    assert max(args["running"] for args in trace.counters["sequences"]) == 2
    assert max(args["waiting"] for args in trace.counters["sequences"]) > 0
    assert trace.counters["sequences"][-1] == {"running": 0, "waiting": 0}
    assert len(trace.counters["rows"]) == len(steps)


def test_cancelled_and_unfinished_requests_end_too(tmp_path):
    path = tmp_path / "trace.json"
    executor = FakeExecutor(max_num_seqs=1, stalled=True)
    with running_engine(executor, tracer=Tracer(path)) as (engine, _):
        engine.submit([1, 2, 3], SamplingParams(max_tokens=5), request_id="runs")
        waits = engine.submit([1, 2, 3], SamplingParams(max_tokens=5), request_id="waits")
        engine.submit([1, 2, 3], SamplingParams(max_tokens=5), request_id="open")
        waits.cancel()
        assert waits.result(10).outputs[0].finish_reason == "abort"
    trace = Trace(path)
    trace.check_lanes()
    assert trace.ends() == [("open", "abort"), ("runs", "abort"), ("waits", "abort")]
    assert {args["request"] for _, args in trace.marks["queue"]} == {"waits", "open"}
    assert [span[2] for span in trace.spans["slot 0"]] == ["prefill"]


def test_preempted_sequences_come_back(tmp_path):
    path = tmp_path / "trace.json"
    executor = FakeExecutor(num_blocks=6, max_num_seqs=2, max_seq_len=96)
    with running_engine(executor, tracer=Tracer(path)) as (engine, _):
        params = SamplingParams(max_tokens=60, temperature=0)
        handles = [engine.submit([i] * 16, params, request_id=f"r{i}") for i in range(2)]
        for handle in handles:
            handle.result(10)
        assert engine.stats()["num_preemptions"] > 0
    trace = Trace(path)
    trace.check_lanes()
    assert trace.ends() == [("r0", "length"), ("r1", "length")]
    spans = [span for lane in trace.slots for span in trace.spans[lane]]
    prefills = [args["request"] for _, _, name, args in spans if name == "prefill"]
    preempted = [
        args["request"] for lane in trace.slots for name, args in trace.marks[lane] if name == "preempted"
    ]
    assert sorted(prefills) == sorted(["r0", "r1", *preempted])
    assert sum(args["new_tokens"] for _, _, name, args in spans if name == "decode") == 120
    assert max(args["used"] for args in trace.counters["KV blocks"]) == 6


def test_cached_tokens_and_preemption_are_marked(tmp_path):
    path = tmp_path / "trace.json"
    tracer = Tracer(path)
    start_s = tracer._start_s
    tracer.admitted(1, 0, "r", 40, 32, start_s + 0.001)
    tracer.token(1, start_s + 0.002)
    tracer.token(1, start_s + 0.003)
    tracer.ended(1, "r", "preempted", start_s + 0.004)
    tracer.admitted(1, 3, "r", 42, 0, start_s + 0.006)
    tracer.token(1, start_s + 0.007)
    tracer.ended(1, "r", "stop", start_s + 0.008)
    tracer.close()
    trace = Trace(path)
    trace.check_lanes()
    assert [name for name, _ in trace.marks["slot 0"]] == ["32 tokens cached", "preempted"]
    assert [(round(begin), round(end), name) for begin, end, name, _ in trace.spans["slot 0"]] == [
        (1000, 2000, "prefill"),
        (2000, 4000, "decode"),
    ]
    assert [name for name, _ in trace.marks["slot 3"]] == ["stop"]
    assert trace.ends() == [("r", "stop")]


def test_a_long_trace_is_cut_and_says_so(tmp_path):
    path = tmp_path / "trace.json"
    tracer = Tracer(path, max_records=100)
    start_s = tracer._start_s
    for number in range(1000):
        time_s = start_s + number * 0.01
        tracer.add_steps([(time_s, time_s + 0.004, time_s + 0.005, 1, 0, 0)])
        tracer.counted(number % 7, 0, 0, time_s)
        tracer.ended(number, "r", "abort", time_s)
    tracer.close()
    trace = Trace(path)
    assert len(trace.check_lanes()) + len(trace.marks["queue"]) + len(trace.counters["sequences"]) == 100
    assert trace.content["otherData"]["note"].startswith("cut after 100 records")
    assert [name for name, _ in trace.marks["loop"]] == ["the trace was cut here"]


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(InvalidRequestError, match="No such file or directory") as caught:
        Tracer(tmp_path / "no" / "folder.json")
    assert caught.value.param == "trace"


def test_run_takes_the_option(monkeypatch, tmp_path):
    asked = []

    def start(config, progress):
        asked.append(config)
        raise InvalidRequestError("enough")

    monkeypatch.setattr(gapless.cli.run, "start", start)
    CliRunner().invoke(app, ["run", "toy", "Hi", "--trace", str(tmp_path / "t.json")])
    assert asked[0].trace == str(tmp_path / "t.json")
    assert EngineConfig(model="toy", trace=tmp_path / "t.json").trace == str(tmp_path / "t.json")
