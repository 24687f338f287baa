"""On real models: prefix cache, preemption and shared choices change nothing but the speed."""

import pytest

from gapless import LLM, SamplingParams

pytestmark = pytest.mark.models

PREFIX = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 8
PROMPTS = [PREFIX + tail for tail in ("Then", "Then", "Once more the fox", "And so on")]


def bits(output):
    return [
        (choice.token_ids, [[(t, entry.logprob) for t, entry in step.items()] for step in choice.logprobs])
        for choice in output.outputs
    ]


def params(**options):
    return SamplingParams(max_tokens=40, logprobs=2, ignore_eos=True, **options)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_the_same_bits_with_and_without_the_cache_and_after_preemption(name, model_path):
    wanted = [
        params(temperature=0),
        params(seed=3, top_p=0.9),
        params(seed=4, n=3),
        params(seed=5, min_p=0.1),
    ]
    with LLM(model_path(name), max_model_len=512, max_num_seqs=8, prefix_caching=False) as llm:
        alone = [bits(llm.generate(prompt, one)[0]) for prompt, one in zip(PROMPTS, wanted, strict=True)]
        bytes_per_block = llm.runtime.kv_bytes // llm.engine.limits.num_blocks
        assert llm.engine.stats()["num_cached_tokens"] == 0
    with LLM(model_path(name), max_model_len=512, max_num_seqs=8) as llm:
        together = llm.generate(PROMPTS, wanted)
        again = llm.generate(PROMPTS, wanted)
        assert [bits(output) for output in together] == alone
        assert [bits(output) for output in again] == alone
        for output in again:
            assert output.metrics.num_cached_tokens >= len(output.prompt_token_ids) // 16 * 16 - 1
    kv_cache_gib = 18 * bytes_per_block / 2**30  # the longest needs 13, all together 12 and 6 times 3
    with LLM(model_path(name), max_model_len=288, max_num_seqs=8, kv_cache_gib=kv_cache_gib) as llm:
        assert [bits(output) for output in llm.generate(PROMPTS, wanted)] == alone
        assert llm.engine.stats()["num_preemptions"] > 0
        assert llm.engine.stats()["num_free_blocks"] == llm.engine.limits.num_blocks
