"""`gapless bench`: speed of a single stream."""

from __future__ import annotations

import json

import typer

from gapless.bench.single_stream import SingleStreamSettings, measure_single_stream
from gapless.config import EngineConfig
from gapless.engine.memory import peak_rss_bytes
from gapless.progress import bytes_bar
from gapless.runtime import start


def bench_model(
    model: str,
    prompt_tokens: int,
    new_tokens: int,
    depth: int,
    repeat: int,
    threads: int | None,
    quant: str | None,
    activations: str,
    as_json: bool,
) -> None:
    """Loads the model with a cache of just the size needed, measures, and prints medians."""
    settings = SingleStreamSettings(prompt_tokens, new_tokens, depth, repeat)
    config = EngineConfig(
        model=model,
        quant=quant,
        activations=activations,
        num_threads=threads,
        max_model_len=settings.max_model_len,
        max_num_seqs=1,
        max_step_tokens=max(512, prompt_tokens) if prompt_tokens <= 4096 else 512,
    )
    with bytes_bar() as report:
        runtime = start(config, lambda done, total: report(f"Loading {model}", done, total))
    try:
        result = measure_single_stream(runtime.engine, settings)
    finally:
        runtime.close()
    summary = {
        "model": runtime.path.name,
        "isa": runtime.isa,
        "threads": runtime.num_threads,
        "settings": {
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "depth": depth,
            "repeat": repeat,
            "activations": activations,
            "quant": quant,
        },
        "pp_tokens_per_s": result.pp_tokens_per_s,
        "tg_tokens_per_s": result.tg_tokens_per_s,
        "pp_runs": result.pp_runs,
        "tg_runs": result.tg_runs,
        "load_s": runtime.load_s,
        "weight_bytes": runtime.model.program.weight_bytes,
        "kv_bytes": runtime.kv_bytes,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
        return
    typer.echo(
        f"{summary['model']}, {runtime.isa}, {runtime.num_threads} threads, {activations}, median of {repeat}"
    )
    typer.echo(f"  prefill of {prompt_tokens} tokens  {result.pp_tokens_per_s:9.1f} tokens/s")
    typer.echo(f"  decode of {new_tokens} tokens    {result.tg_tokens_per_s:9.1f} tokens/s")
    typer.echo(f"  load {runtime.load_s:.2f} s, peak memory {peak_rss_bytes() / (1 << 20):.0f} MiB")
