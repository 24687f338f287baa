"""Opens a GGUF model, which is one file or a set of split files (`name-00001-of-00003.gguf`)."""

from __future__ import annotations

import re
from pathlib import Path

from gapless.errors import FormatError, LoadError
from gapless.loading.checkpoint import Checkpoint, CheckpointKind, TensorInfo
from gapless.loading.gguf import GgufFile, parse_gguf
from gapless.loading.mapped_file import MappedFile

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NUM_NAMED = 5  # how many missing files an error lists


def open_gguf(file: MappedFile) -> Checkpoint:
    """Read `file` and, if it is one shard of a set, the others beside it, whichever of them it is.

    The set's metadata is that of the first shard. LoadError names the files that are missing.
    """
    opened = parse_gguf(file.data, str(file.path))
    count = opened.metadata.get("split.count", 1)
    if count <= 1:
        return Checkpoint(file.path, CheckpointKind.GGUF, opened.metadata, opened.tensors, [file])
    paths = _shard_paths(file.path, opened)
    files = [file if path == file.path else MappedFile(path) for path in paths]
    shards = [parse_gguf(shard.data, str(shard.path), number) for number, shard in enumerate(files)]
    return Checkpoint(file.path, CheckpointKind.GGUF, shards[0].metadata, _join(paths, shards), files)


def _shard_paths(path: Path, opened: GgufFile) -> list[Path]:
    """The paths of the whole set that `path` belongs to, in order; all exist."""
    count = opened.metadata["split.count"]
    number = opened.metadata.get("split.no", 0)
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        raise LoadError(
            f"{path} says it is part {number + 1} of a set of {count}, so its name must end in "
            f"-{number + 1:05}-of-{count:05}.gguf for the others to be found. Rename the files."
        )
    names = [f"{match['stem']}-{index:05}-of-{count:05}.gguf" for index in range(1, count + 1)]
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing:
        listed = ", ".join(missing[:_NUM_NAMED]) + (" …" if len(missing) > _NUM_NAMED else "")
        raise LoadError(
            f"{path} is part of a set of {count} files of which {len(missing)} are missing in {path.parent}: "
            f"{listed}. Put all parts into one folder."
        )
    return [path.with_name(name) for name in names]


def _join(paths: list[Path], shards: list[GgufFile]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for number, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        said = (shard.metadata.get("split.no"), shard.metadata.get("split.count"))
        if said != (number, len(shards)):
            raise FormatError(
                f"{path} has split.no {said[0]} and split.count {said[1]}, its name says {number} and "
                f"{len(shards)}"
            )
        for name, info in shard.tensors.items():
            if name in tensors:
                raise FormatError(f"{path}: tensor {name!r} is also in {paths[tensors[name].shard]}")
            tensors[name] = info
    expected = shards[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise FormatError(
            f"{paths[0]} and its parts hold {len(tensors)} tensors, 'split.tensors.count' says {expected}; "
            "the parts are not of the same model"
        )
    return tensors
