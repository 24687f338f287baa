"""`gapless bench`: what `gapless.bench` measures, as tables or as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import typer

from gapless.bench.context_length import ContextLengthSettings, measure_context_length
from gapless.bench.interference import InterferenceSettings, measure_interference
from gapless.bench.many_streams import ManyStreamsSettings, measure_many_streams
from gapless.bench.shared_prefix import SharedPrefixSettings, measure_shared_prefix
from gapless.bench.single_stream import SingleStreamSettings, measure_single_stream
from gapless.bench.token_gap import TokenGapSettings, measure_token_gap
from gapless.cli.table import Column, GrowingTable
from gapless.config import EngineConfig
from gapless.engine.memory import peak_rss_bytes
from gapless.engine.trace import Tracer
from gapless.errors import InvalidRequestError
from gapless.progress import bytes_bar
from gapless.runtime import Runtime, start

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The command's options; None: each measurement's own default."""

    model: str
    streams: str | None = None
    gap: bool = False
    interference: bool = False
    long_prompt: int = 4000
    prefix: int | None = None
    contexts: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    depth: int = 1
    repeat: int | None = None
    threads: int | None = None
    quant: str | None = None
    activations: str = "a8"
    kv_dtype: str = "f16"
    kv_cache_gib: float | None = None
    target_tpot_ms: float | None = None
    trace: str | None = None
    as_json: bool = False


def bench_model(options: BenchOptions) -> None:
    """Measures what the options ask for and prints it. InvalidRequestError if they ask for several things."""
    modes: dict[str, Callable[[BenchOptions], None]] = {}
    if options.gap:
        modes["--gap"] = _bench_gap
    if options.interference:
        modes["--interference"] = _bench_interference
    if options.prefix is not None:
        modes["--prefix"] = _bench_prefix
    if options.contexts is not None:
        modes["--contexts"] = _bench_contexts
    if options.streams is not None and not (options.gap or options.interference):
        modes["--streams"] = _bench_streams
    if len(modes) > 1:
        raise InvalidRequestError(f"{' and '.join(modes)} are different measurements: ask for one at a time.")
    next(iter(modes.values()), _bench_single)(options)


def _bench_single(options: BenchOptions) -> None:
    settings = SingleStreamSettings(
        options.prompt_tokens or 512, options.new_tokens or 64, options.depth, options.repeat or 5
    )
    # A prompt of usual length is prefilled in one step, as llama-bench does.
    step_tokens = max(512, settings.prompt_tokens) if settings.prompt_tokens <= 4096 else 512
    with _running(options, 1, settings.max_model_len, max_step_tokens=step_tokens) as runtime:
        result = measure_single_stream(runtime.engine, settings)
        figures = {
            "pp_tokens_per_s": result.pp_tokens_per_s,
            "tg_tokens_per_s": result.tg_tokens_per_s,
            "pp_runs": result.pp_runs,
            "tg_runs": result.tg_runs,
        }
        report = _report(runtime, options, settings, figures)
    if options.as_json:
        _print_json(report)
        return
    _print_title(runtime, options, f"median of {settings.repeat}")
    typer.echo(f"  prefill of {settings.prompt_tokens} tokens  {result.pp_tokens_per_s:9.1f} tokens/s")
    typer.echo(f"  decode of {settings.new_tokens} tokens    {result.tg_tokens_per_s:9.1f} tokens/s")
    typer.echo(f"  load {runtime.load_s:.2f} s, peak memory {peak_rss_bytes() / MIB:.0f} MiB")


def _bench_streams(options: BenchOptions) -> None:
    settings = ManyStreamsSettings(
        _counts("streams", options.streams or ""),
        options.prompt_tokens or 128,
        options.new_tokens or 64,
        options.repeat or 3,
    )
    columns = (
        Column("streams", "streams", "d"),
        Column("decode t/s", "decode_tokens_per_s", ".1f"),
        Column("prefill t/s", "prefill_tokens_per_s", ".1f"),
        Column("output t/s", "output_tokens_per_s", ".1f"),
        *(Column(f"TTFT p{p}", f"ttft_p{p}_ms", ".0f") for p in (50, 99)),
        *(Column(f"TPOT p{p}", f"tpot_p{p}_ms", ".1f") for p in (50, 99)),
        *(Column(f"ITL p{p}", f"itl_p{p}_ms", ".1f") for p in (50, 99)),
        Column("RSS, MiB", "rss_bytes", ".0f", MIB),
    )
    with _running(options, settings.max_num_seqs, settings.max_model_len) as runtime:
        lengths = f"prompts of {settings.prompt_tokens}, {settings.new_tokens} new tokens"
        title = f"{lengths}, median of {settings.repeat}"
        results = map(asdict, measure_many_streams(runtime.engine, settings))
        _print_rows(runtime, options, settings, title, columns, results)


def _bench_gap(options: BenchOptions) -> None:
    settings = TokenGapSettings(_count(options, 256), options.prompt_tokens or 16, options.new_tokens or 200)
    tracer = Tracer(options.trace)
    with _running(options, settings.streams, settings.max_model_len, tracer=tracer) as runtime:
        result = measure_token_gap(runtime.engine, tracer, settings)
        figures = {**asdict(result.python_busy), "python_idle": asdict(result.python_idle)}
        report = _report(runtime, options, settings, figures)
    if options.as_json:
        _print_json(report)
        return
    _print_title(runtime, options, f"{settings.streams} streams decode, windows of {settings.steps} steps")
    table = GrowingTable(
        (
            Column("Python", "python", "s", width=13),
            Column("gap p50, us", "gap_p50_us", ".1f"),
            Column("p99", "gap_p99_us", ".1f"),
            Column("max", "gap_max_us", ".1f"),
            Column("busy share", "busy_share", ".5f"),
            Column("step p50, ms", "step_p50_ms", ".2f"),
        )
    )
    table.print_row({"python": "burns the GIL", **asdict(result.python_busy)})
    table.print_row({"python": "idle", **asdict(result.python_idle)})
    typer.echo("  gaps while Python burns the GIL:")
    for bucket, count in enumerate(result.python_busy.gap_histogram):
        if count:
            typer.echo(f"    {1 << bucket if bucket else 0:6d} to {2 << bucket:6d} us  {count}")


def _bench_interference(options: BenchOptions) -> None:
    settings = InterferenceSettings(
        _count(options, 8),
        options.prompt_tokens or 128,
        options.long_prompt,
        options.new_tokens or 64,
        options.repeat or 3,
    )
    with _running(options, settings.max_num_seqs, settings.max_model_len) as runtime:
        result = measure_interference(runtime.engine, settings)
        report = _report(runtime, options, settings, asdict(result))
    if options.as_json:
        _print_json(report)
        return
    _print_title(runtime, options, f"{settings.streams} streams, median of {settings.repeat}")
    typer.echo(f"  ITL alone      p50 {result.itl_p50_ms:8.1f} ms   p99 {result.itl_p99_ms:8.1f} ms")
    typer.echo(
        f"  ITL beside it  p50 {result.loaded_itl_p50_ms:8.1f} ms   p99 {result.loaded_itl_p99_ms:8.1f} ms   "
        f"p99 {result.itl_p99_ratio:.2f}x"
    )
    typer.echo(f"  prompt of {settings.long_prompt} tokens: TTFT {result.long_ttft_ms:.0f} ms")


def _bench_prefix(options: BenchOptions) -> None:
    assert options.prefix is not None
    settings = SharedPrefixSettings(options.prefix, options.repeat or 5)
    with _running(options, 1, settings.max_model_len) as runtime:
        result = measure_shared_prefix(runtime.engine, settings)
        report = _report(runtime, options, settings, asdict(result))
    if options.as_json:
        _print_json(report)
        return
    _print_title(runtime, options, f"prefix of {settings.prefix_tokens} tokens, median of {settings.repeat}")
    typer.echo(
        f"  TTFT first {result.first_ttft_ms:.1f} ms, second {result.second_ttft_ms:.1f} ms "
        f"({result.ttft_ratio:.1%})"
    )


def _bench_contexts(options: BenchOptions) -> None:
    contexts = _counts("contexts", options.contexts or "")
    settings = ContextLengthSettings(contexts, options.new_tokens or 64, options.repeat or 1)
    columns = (
        Column("context", "context", "d"),
        Column("prefill t/s", "prefill_tokens_per_s", ".1f"),
        Column("decode t/s", "decode_tokens_per_s", ".1f"),
        Column("TTFT, s", "ttft_s", ".2f"),
        Column("KV, MiB", "kv_bytes", ".1f", MIB),
        Column("RSS growth, MiB", "rss_growth_bytes", ".1f", MIB),
    )
    with _running(options, 1, settings.max_model_len, prefix_caching=False) as runtime:
        title = f"{settings.new_tokens} new tokens, median of {settings.repeat}"
        results = map(asdict, measure_context_length(runtime.engine, settings, _kv_bytes_per_token(runtime)))
        _print_rows(runtime, options, settings, title, columns, results)


# --- the engine ---


@contextlib.contextmanager
def _running(
    options: BenchOptions,
    max_num_seqs: int,
    max_model_len: int,
    *,
    max_step_tokens: int = 512,
    prefix_caching: bool = True,
    tracer: Tracer | None = None,
) -> Iterator[Runtime]:
    """The model with an engine of just the size needed."""
    config = EngineConfig(
        model=options.model,
        quant=options.quant,
        activations=options.activations,
        num_threads=options.threads,
        kv_dtype=options.kv_dtype,
        kv_cache_gib=options.kv_cache_gib,
        target_tpot_ms=options.target_tpot_ms,
        trace=options.trace,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_step_tokens=max_step_tokens,
        prefix_caching=prefix_caching,
    )
    with bytes_bar() as report:
        runtime = start(config, lambda done, total: report(f"Loading {options.model}", done, total), tracer)
    try:
        yield runtime
    finally:
        runtime.close()


def _kv_bytes_per_token(runtime: Runtime) -> float:
    from gapless._native import Executor

    return runtime.kv_bytes / (runtime.engine.limits.num_blocks * Executor.block_size)


def _counts(name: str, text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise InvalidRequestError(
            f"--{name} takes positive numbers with commas between them, as in 1,8,32, but it is {text!r}.",
            param=name,
        )
    return counts


def _count(options: BenchOptions, default: int) -> int:
    if options.streams is None:
        return default
    counts = _counts("streams", options.streams)
    if len(counts) > 1:
        raise InvalidRequestError(
            f"This measurement takes one number of --streams, not {options.streams}.", param="streams"
        )
    return counts[0]


# --- output ---


def _report(
    runtime: Runtime, options: BenchOptions, settings: Any, figures: dict[str, Any]
) -> dict[str, Any]:
    return {
        "model": runtime.path.name,
        "isa": runtime.isa,
        "threads": runtime.num_threads,
        "settings": {
            **asdict(settings),
            "activations": options.activations,
            "quant": options.quant,
            "kv_dtype": options.kv_dtype,
        },
        **figures,
        "load_s": runtime.load_s,
        "weight_bytes": runtime.model.program.weight_bytes,
        "kv_bytes": runtime.kv_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _print_json(report: dict[str, Any]) -> None:
    typer.echo(json.dumps(report, indent=2))


def _print_title(runtime: Runtime, options: BenchOptions, what: str) -> None:
    typer.echo(
        f"{runtime.path.name}, {runtime.isa}, {runtime.num_threads} threads, {options.activations}, "
        f"{options.kv_dtype} KV, {what}"
    )


def _print_rows(
    runtime: Runtime,
    options: BenchOptions,
    settings: Any,
    title: str,
    columns: Iterable[Column],
    results: Iterable[dict[str, Any]],
) -> None:
    """A table that grows as the results come; with --json on a terminal only, to show the progress."""
    table = None
    if not options.as_json:
        _print_title(runtime, options, title)
    if not options.as_json or sys.stderr.isatty():
        table = GrowingTable(columns, to_stderr=options.as_json)
    rows = []
    for row in results:
        rows.append(row)
        if table is not None:
            table.print_row(row)
    if options.as_json:
        _print_json(_report(runtime, options, settings, {"results": rows}))
