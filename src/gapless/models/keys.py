"""Reads configuration keys, with an error that names the key for whatever is missing or strange."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.errors import FormatError, UnsupportedModelError
from gapless.loading import Checkpoint, CheckpointKind
from gapless.loading.dequantize import dequantize

# Needed for tensors in which a few numbers per layer are expected, not weights.
_MAX_VALUES = 1 << 16


class Keys:
    """The keys of one config.json (or a section of it), or the keys of one architecture in a GGUF file.

    A key that is null counts as absent. Every getter takes a default; without it the key is required.
    """

    def __init__(
        self, values: Mapping[str, Any], source: str, prefix: str = "", checkpoint: Checkpoint | None = None
    ) -> None:
        self._values = values
        self._source = source
        self._prefix = prefix
        self._checkpoint = checkpoint
        self._seen: set[str] = set()
        self._sections: dict[str, Keys] = {}

    @staticmethod
    def of(checkpoint: Checkpoint) -> Keys:
        """The keys that describe the text network of a checkpoint."""
        metadata, source = checkpoint.metadata, str(checkpoint.path)
        if checkpoint.kind is CheckpointKind.GGUF:
            return Keys(metadata, source, f"{metadata['general.architecture']}.", checkpoint)
        inner = metadata.get("text_config")
        values = {**metadata, **inner} if isinstance(inner, Mapping) else metadata
        return Keys(values, f"{source}/config.json", checkpoint=checkpoint)

    def integer(
        self, name: str, default: int | None = None, minimum: int = 1, maximum: int = (1 << 31) - 1
    ) -> int:
        """A whole number between two bounds. Arrays that repeat one number count as that number."""
        value = self._get(name, default)
        if isinstance(value, np.ndarray | Sequence) and not isinstance(value, str) and len(value):
            if any(item != value[0] for item in value):
                raise UnsupportedModelError(
                    f"{self._where(name)} differs from layer to layer, which is not supported."
                )
            value = value[0]
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise FormatError(f"{self._where(name)} must be a whole number, it is {value!r:.100}")
        if not minimum <= value <= maximum:
            raise FormatError(f"{self._where(name)} must be from {minimum} to {maximum}, it is {value}")
        return int(value)

    def number(
        self,
        name: str,
        default: float | None = None,
        minimum: float = 0.0,
        maximum: float = float(np.finfo(np.float32).max),
    ) -> float:
        """A number between two bounds."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise FormatError(f"{self._where(name)} must be a number, it is {value!r:.100}")
        if not minimum <= value <= maximum:  # also true of NaN
            raise FormatError(f"{self._where(name)} must be from {minimum} to {maximum}, it is {value}")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise FormatError(f"{self._where(name)} must be true or false, it is {value!r:.100}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise FormatError(f"{self._where(name)} must be a string, it is {value!r:.100}")
        return value

    def choice(self, name: str, supported: Collection[Any], default: Any = None) -> Any:
        """One of the `supported` values; UnsupportedModelError for any other."""
        value = self._get(name, default)
        if not any(value is item or value == item for item in supported):
            known = ", ".join(repr(item) for item in supported)
            raise UnsupportedModelError(f"{self._where(name)} is {value!r:.100}; supported: {known}.")
        return value

    def items(self, name: str) -> tuple[Any, ...] | None:
        """An array of anything; None if absent."""
        if not self.has(name):
            return None
        value = self._get(name, None)
        if isinstance(value, str) or not isinstance(value, np.ndarray | Sequence) or len(value) > _MAX_VALUES:
            raise FormatError(f"{self._where(name)} must be a short array, it is {value!r:.100}")
        return tuple(item.item() if isinstance(item, np.generic) else item for item in value)

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """An array of finite numbers; None if absent."""
        found = self.items(name)
        if found is None:
            return None
        if not all(isinstance(item, int | float) and np.isfinite(item) for item in found):
            raise FormatError(f"{self._where(name)} must be an array of finite numbers")
        return tuple(float(item) for item in found)

    def section(self, name: str) -> Keys | None:
        """An object inside the configuration; None if absent."""
        if not self.has(name):
            return None
        value = self._get(name, None)
        if not isinstance(value, Mapping):
            raise FormatError(f"{self._where(name)} must be an object, it is {value!r:.100}")
        return self._sections.setdefault(name, Keys(value, self._where(name)))

    def has(self, name: str) -> bool:
        return self._values.get(self._prefix + name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the key is there without a value, which switches off what otherwise has a default."""
        return self._prefix + name in self._values and not self.has(name)

    def has_tensor(self, name: str) -> bool:
        return self._checkpoint is not None and name in self._checkpoint.tensors

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """FormatError if the checkpoint has no such tensor."""
        if self._checkpoint is None or name not in self._checkpoint.tensors:
            raise FormatError(f"{self._source}: tensor {name!r} is missing")
        return self._checkpoint.tensors[name].shape

    def tensor(self, name: str) -> npt.NDArray[np.float32] | None:
        """The values of a small tensor that is configuration rather than weight; None if absent."""
        if self._checkpoint is None or name not in self._checkpoint.tensors:
            return None
        info = self._checkpoint.tensors[name]
        if info.num_values > _MAX_VALUES:
            raise FormatError(f"{self._source}: tensor {name!r} has {info.num_values} values, too many")
        return dequantize(info.type, self._checkpoint.raw(name), info.shape)

    @property
    def num_tensors(self) -> int:
        return 0 if self._checkpoint is None else len(self._checkpoint.tensors)

    def unread(self) -> list[str]:
        """Names of the keys that nobody asked for."""
        own = [
            name
            for name, value in self._values.items()
            if name.startswith(self._prefix) and value is not None
        ]
        found = [name for name in own if name.removeprefix(self._prefix) not in self._seen]
        for section, keys in self._sections.items():
            found += [f"{section}.{name}" for name in keys.unread()]
        return sorted(found)

    def refuse(self, name: str, why: str) -> UnsupportedModelError:
        """The error for a value that is known but not supported; to be raised by the caller."""
        return UnsupportedModelError(
            f"{self._where(name)} is {self._values.get(self._prefix + name)!r:.100}: {why}."
        )

    def _get(self, name: str, default: Any) -> Any:
        self._seen.add(name)
        value = self._values.get(self._prefix + name)
        if value is None:
            if default is None:
                raise FormatError(f"{self._source}: key {self._prefix + name!r} is missing")
            return default
        return value

    def _where(self, name: str) -> str:
        return f"{self._source}: {self._prefix + name!r}"
