"""The state of a sort's master or worker in a file, written on every move, and what it takes to go on from it.

Invariant: the file always holds one whole state; it is replaced, never changed.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import orjson

from interlock.lifecycle import SORT_WORKER, SortWorkerState
from interlock.sort.job import Moved
from interlock.sort.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from interlock.errors import InvalidTransitionError
    from interlock.machine import Move

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
