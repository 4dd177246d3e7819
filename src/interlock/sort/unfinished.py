"""The unfinished work of one sort: where it is kept, which sort it is of, and what is removed when the sort ends.

Invariant: what is taken up again is of a sort with the same input, format, output, division and memory. A sort that
fails leaves no partition of its own; only a kill leaves both behind, for the next start to go on from.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from interlock.sort.job import HIDDEN
from interlock.sort.journal import STATE
from interlock.sort.logs import log
from interlock.sort.places import held_partitions
from interlock.sort.runs import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from interlock.sort.job import Settings
    from interlock.sort.records import Source

MARK = "sort"  # a file that tells which sort the unfinished work in a directory is of


@contextmanager
def unfinished(source: Source, output: Path, workers: int, settings: Settings, temp: Path | None) -> Iterator[Path]:
    """Give the directory for the unfinished work of a sort, and empty it when the sort has ended."""
    place = temp or output / HIDDEN
    place.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    before = _begin(place, output, _stamp(source, output, workers, settings))
    try:
        yield place
    except BaseException:
        _remove_output(output, before)
        raise
    finally:
        _clear(place)
        if not any(place.iterdir()):
            place.rmdir()


def _stamp(source: Source, output: Path, workers: int, settings: Settings) -> str:
    """Give what tells two sorts apart, and two divisions of the same records: blocks are cut by the memory."""
    division = (workers, settings.partitions, settings.memory, settings.block_records, settings.window_records)
    return xxhash.xxh3_64_hexdigest(os.fsencode(f"{fingerprint(source)} {division} {output.resolve()}"))


def _begin(place: Path, output: Path, stamp: str) -> dict[str, int]:
    """Mark the directory as this sort's; remove what another left there. Give the partitions from before the sort."""
    mark = place / MARK
    found = _read(mark)
    if found.get("stamp") == stamp:
        before: dict[str, int] = found["before"]
        return before
    _clear(place)
    before = _held(output)
    mark.write_bytes(orjson.dumps({"stamp": stamp, "before": before}))
    return before


def _read(mark: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(mark.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _held(output: Path) -> dict[str, int]:
    """List the partitions in a directory, each with what changes when it is replaced."""
    return {path.name: path.lstat().st_ino for path in held_partitions(output)}


def _clear(place: Path) -> None:
    """Remove what a sort left in a directory, and nothing else."""
    for path in place.glob("worker-*"):
        shutil.rmtree(path, ignore_errors=True)
    for name in (MARK, STATE, f"{STATE}.part"):
        (place / name).unlink(missing_ok=True)


def _remove_output(output: Path, before: dict[str, int]) -> None:
    """Remove the files that a failed sort wrote; if it had begun to replace others, what is left of those too."""
    now = _held(output)
    is_replacing = any(now.get(name) != number for name, number in before.items())
    if is_replacing:
        log.warning("the partitions in %s were being replaced when the sort failed: none is left", output)
    for path in output.iterdir():
        if path.name.lstrip(".").startswith("partition.") and (is_replacing or path.name not in before):
            path.unlink(missing_ok=True)
