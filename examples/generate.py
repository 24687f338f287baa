"""Completes several prompts at once. Fetch the model first: gapless pull smollm2-135m"""

from gapless import LLM, SamplingParams

prompts = ["The capital of France is", "The largest planet of the solar system is", "Water boils at"]
params = SamplingParams(max_tokens=24, temperature=0.2, top_p=0.9, seed=1)

with LLM("smollm2-135m") as llm:
    for output in llm.generate(prompts, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
