import asyncio
import gc
import threading
import time

import pytest
from fake_executor import FakeExecutor
from toy import BOS, EOS, byte_tokenizer, running_engine, say

from gapless.engine import FinishReason
from gapless.engine.events import FinishEvent
from gapless.errors import ContextLengthError, EngineError, InvalidRequestError
from gapless.sampling import SamplingParams


def ids(text):
    return list(text.encode())


def wait_for(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.001)


def test_a_request_runs_to_its_end_token():
    with running_engine(FakeExecutor(script=say("Paris."))) as (engine, _):
        result = engine.submit(ids("Capital?"), SamplingParams(max_tokens=50)).result(timeout=5)
    (choice,) = result.outputs
    assert choice.text == "Paris."
    assert choice.token_ids == [*ids("Paris."), EOS]  # the end token is reported but not shown
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert result.prompt_token_ids == ids("Capital?")
    assert result.finished
    metrics = result.metrics
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (8, 7)
    assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.e2e_s
    assert metrics.tpot_s > 0


def test_max_tokens_ends_with_length_and_is_capped_by_the_context():
    with running_engine() as (engine, _):
        short = engine.submit(ids("abc"), SamplingParams(max_tokens=4))
        long = engine.submit(ids("abc"), SamplingParams(max_tokens=None))
        assert short.result(5).outputs[0].text == "abca"
        output = long.result(5).outputs[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 256 - 3


def test_growing_sequences_get_their_blocks():
    with running_engine() as (engine, executor):
        engine.submit(ids("abc"), SamplingParams(max_tokens=250)).result(5)
        assert executor.num_extends > 0
        assert engine.stats()["num_free_blocks"] == executor.num_blocks


def test_more_requests_than_slots():
    with running_engine(FakeExecutor(max_num_seqs=2)) as (engine, executor):
        handles = [engine.submit(ids(f"{number:02}"), SamplingParams(max_tokens=6)) for number in range(20)]
        texts = [handle.result(5).outputs[0].text for handle in handles]
        assert texts == [f"{number:02}" * 3 for number in range(20)]
        assert [sequence_id for _, sequence_id in executor.admissions] == list(range(1, 21))
        assert engine.stats()["num_running"] == engine.stats()["num_waiting"] == 0


def test_stop_string_ends_the_request_and_drops_what_follows():
    with running_engine(FakeExecutor(script=say("DEFGHIJKLMN", end=False))) as (engine, executor):
        handle = engine.submit(ids("ABC"), SamplingParams(max_tokens=200, stop=["ZZ", "GHI"]))
        shown = "".join(chunk.text for chunk in handle)
        wait_for(lambda: engine.stats()["num_running"] == 0)
        assert not executor.slots
    choice = handle.output.outputs[0]
    assert shown == choice.text == "DEF"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "GHI")
    assert choice.token_ids == ids("DEFGHI")
    assert handle.stats.num_output_tokens == 6


def test_a_stop_string_can_be_shown():
    params = SamplingParams(max_tokens=50, stop="c", include_stop_str_in_output=True)
    with running_engine(FakeExecutor(script=say("abcd"))) as (engine, _):
        assert engine.submit([1], params).result(5).outputs[0].text == "abc"


def test_the_start_of_a_stop_string_is_not_lost():
    with running_engine(FakeExecutor(script=say("see DEFG"))) as (engine, _):
        result = engine.submit(ids("x"), SamplingParams(max_tokens=50, stop="DEFGH")).result(5)
    assert result.outputs[0].text == "see DEFG"
    assert result.outputs[0].stop_reason is None


def test_min_tokens_comes_before_stop_strings():
    with running_engine(FakeExecutor(script=say("aXaXaXaX", end=False))) as (engine, _):
        result = engine.submit([1], SamplingParams(max_tokens=20, stop="X", min_tokens=4)).result(5)
    assert result.outputs[0].text == "aXaXa"


def test_stop_token_ids_are_named_and_not_shown():
    with running_engine(FakeExecutor(script=say("ab!cd"))) as (engine, _):
        result = engine.submit([1], SamplingParams(max_tokens=20, stop_token_ids=[ord("!")])).result(5)
    choice = result.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", ord("!"))
    assert choice.token_ids == ids("ab!")


def test_ignore_eos():
    with running_engine(FakeExecutor(script=say("ab"))) as (engine, _):
        result = engine.submit([1], SamplingParams(max_tokens=7, ignore_eos=True)).result(5)
    assert result.outputs[0].token_ids == [97, 98, EOS, 97, 98, EOS, 97]
    assert result.outputs[0].text == "ababa"
    assert result.outputs[0].finish_reason == "length"


def test_characters_of_several_tokens_stream_whole():
    with running_engine(FakeExecutor(script=say("a😀é"))) as (engine, _):
        pieces = [chunk.text for chunk in engine.submit([1], SamplingParams(max_tokens=20))]
    assert "".join(pieces) == "a😀é"
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_is_flushed_at_the_end():
    with running_engine(FakeExecutor(script=say("a😀"))) as (engine, _):
        result = engine.submit([1], SamplingParams(max_tokens=3)).result(5)
    assert result.outputs[0].text == "a\ufffd"


def test_choices_each_end_once_with_their_index():
    with running_engine() as (engine, _executor):
        handle = engine.submit(ids("ab"), SamplingParams(max_tokens=5, n=3, seed=1))
        ends = [chunk.index for chunk in handle if chunk.finish_reason]
        assert sorted(ends) == [0, 1, 2]
        assert [choice.index for choice in handle.output.outputs] == [0, 1, 2]
        assert handle.stats.num_prompt_tokens == 2
        assert handle.stats.num_output_tokens == 15


def test_logprobs():
    params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1)
    with running_engine() as (engine, _):
        result = engine.submit(ids("abc"), params).result(5)
    first = result.outputs[0].logprobs[0]
    assert list(first) == [ord("a"), 3]
    assert (first[97].logprob, first[97].rank, first[97].decoded_token) == (-0.25, 1, "a")
    assert result.outputs[0].cumulative_logprob == -0.5
    assert result.prompt_logprobs[0] is None
    assert [list(entry) for entry in result.prompt_logprobs[1:]] == [[ord("b"), 7], [ord("c"), 7]]
    assert result.outputs[0].logprobs is not None


def test_no_logprobs_unless_asked():
    with running_engine() as (engine, _):
        result = engine.submit(ids("abc"), SamplingParams(max_tokens=2)).result(5)
    assert result.outputs[0].logprobs is result.prompt_logprobs is None


def test_cancel_running_and_waiting():
    with running_engine(FakeExecutor(max_num_seqs=1, stalled=True)) as (engine, executor):
        running = engine.submit(ids("a"))
        waiting = engine.submit(ids("b"))
        waiting.cancel()
        assert waiting.result(5).outputs[0].finish_reason == "abort"
        running.cancel()
        running.cancel()
        assert running.result(5).outputs[0].finish_reason == "abort"
        running.cancel()  # after the end: nothing happens
        executor.resume()
        assert engine.submit(ids("c"), SamplingParams(max_tokens=2)).result(5).outputs[0].text == "cc"


def test_result_times_out_and_the_request_goes_on():
    with running_engine(FakeExecutor(stalled=True)) as (engine, executor):
        handle = engine.submit(ids("ab"), SamplingParams(max_tokens=2))
        with pytest.raises(TimeoutError, match=handle.request_id):
            handle.result(timeout=0.05)
        executor.resume()
        assert handle.result(5).outputs[0].text == "ab"


def test_async_iteration():
    async def collect(engine, text):
        handle = engine.submit(ids(text), SamplingParams(max_tokens=6))
        return "".join([chunk.text async for chunk in handle])

    async def both(engine):
        return await asyncio.gather(collect(engine, "abc"), collect(engine, "xy"))

    with running_engine() as (engine, _):
        assert asyncio.run(both(engine)) == ["abcabc", "xyxyxy"]


def test_a_failing_executor_ends_every_request_with_the_reason():
    with running_engine(FakeExecutor(max_num_seqs=1, stalled=True)) as (engine, executor):
        handles = [engine.submit(ids("a")), engine.submit(ids("b"))]
        executor.fail("out of memory")
        for handle in handles:
            with pytest.raises(EngineError, match="out of memory"):
                handle.result(5)
        wait_for(lambda: not engine._thread.is_alive())
        with pytest.raises(EngineError, match="out of memory"):
            engine.submit(ids("c"))


def test_a_request_that_the_executor_refuses_harms_no_other():
    executor = FakeExecutor()
    admit = executor.admit

    def refuse(slot, sequence_id, token_ids, *rest):
        if len(token_ids) == 3:
            raise ValueError("no threes")
        admit(slot, sequence_id, token_ids, *rest)

    executor.admit = refuse
    with running_engine(executor) as (engine, _):
        good, bad = engine.submit(ids("ab"), SamplingParams(max_tokens=2)), engine.submit(ids("abc"))
        with pytest.raises(EngineError, match="no threes"):
            bad.result(5)
        assert good.result(5).outputs[0].text == "ab"
        assert engine.stats()["num_running"] == 0


def test_a_failing_consumer_harms_no_other(caplog):
    with running_engine() as (engine, _):
        request = engine.make_request(ids("ab"), SamplingParams(max_tokens=2))
        engine.start(request, lambda request, events: 1 / 0)
        assert engine.submit(ids("cd"), SamplingParams(max_tokens=2)).result(5).outputs[0].text == "cd"
    assert "ZeroDivisionError" in caplog.text


def test_close_aborts_what_is_open():
    with running_engine(FakeExecutor(max_num_seqs=1, stalled=True)) as (engine, _):
        handles = [engine.submit(ids("a")), engine.submit(ids("b"))]
        engine.close()
        assert [handle.result(5).outputs[0].finish_reason for handle in handles] == ["abort", "abort"]
        with pytest.raises(EngineError, match="closed"):
            engine.submit(ids("c"))
        engine.close()
        assert not engine._thread.is_alive()


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ([258], {}, "prompt", "258.*258 tokens"),
        ([1, -1], {}, "prompt", "Token 1 of the prompt is -1"),
        ([1.5], {}, "prompt", "integers"),
        ([True], {}, "prompt", "integers"),
        ("text", {}, "prompt", "integers"),
        ([1], {"stop_token_ids": [258]}, "stop_token_ids", "258"),
        ([1], {"logit_bias": {999: 1.0}}, "logit_bias", "999"),
        ([1], {"logprobs": 259}, "logprobs", "259"),
    ],
)
def test_what_the_executor_must_never_see(prompt, params, param, words):
    with running_engine() as (engine, executor):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            engine.submit(prompt, SamplingParams(**params))
        assert caught.value.param == param
        assert not executor.admissions


def test_too_long_a_prompt_is_refused_at_once_and_the_limit_itself_fits():
    with running_engine() as (engine, _):
        with pytest.raises(ContextLengthError, match="256 tokens"):
            engine.submit([1] * 256)
        assert len(engine.submit([1] * 255).result(5).outputs[0].token_ids) == 1


def test_an_empty_prompt_is_the_beginning_of_a_text_where_there_is_a_token_for_it():
    with running_engine() as (engine, _):
        assert engine.submit([], SamplingParams(max_tokens=1)).result(5).prompt_token_ids == [BOS]
    without = running_engine(tokenizer=byte_tokenizer(bos=None))
    with without as (engine, _), pytest.raises(InvalidRequestError, match="empty"):
        engine.submit([])


def test_every_request_ends_exactly_once_whatever_happens_to_it():
    """Many threads submit, cancel and choose stop strings at random moments."""
    ends = {}
    lock = threading.Lock()

    def sink(request, events):
        with lock:
            for event in events:
                if isinstance(event, FinishEvent):
                    ends.setdefault((request.id, event.choice), []).append(event.reason)

    def client(engine, name):
        for number in range(40):
            params = SamplingParams(max_tokens=1 + number % 60, n=1 + number % 3)
            request = engine.make_request([number], params, request_id=f"{name}-{number}")
            engine.start(request, sink)
            if number % 3 == 0:
                engine.cancel(request, number % params.n)
            if number % 5 == 0:
                time.sleep(0.0005)
                engine.cancel(request)

    with running_engine(FakeExecutor(num_blocks=20, max_num_seqs=3)) as (engine, _executor):
        threads = [threading.Thread(target=client, args=(engine, name)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expected = sum(1 + number % 3 for number in range(40)) * 3
        wait_for(lambda: len(ends) == expected, timeout_s=20)
        assert all(len(reasons) == 1 for reasons in ends.values())
        assert {reasons[0] for reasons in ends.values()} == {FinishReason.LENGTH, FinishReason.ABORT}
        stats = engine.stats()
        assert (stats["num_running"], stats["num_waiting"], stats["num_free_blocks"]) == (0, 0, 20)


def test_nothing_is_kept_of_requests_that_ended():
    with running_engine() as (engine, _):
        for _ in range(5):
            engine.submit(ids("abc"), SamplingParams(max_tokens=3)).result(5)
        gc.collect()
        assert not [item for item in gc.get_objects() if type(item).__name__ == "Request"]
