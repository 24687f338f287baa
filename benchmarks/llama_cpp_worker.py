"""Measures llama.cpp on request, for vs_llama_cpp.py; needs an interpreter that has llama_cpp."""

import ctypes
import json
import random
import resource
import sys
import time

import llama_cpp

BATCH_TOKENS = 2048  # llama.cpp's defaults: of a batch, and of what is computed at once
MICRO_BATCH_TOKENS = 512


@llama_cpp.llama_log_callback
def _silent(level, text, user_data):
    pass


class Batches:
    """Rows of (token, position, sequence, whether logits are wanted) as llama.cpp's batches."""

    def __init__(self, rows):
        self._batches = []
        for first in range(0, len(rows), BATCH_TOKENS):
            part = rows[first : first + BATCH_TOKENS]
            batch = llama_cpp.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for index, (token, position, sequence, logits) in enumerate(part):
                batch.token[index] = token
                batch.pos[index] = position
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = logits
            self._batches.append(batch)

    def decode(self, context):
        for batch in self._batches:
            if llama_cpp.llama_decode(context, batch) != 0:
                raise SystemExit("llama_decode failed")
        llama_cpp.llama_synchronize(context)

    def free(self):
        for batch in self._batches:
            llama_cpp.llama_batch_free(batch)


class Bench:
    def __init__(self, path, threads, prompt_tokens, new_tokens, max_streams):
        self._prompt_tokens, self._new_tokens = prompt_tokens, new_tokens
        self._rng = random.Random(0)
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_threads = params.n_threads_batch = threads
        if max_streams == 0:  # as llama-bench
            params.n_ctx = max(prompt_tokens, new_tokens) + 8
            params.n_batch = params.n_ubatch = prompt_tokens
        else:  # as llama-batched-bench
            params.n_ctx = max_streams * (prompt_tokens + new_tokens)
            params.n_batch, params.n_ubatch = BATCH_TOKENS, MICRO_BATCH_TOKENS
            params.n_seq_max = max_streams
            params.kv_unified = False
            params.swa_full = False
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def single(self, batches, size):
        """Tokens per second of so many successive batches of random tokens, as llama-bench measures."""
        llama_cpp.llama_memory_clear(self._memory, True)
        begin = time.perf_counter()
        for _ in range(batches):
            tokens = (llama_cpp.llama_token * size)(*(self._token() for _ in range(size)))
            if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, size)) != 0:
                raise SystemExit("llama_decode failed")
            llama_cpp.llama_synchronize(self._context)
        return batches * size / (time.perf_counter() - begin)

    def streams(self, count):
        """All prompts first, then step after step with one token of each, as llama-batched-bench does."""
        llama_cpp.llama_memory_clear(self._memory, True)
        last = self._prompt_tokens - 1
        prompts = [
            (self._token(), position, sequence, position == last)
            for sequence in range(count)
            for position in range(self._prompt_tokens)
        ]
        steps = [
            [(self._token(), self._prompt_tokens + step, sequence, True) for sequence in range(count)]
            for step in range(self._new_tokens)
        ]
        return {
            "prefill_tokens_per_s": len(prompts) / self._seconds([prompts]),
            "decode_tokens_per_s": count * self._new_tokens / self._seconds(steps),
        }

    def _seconds(self, steps):
        batches = [Batches(rows) for rows in steps]  # made before the clock starts
        begin = time.perf_counter()
        for batch in batches:
            batch.decode(self._context)
        seconds = time.perf_counter() - begin
        for batch in batches:
            batch.free()
        return seconds

    def _token(self):
        return self._rng.randrange(self._vocab_size)


def main():
    path, (threads, prompt_tokens, new_tokens, max_streams) = sys.argv[1], map(int, sys.argv[2:6])
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    started = time.perf_counter()
    bench = Bench(path, threads, prompt_tokens, new_tokens, max_streams)
    load_s = time.perf_counter() - started

    def answer(**values):
        print(json.dumps(values), flush=True)

    answer(ready=True, load_s=load_s, system=llama_cpp.llama_print_system_info().decode())
    for line in sys.stdin:
        match line.split():
            case ["pp"]:
                answer(tokens_per_s=bench.single(1, prompt_tokens))
            case ["tg"]:
                answer(tokens_per_s=bench.single(new_tokens, 1))
            case ["streams", count]:
                answer(**bench.streams(int(count)))
            case ["rss"]:
                answer(peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


main()
