"""Streams through the library, in a process of its own: see `targets.LibraryTarget`.

Each line of standard input asks with `texts` and `max_tokens`, as JSON; each line of standard output answers
with the streams. They are those of a program with an event loop: a task reads each stream's text.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from gapless import SamplingParams
from gapless.async_engine import AsyncEngine
from gapless.config import EngineConfig


async def run(engine: AsyncEngine, texts: list[str], max_tokens: int) -> list[dict[str, object]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    started_s = time.perf_counter()
    return await asyncio.gather(*(read(engine, text, params, started_s) for text in texts))


async def read(engine: AsyncEngine, text: str, params: SamplingParams, started_s: float) -> dict[str, object]:
    handle = engine.submit(text, params)
    times_s = [time.perf_counter() async for chunk in handle if chunk.token_ids]
    metrics = handle.stats
    return {
        "started_s": started_s,
        "chunk_times_s": times_s,
        "num_tokens": metrics.num_output_tokens,
        "prompt_tokens": metrics.num_prompt_tokens,
    }


async def main() -> None:
    async with await AsyncEngine.load(EngineConfig(**json.loads(sys.argv[1]))) as engine:
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(await run(engine, **json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
