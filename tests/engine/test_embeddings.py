"""Embeddings as users and servers get them, over the scripted executor."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from fake_executor import FakeExecutor
from toy import BOS, running_engine, toy_llm

from gapless import Pooling, SamplingParams
from gapless.engine.events import EmbeddingEvent, FinishEvent, FinishReason, TokenEvent
from gapless.engine.trace import Tracer
from gapless.errors import ContextLengthError, EngineError, InvalidRequestError

PARAMS = SamplingParams()


class Sink:
    """Gathers the events of requests until each has ended."""

    def __init__(self):
        self.events = {}
        self._ended = threading.Condition()

    def __call__(self, request, events):
        with self._ended:
            self.events.setdefault(request, []).extend(events)
            self._ended.notify()

    def wait(self, request):
        def ended():
            return any(isinstance(event, FinishEvent) for event in self.events.get(request, ()))

        with self._ended:
            assert self._ended.wait_for(ended, 5)
            return self.events[request]


def start(engine, sink, prompt, pooling, **options):
    request = engine.make_request(prompt, PARAMS, pooling=pooling, **options)
    engine.start(request, sink)
    return request


@pytest.mark.parametrize(
    ("pooling", "expected"), [(Pooling.LAST, [4, 1]), (Pooling.MEAN, [3, 1]), (Pooling.CLS, [2, 1])]
)
def test_a_server_gets_the_vector_and_then_the_end(pooling, expected):
    sink = Sink()
    with running_engine() as (engine, _):
        events = sink.wait(start(engine, sink, [2, 3, 4], pooling, normalize=False))
    embedding, end = events
    assert embedding.choice == end.choice == 0
    assert embedding.vector.dtype == np.float32
    assert embedding.vector.tolist() == expected
    assert end.reason is FinishReason.STOP


def test_embed_keeps_the_order_and_takes_prompts_in_every_form():
    with toy_llm(FakeExecutor(max_num_seqs=2)) as llm:
        outputs = llm.embed(["ab", [99], {"prompt_token_ids": [3, 4]}] * 5, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[97, 98], [99], [3, 4]] * 5
        for output in outputs:
            last = output.prompt_token_ids[-1]
            np.testing.assert_allclose(output.outputs.embedding, np.array([last, 1]) / np.hypot(last, 1))
            assert output.outputs.hidden_size == 2
            assert output.finished
        assert outputs[0].prompt == "ab"
        assert outputs[1].prompt is None
        assert llm.embed([]) == []
        assert llm.embed("ab", pooling="mean", normalize=False)[0].outputs.embedding.tolist() == [97.5, 1]
        assert llm.engine.stats()["num_free_blocks"] == 64


def test_metrics():
    with toy_llm() as llm:
        metrics = llm.embed("abc")[0].metrics
    assert 0 <= metrics.queue_s <= metrics.e2e_s
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (3, 0)
    assert metrics.ttft_s is metrics.tpot_s is None


def test_a_prompt_may_fill_the_context_and_no_more():
    with toy_llm() as llm:
        assert len(llm.embed([1] * 256)[0].prompt_token_ids) == 256
        with pytest.raises(
            ContextLengthError,
            match=r"length is 256 tokens \(max_model_len\), and the prompt is too long with 257: shorten",
        ):
            llm.embed([[1], [1] * 257])
    with running_engine(FakeExecutor(num_blocks=4)) as (engine, _):
        sink = Sink()
        sink.wait(start(engine, sink, [1] * 64, Pooling.MEAN))
        with pytest.raises(ContextLengthError, match="65 prompt tokens do not fit") as caught:
            engine.make_request([1] * 65, PARAMS, pooling=Pooling.MEAN)
        assert caught.value.param == "prompt"


def test_an_empty_prompt_is_the_beginning_of_a_text_where_there_is_a_token_for_it():
    with toy_llm() as llm:
        assert llm.embed("")[0].prompt_token_ids == [BOS]
    with toy_llm(bos=None) as llm, pytest.raises(InvalidRequestError, match="empty"):
        llm.embed("")


@pytest.mark.parametrize(
    ("params", "param"),
    [({"n": 2}, "n"), ({"logprobs": 0}, "logprobs"), ({"prompt_logprobs": 0}, "prompt_logprobs")],
)
def test_what_an_embedding_cannot_give_is_refused(params, param):
    with running_engine() as (engine, _):
        with pytest.raises(InvalidRequestError, match="embedding") as caught:
            engine.make_request([1], SamplingParams(**params), pooling=Pooling.LAST)
        assert caught.value.param == param


def test_wrong_words_are_refused():
    with toy_llm() as llm:
        for pooling in ("max", 3):
            with pytest.raises(InvalidRequestError, match="last, mean or cls"):
                llm.embed("a", pooling=pooling)
        with pytest.raises(InvalidRequestError, match="normalize"):
            llm.embed("a", normalize="no")


def test_the_last_token_profits_from_the_cache_and_the_others_compute_everything():
    executor = FakeExecutor()
    with toy_llm(executor) as llm:
        llm.generate("x" * 40, SamplingParams(max_tokens=2))
        cached = {
            pooling: llm.embed("x" * 40 + "y", pooling=pooling)[0].metrics.num_cached_tokens
            for pooling in Pooling
        }
        assert cached == {Pooling.LAST: 32, Pooling.MEAN: 0, Pooling.CLS: 0}
        llm.embed("z" * 40, pooling="mean")  # what an embedding computed serves others
        assert llm.generate("z" * 40, SamplingParams(max_tokens=2))[0].metrics.num_cached_tokens == 32


def test_cancelled_while_it_waits_and_while_it_runs():
    sink = Sink()
    with running_engine(FakeExecutor(max_num_seqs=1, stalled=True)) as (engine, executor):
        running = start(engine, sink, [1] * 40, Pooling.MEAN)
        waiting = start(engine, sink, [2] * 40, Pooling.LAST)
        for request in (waiting, running):
            engine.cancel(request)
            assert [event.reason for event in sink.wait(request)] == [FinishReason.ABORT]
        executor.resume()
        assert len(sink.wait(start(engine, sink, [3], Pooling.CLS))) == 2
        stats = engine.stats()
    assert (stats["num_running"], stats["num_waiting"], stats["num_free_blocks"]) == (0, 0, 64)


@pytest.mark.parametrize("pooling", Pooling)
def test_put_out_by_a_more_urgent_request_it_begins_again(pooling):
    sink = Sink()
    with running_engine(FakeExecutor(max_num_seqs=1, stalled=True)) as (engine, executor):
        request = start(engine, sink, [1, 2, 3] * 20, pooling, priority=1, normalize=False)
        urgent = engine.submit([9], SamplingParams(max_tokens=2), priority=0)
        executor.resume()
        urgent.result(5)
        embedding, end = sink.wait(request)
    assert embedding.vector.tolist() == {"last": [3, 1], "mean": [2, 1], "cls": [1, 1]}[pooling.value]
    assert end.reason is FinishReason.STOP
    assert request.num_preemptions == 1


def test_embeddings_and_streams_in_a_cache_that_is_too_small_for_all():
    """Every request ends once, with what it asked for, though streams put embeddings out to grow."""
    sink = Sink()
    with running_engine(FakeExecutor(num_blocks=16, max_num_seqs=4)) as (engine, _):
        streams = [
            engine.make_request([10 + number] * 20, SamplingParams(max_tokens=150)) for number in range(3)
        ]
        kinds = list(Pooling) * 4
        embeddings = [
            engine.make_request([number, 200] * 60, PARAMS, pooling=kind, normalize=False)
            for number, kind in enumerate(kinds)
        ]
        for number, request in enumerate(embeddings):
            if number < len(streams):
                engine.start(streams[number], sink)
            engine.start(request, sink)
        for request in (*streams, *embeddings):
            sink.wait(request)
        assert engine.stats()["num_free_blocks"] == 16
    for request, events in sink.events.items():
        assert sum(isinstance(event, FinishEvent) for event in events) == 1
        if request.pooling is None:
            tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
            assert tokens == [request.prompt_token_ids[0]] * 150
        else:
            number = request.prompt_token_ids[0]
            expected = {"last": 200, "mean": (number + 200) / 2, "cls": number}[request.pooling.value]
            (embedding,) = (event for event in events if isinstance(event, EmbeddingEvent))
            assert embedding.vector.tolist() == [expected, 1]


def test_the_end_of_the_engine_is_no_embedding():
    executor = FakeExecutor(stalled=True)
    with toy_llm(executor) as llm:
        executor.fail("broken")
        with pytest.raises(EngineError, match="broken"):
            llm.embed(["a", "b"])
    admitted = threading.Event()
    executor = FakeExecutor(stalled=True)
    admit = executor.admit

    def tell(*arguments):
        admit(*arguments)
        admitted.set()

    executor.admit = tell
    with toy_llm(executor) as llm:
        closing = threading.Thread(target=lambda: admitted.wait(5) and llm.close())
        closing.start()
        with pytest.raises(EngineError, match="ended before its embedding"):
            llm.embed("a")
        closing.join()


def test_a_model_whose_pooling_is_not_known_wants_to_be_told():
    with toy_llm() as llm:
        llm.engine.limits = replace(llm.engine.limits, pooling=None)
        with pytest.raises(InvalidRequestError, match="choose one"):
            llm.embed("a")
        assert len(llm.embed("a", pooling="last")) == 1


def test_the_trace_shows_a_prefill_and_its_end(tmp_path):
    with toy_llm(tracer=Tracer(tmp_path / "trace.json")) as llm:
        llm.embed("abc")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"prefill", "stop"} <= names
    assert "decode" not in names
