"""Stamps of input files: size, modification time and inode, by which a change during the sort is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from interlock.errors import SortInputError
from interlock.sort.settings import UNPACKED_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.sort.data.records import Source

    Stamps = Mapping[str, list[int]]

NAMES = ("size", "modification time", "inode")


def take_stamps(source: Source) -> Stamps:
    """Return size, modification time and inode of every file of a source, by its path."""
    return {path: take_stamp(path) for path in dict.fromkeys(extent.path for extent in source.extents if extent.path)}


def describe_change(before: Stamps, now: Stamps) -> str:
    """Describe the first file that changed; empty if none did, or the stamps are of other files.

    Unpacked copies count as other files: every process that unpacks an input makes new ones.
    """
    for path, stamp in before.items():
        current = now.get(path)
        if Path(path).parent.name == UNPACKED_DIRECTORY:
            continue
        if current is not None and list(stamp) != list(current):
            changes = [
                f"its {name} was {old:,} and is {new:,}" if name == "size" else f"its {name} is another one"
                for name, old, new in zip(NAMES, stamp, current, strict=True)
                if old != new
            ]
            return f"input {path} changed: {', '.join(changes)}"
    return ""


def take_stamp(path: str | Path) -> list[int]:
    """Return size, modification time and inode of a file."""
    try:
        status = Path(path).stat()
    except OSError as error:
        raise SortInputError(
            f"input {path} cannot be read: {error.strerror}; it must stay until the sort ends"
        ) from error
    return [status.st_size, status.st_mtime_ns, status.st_ino]
