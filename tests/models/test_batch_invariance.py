"""The same request gives the same bits, whatever runs beside it and however its prompt is cut."""

import pytest

from gapless import LLM, SamplingParams

pytestmark = pytest.mark.models

MODELS = ["smollm2-135m", "gemma3-270m"]
PROMPT = (
    "In computing, a cache is a component that stores data so that future requests can be served faster. " * 3
)


def bits(output):
    """All token ids and the exact log-probabilities of prompt and output."""
    prompt = [
        None if entry is None else [(t, e.logprob) for t, e in entry.items()]
        for entry in output.prompt_logprobs
    ]
    choices = [
        (choice.token_ids, [[(t, e.logprob) for t, e in entry.items()] for entry in choice.logprobs])
        for choice in output.outputs
    ]
    return prompt, choices


def params(**options):
    return SamplingParams(max_tokens=16, logprobs=2, prompt_logprobs=2, ignore_eos=True, **options)


@pytest.mark.parametrize(
    ("activations", "kv_dtype"), [("a8", "f16"), ("a16", "f16"), ("a8", "bf16"), ("a8", "int8")]
)
@pytest.mark.parametrize("name", MODELS)
def test_alone_in_company_in_chunks_and_with_other_threads(name, activations, kv_dtype, model_path):
    wanted = [params(temperature=0), params(temperature=0.9, top_p=0.9, seed=5)]
    settings = [
        {"num_threads": 2, "max_num_seqs": 16, "max_step_tokens": 512},
        {"num_threads": 1, "max_num_seqs": 2, "max_step_tokens": 512},
        {"num_threads": 2, "max_num_seqs": 2, "max_step_tokens": 7},
    ]
    seen = []
    for setting in settings:
        options = {"activations": activations, "kv_dtype": kv_dtype, "max_model_len": 256, **setting}
        with LLM(model_path(name), **options) as llm:
            seen.append([bits(llm.generate(PROMPT, one)[0]) for one in wanted])
            if setting["max_num_seqs"] == 16:
                others = [
                    f"{number} little ducks went out one day " * (1 + number % 3) for number in range(14)
                ]
                prompts = [*others[:5], PROMPT, *others[5:], PROMPT]
                fillers = [SamplingParams(max_tokens=3 + number, seed=number) for number in range(14)]
                outputs = llm.generate(prompts, [*fillers[:5], wanted[0], *fillers[5:], wanted[1]])
                seen.append([bits(outputs[5]), bits(outputs[15])])
    for other in seen[1:]:
        assert other == seen[0]
