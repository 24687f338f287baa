"""Reads model files into one neutral form: named tensors as raw bytes, and metadata.

Knows file formats and block layouts; knows nothing of what a model computes.
"""

from gapless.loading.checkpoint import Checkpoint, CheckpointKind, TensorInfo
from gapless.loading.detect import open_checkpoint
from gapless.loading.strings import StringArray
from gapless.loading.tensor_type import TensorType

__all__ = ["Checkpoint", "CheckpointKind", "StringArray", "TensorInfo", "TensorType", "open_checkpoint"]
