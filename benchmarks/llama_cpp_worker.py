"""Measures llama.cpp on request, for vs_llama_cpp.py; needs an interpreter that has llama_cpp."""

import ctypes
import json
import random
import resource
import sys
import time

import llama_cpp


@llama_cpp.llama_log_callback
def _silent(level, text, user_data):
    pass


def main():
    path, threads, prompt_tokens, new_tokens = sys.argv[1], *map(int, sys.argv[2:5])
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    started = time.perf_counter()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = max(prompt_tokens, new_tokens) + 8
    params.n_batch = params.n_ubatch = prompt_tokens
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    load_s = time.perf_counter() - started
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    rng = random.Random(0)

    def decode(count):
        """One batch of random tokens, as llama-bench does."""
        tokens = (llama_cpp.llama_token * count)(*(rng.randrange(vocab_size) for _ in range(count)))
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, count)) != 0:
            raise SystemExit("llama_decode failed")
        llama_cpp.llama_synchronize(context)

    def measure(batches, size):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        begin = time.perf_counter()
        for _ in range(batches):
            decode(size)
        return batches * size / (time.perf_counter() - begin)

    def answer(**values):
        print(json.dumps(values), flush=True)

    answer(ready=True, load_s=load_s, system=llama_cpp.llama_print_system_info().decode())
    for line in sys.stdin:
        match line.strip():
            case "pp":
                answer(tokens_per_s=measure(1, prompt_tokens))
            case "tg":
                answer(tokens_per_s=measure(new_tokens, 1))
            case "rss":
                answer(peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


main()
