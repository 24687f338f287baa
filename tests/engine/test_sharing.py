"""What users see of priorities, preemption, shared prefixes and states, over the scripted executor."""

import asyncio
import gc
import threading
import time

import pytest
from fake_executor import FakeExecutor
from toy import byte_tokenizer, running_engine, toy_llm

from gapless.async_engine import AsyncEngine
from gapless.engine import SequenceState
from gapless.engine.events import FinishEvent
from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams


def ids(text):
    return list(text.encode())


def test_a_second_request_with_the_same_beginning_reports_its_cached_tokens():
    with running_engine() as (engine, _):
        first = engine.submit(ids("x" * 40), SamplingParams(max_tokens=2)).result(5)
        second = engine.submit(ids("x" * 40 + "y"), SamplingParams(max_tokens=2)).result(5)
        stats = engine.stats()
    assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 32)
    assert second.outputs[0].text == "xx"
    assert (stats["num_prompt_tokens"], stats["num_cached_tokens"]) == (81, 32)


def test_choices_of_one_prompt_share_its_blocks():
    executor = FakeExecutor(num_blocks=12, max_num_seqs=4)
    with running_engine(executor) as (engine, _):
        result = engine.submit(ids("x" * 100), SamplingParams(max_tokens=3, n=4)).result(5)
        assert [choice.text for choice in result.outputs] == ["xxx"] * 4
        assert engine.stats()["num_preemptions"] == 0  # 4 x 7 blocks would not fit into 12


def test_preempted_requests_give_what_they_would_have_given():
    """Three sequences of up to 15 blocks in a cache of 16."""
    with running_engine(FakeExecutor(num_blocks=16, max_num_seqs=3)) as (engine, _):
        handles = [engine.submit(ids(c * 10), SamplingParams(max_tokens=200)) for c in "abc"]
        results = [handle.result(20) for handle in handles]
        stats = engine.stats()
    assert [result.outputs[0].text for result in results] == ["a" * 200, "b" * 200, "c" * 200]
    assert stats["num_preemptions"] > 0
    assert sum(result.metrics.num_preemptions for result in results) == stats["num_preemptions"]
    assert results[0].metrics.num_preemptions == 0  # the first in line never gives way


def test_an_urgent_request_puts_out_another_which_goes_on_later():
    executor = FakeExecutor(max_num_seqs=1, stalled=True)
    with running_engine(executor) as (engine, _):
        ordinary = engine.submit(ids("abc"), SamplingParams(max_tokens=100), priority=1)
        urgent = engine.submit(ids("xyz"), SamplingParams(max_tokens=3), priority=0)
        executor.resume()
        assert urgent.result(5).outputs[0].text == "xyz"
        assert ordinary.result(5).outputs[0].text == ("abc" * 34)[:100]
        assert [sequence_id for _, sequence_id in executor.admissions] == [1, 2, 1]


def test_priority_is_checked():
    with running_engine() as (engine, _), pytest.raises(InvalidRequestError, match="priority"):
        engine.submit(ids("a"), priority="high")


def test_states():
    executor = FakeExecutor(max_num_seqs=1, stalled=True)
    with running_engine(executor) as (engine, _):
        first, second = engine.submit(ids("a")), engine.submit(ids("b"))
        assert (first.state, second.state) == (SequenceState.PREFILL, SequenceState.WAITING)
        executor.resume()
        for handle in (first, second):
            handle.result(5)
            assert handle.state is SequenceState.FINISHED


def test_a_cancelled_request_that_is_being_preempted_ends_once():
    ends = []
    executor = FakeExecutor(max_num_seqs=1, stalled=True)
    with running_engine(executor) as (engine, _):
        request = engine.make_request(ids("a"), SamplingParams(max_tokens=50), priority=9)
        engine.start(request, lambda _, events: ends.extend(e for e in events if isinstance(e, FinishEvent)))
        urgent = engine.submit(ids("b"), SamplingParams(max_tokens=1), priority=0)  # puts the other one out
        engine.cancel(request)
        executor.resume()
        urgent.result(5)
        deadline = time.monotonic() + 5
        while not ends:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert engine.stats()["num_waiting"] == 0
    assert [end.reason.value for end in ends] == ["abort"]


def test_a_consumer_may_cancel_from_within_and_garbage_may_be_collected_at_any_moment():
    """Cancellations from a sink, and from generators that the collector ends in the midst of the engine."""
    done = threading.Event()

    def sink(request, events):
        engine.cancel(request)
        gc.collect()
        if any(isinstance(event, FinishEvent) for event in events):
            done.set()

    with toy_llm() as llm:
        engine = llm.engine
        cycle = []
        stream = llm.stream("abc", SamplingParams(max_tokens=200))
        next(stream)
        cycle += [cycle, stream]
        del stream, cycle
        engine.start(engine.make_request(ids("abc"), SamplingParams(max_tokens=200)), sink)
        assert done.wait(5)
        deadline = time.monotonic() + 5
        while engine.stats()["num_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_async_engine_streams_and_a_task_that_is_cancelled_ends_its_request():
    async def scenario(llm):
        engine = AsyncEngine(llm.runtime)
        texts = [chunk.text async for chunk in engine.generate("abc", SamplingParams(max_tokens=6))]
        assert "".join(texts) == "zzzzzz"

        async def endless():
            async for _ in engine.generate("abc", SamplingParams(max_tokens=200), priority=3):
                started.set()

        started = asyncio.Event()
        task = asyncio.create_task(endless())
        await asyncio.wait_for(started.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(1000):
            if not engine.stats()["num_running"]:
                break
            await asyncio.sleep(0.002)
        assert engine.stats()["num_running"] == 0
        await engine.close()

    def slowly(token_ids, num_prompt):
        time.sleep(0.002)
        return ord("z")

    with toy_llm(FakeExecutor(script=slowly)) as llm:
        asyncio.run(scenario(llm))


def test_priorities_of_a_batch():
    with toy_llm(FakeExecutor(max_num_seqs=1, max_seq_len=256)) as llm:
        outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=2), priority=[1, 0])
        assert len(outputs) == 2
        with pytest.raises(InvalidRequestError, match="2 prompts but 1 priorities"):
            llm.generate(["a", "b"], priority=[1])


def test_tokenizer_of_async_engine():
    with toy_llm() as llm:
        assert AsyncEngine(llm.runtime).tokenizer.vocab_size == byte_tokenizer().vocab_size
