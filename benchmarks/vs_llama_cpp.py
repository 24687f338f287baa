#!/usr/bin/env python3
"""Gapless and llama.cpp side by side: the same files, threads and token counts, taken in turns in one run.

    python benchmarks/vs_llama_cpp.py --llama-python VENV/bin/python MODEL.gguf [MODEL.gguf ...]

VENV is an environment with llama-cpp-python, built for this machine (CMAKE_ARGS=-DGGML_NATIVE=ON pip install
llama-cpp-python). Both engines are loaded at the same time, each in a process of its own that sleeps while
the other one is measured; every round measures one prefill and one decode of each. Prints medians and ratios
as a table, and writes all figures with --json. Each worker answers `pp`, `tg`, `streams N` and `rss` on its
standard input with a line of JSON.

With --streams 1,8,32 so many streams run at the same time: llama.cpp as its batched bench does (all prompts
first, then a token of each in every step), Gapless as `gapless bench --streams` does.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
ENGINES = ("gapless", "llama.cpp")
MEASURES = ("pp", "tg")
PHASES = ("prefill_tokens_per_s", "decode_tokens_per_s")


class Worker:
    """A process that measures one engine."""

    def __init__(self, *command):
        self._process = subprocess.Popen(
            [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.facts = self._answer()

    def ask(self, question):
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self):
        self._process.stdin.close()
        self._process.wait()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"The worker {self._process.args} ended without an answer.")
        return json.loads(line)


def start_workers(model, options):
    # Each worker's last size is the largest count of streams, 0 for measurements of a single one.
    sizes = (model, options.threads, options.prompt_tokens, options.new_tokens, max(options.streams or [0]))
    return {
        "gapless": Worker(sys.executable, HERE / "gapless_worker.py", *sizes, options.activations),
        "llama.cpp": Worker(options.llama_python, HERE / "llama_cpp_worker.py", *sizes),
    }


def compare(model, options):
    """All figures of one model: for each engine its runs, and the ratios of the medians."""
    workers = start_workers(model, options)
    runs = {engine: {measure: [] for measure in MEASURES} for engine in ENGINES}
    for number in range(1 + options.repeat):
        for measure in MEASURES:
            for engine in ENGINES:
                speed = workers[engine].ask(measure)["tokens_per_s"]
                if number > 0:  # the first round warms up
                    runs[engine][measure].append(speed)
    result = {"model": model.name, "file_bytes": model.stat().st_size}
    for engine, worker in workers.items():
        medians = {
            f"{measure}_tokens_per_s": statistics.median(runs[engine][measure]) for measure in MEASURES
        }
        result[engine] = {**worker.facts, **worker.ask("rss"), **medians, "runs": runs[engine]}
        worker.close()
    result["ratio"] = {
        measure: result["gapless"][f"{measure}_tokens_per_s"] / result["llama.cpp"][f"{measure}_tokens_per_s"]
        for measure in MEASURES
    }
    return result


def compare_streams(model, options):
    """As `compare`, with a result for each count of streams, which is printed as it is ready."""
    workers = start_workers(model, options)
    for engine in ENGINES:
        workers[engine].ask(f"streams {min(options.streams)}")  # warms up
    results = []
    for count in options.streams:
        runs = {engine: {phase: [] for phase in PHASES} for engine in ENGINES}
        for _ in range(options.repeat):
            for engine in ENGINES:
                answer = workers[engine].ask(f"streams {count}")
                for phase in PHASES:
                    runs[engine][phase].append(answer[phase])
        result = {"model": model.name, "streams": count, "runs": runs}
        for engine in ENGINES:
            result[engine] = {phase: statistics.median(runs[engine][phase]) for phase in PHASES}
        result["ratio"] = {phase: result["gapless"][phase] / result["llama.cpp"][phase] for phase in PHASES}
        print_streams_row(result)
        results.append(result)
    for worker in workers.values():
        worker.close()
    return results


def print_streams_row(result):
    cells = [result["model"][:40].ljust(40), f"{result['streams']:7d}"]
    for phase in PHASES:
        cells += [f"{result[engine][phase]:9.1f}" for engine in ENGINES]
        cells.append(f"{result['ratio'][phase]:5.2f}x")
    print("  ".join(cells), flush=True)


def print_row(result):
    cells = [result["model"][:40].ljust(40)]
    for measure in MEASURES:
        cells += [f"{result[engine][f'{measure}_tokens_per_s']:9.1f}" for engine in ENGINES]
        cells.append(f"{result['ratio'][measure]:5.2f}x")
    cells += [
        f"{result['gapless']['load_s']:6.2f}",
        f"{result['gapless']['peak_rss_bytes'] / (1 << 20):7.0f}",
    ]
    print("  ".join(cells), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=pathlib.Path, metavar="MODEL")
    parser.add_argument("--llama-python", required=True, help="an interpreter that can import llama_cpp")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--streams", type=counts, metavar="N,N,...", help="measure many streams at a time")
    parser.add_argument("--prompt-tokens", type=int, help="default: 512, with --streams 128")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, help="default: 5, with --streams 3")
    parser.add_argument("--activations", default="a8", choices=("a8", "a16"))
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    options = parser.parse_args()
    options.prompt_tokens = options.prompt_tokens or (128 if options.streams else 512)
    options.repeat = options.repeat or (3 if options.streams else 5)
    print(
        f"{options.threads} threads, prompt {options.prompt_tokens}, new {options.new_tokens}, "
        f"median of {options.repeat}; tokens/s, seconds, MiB"
    )
    print(heading(options), flush=True)
    results = []
    for model in options.models:
        if options.streams:
            results += compare_streams(model, options)
        else:
            results.append(compare(model, options))
            print_row(results[-1])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def counts(text):
    return [int(part) for part in text.split(",")]


def heading(options):
    cells = ["model".ljust(40)]
    if options.streams:
        cells.append("streams")
    for measure in MEASURES:
        cells += [f"{measure} gapl.".rjust(9), f"{measure} llama".rjust(9), " ratio"]
    if not options.streams:
        cells += ["load s", "RSS MiB"]
    return "  ".join(cells)


if __name__ == "__main__":
    main()
