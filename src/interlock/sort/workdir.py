"""The directories of a sort on disk: work directory, state journal, and the checks and locks of the output directory.

A sort never writes into its input, and only one sort at a time writes to an output directory. A master or worker saves
its state to a journal in its work directory on every transition, so that a new process can resume after a kill.

Invariant: a journal file always holds one whole state; it is replaced, never changed in place, and one that was damaged
counts as missing. Work is resumed only for
a sort with the same input, format, output, number of workers and partitions, and memory. A sort that fails leaves no
partition of its own; only a kill leaves partitions and unfinished work behind.
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
from typing import TYPE_CHECKING, Any, TextIO

import orjson
import xxhash

from interlock.errors import SortInputError
from interlock.lifecycle import SortWorkerState
from interlock.sort.data.checksum import fingerprint
from interlock.sort.data.input_stamps import describe_change, take_stamps
from interlock.sort.logging import log
from interlock.sort.settings import PHASES, TOKEN_FILE, WORK_DIRECTORY, TransitionRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from interlock.errors import InvalidTransitionError
    from interlock.machine import Move
    from interlock.sort.data.records import Source
    from interlock.sort.settings import Settings

STATE_FILE = "state.json"
CHECKSUM_FIELD = "xxh3"
IDENTITY_FILE = "sort"  # identifies the sort to which the content of a work directory belongs
PARTITION_NAME = re.compile(r"partition\.(\d+)(?:\.gz|\.zst)?")


class Journal:
    """Observes one state machine; keeps its history and phase durations, and saves them with a checkpoint.

    `name` is the name of the process in logs. `on_save` additionally receives each saved state, for a database.
    """

    def __init__(self, directory: Path | None, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock  # of durations: the wall clock may be set back
        self._began_at = self._entered_at = clock()
        self._elapsed_before = 0.0  # of earlier processes
        self.checkpoint: dict[str, Any] = {}
        self.history: list[TransitionRecord] = []
        self.phases: dict[str, float] = {}
        self.on_save: Callable[[dict[str, Any]], object] | None = None
        self.directory = directory
        self._path = directory / STATE_FILE if directory is not None else None

    def load(self) -> dict[str, Any] | None:
        """Read the state that an earlier process saved; None if there is none, or it is damaged."""
        if self._path is None:
            return None
        state = read_json(self._path)
        return state if "state" in state else None

    def resume(self, saved: dict[str, Any]) -> None:
        """Continue the history of an earlier process."""
        self.history = [TransitionRecord(*one) for one in saved.get("history", [])]
        self.phases = dict(saved.get("phases", {}))
        self._elapsed_before = max((one.elapsed for one in self.history), default=0.0)
        self.checkpoint = dict(saved.get("checkpoint", {}))

    def save(self, state: str) -> None:
        """Replace the file, and pass the state to `on_save`."""
        if self.on_save is not None:
            history = [one._asdict() for one in self.history]
            self.on_save({"name": self.name, "state": state, "history": history, "phases": dict(self.phases)})
        if self._path is None:
            return
        document = {
            "name": self.name,
            "state": state,
            "history": self.history,
            "phases": self.phases,
            "checkpoint": self.checkpoint,
        }
        try:
            write_json(self._path, document)
        except OSError as error:
            log.error("%s: cannot save its state: %s", self.name, error)

    def remove(self) -> None:
        """Remove the file: there is nothing to resume."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def moved(self, move: Move[Any, Any], /) -> None:
        """Record a transition and save the state."""
        self.record(move)
        self.save(str(move.to_state))

    def record(self, move: Move[Any, Any]) -> None:
        """Record a transition that is saved with the next one."""
        now = self._clock()
        self.history.append(
            TransitionRecord(
                str(move.from_state),
                str(move.to_state),
                str(move.event),
                move.reason or "",
                move.timestamp,
                round(self._elapsed_before + now - self._began_at, 6),
            )
        )
        if move.from_state in PHASES:
            self.phases[str(move.from_state)] = round(now - self._entered_at, 6)
        self._entered_at = now
        log.info("%s: %s -> %s (%s)", self.name, move.from_state, move.to_state, move.reason)

    def print_history(self, file: TextIO | None = None) -> None:
        """Print every transition with the seconds since the first one."""
        print("=== State Transition History ===", file=file)
        began = self.history[0].elapsed if self.history else 0.0
        for one in self.history:
            print(f"[+{one.elapsed - began:.1f}s] {one.from_state} -> {one.to_state}: {one.reason}", file=file)

    def print_phase_durations(self, file: TextIO | None = None) -> None:
        """Print how long every phase took; a phase that has not ended is in progress."""
        print("=== Phase Durations ===", file=file)
        states = dict.fromkeys(one.to_state for one in self.history)
        for phase in (str(one) for one in PHASES if str(one) in states):
            is_current = self.history[-1].to_state == phase
            took = "In progress" if is_current else f"{self.phases.get(phase, 0.0):.2f}s"
            print(f"{phase}: {took}", file=file)

    def refused(self, error: InvalidTransitionError, reason: str | None, /) -> None:
        """Log a transition that was refused."""
        log.info("%s: %s (%s)", self.name, error, reason)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Replace a file by a JSON object, not an empty one, whose last field is the checksum of all bytes before it."""
    body = orjson.dumps(document, default=list).removesuffix(b"}")
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(body + _checksum_field(body))
    part.rename(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object with its checksum; an empty one if the file is missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return {}
    body = content[: -len(_checksum_field(b""))]
    if content != body + _checksum_field(body):
        return {}
    found: dict[str, Any] = orjson.loads(content)
    del found[CHECKSUM_FIELD]
    return found


def _checksum_field(body: bytes) -> bytes:
    return f',"{CHECKSUM_FIELD}":"{xxhash.xxh3_64_hexdigest(body)}"}}'.encode()


def new_identity() -> str:
    """Create the identity of a worker, which it keeps across restarts."""
    return f"{time.time_ns():x}-{secrets.token_hex(4)}"


def new_incarnation() -> int:
    """Create the number of one start of a worker."""
    return secrets.randbits(63)


def is_resumable(work_dir: Path) -> bool:
    """Return whether a directory holds the state of a killed sort: one that ends or fails removes its state."""
    for path in [work_dir / STATE_FILE, *work_dir.glob(f"*/{STATE_FILE}")]:
        saved = Journal(path.parent, "").load()
        if saved is not None and saved["state"] != SortWorkerState.FAILED:
            return True
    return False


def check_directories(
    inputs: Sequence[Path], output: Path, work_dir: Path | None = None, files: Iterable[str] = ()
) -> None:
    """Refuse an output or work directory inside an input, and an input inside the output, also through links."""
    for kind, directory in (("output", output), ("temporary", work_dir)):
        if directory is None:
            continue
        check_name(f"the {kind} directory", directory)
        if directory.exists() and not directory.is_dir():
            raise SortInputError(f"the {kind} directory {directory} is a file")
        for given in inputs:
            _check_apart(kind, directory, given)
    _check_links(output, work_dir, files)


def _check_apart(kind: str, directory: Path, given: Path) -> None:
    target, source = directory.resolve(), given.resolve()
    if target == source or target.is_relative_to(source):
        raise SortInputError(f"the {kind} directory {directory} is inside the input {given}, which is only read")
    if kind == "output" and source.is_relative_to(target):
        raise SortInputError(f"the input {given} is inside the {kind} directory {directory}: choose another one")


def _check_links(output: Path, work_dir: Path | None, files: Iterable[str]) -> None:
    """Refuse input files that resolve, through links, to a directory that the sort writes to."""
    written = {
        directory.resolve(): kind
        for kind, directory in (("output", output), ("temporary", work_dir))
        if directory is not None
    }
    resolve = cache(Path.resolve)  # links are rare: resolve each directory once, and only those files that are links
    for path in map(Path, files):
        target = path.resolve() if path.is_symlink() else resolve(path.parent)
        for directory, kind in written.items():
            if target.is_relative_to(directory):
                raise SortInputError(f"the input {path} is in the {kind} directory {directory}: choose another one")


def check_name(what: str, path: Path) -> None:
    """Refuse a path that cannot be written in a report or a message."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise SortInputError(f"{what} {str(path)!a} has a name that is not UTF-8: rename it") from error


def prepare_output(output: Path, *, overwrite: bool = False) -> None:
    """Create the output directory; refuse one that holds partitions, unless they may be replaced."""
    make_directory("output", output)
    partitions = list_partitions(output)
    if partitions and not overwrite:
        raise SortInputError(
            f"the output directory {output} already holds {partitions[0].name}"
            + (f" and {len(partitions) - 1} more" if len(partitions) > 1 else "")
            + ": name an empty one, or replace them with --overwrite"
        )


def make_directory(kind: str, directory: Path) -> None:
    """Create a directory unless it exists; refuse one that is not writable."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SortInputError(f"the {kind} directory {directory} cannot be made: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise SortInputError(f"the {kind} directory {directory} is not writable")


def list_partitions(output: Path) -> list[Path]:
    """List the partition files in a directory by their numbers."""
    found = [(int(match[1]), path) for path in output.iterdir() if (match := PARTITION_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def lock_output(output: Path) -> AbstractContextManager[None]:
    """Lock the output directory for one sort; refuse if another sort has it."""
    return _lock(output, f"another sort writes to the output directory {output}: every worker needs one of its own")


def lock_state(work_dir: Path) -> AbstractContextManager[None]:
    """Lock the directory of a master's state; refuse if another master has it."""
    return _lock(
        work_dir, f"another sort master is running with its state in {work_dir}: name another --temp, or end it first"
    )


@contextmanager
def _lock(directory: Path, refusal: str) -> Iterator[None]:
    """Hold an flock on the directory itself: it leaves no file behind, and ends with the process."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise SortInputError(f"the directory {directory} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SortInputError(refusal) from error
        yield
    finally:
        os.close(descriptor)


@contextmanager
def open_work_directory(
    source: Source, output: Path, workers: int, settings: Settings, work_dir: Path | None
) -> Iterator[Path]:
    """Create or resume the work directory of a sort, and empty it when the sort has ended."""
    directory = work_dir or output / WORK_DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    before = _begin(directory, output, _sort_identity(source, output, workers, settings), source)
    try:
        yield directory
    except BaseException:
        _remove_output(output, before)
        raise
    finally:
        _clear(directory)
        if not any(directory.iterdir()):
            directory.rmdir()


def _sort_identity(source: Source, output: Path, workers: int, settings: Settings) -> str:
    """Return a hash that differs between sorts; the memory is part of it, because it determines the block size."""
    division = (
        workers,
        settings.partitions,
        settings.memory,
        settings.block_records,
        settings.window_records,
        settings.compression,
    )
    return xxhash.xxh3_64_hexdigest(os.fsencode(f"{fingerprint(source)} {division} {output.resolve()}"))


def _begin(directory: Path, output: Path, identity: str, source: Source) -> dict[str, int]:
    """Claim the directory for this sort, and empty it of another's work; return the partitions from before."""
    path = directory / IDENTITY_FILE
    found = read_json(path)
    if found.get("identity") == identity:
        before: dict[str, int] = found["before"]
        return before
    stamps, record_format = take_stamps(source), str(source.format)
    change = describe_change(found.get("files", {}), stamps)
    if not change and found.get("format", record_format) != record_format:
        change = f"{found['format']} became {record_format}"
    if change:
        log.warning("%s since an earlier sort to this output was killed: this one starts over", change)
    _clear(directory)
    before = _partition_inodes(output)
    write_json(path, {"identity": identity, "before": before, "files": stamps, "format": record_format})
    return before


def _partition_inodes(output: Path) -> dict[str, int]:
    """List the partitions in a directory with their inode numbers, which change when they are replaced."""
    return {path.name: path.lstat().st_ino for path in list_partitions(output)}


def _clear(directory: Path) -> None:
    """Remove the files that a sort left in a directory, and nothing else."""
    for path in directory.glob("worker-*"):
        shutil.rmtree(path, ignore_errors=True)
    for name in (IDENTITY_FILE, f"{IDENTITY_FILE}.part", STATE_FILE, f"{STATE_FILE}.part", TOKEN_FILE):
        (directory / name).unlink(missing_ok=True)


def _remove_output(output: Path, before: dict[str, int]) -> None:
    """Remove the partitions that a failed sort wrote; if it had begun to replace older ones, the rest of those too."""
    now = _partition_inodes(output)
    is_replacing = any(now.get(name) != inode for name, inode in before.items())
    if is_replacing:
        log.warning("the partitions in %s were being replaced when the sort failed: none is left", output)
    for path in output.iterdir():
        if path.name.lstrip(".").startswith("partition.") and (is_replacing or path.name not in before):
            path.unlink(missing_ok=True)
