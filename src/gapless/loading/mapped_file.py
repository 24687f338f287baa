"""A file mapped into memory, read-only."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gapless.errors import FormatError, LoadError

Bytes = npt.NDArray[np.uint8]


class MappedFile:
    """A read-only mapping of a whole file. Views of it stay valid after `close`, which drops our own hold."""

    def __init__(self, path: Path) -> None:
        """Map `path`. LoadError if it cannot be read or is no regular file; FormatError if it is empty."""
        self.path = path
        try:
            status = path.stat()  # before opening: opening a FIFO would wait for a writer
        except FileNotFoundError:
            raise LoadError(f"{path} does not exist. Check the path, or fetch the model again.") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise LoadError(f"{path} cannot be read: {error}.") from error
        if not stat.S_ISREG(status.st_mode):
            raise LoadError(f"{path} is not a regular file. Give the path of a model file or folder.")
        if status.st_size == 0:
            raise FormatError(f"{path} is empty. The download or copy failed; fetch the file again.")
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: emptied since the check
            raise LoadError(f"{path} cannot be read: {error}.") from error
        self.data = memoryview(self._map)

    def bytes_at(self, offset: int, nbytes: int) -> Bytes:
        """The bytes `offset … offset + nbytes` as a read-only view, without a copy."""
        return np.frombuffer(self.data, np.uint8, nbytes, offset)

    def release(self, offset: int, nbytes: int) -> None:
        """Let the kernel drop the whole pages inside this range; they are read again when touched."""
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def close(self) -> None:
        """Unmap now if nobody holds a view, else when the last view goes."""
        try:
            self.data.release()
            self._map.close()
        except BufferError:
            pass  # views are still in use: the mapping goes with the last of them
