"""Opens a Hugging Face model folder: config.json and safetensors files, one or several."""

from __future__ import annotations

from os.path import exists  # unlike Path.exists, false for names that the system refuses
from pathlib import Path, PurePosixPath
from typing import Any

from gapless.errors import FormatError, LoadError, UnsupportedModelError
from gapless.loading.checkpoint import Checkpoint, CheckpointKind, TensorInfo
from gapless.loading.json_object import parse_json_object
from gapless.loading.mapped_file import MappedFile
from gapless.loading.safetensors import parse_safetensors

_CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_POOLING_CONFIG = "1_Pooling/config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NUM_NAMED = 5  # how many missing files an error lists


def open_hf_folder(directory: Path) -> Checkpoint:
    """Read the folder's configuration and the headers of its weight files.

    LoadError for what is missing, FormatError for what is malformed, UnsupportedModelError for pickles.
    """
    if not exists(directory / _CONFIG):
        raise LoadError(f"{directory} has no {_CONFIG}.{_hint(directory)}")
    config = _read_json(directory / _CONFIG)
    optional = [
        _read_json(directory / name) if exists(directory / name) else {}
        for name in (_GENERATION_CONFIG, _POOLING_CONFIG)
    ]
    files, tensors = _open_weights(directory)
    return Checkpoint(directory, CheckpointKind.HF, config, tensors, files, directory, *optional)


def _hint(directory: Path) -> str:
    ggufs = sorted(directory.glob("*.gguf"))
    if ggufs:
        return f" It holds GGUF files: give the path of one of them, such as {ggufs[0]}."
    return " Give a Hugging Face model folder, or the path of a GGUF file."


def _read_json(path: Path) -> dict[str, Any]:
    file = MappedFile(path)
    try:
        return parse_json_object(bytes(file.data), str(path))
    finally:
        file.close()


def _open_weights(directory: Path) -> tuple[list[MappedFile], dict[str, TensorInfo]]:
    if exists(directory / _WEIGHTS):
        file = MappedFile(directory / _WEIGHTS)
        return [file], parse_safetensors(file.data, str(file.path))
    if exists(directory / _INDEX):
        return _open_shards(directory, _read_index(directory / _INDEX))
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{directory} has only pickled weights ({pickles[0]}), which can run code when loaded and are "
            "not read. Convert them once with transformers: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder, safe_serialization=True)."
        )
    raise LoadError(f"{directory} has neither {_WEIGHTS} nor {_INDEX}. Fetch the rest of the model.")


def _read_index(path: Path) -> dict[str, str]:
    """Which file each tensor is in; file names are checked to lie inside the folder."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{path} has no weight_map")
    if not all(isinstance(file_name, str) for file_name in weight_map.values()):
        raise FormatError(f"{path}: weight_map must map names to strings")
    for file_name in set(weight_map.values()):
        parts = PurePosixPath(file_name)
        # Not resolved: in the cache of huggingface_hub the files are links out of the folder.
        if parts.is_absolute() or not parts.parts or ".." in parts.parts or set("\\:\0") & set(file_name):
            raise FormatError(f"{path}: weight_map names {file_name!r:.100}, which is not inside the folder")
    return weight_map


def _open_shards(
    directory: Path, weight_map: dict[str, str]
) -> tuple[list[MappedFile], dict[str, TensorInfo]]:
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not exists(directory / name)]
    if missing:
        listed = ", ".join(f"{name!r:.100}" for name in missing[:_NUM_NAMED])
        more = " …" if len(missing) > _NUM_NAMED else ""
        raise LoadError(
            f"{directory} lacks {len(missing)} of {len(names)} weight files: {listed}{more}. Fetch it again."
        )
    files = [MappedFile(directory / name) for name in names]
    found = [parse_safetensors(file.data, str(file.path), shard) for shard, file in enumerate(files)]
    shard_of = {name: shard for shard, name in enumerate(names)}
    tensors: dict[str, TensorInfo] = {}
    for name, file_name in weight_map.items():
        info = found[shard_of[file_name]].get(name)
        if info is None:
            raise FormatError(f"{directory / file_name} has no tensor {name!r}, which {_INDEX} says is there")
        tensors[name] = info
    return files, tensors
