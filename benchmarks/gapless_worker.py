"""Measures Gapless on request, for vs_llama_cpp.py."""

import json
import sys

from gapless.bench.many_streams import ManyStreams, ManyStreamsSettings
from gapless.bench.single_stream import SingleStream, SingleStreamSettings
from gapless.config import EngineConfig
from gapless.engine.memory import peak_rss_bytes
from gapless.runtime import start


def main():
    path, activations = sys.argv[1], sys.argv[6]
    threads, prompt_tokens, new_tokens, max_streams = map(int, sys.argv[2:6])
    single = SingleStreamSettings(prompt_tokens, new_tokens)
    many = ManyStreamsSettings((max(1, max_streams),), prompt_tokens, new_tokens)
    runtime = start(
        EngineConfig(
            model=path,
            activations=activations,
            num_threads=threads,
            max_model_len=many.max_model_len if max_streams else single.max_model_len,
            max_num_seqs=max(1, max_streams),
            max_step_tokens=max(512, prompt_tokens),
        )
    )
    stream, streams = SingleStream(runtime.engine, single), ManyStreams(runtime.engine, many)

    def answer(**values):
        print(json.dumps(values), flush=True)

    answer(ready=True, load_s=runtime.load_s, system=runtime.isa, kv_bytes=runtime.kv_bytes)
    for line in sys.stdin:
        match line.split():
            case ["pp"]:
                answer(tokens_per_s=stream.prefill_speed())
            case ["tg"]:
                answer(tokens_per_s=stream.decode_speed())
            case ["streams", count]:
                answer(**streams.prefill_and_decode(int(count)))
            case ["rss"]:
                answer(peak_rss_bytes=peak_rss_bytes())
    runtime.close()


main()
