"""Runs requests side by side in asyncio, and gives up on what takes too long. Fetch the model first:
gapless pull smollm2-135m"""

import asyncio

from gapless import AsyncEngine, EngineConfig, SamplingParams


async def ask(engine, question, patience_s):
    """The answer, or what there is of it when patience runs out."""
    text = ""

    async def listen():
        nonlocal text
        params = SamplingParams(max_tokens=300, temperature=0.3)
        async for chunk in engine.generate([{"role": "user", "content": question}], params):
            text += chunk.text

    try:
        await asyncio.wait_for(listen(), patience_s)
    except asyncio.TimeoutError:  # leaving the loop has ended the request
        text += " ..."
    return f"{question}\n  {text!r}"


async def main():
    async with await AsyncEngine.load(EngineConfig(model="smollm2-135m")) as engine:
        questions = ["What is a cache?", "Name three colours.", "Tell me a very long story."]
        for answer in await asyncio.gather(*(ask(engine, question, 2.0) for question in questions)):
            print(answer)


asyncio.run(main())
