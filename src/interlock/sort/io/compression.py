"""Compressed input and output: gzip and zstd files, and standard input, which cannot be read at any offset.

A sort reads its input at many offsets, and more than once. So such inputs are unpacked into files of a directory first.
"""

from __future__ import annotations

import gzip
import os
import select
import shutil
import sys
import tempfile
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, Self, cast

from interlock.errors import ConfigError, SortError, SortInputError
from interlock.sort.data.input_stamps import describe_change, take_stamp
from interlock.sort.data.records import STANDARD_INPUT, list_files
from interlock.sort.logging import stop_on_interrupt
from interlock.sort.settings import Compression

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

COPY_BYTES = 1 << 20
MAX_COPIED_NAME = 60  # characters of the name of an input in that of its copy, of at most four bytes each
ZSTD_PIECE_BYTES = 1024  # decompressed at once, to at most 32 MiB, if lines repeat
STDIN = 0
STOP_CHECK_INTERVAL_MS = 100  # while standard input has nothing to read
GZIP_LEVEL, ZSTD_LEVEL = 1, 3
GZIP_HEADER = 16  # added to the window bits of zlib: with the header and the checksum of gzip


class Compressor(Protocol):
    """Compresses bytes that are given one after the other."""

    def compress(self, data: memoryview, /) -> bytes:
        """Compress some bytes; return what is ready."""

    def flush(self) -> bytes:
        """Return the rest."""


def make_compressor(compression: Compression) -> Compressor:
    """Return a compressor of one gzip member or zstd frame; files may consist of many."""
    if compression is Compression.GZIP:
        return zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS + GZIP_HEADER)
    return cast("Compressor", _zstandard().ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compressobj())


def _zstandard() -> Any:
    """Import the library of zstd, which few sorts need."""
    try:
        return import_module("zstandard")
    except ModuleNotFoundError as error:
        raise ConfigError(f"zstd files need {error.name}: pip install 'interlock[sort]'") from error


def compression_of(path: Path) -> Compression | None:
    """Return how a file is compressed, by its name."""
    return next((one for one in Compression if path.name.endswith(one.suffix)), None)


def needs_unpacking(path: Path) -> bool:
    """Return whether an input is standard input, or a compressed file."""
    return path == STANDARD_INPUT or compression_of(path) is not None


@contextmanager
def unpacked(paths: Sequence[Path], directory: Path, stop: threading.Event | None = None) -> Iterator[list[Path]]:
    """Unpack those files that need it into a new directory; yield all in order, and remove the directory at the end.

    Setting `stop` ends the copies with SortError.
    """
    directory.mkdir(parents=True)
    stop, failed = stop or threading.Event(), threading.Event()

    def is_stopped() -> bool:
        return stop.is_set() or failed.is_set()

    def unpack(number: int) -> Path:
        path = paths[number]
        if not needs_unpacking(path):
            return path
        target = directory / f"{number:08}-{_name_of_copy(path)}"
        try:
            _unpack(path, target, is_stopped)
        except BaseException:
            failed.set()  # the other copies would be made for nothing
            raise
        return target

    try:
        with stop_on_interrupt(stop), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            copies = [pool.submit(unpack, number) for number in range(len(paths))]
            found = _first_failure_or_all(copies)
        yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _name_of_copy(path: Path) -> str:
    """Return a name by which errors in the content of a copy name its input, and which no suffix makes a packed one."""
    if path == STANDARD_INPUT:
        return "stdin"
    suffix = (found := compression_of(path)) and found.suffix
    return path.name.removesuffix(suffix or "")[:MAX_COPIED_NAME]


@contextmanager
def unpacked_for_validation(
    outputs: Sequence[Path], inputs: Sequence[Path]
) -> Iterator[tuple[Sequence[Path], Sequence[Path]]]:
    """Yield output directories and inputs, with compressed files unpacked in a temporary directory if there are any."""
    contents = [sorted(place.iterdir()) if place.is_dir() else [] for place in outputs]
    files = list_files(inputs) if inputs else []
    if not any(map(needs_unpacking, [*(path for content in contents for path in content), *files])):
        yield outputs, inputs
        return
    with tempfile.TemporaryDirectory(prefix="interlock-sort-") as name, ExitStack() as stack:
        places: list[Path] = []
        for number, content in enumerate(contents):
            place = Path(name, str(number))
            place.mkdir()
            places.append(place)
            unpacked_files = stack.enter_context(unpacked(content, Path(name, f"{number}-unpacked")))
            for path, target in zip(content, unpacked_files, strict=True):
                suffix = (found := compression_of(path)) and found.suffix
                (place / path.name.removesuffix(suffix or "")).symlink_to(target.absolute())
        yield places, stack.enter_context(unpacked(files, Path(name, "inputs")))


class _Stopped(SortError):  # noqa: N818 - a named outcome
    """A copy was stopped before its end."""


def _first_failure_or_all(copies: Sequence[Future[Path]]) -> list[Path]:
    """Return the paths of all copies, or raise the failure that stopped the others."""
    errors = [error for copy in copies if (error := copy.exception()) is not None]
    for error in sorted(errors, key=lambda one: isinstance(one, _Stopped)):
        raise error
    return [copy.result() for copy in copies]


def _unpack(path: Path, target: Path, is_stopped: Callable[[], bool]) -> None:
    """Write the content of one file to another one."""
    try:
        with target.open("wb") as file:
            if path == STANDARD_INPUT:
                _copy(lambda: _read_stdin(is_stopped), file, is_stopped)
                return
            before = take_stamp(path)
            with path.open("rb") as packed, _open_packed(path, packed) as content:
                _copy(lambda: content.read(COPY_BYTES), file, is_stopped)
    except (gzip.BadGzipFile, zlib.error, EOFError, _DamagedFrame) as error:
        raise SortInputError(f"input {path} is not a whole {compression_of(path)} file: {error}") from error
    except OSError as error:
        raise SortError(f"input {path} cannot be unpacked to {target.parent}: {error.strerror or error}") from error
    change = describe_change({str(path): before}, {str(path): take_stamp(path)})
    if change:
        raise SortInputError(f"{change} while it was unpacked; start a new sort")


def _copy(read: Callable[[], bytes], file: IO[bytes], is_stopped: Callable[[], bool]) -> None:
    """Write all that is read to a file."""
    while True:
        data = read()
        if is_stopped():
            raise _Stopped("the sort was stopped while its input was unpacked")
        if not data:
            return
        file.write(data)


def _read_stdin(is_stopped: Callable[[], bool]) -> bytes:
    """Read from standard input as soon as it has anything; return nothing at its end, or when the sort is stopped."""
    if sys.stdin is None:
        raise SortInputError("standard input is closed: give files, or a pipe")
    poll = select.poll()
    poll.register(STDIN, select.POLLIN)
    while not is_stopped():
        if poll.poll(STOP_CHECK_INTERVAL_MS):
            return os.read(STDIN, COPY_BYTES)
    return b""


def _open_packed(path: Path, packed: IO[bytes]) -> IO[bytes]:
    if compression_of(path) is Compression.GZIP:
        return cast("IO[bytes]", gzip.GzipFile(fileobj=packed))
    return cast("IO[bytes]", _WholeFrames(packed))


class _DamagedFrame(Exception):  # noqa: N818 - a named outcome
    """A frame of a zstd file cannot be decompressed."""


class _WholeFrames:
    """Reads the frames of a zstd file, and raises EOFError if the last one is cut off, which `zstandard` accepts."""

    def __init__(self, packed: IO[bytes]) -> None:
        self._packed = packed
        library = _zstandard()
        self._error = library.ZstdError
        self._decompressor = library.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._has_begun = False
        self._rest = memoryview(b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def read(self, size: int) -> bytes:
        """Return some bytes of the content; none at the end."""
        while True:
            self._rest = self._rest or memoryview(self._packed.read(size))
            piece, self._rest = self._rest[:ZSTD_PIECE_BYTES], self._rest[ZSTD_PIECE_BYTES:]
            if not piece:
                if self._has_begun:
                    raise EOFError("its last frame is cut off")
                return b""
            self._has_begun = True
            try:
                found: bytes = self._frame.decompress(piece)
            except self._error as error:
                raise _DamagedFrame(str(error)) from error
            if self._frame.eof:
                self._rest = memoryview(self._frame.unused_data + bytes(self._rest))
                self._frame, self._has_begun = self._decompressor.decompressobj(), False
            if found:
                return found
