"""What users of the library rely on, with a real model."""

import time

import pytest

from gapless import LLM, SamplingParams

pytestmark = pytest.mark.models

GREEDY = SamplingParams(max_tokens=24, temperature=0)
QUESTION = [{"role": "user", "content": "Name three primary colors."}]


@pytest.fixture(scope="module")
def llm(model_path):
    with LLM(model_path("smollm2-135m"), max_model_len=1024, max_num_seqs=16) as llm:
        yield llm


def test_generate(llm):
    (output,) = llm.generate("The capital of France is", GREEDY)
    assert output.outputs[0].text.startswith(" Paris")
    assert output.prompt_token_ids == llm.tokenizer.encode("The capital of France is")


def test_chat(llm):
    (output,) = llm.chat(QUESTION, SamplingParams(max_tokens=64, temperature=0))
    assert "Blue" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text


def test_stream_joins_to_the_whole_text(llm):
    (output,) = llm.chat(QUESTION, GREEDY)
    pieces = list(llm.stream(QUESTION, GREEDY))
    assert "".join(pieces) == output.outputs[0].text
    assert len(pieces) > 3


def test_stop_string(llm):
    prompt = "Here is the English alphabet: ABC"
    free = llm.generate(prompt, GREEDY)[0].outputs[0].text
    stop = free[4:8]
    pieces = list(llm.stream(prompt, SamplingParams(max_tokens=24, temperature=0, stop=stop)))
    assert "".join(pieces) == free[: free.index(stop)]


def test_logprobs_of_greedy_are_those_of_the_most_likely(llm):
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=3)
    choice = llm.generate("One, two, three,", params)[0].outputs[0]
    assert len(choice.logprobs) == len(choice.token_ids)
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert entry[token_id].rank == 1
        assert len(entry) == 3
        assert max(entry.values(), key=lambda e: e.logprob) is entry[token_id]
    assert choice.cumulative_logprob == pytest.approx(
        sum(
            entry[token_id].logprob for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True)
        )
    )


def test_n_gives_different_choices_and_a_seed_the_same_again(llm):
    params = SamplingParams(max_tokens=16, temperature=1.0, n=3, seed=11)
    first = [choice.token_ids for choice in llm.generate("Once upon a time", params)[0].outputs]
    assert len({tuple(ids) for ids in first}) == 3
    again = llm.generate(["The weather", "Once upon a time", "Hello"], [GREEDY, params, GREEDY])[1]
    assert [choice.token_ids for choice in again.outputs] == first
    single = SamplingParams(max_tokens=16, temperature=1.0, seed=11)
    assert llm.generate("Once upon a time", single)[0].outputs[0].token_ids == first[0]


def test_without_a_seed_answers_differ(llm):
    params = SamplingParams(max_tokens=16, temperature=1.5)
    texts = {llm.generate("Once upon a time", params)[0].outputs[0].text for _ in range(4)}
    assert len(texts) > 1


def test_penalties_change_the_output(llm):
    prompt = "BANANA " * 8
    plain = llm.generate(prompt, GREEDY)[0].outputs[0].text
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 2.0}):
        params = SamplingParams(max_tokens=24, temperature=0, **penalty)
        assert llm.generate(prompt, params)[0].outputs[0].text != plain, penalty


def test_logit_bias_and_top_p_zero(llm):
    (token_id,) = llm.tokenizer.encode("!")
    params = SamplingParams(max_tokens=5, temperature=1.0, logit_bias={token_id: 100.0})
    assert llm.generate("Hi", params)[0].outputs[0].text == "!!!!!"
    narrow = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.0)
    assert llm.generate("Hi", narrow)[0].outputs[0].text == llm.generate("Hi", GREEDY)[0].outputs[0].text


def test_cancelling_frees_the_slot_while_prefilling(llm):
    handles = [llm.submit([5] * 1000, SamplingParams(max_tokens=20)) for _ in range(4)]
    for handle in handles:
        handle.cancel()
    assert [handle.result(30).outputs[0].finish_reason for handle in handles] == ["abort"] * 4
    stats = llm.engine.stats()
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)


def test_idle_costs_next_to_nothing(llm):
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.05
