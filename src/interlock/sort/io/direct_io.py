"""Files that are written and read past the page cache, where the file system can do that.

Copying gigabytes into the page cache and waiting for the disk to take them costs several times what the disk itself
needs. The disk takes whole pages from aligned memory; what is left at the edges of a piece goes the ordinary way. That
memory is in large pages: a virtual disk was two to three times as fast with them, for an eighth of the processor time,
which more than pays for a copy from there to where the bytes belong.

Invariant: what was written is in the file whichever way it went; pieces may be written in any order, from any thread. A
room is lent to one at a time.
"""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from interlock.errors import SortError
from interlock.sort.io.memory import large_pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from interlock.sort.data.keys import Rows

PAGE = 4096
ROOM = 4 << 20
AT_ONCE = ROOM - PAGE  # bytes that a room holds wherever in a page they begin
LOOKED_AT = 128 << 10  # bytes of the page cache that are asked for at once: a miss makes the system read as many
_rooms: list[NDArray[np.uint8]] = []


class ShorterError(SortError):
    """A file ended before what should be read of it."""


@contextmanager
def room() -> Iterator[NDArray[np.uint8]]:
    """Lend an array of ROOM bytes from which, and to which, disks are fast."""
    try:
        lent = _rooms.pop()
    except IndexError:
        lent = large_pages(ROOM)
    try:
        yield lent
    finally:
        _rooms.append(lent)


def placed(array: NDArray[np.uint8], rows: int, record_length: int, offset: int) -> Rows:
    """Give the part of an array with a page to spare to which the disk can bring rows from a place in a file."""
    start = offset % PAGE
    return array[start : start + rows * record_length].reshape(rows, record_length)


class DirectWriter:
    """A new file of a known size, for which the disk space is taken at once."""

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
        """Write a piece; one in a room that begins as far into a page there as in the file goes past the page cache."""
        try:
            self._write(data, offset)
        except OSError as error:
            raise SortError(f"cannot write to {self._path}: {error.strerror}") from error

    def _write(self, data: memoryview, offset: int) -> None:
        head = min(-offset % PAGE, len(data))
        whole = (len(data) - head) // PAGE * PAGE
        if self._direct < 0 or not whole or (_address(data) + head) % PAGE:
            write_fully(self._file, data, offset)
            return
        write_fully(self._file, data[:head], offset)
        middle = data[head : head + whole]
        try:
            write_fully(self._direct, middle, offset + head)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            write_fully(self._file, middle, offset + head)  # this file system wants it otherwise
        write_fully(self._file, data[head + whole :], offset + head + whole)

    def sync(self) -> None:
        """Wait until the disk has all of it."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        for file in (self._file, self._direct):
            if file >= 0:
                os.close(file)
        self._file = self._direct = -1


class DirectReader:
    """A file that is read in pieces, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._file).st_size
        self._direct = _open_direct(path, os.O_RDONLY)

    def read(self, into: memoryview, offset: int) -> None:
        """Fill a buffer from a place in the file; the disk brings it there if it is `placed` for that."""
        head = min(-offset % PAGE, len(into))
        end = head + (len(into) - head) // PAGE * PAGE
        if self._direct < 0:
            read_fully(self._file, into, offset, self.path)
        elif head < end and (_address(into) + head) % PAGE == 0:
            self._read_aside(into[:head], offset)
            self._read_here(into[head:end], offset + head)
            self._read_aside(into[end:], offset + end)
        else:
            self._read_aside(into, offset)

    def view(self, lent: NDArray[np.uint8], offset: int, size: int) -> memoryview:
        """Give a piece of the file, in a room; it may have AT_ONCE bytes."""
        first = offset % PAGE
        found = lent.data[first : first + size]
        if self._direct < 0:
            read_fully(self._file, found, offset, self.path)
            return found
        try:
            self._read_pages(lent, offset, size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            read_fully(self._file, found, offset, self.path)
        return found

    def close(self) -> None:
        """Close the file; safe to call twice."""
        for file in (self._file, self._direct):
            if file >= 0:
                os.close(file)
        self._file = self._direct = -1

    def _read_here(self, into: memoryview, offset: int) -> None:
        """Read whole pages to where they belong."""
        try:
            read_fully(self._direct, into, offset, self.path)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            read_fully(self._file, into, offset, self.path)  # this file system wants it otherwise

    def _read_aside(self, into: memoryview, offset: int) -> None:
        """Read a piece into a room, and copy it."""
        target = np.frombuffer(into, dtype=np.uint8)  # numpy lets other threads work while it copies
        with room() as lent:
            for done in range(0, len(target), AT_ONCE):
                piece = target[done : done + AT_ONCE]
                piece[:] = self.view(lent, offset + done, len(piece))

    def _read_pages(self, lent: NDArray[np.uint8], offset: int, size: int) -> None:
        """Read the pages that hold a piece; the last one may end with the file."""
        first = offset // PAGE * PAGE
        end = -(-(offset + size) // PAGE) * PAGE
        needed, got = offset + size - first, 0
        while got < needed:
            more = os.preadv(self._direct, [lent.data[got : end - first]], first + got)
            if not more:
                raise ShorterError(f"{self.path} became shorter while it was used")
            got += more


def no_reading_ahead(file: int) -> None:
    """Have the system read what is asked for and no more; it would read megabytes for a few bytes."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def read_cached(file: int, into: memoryview, offset: int) -> int:
    """Read from a place on what is in the page cache already, and no more; give how many bytes.

    The file must be one without reading ahead: the question alone would make the system begin with that.
    """
    done = 0
    try:
        while done < len(into):
            got = os.preadv(file, [into[done : done + LOOKED_AT]], offset + done, os.RWF_NOWAIT)
            if not got:
                break
            done += got
    except (OSError, AttributeError):
        return done  # it is not in memory, or this system cannot tell
    return done


def read_uncached(path: Path, into: memoryview, offset: int) -> None:
    """Fill a buffer from a place in a file, past the page cache."""
    file = DirectReader(path)
    try:
        file.read(into, offset)
    finally:
        file.close()


def read_fully(file: int, into: memoryview, offset: int, path: Path) -> None:
    """Fill a buffer from a place in a file."""
    done = 0
    while done < len(into):
        got = os.preadv(file, [into[done:]], offset + done)
        if not got:
            raise ShorterError(f"{path} became shorter while it was used")
        done += got


def write_fully(file: int, data: memoryview, offset: int) -> None:
    """Write a whole buffer to a place in a file."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def _open_direct(path: Path, way: int) -> int:
    """Open a file past the page cache; -1 where that cannot be done."""
    try:
        return os.open(path, way | os.O_DIRECT)
    except (OSError, AttributeError):
        return -1


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)
