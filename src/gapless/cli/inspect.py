"""`gapless inspect`: what is in a model file, without loading it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import typer

from gapless import hub
from gapless.config import KV_DTYPES
from gapless.errors import GaplessError
from gapless.loading import Checkpoint, open_checkpoint
from gapless.sampling import check

_MAX_SHOWN_CHARACTERS = 100
_MAX_SHOWN_ITEMS = 16


def inspect_model(model: str, kv_dtype: str, as_json: bool) -> None:
    """Prints metadata, tensors, types and the memory needed with a KV cache of type `kv_dtype`."""
    check.one_of("kv_dtype", kv_dtype, KV_DTYPES)
    with open_checkpoint(hub.resolve(model)) as checkpoint:
        report = _report(checkpoint, kv_dtype)
    if as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False, default=str))
    else:
        _print(report)


def _report(checkpoint: Checkpoint, kv_dtype: str) -> dict[str, Any]:
    types: Counter[str] = Counter()
    type_bytes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        types[info.type.name] += 1
        type_bytes[info.type.name] += info.nbytes
    return {
        "path": str(checkpoint.path),
        "kind": checkpoint.kind.value,
        "metadata": {key: _plain(value) for key, value in checkpoint.metadata.items()},
        "types": {name: {"tensors": count, "bytes": type_bytes[name]} for name, count in types.most_common()},
        "parameters": sum(info.num_values for info in checkpoint.tensors.values()),
        "memory": _memory(checkpoint, kv_dtype),
        "tensors": [
            {"name": info.name, "type": info.type.name, "shape": list(info.shape), "bytes": info.nbytes}
            for info in checkpoint.tensors.values()
        ],
    }


def _memory(checkpoint: Checkpoint, kv_dtype: str) -> dict[str, Any]:
    """Bytes that running the model takes, if the network is one that Gapless knows."""
    memory: dict[str, Any] = {"file_bytes": checkpoint.total_bytes}
    try:
        from gapless.models.loader import estimate_memory
        from gapless.models.registry import find_architecture, read_config

        config = read_config(checkpoint, find_architecture(checkpoint))
        estimate = estimate_memory(checkpoint, kv_dtype=kv_dtype)
    except GaplessError as error:
        return {**memory, "unsupported": str(error)}
    return {
        **memory,
        "weight_bytes": estimate.weight_bytes,
        "activation_bytes": estimate.arena_bytes,
        "kv_dtype": kv_dtype,
        "kv_bytes_per_1k_tokens": estimate.kv_bytes_per_token * 1024,
        "kv_bytes_of_full_context": estimate.kv_bytes_per_token * config.context_length,
        "context_length": config.context_length,
    }


def _plain(value: Any) -> Any:
    """Metadata as JSON can hold it; long arrays only by their length."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float)) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if not isinstance(value, Iterable) or not isinstance(value, Sized):
        return str(value)
    if len(value) > _MAX_SHOWN_ITEMS:
        return f"[{len(value)} items]"
    return [_plain(item) for item in (value.tolist() if hasattr(value, "tolist") else value)]


def _print(report: dict[str, Any]) -> None:
    typer.secho(
        f"{report['path']} ({report['kind']}, {report['parameters'] / 1e6:.1f} M parameters)", bold=True
    )
    _heading("Metadata")
    _table([[key, _short(value)] for key, value in report["metadata"].items()])
    _heading("Tensors")
    _table(
        [[t["name"], t["type"], "x".join(map(str, t["shape"])), _size(t["bytes"])] for t in report["tensors"]]
    )
    _heading("Types")
    _table([[name, f"{t['tensors']} tensors", _size(t["bytes"])] for name, t in report["types"].items()])
    _heading("Memory")
    _table(_memory_rows(report["memory"]))


def _memory_rows(memory: Mapping[str, Any]) -> list[list[str]]:
    rows = [["tensors in the file", _size(memory["file_bytes"])]]
    if "unsupported" in memory:
        return [*rows, ["cannot be run", memory["unsupported"]]]
    full = f"{memory['kv_dtype']} KV cache of the full context ({memory['context_length']} tokens)"
    return [
        *rows,
        ["weights as packed (about)", _size(memory["weight_bytes"])],
        ["activations of a step, at most", _size(memory["activation_bytes"])],
        [f"{memory['kv_dtype']} KV cache per 1024 tokens", _size(memory["kv_bytes_per_1k_tokens"])],
        [full, _size(memory["kv_bytes_of_full_context"])],
    ]


def _heading(text: str) -> None:
    typer.echo()
    typer.secho(text, bold=True)


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo(
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[: _MAX_SHOWN_CHARACTERS - 3] + "..."


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / 1024:.1f} KiB"
