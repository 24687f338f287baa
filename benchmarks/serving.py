#!/usr/bin/env python3
"""Speed and latency of a server that speaks OpenAI's API, over HTTP as its clients see them.

    python benchmarks/serving.py --url http://127.0.0.1:8000 --streams 1,8,64
    python benchmarks/serving.py --url http://127.0.0.1:8000 --streams 16 --requests 200
    python benchmarks/serving.py --url http://127.0.0.1:8000 --rate 2.5 --requests 100
    python benchmarks/serving.py --compare MODEL.gguf --streams 1,8,64 [--llama-server PATH]
    python benchmarks/serving.py --compare MODEL.gguf --streams 64 --new-tokens 800 --turns 1
    python benchmarks/serving.py --idle-ttft MODEL.gguf

With --streams alone, each count of streams is measured as `gapless bench --streams` does, all at once:
prefill (one token each), decode (the same prompts go on; the next --new-tokens tokens of all streams from the
moment at which the last one has its first text) and together (new prompts; latencies and output tokens per
second). With --requests so many are sent, a new one when one ends; with --rate they arrive at random
(Poisson), however many are running. `loadgen/figures.py` says what the figures mean.

--compare takes turns between the library without a server, `gapless serve`, and llama.cpp's server if it is
given: the same texts, threads and counts; those that are not being measured are idle. With --turns they take
turns of so many seconds within one decode, and only that is measured (`loadgen/turns.py`): for small
differences on a machine whose speed changes. --idle-ttft measures what a server adds to the time to the first
token of a single request, against token ids handed to the engine.

Prompts are random words, new ones for each request. Processor times per token are printed, with --streams
alone those of decoding: what the client takes is taken from a server on the same machine. Failed requests are
counted by kind and make the command fail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadgen import figures
from loadgen.figures import MeasurementError
from loadgen.openai import FULL_LENGTH, Api, first_model
from loadgen.prompts import RandomPrompts
from loadgen.targets import (
    HttpTarget,
    LibraryTarget,
    Run,
    ServerShape,
    Target,
    start_gapless,
    start_llama_server,
)
from loadgen.turns import decode_in_turns

# Tokens that a stream may have when the last one gets its first, and still decode --new-tokens beside it.
_SLACK_TOKENS = 64
# Room for a chat template, and for prompts that have more tokens than were asked for.
_SPARE_TOKENS = 128
_IDLE_PROMPT_TOKENS = 16
_WARMUP_TOKENS = 16
_RATIOS = (
    "decode_tokens_per_s",
    "prefill_tokens_per_s",
    "output_tokens_per_s",
    "tpot_p50_ms",
    "ttft_p50_ms",
    "server_us_per_token",
)
_ROUNDS_FOR_QUARTILES = 5
_TABLE = (
    ("decode t/s", "decode_tokens_per_s", 1),
    ("prefill t/s", "prefill_tokens_per_s", 1),
    ("output t/s", "output_tokens_per_s", 1),
    ("req/s", "requests_per_s", 2),
    *((f"TTFT p{percent}", f"ttft_p{percent}_ms", 0) for percent in figures.PERCENTS),
    *((f"TPOT p{percent}", f"tpot_p{percent}_ms", 2) for percent in figures.PERCENTS),
    *((f"ITL p{percent}", f"itl_p{percent}_ms", 1) for percent in figures.PERCENTS),
    ("tok/chunk", "tokens_per_chunk", 2),
    ("client us/tok", "client_us_per_token", 1),
    ("server us/tok", "server_us_per_token", 0),
)


class Bench:
    """Measures targets with prompts that no request had before."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._prompt_tokens: int = options.prompt_tokens
        self._new_tokens: int = options.new_tokens
        self._prompts = RandomPrompts(options.seed)
        self._rng = random.Random(options.seed)
        self.failures: Counter[str] = Counter()

    def fit_prompts(self, target: Target) -> None:
        """So that prompts have the length that was asked for, by this target's count."""
        (stream,) = self._checked(target.run(self.prompts(1), 1)).streams
        self._prompts.fit(self._prompt_tokens, stream.prompt_tokens)

    def prompts(self, count: int) -> list[str]:
        return self._prompts.texts(count, self._prompt_tokens)

    def round(self, targets: Sequence[Target], num_streams: int) -> list[dict[str, float]]:
        """Each target's figures, with the same prompts for all."""
        first, second = self.prompts(num_streams), self.prompts(num_streams)
        return [self._all_at_once(target, first, second) for target in targets]

    def closed_loop(self, target: HttpTarget, num_streams: int, num_requests: int) -> dict[str, float]:
        """A new request whenever one ends."""
        return self._figures(target.run(self.prompts(num_requests), self._new_tokens, num_streams))

    def open_loop(self, target: HttpTarget, rate_per_s: float, num_requests: int) -> dict[str, float]:
        """Requests arrive whether or not others have ended."""
        arrivals_s, now_s = [], 0.0
        for _ in range(num_requests):
            arrivals_s.append(now_s)
            now_s += self._rng.expovariate(rate_per_s)
        run = target.run(self.prompts(num_requests), self._new_tokens, num_requests, arrivals_s)
        return self._figures(run)

    def _all_at_once(self, target: Target, prompts: list[str], others: list[str]) -> dict[str, float]:
        prefill = self._checked(target.run(prompts, 1)).streams
        decode = self._checked(target.run(prompts, self._new_tokens + _SLACK_TOKENS))
        return {
            "prefill_tokens_per_s": figures.prefill_tokens_per_s(prefill),
            "decode_tokens_per_s": figures.decode_tokens_per_s(decode.streams, self._new_tokens),
            **self._figures(target.run(others, self._new_tokens)),
            **_cpu_times(decode),
        }

    def _figures(self, run: Run) -> dict[str, float]:
        checked = self._checked(run)
        return {**figures.latencies(checked.streams), **_cpu_times(checked)}

    def _checked(self, run: Run) -> Run:
        """The streams that did not fail; MeasurementError if there is none."""
        failures = figures.failures(run.streams)
        self.failures += failures
        streams = [stream for stream in run.streams if stream.failure is None]
        if not streams:
            raise MeasurementError(f"All requests failed: {next(iter(failures))}")
        return Run(streams, run.client_cpu_s, run.server_cpu_s)


def _cpu_times(run: Run) -> dict[str, float]:
    num_tokens = sum(stream.num_tokens for stream in run.streams)
    return {
        "client_us_per_token": run.client_cpu_s / num_tokens * 1e6,
        "server_us_per_token": run.server_cpu_s / num_tokens * 1e6,
    }


def measure_server(options: argparse.Namespace, bench: Bench) -> list[dict[str, Any]]:
    """One server, at each count of streams or at one rate of arrivals."""
    model = options.model or first_model(options.url, options.api_key)
    api = Api(model, options.endpoint, options.api_key, options.full_length)
    target = HttpTarget("server", options.url, api)
    try:
        bench.fit_prompts(target)
        if options.warmup:
            bench.round([target], options.warmup)
        print_heading()
        counts = options.streams if options.rate is None else [0]
        return [
            result_of(
                target, count, [server_round(options, bench, target, count) for _ in range(options.repeat)]
            )
            for count in counts
        ]
    finally:
        target.close()


def server_round(
    options: argparse.Namespace, bench: Bench, target: HttpTarget, num_streams: int
) -> dict[str, float]:
    """What the options ask for, once."""
    if options.rate is not None:
        return bench.open_loop(target, options.rate, options.requests)
    if options.requests is not None:
        return bench.closed_loop(target, num_streams, options.requests)
    return bench.round([target], num_streams)[0]


def compare(options: argparse.Namespace, bench: Bench) -> list[dict[str, Any]]:
    """The library and servers, in turns."""
    targets = start_targets(options, options.compare)
    results = []
    try:
        bench.fit_prompts(targets[0])
        bench.round(targets, options.warmup or 1)
        print_heading()
        for count in options.streams:
            rounds = []
            for number in range(options.repeat):  # in turns, so that none has the better moment every time
                order = 1 if number % 2 == 0 else -1
                rounds.append(bench.round(targets[::order], count)[::order])
                show_progress(targets, rounds)
            rows = [
                result_of(target, count, own)
                for target, own in zip(targets, zip(*rounds, strict=True), strict=True)
            ]
            for row in rows[1:]:
                print_ratios(row, rows[0])
            results += rows
    finally:
        for target in targets:
            target.close()
    return results


def compare_in_turns(options: argparse.Namespace, bench: Bench) -> list[dict[str, Any]]:
    """Decode of the library and of servers, in turns within one run for each repetition."""
    targets = start_targets(options, options.compare)
    results = []
    try:
        bench.fit_prompts(targets[0])
        for target in targets:
            target.run(bench.prompts(1), _WARMUP_TOKENS)
        for count in options.streams:
            rates: list[list[float]] = [[] for _ in targets]
            for number in range(options.repeat):
                prompts = bench.prompts(count)
                for own, more in zip(
                    rates, decode_in_turns(targets, prompts, options.new_tokens, options.turns), strict=True
                ):
                    own += more
                print(f"    run {number + 1}, {len(rates[0])} turns each so far", file=sys.stderr, flush=True)
            for target, own in zip(targets, rates, strict=True):
                ratios = [mine / its for mine, its in zip(own, rates[0], strict=True)]
                low, median, high = statistics.quantiles(ratios, n=4)
                mean, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
                print(
                    f"{target.name:14s}  {count} streams, {len(own)} turns  "
                    f"decode {statistics.median(own):.1f} t/s, of the library's {median:.3f} "
                    f"({low:.2f} to {high:.2f}), mean {mean:.3f} +- {error:.3f}",
                    flush=True,
                )
                results.append({"target": target.name, "streams": count, "decode_tokens_per_s": own})
    finally:
        for target in targets:
            target.close()
    return results


def measure_idle_ttft(options: argparse.Namespace, bench: Bench) -> list[dict[str, Any]]:
    """Single requests in turns, and what each server adds to the library's TTFT."""
    targets = start_targets(options, options.idle_ttft)
    ttfts_ms: dict[str, list[float]] = {target.name: [] for target in targets}
    try:
        bench.fit_prompts(targets[0])
        bench.round(targets, 1)
        for _ in range(options.requests or 50):
            prompts = bench.prompts(1)
            for target in targets:
                (stream,) = target.run(prompts, 1).streams
                if stream.failure is not None:
                    raise MeasurementError(f"{target.name}: {stream.failure}")
                ttfts_ms[target.name].append(stream.ttft_s * 1e3)
    finally:
        for target in targets:
            target.close()
    library_ms = statistics.median(ttfts_ms["library"])
    results = []
    for name, values in ttfts_ms.items():
        median_ms = statistics.median(values)
        print(f"{name:14s}  TTFT {median_ms:7.2f} ms, over the library's {median_ms - library_ms:7.2f} ms")
        results.append({"target": name, "ttft_p50_ms": median_ms, "over_library_ms": median_ms - library_ms})
    return results


def start_targets(options: argparse.Namespace, model: Path) -> list[Target]:
    new_tokens = options.new_tokens + _SLACK_TOKENS
    shape = ServerShape(
        threads=options.threads,
        max_streams=max(options.streams),
        max_model_len=options.prompt_tokens + new_tokens + _SPARE_TOKENS,
    )
    targets: list[Target] = [LibraryTarget(model, shape)]
    targets.append(start_gapless(model, shape, options.endpoint, shlex.split(options.gapless_args)))
    if options.llama_server is not None:
        more = shlex.split(options.llama_args)
        targets.append(start_llama_server(options.llama_server, model, shape, options.endpoint, more))
    return targets


def result_of(target: Target, num_streams: int, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Prints the medians as a row and returns them with the rounds."""
    medians = figures.medians(rounds)
    cells = [f"{target.name:14s}", f"{num_streams or 'open':>7}"]
    for heading, name, digits in _TABLE:
        cell = f"{medians[name]:.{digits}f}" if name in medians else "-"
        cells.append(cell.rjust(max(7, len(heading))))
    print("  ".join(cells), flush=True)
    return {"target": target.name, "streams": num_streams, **medians, "rounds": list(rounds)}


def print_heading() -> None:
    cells = ["".ljust(14), "streams", *(heading.rjust(7) for heading, _, _ in _TABLE)]
    print("  ".join(cells), flush=True)


def show_progress(targets: Sequence[Target], rounds: Sequence[Sequence[dict[str, float]]]) -> None:
    """A round can take minutes. Not on standard output: that is for the table."""
    speeds = [
        f"{target.name} {own['decode_tokens_per_s']:.0f}"
        for target, own in zip(targets, rounds[-1], strict=True)
    ]
    print(f"    round {len(rounds)}, decode t/s: {', '.join(speeds)}", file=sys.stderr, flush=True)


def print_ratios(row: dict[str, Any], library: dict[str, Any]) -> None:
    """Medians of the rounds' own ratios, and their quartiles: a round's two sides ran one after the other, so
    that what the machine's speed does between rounds is in neither."""
    cells = []
    for name in _RATIOS:
        pairs = zip(row["rounds"], library["rounds"], strict=True)
        ratios = [mine[name] / its[name] for mine, its in pairs if its.get(name, 0.0) > 0.0]
        if not ratios:
            continue
        cell = f"{name} {statistics.median(ratios):.3f}"
        if len(ratios) >= _ROUNDS_FOR_QUARTILES:
            low, _, high = statistics.quantiles(ratios, n=4)
            cell += f" ({low:.2f} to {high:.2f})"
        cells.append(cell)
    print(f"    {row['target']} / library: {', '.join(cells)}", flush=True)


def counts(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise ValueError
    return values


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="the name that is sent; default: the first that the server has")
    parser.add_argument("--api-key")
    parser.add_argument("--endpoint", default="completions", choices=("completions", "chat"))
    parser.add_argument(
        "--full-length", default="both", choices=FULL_LENGTH, help="fields sent against early ends"
    )
    parser.add_argument("--streams", type=counts, default=[1, 8, 64], metavar="N,N,...")
    parser.add_argument("--requests", type=int, help="in total; default with --rate 100, with --idle-ttft 50")
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=1, help="streams of a first round that does not count")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, help="of the prompts; default: other ones in each run")
    parser.add_argument("--compare", type=Path, metavar="MODEL")
    parser.add_argument("--turns", type=float, metavar="SECONDS", help="with --compare")
    parser.add_argument("--idle-ttft", type=Path, metavar="MODEL")
    parser.add_argument("--llama-server", type=Path, help="the program, of llama.cpp")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--gapless-args", default="", help="further options of `gapless serve`")
    parser.add_argument("--llama-args", default="", help="further options of llama-server")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args(arguments)
    if options.new_tokens < 2:
        parser.error("--new-tokens is at least 2: there is no time between tokens with one.")
    if options.turns is not None and (options.turns <= 0 or options.compare is None):
        parser.error("--turns is a number of seconds, for --compare.")
    if options.rate is not None:
        options.requests = options.requests or 100
    if options.idle_ttft is not None:
        options.streams = [1]
    options.prompt_tokens = options.prompt_tokens or (_IDLE_PROMPT_TOKENS if options.idle_ttft else 128)
    return options


def measurement(options: argparse.Namespace) -> Callable[[argparse.Namespace, Bench], list[dict[str, Any]]]:
    """What the options ask for."""
    if options.compare:
        return compare if options.turns is None else compare_in_turns
    return measure_idle_ttft if options.idle_ttft else measure_server


def main() -> None:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the servers are stopped on the way out
    bench = Bench(options)
    measure = measurement(options)
    try:
        results = measure(options, bench)
    except MeasurementError as error:
        sys.exit(str(error))
    if options.json:
        report = {"settings": {**vars(options)}, "results": results, "failures": bench.failures}
        options.json.write_text(json.dumps(report, indent=2, default=str) + "\n")
    for failure, count in bench.failures.items():
        print(f"{count} requests failed: {failure}")
    if bench.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
