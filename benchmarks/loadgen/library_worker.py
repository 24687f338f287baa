"""Streams through the library, in a process of its own: see `targets.LibraryTarget`.

Each line of standard input asks with `texts` and `max_tokens`, as JSON; each line of standard output answers
with the streams. Texts are encoded before the clock starts: the library's figures are the engine's.
"""

from __future__ import annotations

import json
import sys

from gapless.bench.streams import StreamGroup
from gapless.config import EngineConfig
from gapless.runtime import Runtime, start


def run(runtime: Runtime, texts: list[str], max_tokens: int) -> list[dict[str, object]]:
    prompts = [runtime.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    group = StreamGroup(runtime.engine, prompts, max_tokens)
    streams = group.wait()
    return [
        {
            "started_s": group.started_s,
            "chunk_times_s": stream.times_s,
            "num_tokens": len(stream.token_ids),
            "prompt_tokens": len(prompt),
        }
        for prompt, stream in zip(prompts, streams, strict=True)
    ]


def main() -> None:
    runtime = start(EngineConfig(**json.loads(sys.argv[1])))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(runtime, **json.loads(line))), flush=True)
    runtime.close()


if __name__ == "__main__":
    main()
