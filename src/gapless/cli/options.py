"""Options that several commands share."""

from typing import Annotated, Optional

import typer

Quant = Annotated[
    Optional[str],  # noqa: UP045  # typer reads annotations at run time, on Python 3.10 too
    typer.Option(help="Quantize an unquantized model while loading: int8 or int4[:GROUP_SIZE]."),
]
Activations = Annotated[
    str, typer.Option(help="a8: inputs of quantized layers are rounded to 8 bits; a16: they are not.")
]
Threads = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="CPU threads. [default: what this machine and its container allow]"),
]
MaxModelLen = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        help="Tokens of prompt and output together. [default: the model's context, if memory allows]"
    ),
]
TargetTpotMs = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        help="Compute prompts in pieces, so that running streams get a token this often. [default: automatic]"
    ),
]
Trace = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(metavar="FILE", help="Write a trace of every step and slot, for ui.perfetto.dev."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
