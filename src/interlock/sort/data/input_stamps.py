"""Stamps of input files: size, modification time and inode, by which a change during the sort is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from interlock.errors import SortInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interlock.sort.data.records import Source

    Stamps = Mapping[str, list[int]]

NAMES = ("size", "modification time", "inode")


def take_stamps(source: Source) -> Stamps:
    """Return size, modification time and inode of every file of a source, by its path."""
    return {path: _take(path) for path in dict.fromkeys(extent.path for extent in source.extents if extent.path)}


def describe_change(before: Stamps, now: Stamps) -> str:
    """Describe the first file that changed; empty if none did, or the stamps are of other files."""
    for path, stamp in before.items():
        current = now.get(path)
        if current is not None and list(stamp) != list(current):
            changes = [
                f"its {name} was {old:,} and is {new:,}" if name == "size" else f"its {name} is another one"
                for name, old, new in zip(NAMES, stamp, current, strict=True)
                if old != new
            ]
            return f"input {path} changed: {', '.join(changes)}"
    return ""


def _take(path: str) -> list[int]:
    try:
        status = Path(path).stat()
    except OSError as error:
        raise SortInputError(
            f"input {path} cannot be read: {error.strerror}; it must stay until the sort ends"
        ) from error
    return [status.st_size, status.st_mtime_ns, status.st_ino]
