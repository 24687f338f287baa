"""Streams the answer to a conversation, with its speed. Fetch the model first: gapless pull smollm2-135m"""

from gapless import LLM, SamplingParams

messages = [
    {"role": "system", "content": "You answer in one short paragraph."},
    {"role": "user", "content": "Why is the sky blue?"},
]

with LLM("smollm2-135m") as llm:
    handle = llm.submit(messages, SamplingParams(max_tokens=200, temperature=0.3))
    for chunk in handle:
        print(chunk.text, end="", flush=True)
    stats = handle.stats
    print(f"\n\n{stats.num_output_tokens} tokens, first after {stats.ttft_s * 1e3:.0f} ms")
