"""Direct I/O: files are read and written past the page cache (O_DIRECT), if the file system supports it.

Copying gigabytes into the page cache and waiting for the writeback costs several times what the disk itself needs.
Direct I/O needs whole pages in aligned memory; the partial pages at the edges of a range go through the page cache. The
memory consists of huge pages: a virtual disk was two to three times as fast with them, for an eighth of the processor
time, which more than pays for a copy between an I/O buffer and the final place of the bytes.

Invariant: a range that was written is in the file whichever way it took; ranges may be written in any order, from any
thread. An I/O buffer has one user at a time.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from interlock.errors import SortError
from interlock.sort.io.memory import allocate_huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from interlock.sort.data.keys import Rows

PAGE_BYTES = 4096
IO_BUFFER_BYTES = 4 << 20
MAX_IO_BYTES = IO_BUFFER_BYTES - PAGE_BYTES  # that an I/O buffer holds at any offset within a page
CACHE_PROBE_BYTES = 128 << 10  # requested from the page cache at once: a miss makes the kernel read as many
_free_buffers: list[NDArray[np.uint8]] = []


class FileShrank(SortError):  # noqa: N818 - a named outcome
    """A file ended before the range that should be read."""


@contextmanager
def io_buffer() -> Iterator[NDArray[np.uint8]]:
    """Borrow an array of IO_BUFFER_BYTES in huge pages, which is fast for direct I/O."""
    try:
        buffer = _free_buffers.pop()
    except IndexError:
        buffer = allocate_huge_pages(IO_BUFFER_BYTES)
    try:
        yield buffer
    finally:
        _free_buffers.append(buffer)


def align_rows(array: NDArray[np.uint8], rows: int, record_length: int, offset: int) -> Rows:
    """Return rows within an array, which has a spare page, that lie as far into a page as `offset` does in a file.

    Direct I/O can read from that offset to these rows without a copy.
    """
    return align(array, offset)[: rows * record_length].reshape(rows, record_length)


def align(array: NDArray[np.uint8], offset: int) -> NDArray[np.uint8]:
    """Return the part of an array with a spare page that begins as far into a page as `offset` does in a file."""
    return array[offset % PAGE_BYTES :]


class DirectWriter:
    """A new file of a known size, whose disk space is allocated at once."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._file = self._direct = -1
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            self.close()
            raise SortError(f"cannot write {size:,} bytes to {path}: {error.strerror}") from error
        self._direct = _open_direct(path, os.O_WRONLY)

    def write(self, data: memoryview, offset: int) -> None:
        """Write a range; one that lies as far into a page in memory as in the file goes past the page cache."""
        try:
            self._write(data, offset)
        except OSError as error:
            raise SortError(f"cannot write to {self._path}: {error.strerror}") from error

    def _write(self, data: memoryview, offset: int) -> None:
        head = min(-offset % PAGE_BYTES, len(data))
        whole = (len(data) - head) // PAGE_BYTES * PAGE_BYTES
        if self._direct < 0 or not whole or (_address(data) + head) % PAGE_BYTES:
            write_fully(self._file, data, offset)
            return
        write_fully(self._file, data[:head], offset)
        middle = data[head : head + whole]
        try:
            write_fully(self._direct, middle, offset + head)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            write_fully(self._file, middle, offset + head)  # this file system needs another alignment
        write_fully(self._file, data[head + whole :], offset + head + whole)

    def sync(self) -> None:
        """Wait until the whole file is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        for file in (self._file, self._direct):
            if file >= 0:
                os.close(file)
        self._file = self._direct = -1


class DirectReader:
    """A file that is read in ranges, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._file).st_size
        self._direct = _open_direct(path, os.O_RDONLY)

    def read(self, into: memoryview, offset: int) -> None:
        """Fill a buffer from an offset of the file; without a copy if the buffer is aligned (`align_rows`)."""
        head = min(-offset % PAGE_BYTES, len(into))
        end = head + (len(into) - head) // PAGE_BYTES * PAGE_BYTES
        if self._direct < 0:
            read_fully(self._file, into, offset, self.path)
        elif head < end and (_address(into) + head) % PAGE_BYTES == 0:
            self._read_and_copy(into[:head], offset)
            self._read_in_place(into[head:end], offset + head)
            self._read_and_copy(into[end:], offset + end)
        else:
            self._read_and_copy(into, offset)

    def view(self, buffer: NDArray[np.uint8], offset: int, size: int) -> memoryview:
        """Read a range of at most MAX_IO_BYTES into an I/O buffer, and return its bytes there."""
        first = offset % PAGE_BYTES
        data = buffer.data[first : first + size]
        if self._direct < 0:
            read_fully(self._file, data, offset, self.path)
            return data
        try:
            self._read_pages(buffer, offset, size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            read_fully(self._file, data, offset, self.path)
        return data

    def close(self) -> None:
        """Close the file; safe to call twice."""
        for file in (self._file, self._direct):
            if file >= 0:
                os.close(file)
        self._file = self._direct = -1

    def _read_in_place(self, into: memoryview, offset: int) -> None:
        """Read whole pages directly into the buffer."""
        try:
            read_fully(self._direct, into, offset, self.path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            read_fully(self._file, into, offset, self.path)  # this file system needs another alignment

    def _read_and_copy(self, into: memoryview, offset: int) -> None:
        """Read a range into an I/O buffer, and copy it."""
        target = np.frombuffer(into, dtype=np.uint8)  # numpy releases the GIL while it copies
        with io_buffer() as buffer:
            for done in range(0, len(target), MAX_IO_BYTES):
                piece = target[done : done + MAX_IO_BYTES]
                piece[:] = self.view(buffer, offset + done, len(piece))

    def _read_pages(self, buffer: NDArray[np.uint8], offset: int, size: int) -> None:
        """Read the pages that hold a range; the last one may end with the file."""
        first = offset // PAGE_BYTES * PAGE_BYTES
        end = -(-(offset + size) // PAGE_BYTES) * PAGE_BYTES
        needed, got = offset + size - first, 0
        while got < needed:
            more = os.preadv(self._direct, [buffer.data[got : end - first]], first + got)
            if not more:
                raise FileShrank(f"{self.path} became shorter while it was read")
            got += more


def disable_readahead(file: int) -> None:
    """Disable the kernel's readahead for a file: it would read megabytes for a few bytes."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def read_cached(file: int, into: memoryview, offset: int) -> int:
    """Read from an offset on as much as the page cache holds; return the number of bytes.

    The file must be one without readahead: the request alone would start it.
    """
    done = 0
    try:
        while done < len(into):
            got = os.preadv(file, [into[done : done + CACHE_PROBE_BYTES]], offset + done, os.RWF_NOWAIT)
            if not got:
                break
            done += got
    except (OSError, AttributeError):
        return done  # not cached, or RWF_NOWAIT is not supported
    return done


def read_uncached(path: Path, into: memoryview, offset: int) -> None:
    """Fill a buffer from an offset of a file, with direct I/O."""
    file = DirectReader(path)
    try:
        file.read(into, offset)
    finally:
        file.close()


def read_fully(file: int, into: memoryview, offset: int, path: Path) -> None:
    """Fill a buffer from an offset of a file."""
    done = 0
    while done < len(into):
        got = os.preadv(file, [into[done:]], offset + done)
        if not got:
            raise FileShrank(f"{path} became shorter while it was read")
        done += got


def write_fully(file: int, data: memoryview, offset: int) -> None:
    """Write a whole buffer at an offset of a file."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def _open_direct(path: Path, flags: int) -> int:
    """Open a file for direct I/O; -1 if the file system or the platform does not support it."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except (OSError, AttributeError):
        return -1


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
