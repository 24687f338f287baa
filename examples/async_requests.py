"""Runs requests side by side in asyncio, and cancels one. Fetch the model first: gapless pull smollm2-135m"""

import asyncio

from gapless import LLM, SamplingParams


async def ask(llm, question, patience_s):
    """The answer, or what there is of it when patience runs out."""
    handle = llm.submit(
        [{"role": "user", "content": question}], SamplingParams(max_tokens=300, temperature=0.3)
    )
    asyncio.get_running_loop().call_later(patience_s, handle.cancel)
    text = ""
    async for chunk in handle:
        text += chunk.text
    return f"{question}\n  {text!r}\n  ended by {handle.output.outputs[0].finish_reason}"


async def main():
    with LLM("smollm2-135m") as llm:
        questions = ["What is a cache?", "Name three colours.", "Tell me a very long story."]
        for answer in await asyncio.gather(*(ask(llm, question, 2.0) for question in questions)):
            print(answer)


asyncio.run(main())
