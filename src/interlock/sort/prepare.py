"""Preparation of a sort: opens the input, checks and locks the output directory, and unpacks what needs it.

Invariant: all checks come before the first write.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from interlock.sort.data.records import STANDARD_INPUT, check_readable, list_files, open_source
from interlock.sort.io.compression import needs_unpacking, unpacked
from interlock.sort.logging import sigterm_as_interrupt
from interlock.sort.settings import UNPACKED_DIRECTORY, WORK_DIRECTORY
from interlock.sort.workdir import (
    check_directories,
    is_resumable,
    list_partitions,
    lock_output,
    make_directory,
    prepare_output,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from interlock.sort.data.line_order import LineOrder
    from interlock.sort.data.records import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFormat:
    """The format of an input as far as it is given; the rest is detected."""

    record_length: int | None = None
    key_length: int | None = None
    ascii: bool | None = None
    lines: LineOrder | None = None

    def open(self, paths: Sequence[Path]) -> Source:
        """Open an input."""
        return open_source(
            paths, record_length=self.record_length, key_length=self.key_length, ascii=self.ascii, lines=self.lines
        )


def own_work_dir(work_dir: Path | None, output: Path) -> Path | None:
    """Return a subdirectory for this output only: it is removed with its whole content."""
    name = blake2b(os.fsencode(output.resolve()), digest_size=6).hexdigest()
    return None if work_dir is None else work_dir / f"{WORK_DIRECTORY}-{name}"


@contextmanager
def prepared(
    inputs: Sequence[Path],
    output: Path,
    work_dir: Path | None,
    input_format: InputFormat,
    *,
    overwrite: bool,
    check: Callable[[Source], object] = lambda _: None,
    on_note: Callable[[str], object] = lambda _: None,
    stop: threading.Event | None = None,
) -> Iterator[tuple[Source, bool]]:
    """Yield the input, and whether an unfinished sort of it is resumed; the output directory is locked meanwhile.

    Setting `stop` ends the unpacking.
    """
    files = list_files(inputs)
    packed = _find_packed(files)
    source = None if packed else input_format.open(inputs)
    if source is not None:
        check(source)
    check_directories(_without_stdin(inputs), output, work_dir, map(str, _without_stdin(files)))
    has_state = is_resumable(work_dir or output / WORK_DIRECTORY)
    prepare_output(output, overwrite=overwrite or has_state)
    if work_dir is not None:
        make_directory("temporary", work_dir)
    with lock_output(output), _removed_if_empty(work_dir), ExitStack() as stack:
        directory = (work_dir or output) / UNPACKED_DIRECTORY
        shutil.rmtree(directory, ignore_errors=True)  # of a sort that was killed
        if source is None:  # a killed sort of such an input starts over
            on_note(f"unpacking {len(packed):,} of {len(files):,} inputs")
            stack.enter_context(sigterm_as_interrupt())
            source = input_format.open(stack.enter_context(unpacked(files, directory, stop)))
            check(source)
        yield source, has_state and not packed


def _without_stdin(paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if path != STANDARD_INPUT]


def _find_packed(files: Sequence[Path]) -> list[Path]:
    """List the files that have to be unpacked; refuse one that cannot be read."""
    packed = [path for path in files if needs_unpacking(path)]
    for path in _without_stdin(packed):
        check_readable(path)
    return packed


@contextmanager
def _removed_if_empty(work_dir: Path | None) -> Iterator[None]:
    """Remove a work directory at the end, unless it holds the state of a sort."""
    try:
        yield
    finally:
        if work_dir is not None:
            with suppress(OSError):  # it is not empty, or was removed
                work_dir.rmdir()


def remove_other_partitions(output: Path, partitions: Sequence[str]) -> None:
    """Remove older partitions that --overwrite allowed to replace and that this sort did not replace by name."""
    names = {path.rpartition("/")[2] for path in partitions}
    for path in list_partitions(output):
        if path.name not in names:
            path.unlink()
