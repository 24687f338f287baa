"""Tells what a path holds and opens it."""

from __future__ import annotations

from os.path import isdir  # unlike Path.is_dir, false for names that the system refuses
from pathlib import Path

from gapless.errors import FormatError, UnsupportedModelError
from gapless.loading.checkpoint import Checkpoint
from gapless.loading.gguf import MAGIC
from gapless.loading.gguf_set import open_gguf
from gapless.loading.hf_folder import open_hf_folder
from gapless.loading.mapped_file import MappedFile

_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file (any part of a split one) or a Hugging Face folder. Reads headers, not weights.

    Raises LoadError if something is missing or unreadable, FormatError if a file is malformed, and
    UnsupportedModelError if it is well-formed but of a kind that Gapless does not read.
    """
    path = Path(path)
    if isdir(path):
        return open_hf_folder(path)
    file = MappedFile(path)
    start = bytes(file.data[:4])
    if start == MAGIC:
        return open_gguf(file)
    file.close()
    if path.suffix == ".safetensors":
        raise UnsupportedModelError(
            f"{path} is one file of a Hugging Face model. Give its folder, with config.json ({path.parent})."
        )
    if start in _OLD_GGML:
        raise UnsupportedModelError(f"{path} is in a format from before GGUF. Get or convert a GGUF file.")
    if start.startswith(_PICKLES):
        raise UnsupportedModelError(
            f"{path} holds pickled weights, which can run code when loaded and are not read. Give a GGUF "
            "file or a Hugging Face folder with safetensors files."
        )
    raise FormatError(
        f"{path} is not a model: it begins with {start!r}. Give a GGUF file or a Hugging Face folder with "
        "config.json and safetensors files."
    )
