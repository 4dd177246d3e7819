"""Files that are written and read past the page cache, where the file system can do that.

Copying gigabytes into the page cache and waiting for the disk to take them costs several times what the disk itself
needs. The disk takes whole pages from aligned memory; what is left at the edges of a piece goes the ordinary way.

Invariant: what was written is in the file whichever way it went; pieces may be written in any order, from any thread.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from interlock.errors import SortError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from interlock.sort.keys import Rows

PAGE = 4096
AT_ONCE = 4 << 20
LOOKED_AT = 128 << 10  # bytes of the page cache that are asked for at once: a miss makes the system read as many
_bounce = threading.local()


class ShorterError(SortError):
    """A file ended before what should be read of it."""


def aligned(size: int) -> NDArray[np.uint8]:
    """Give an array of bytes that begins at a page, with two to spare, so that data can be placed within it."""
    raw = np.empty(size + 3 * PAGE, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE
    return raw[start : start + size + 2 * PAGE]


def placed(room: NDArray[np.uint8], rows: int, record_length: int, offset: int) -> Rows:
    """Give the part of an aligned array from which rows can go straight to a place in a file."""
    start = offset % PAGE
    return room[start : start + rows * record_length].reshape(rows, record_length)


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
        """Write a piece; from memory as `placed` gives it, most of it goes straight to the disk."""
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
        """Fill a buffer from a place in the file; memory as `placed` gives it is mostly filled by the disk."""
        head = min(-offset % PAGE, len(into))
        whole = (len(into) - head) // PAGE * PAGE
        if self._direct < 0:
            read_fully(self._file, into, offset, self.path)
        elif whole and (_address(into) + head) % PAGE == 0:
            self._read_aside(into[:head], offset)
            self._read_here(into[head : head + whole], offset + head)
            self._read_aside(into[head + whole :], offset + head + whole)
        else:
            self._read_aside(into, offset)

    def view(self, room: NDArray[np.uint8], offset: int, size: int) -> memoryview:
        """Give a piece of the file, in an aligned array that has room for it and two pages more."""
        first = offset % PAGE
        found = room.data[first : first + size]
        if self._direct < 0:
            read_fully(self._file, found, offset, self.path)
            return found
        try:
            self._read_pages(room, offset, size)
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
        """Read a piece into memory of this thread's own, and copy it."""
        room: NDArray[np.uint8] | None = getattr(_bounce, "room", None)
        if room is None:
            room = _bounce.room = aligned(AT_ONCE + PAGE)
        for done in range(0, len(into), AT_ONCE):
            piece = into[done : done + AT_ONCE]
            piece[:] = self.view(room, offset + done, len(piece))

    def _read_pages(self, room: NDArray[np.uint8], offset: int, size: int) -> None:
        """Read the pages that hold a piece; the last one may end with the file."""
        first = offset // PAGE * PAGE
        end = -(-(offset + size) // PAGE) * PAGE
        needed, got = offset + size - first, 0
        while got < needed:
            more = os.preadv(self._direct, [room.data[got : end - first]], first + got)
            if not more:
                raise ShorterError(f"{self.path} became shorter while it was used")
            got += more


def no_reading_ahead(file: int) -> None:
    """Have the system read what is asked for and no more; it would read megabytes for a few bytes."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def read_cached(file: int, room: memoryview, offset: int) -> int:
    """Read from a place on what is in the page cache already, and no more; give how many bytes.

    The file must be one without reading ahead: the question alone would make the system begin with that.
    """
    done = 0
    try:
        while done < len(room):
            got = os.preadv(file, [room[done : done + LOOKED_AT]], offset + done, os.RWF_NOWAIT)
            if not got:
                break
            done += got
    except (OSError, AttributeError):
        return done  # it is not in memory, or this system cannot tell
    return done


def read_uncached(path: Path, room: memoryview, offset: int) -> None:
    """Fill a buffer from a place in a file, past the page cache."""
    file = DirectReader(path)
    try:
        file.read(room, offset)
    finally:
        file.close()


def read_fully(file: int, room: memoryview, offset: int, path: Path) -> None:
    """Fill a buffer from a place in a file."""
    done = 0
    while done < len(room):
        got = os.preadv(file, [room[done:]], offset + done)
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
