"""Files that are on the disk when they are said to be, and their checksums."""

from __future__ import annotations

import io
import os
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.filesystem import FileSystem

if TYPE_CHECKING:
    from collections.abc import Iterator

_BLOCK = 4 << 20  # bytes


@dataclass(frozen=True)
class Written:
    """What was written into a file."""

    size: int  # bytes
    crc32: int


def write_new(path: Path, data: bytes) -> Written:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(len(data), zlib.crc32(data))


def replace(path: Path, data: bytes) -> None:
    """Give a file new content: a reader sees the old or the new one, never a part."""
    beside = path.with_name(f".{path.name}.new")  # one name: a killed process leaves one at most
    try:
        write_new(beside, data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def checksum(path: Path) -> int:
    """The CRC-32 of a file's content."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


class Checksummed(FileSystem):
    """torch.distributed.checkpoint's way to files, with a checksum of each file taken while it is written.

    (The format has a checksum of its own, but torch does not look at it when it reads.)

    Attributes:
        written: by file name.
        failure: what a write failed with. (torch.save then fails in its own way, and hides it.)

    """

    def __init__(self) -> None:
        super().__init__()
        self.failure: OSError | None = None
        self.written: dict[str, Written] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file; what is written into it is counted and summed up."""
        with Path(path).open(mode) as stream:
            counted = _Counted(stream)
            try:
                yield counted
            finally:
                self.failure = self.failure or counted.failure
        self.written[Path(path).name] = Written(counted.size, counted.crc)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file: its checksum goes with it."""
        super().rename(path, new_path)
        if (known := self.written.pop(Path(path).name, None)) is not None:
            self.written[Path(new_path).name] = known


class _Counted(io.RawIOBase):
    """A stream that only ever grows."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = self.crc = 0
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        view = memoryview(data)
        self.crc = zlib.crc32(view, self.crc)
        self.size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        # Asked for by os.fsync(), which must not leave anything in a buffer behind.
        self._stream.flush()
        number: int = self._stream.fileno()
        return number

    def close(self) -> None:
        self._stream.close()
        super().close()
