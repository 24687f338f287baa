"""Options that several commands share."""

from typing import Annotated, Optional

import typer

Quant = Annotated[
    Optional[str],  # noqa: UP045  # typer reads annotations at run time, on Python 3.10 too
    typer.Option(
        envvar="GAPLESS_QUANT", help="Quantize an unquantized model while loading: int8 or int4[:GROUP_SIZE]."
    ),
]
Activations = Annotated[
    str,
    typer.Option(
        envvar="GAPLESS_ACTIVATIONS",
        help="a8: inputs of quantized layers are rounded to 8 bits; a16: they are not.",
    ),
]
Threads = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        envvar="GAPLESS_THREADS", help="CPU threads. [default: what this machine and its container allow]"
    ),
]
MaxModelLen = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        envvar="GAPLESS_MAX_MODEL_LEN",
        help="Tokens of prompt and output together. [default: the model's context, if memory allows]",
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        envvar="GAPLESS_KV_DTYPE",
        help="Type of the KV cache: f16, bf16, or int8: half the memory, less exact.",
    ),
]
KvCacheGib = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        envvar="GAPLESS_KV_CACHE_GIB", help="Upper bound of the KV cache. [default: half of the free memory]"
    ),
]
TargetTpotMs = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        envvar="GAPLESS_TARGET_TPOT_MS",
        help="Prefill is cut into pieces that aim at a token this often for running streams. [default: 1.6 "
        "times their own time]",
    ),
]
Trace = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        envvar="GAPLESS_TRACE",
        metavar="FILE",
        help="Write a trace of every step and slot, for ui.perfetto.dev.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
