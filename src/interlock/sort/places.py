"""Where a sort may write: never into its input, and one at a time into one output directory.

Invariant: a claim leaves nothing in the directory: it is a lock on the directory itself, gone with its holder.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from interlock.errors import SortInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

PARTITION = re.compile(r"partition\.(\d+)")


def check_places(inputs: Sequence[Path], output: Path, temp: Path | None = None, files: Iterable[str] = ()) -> None:
    """Refuse an output or temporary directory inside an input, and an input inside the output, also through links."""
    for what, place in (("output", output), ("temporary", temp)):
        if place is None:
            continue
        check_name(f"the {what} directory", place)
        if place.exists() and not place.is_dir():
            raise SortInputError(f"the {what} directory {place} is a file")
        for given in inputs:
            _keep_apart(what, place, given)
    _keep_links_apart(output, temp, files)


def _keep_links_apart(output: Path, temp: Path | None, files: Iterable[str]) -> None:
    """Refuse input files that are, through links, where the sort writes."""
    taken = {place.resolve(): what for what, place in (("output", output), ("temporary", temp)) if place is not None}
    real = cache(Path.resolve)  # links are few: a look at each directory, and at each file whether it is one
    for path in map(Path, files):
        found = path.resolve() if path.is_symlink() else real(path.parent)
        for place, what in taken.items():
            if found.is_relative_to(place):
                raise SortInputError(f"the input {path} is in the {what} directory {place}: choose another one")


def check_name(what: str, path: Path) -> None:
    """Refuse a name that cannot be written in a report or a message."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise SortInputError(f"{what} {str(path)!a} has a name that is not UTF-8: rename it") from error


def prepare_output(output: Path, *, overwrite: bool = False) -> None:
    """Make the output directory; refuse one with partitions of another sort in it, unless they may be replaced."""
    make_directory("output", output)
    held = held_partitions(output)
    if held and not overwrite:
        raise SortInputError(
            f"the output directory {output} already holds {held[0].name}"
            + (f" and {len(held) - 1} more" if len(held) > 1 else "")
            + ": name an empty one, or replace them with --overwrite"
        )


def make_directory(what: str, place: Path) -> None:
    """Make a directory, unless it is there; refuse one that cannot be written to."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SortInputError(f"the {what} directory {place} cannot be made: {error.strerror}") from error
    if not os.access(place, os.W_OK | os.X_OK):
        raise SortInputError(f"the {what} directory {place} cannot be written to")


def held_partitions(output: Path) -> list[Path]:
    """List the partition files in a directory, by their numbers."""
    found = [(int(match[1]), path) for path in output.iterdir() if (match := PARTITION.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def claim_output(output: Path) -> AbstractContextManager[None]:
    """Hold the output directory for one sort; refuse when another has it."""
    return _claim(output, f"another sort writes to the output directory {output}: every worker needs one of its own")


def claim_state(temp: Path) -> AbstractContextManager[None]:
    """Hold the directory of a master's state; refuse when another master has it."""
    return _claim(
        temp, f"another sort master is running with its state in {temp}: name another --temp, or end it first"
    )


@contextmanager
def _claim(place: Path, taken: str) -> Iterator[None]:
    try:
        held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SortInputError(f"the directory {place} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SortInputError(taken) from error
        yield
    finally:
        os.close(held)


def _keep_apart(what: str, place: Path, given: Path) -> None:
    target, source = place.resolve(), given.resolve()
    if target == source or target.is_relative_to(source):
        raise SortInputError(f"the {what} directory {place} is inside the input {given}, which is only read")
    if what == "output" and source.is_relative_to(target):
        raise SortInputError(f"the input {given} is inside the {what} directory {place}: choose another one")
