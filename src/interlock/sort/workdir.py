"""The state of a sort's master or worker in a file, written on every move, and what it takes to go on from it.

Invariant: the file always holds one whole state; it is replaced, never changed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

from interlock.errors import SortInputError
from interlock.lifecycle import SORT_WORKER, SortWorkerState
from interlock.sort.data.checksum import fingerprint
from interlock.sort.logging import log
from interlock.sort.settings import HIDDEN, Moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from interlock.errors import InvalidTransitionError
    from interlock.machine import Move
    from interlock.sort.data.records import Source
    from interlock.sort.settings import Settings


STATE = "state.json"
PHASES = ("Sampling", "Sorting", "Shuffling", "Merging")


class Journal:
    """Sees every move of one machine, keeps the history and the durations, and saves both with what else is kept."""

    def __init__(self, place: Path | None, who: str) -> None:
        self.who = who
        self.kept: dict[str, Any] = {}
        self.history: list[Moved] = []
        self.phases: dict[str, float] = {}
        self.also: Callable[[dict[str, Any]], object] | None = None  # where else a saved state goes: a database
        self.place = place
        self._path = place / STATE if place is not None else None

    def load(self) -> dict[str, Any] | None:
        """Read what an earlier process left; None when there is nothing that can be read."""
        if self._path is None:
            return None
        try:
            found = orjson.loads(self._path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        if not isinstance(found, dict) or "state" not in found:
            return None
        return found

    def resume(self, found: dict[str, Any]) -> None:
        """Go on with the history of an earlier process."""
        self.history = [Moved(*move) for move in found.get("history", [])]
        self.phases = dict(found.get("phases", {}))
        self.kept = dict(found.get("kept", {}))

    def save(self, state: str) -> None:
        """Replace the file, and pass the state on to whoever else keeps it."""
        if self.also is not None:
            self.also({"who": self.who, "state": state, "history": [move._asdict() for move in self.history]})
        if self._path is None:
            return
        try:
            self._replace(self._path, state)
        except OSError as error:
            log.error("%s: cannot save its state: %s", self.who, error)

    def _replace(self, path: Path, state: str) -> None:
        part = path.with_name(f"{STATE}.part")
        document = {
            "who": self.who, "state": state, "history": self.history, "phases": self.phases, "kept": self.kept
        }  # fmt: skip
        part.write_bytes(orjson.dumps(document, default=list))
        part.rename(path)

    def remove(self) -> None:
        """Remove the file: there is nothing to go on with."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def moved(self, move: Move[Any, Any], /) -> None:
        """Record a move that was made, and save the state."""
        self.record(move)
        self.save(str(move.to_state))

    def record(self, move: Move[Any, Any]) -> None:
        """Record a move that is saved with the next one."""
        self.history.append(
            Moved(str(move.from_state), str(move.to_state), str(move.event), move.reason or "", move.timestamp)
        )
        if move.from_state in PHASES:
            self.phases[str(move.from_state)] = round(move.lasted, 6)
        log.info("%s: %s -> %s (%s)", self.who, move.from_state, move.to_state, move.reason)

    def refused(self, error: InvalidTransitionError, reason: str | None, /) -> None:
        """Log a move that was refused."""
        log.info("%s: %s (%s)", self.who, error, reason)


def new_identity() -> str:
    """Make a name that a worker keeps when it is started again."""
    return f"{time.time_ns():x}-{secrets.token_hex(4)}"


def new_incarnation() -> int:
    """Make the number of one start of a worker."""
    return secrets.randbits(63)


def is_resumable(temp: Path) -> bool:
    """Tell whether a directory holds the state of a sort that has not failed: one that ends removes its state."""
    for path in [temp / STATE, *temp.glob(f"*/{STATE}")]:
        found = Journal(path.parent, "").load()
        if found is not None and found["state"] != SortWorkerState.FAILED:
            return True
    return False


def rank(state: str) -> int:
    """Say how far a sort worker's state is; a failed one is farthest."""
    order = list(SORT_WORKER.states)
    return order.index(SortWorkerState(state))


# SECTION sort/places
# Where a sort may write: never into its input, and one at a time into one output directory.
#
# Invariant: a claim leaves nothing in the directory: it is a lock on the directory itself, gone with its holder.

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


# SECTION sort/unfinished
# The unfinished work of one sort: where it is kept, which sort it is of, and what is removed when the sort ends.
#
# Invariant: what is taken up again is of a sort with the same input, format, output, division and memory. A sort that
# fails leaves no partition of its own; only a kill leaves both behind, for the next start to go on from.

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
