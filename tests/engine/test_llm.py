import numpy as np
import pytest
from fake_executor import FakeExecutor
from toy import say, toy_llm

from gapless import SamplingParams
from gapless.errors import ContextLengthError, EngineError, InvalidRequestError, TemplateError


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


PARAMS = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    "prompts",
    [
        "ab",
        [97, 98],
        np.array([97, 98]),
        {"prompt": "ab"},
        {"prompt_token_ids": [97, 98]},
    ],
)
def test_one_prompt_in_every_form(prompts):
    with toy_llm() as llm:
        (output,) = llm.generate(prompts, PARAMS)
    assert output.outputs[0].text == "abab"
    assert output.prompt_token_ids == [97, 98]


def test_a_batch_keeps_its_order():
    with toy_llm(FakeExecutor(max_num_seqs=2)) as llm:
        outputs = llm.generate(["ab", [99], {"prompt": "de"}, "f"] * 5, PARAMS, use_tqdm=False)
        assert texts(outputs) == ["abab", "cccc", "dede", "ffff"] * 5
        assert outputs[0].prompt == "ab"
        assert outputs[1].prompt is None
        assert llm.generate([], PARAMS) == []


def test_parameters_for_each_prompt():
    with toy_llm() as llm:
        params = [SamplingParams(max_tokens=count) for count in (1, 3)]
        assert texts(llm.generate(["a", "b"], params)) == ["a", "bbb"]
        with pytest.raises(InvalidRequestError, match="2 prompts but 1"):
            llm.generate(["a", "b"], params[:1])


def test_one_bad_prompt_stops_the_batch_before_anything_runs():
    executor = FakeExecutor()
    with toy_llm(executor) as llm:
        with pytest.raises(ContextLengthError):
            llm.generate(["a", "b" * 300], PARAMS)
        with pytest.raises(InvalidRequestError):
            llm.generate(["a", [1, 9999]], PARAMS)
        with pytest.raises(InvalidRequestError):
            llm.generate(["a", {"text": "b"}], PARAMS)
        with pytest.raises(InvalidRequestError):
            llm.generate(7, PARAMS)
        assert not executor.admissions


def test_chat_goes_through_the_template():
    with toy_llm(FakeExecutor(script=say("Hi!"))) as llm:
        messages = [{"role": "user", "content": "Hello"}]
        (output,) = llm.chat(messages, SamplingParams(max_tokens=10))
        assert bytes(output.prompt_token_ids).decode() == "user:Hello;"
        assert output.outputs[0].text == "Hi!"
        assert texts(llm.chat([messages, messages], SamplingParams(max_tokens=10))) == ["Hi!", "Hi!"]


def test_chat_without_a_template():
    with toy_llm(template=None) as llm:
        with pytest.raises(TemplateError):
            llm.chat([{"role": "user", "content": "Hello"}])
        with pytest.raises(InvalidRequestError):
            llm.chat("Hello")
        assert texts(llm.generate("ab", PARAMS)) == ["abab"]


def test_stream_of_a_prompt_and_of_messages():
    with toy_llm(FakeExecutor(script=say("one two"))) as llm:
        params = SamplingParams(max_tokens=10)
        assert "".join(llm.stream("x", params)) == "one two"
        assert "".join(llm.stream([{"role": "user", "content": "x"}], params)) == "one two"


def test_leaving_a_stream_early_frees_its_slot():
    executor = FakeExecutor(script=say("go on and on", end=False))
    with toy_llm(executor) as llm:
        stream = llm.stream("x", SamplingParams(max_tokens=200))
        assert next(stream) == "g"
        stream.close()
        assert texts(llm.generate("y", SamplingParams(max_tokens=2))) == ["go"]
        assert llm.engine.stats()["num_running"] == 0


def test_wrong_arguments_of_stream_raise_at_once():
    with toy_llm() as llm, pytest.raises(ContextLengthError):
        llm.stream("x" * 500)


def test_an_engine_failure_reaches_the_caller():
    executor = FakeExecutor(stalled=True)
    with toy_llm(executor) as llm:
        executor.fail("broken")
        with pytest.raises(EngineError, match="broken"):
            llm.generate(["a", "b"])


def test_an_interrupt_cancels_the_batch(monkeypatch):
    from gapless.engine.mailbox import Mailbox

    def interrupted(self, timeout_s=None):
        raise KeyboardInterrupt

    executor = FakeExecutor(stalled=True)
    with toy_llm(executor) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(Mailbox, "get", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a"] * 10)
        executor.resume()
        assert texts(llm.generate("b", SamplingParams(max_tokens=2))) == ["bb"]
        assert llm.engine.stats()["num_waiting"] == 0


def test_closing_twice_and_use_after_close():
    with toy_llm() as llm:
        llm.close()
        llm.close()
        with pytest.raises(EngineError, match="closed"):
            llm.generate("a")
