"""Measures Gapless on request, for vs_llama_cpp.py."""

import json
import sys

from gapless.bench.single_stream import SingleStream, SingleStreamSettings
from gapless.config import EngineConfig
from gapless.engine.memory import peak_rss_bytes
from gapless.runtime import start


def main():
    path, activations = sys.argv[1], sys.argv[5]
    threads, prompt_tokens, new_tokens = map(int, sys.argv[2:5])
    settings = SingleStreamSettings(prompt_tokens, new_tokens)
    runtime = start(
        EngineConfig(
            model=path,
            activations=activations,
            num_threads=threads,
            max_model_len=settings.max_model_len,
            max_num_seqs=1,
            max_step_tokens=prompt_tokens,
        )
    )
    stream = SingleStream(runtime.engine, settings)

    def answer(**values):
        print(json.dumps(values), flush=True)

    answer(ready=True, load_s=runtime.load_s, system=runtime.isa, kv_bytes=runtime.kv_bytes)
    for line in sys.stdin:
        match line.strip():
            case "pp":
                answer(tokens_per_s=stream.prefill_speed())
            case "tg":
                answer(tokens_per_s=stream.decode_speed())
            case "rss":
                answer(peak_rss_bytes=peak_rss_bytes())
    runtime.close()


main()
