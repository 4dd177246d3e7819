"""An instance of a Machine: its state, its bounded history, and the only way to change them.

Invariant: state and history change together under one lock, or not at all; the observer runs after the transition
and outside the lock, so that it can neither block nor undo it.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol

from interlock.errors import InvalidTransitionError, UnexpectedStateError
from interlock.machine.definition import E, Machine, S

if TYPE_CHECKING:
    from collections.abc import Callable

HISTORY_SIZE = 64  # transitions kept per instance

# One lock for all instances: a transition takes less than a microsecond, and a lock for each of a thousand instances
# costs more than contention on this one.
_transition_lock = threading.Lock()


class Move(NamedTuple, Generic[S, E]):
    """One transition: what, when (seconds since the epoch), why, and the seconds spent in the state before it."""

    from_state: S
    to_state: S
    event: E
    reason: str | None
    timestamp: float
    lasted: float

    @property
    def at(self) -> datetime:
        """The time of the transition as an aware datetime."""
        return datetime.fromtimestamp(self.timestamp, UTC)


class Observer(Protocol):
    """Receives every transition and every refusal; telemetry implements it."""

    def moved(self, move: Move[S, E], /) -> None:
        """Receive a transition that was made."""

    def refused(self, error: InvalidTransitionError, reason: str | None, /) -> None:
        """Receive a transition that was refused."""


class StateMachine(Generic[S, E]):
    """A current state, the machine it follows and its latest transitions."""

    __slots__ = ("_clock", "_history", "_kept", "_observer", "_since", "machine", "state")

    def __init__(
        self,
        machine: Machine[S, E],
        state: S | None = None,
        *,
        observer: Observer | None = None,
        history: int = HISTORY_SIZE,
        clock: Callable[[], float] = time.time,
        since: float | None = None,
    ) -> None:
        """Begin in a state, since now or since an earlier time."""
        self.machine = machine
        self.state: S = state if state is not None else _only_initial(machine)
        self._observer = observer
        self._history: list[Move[S, E]] = []
        self._kept = history
        self._clock = clock
        self._since = clock() if since is None else since

    def transition(self, event: E, reason: str | None = None, *, at: float | None = None) -> S:
        """Apply the event and return the new state, or raise InvalidTransitionError.

        `at` is the time of an event that lies in the past: the request whose reply tells of it.
        """
        with _transition_lock:
            before = self.state
            move = self._move(event, reason, at)
        if move is None:
            raise self._refusal(before, event, reason)
        if self._observer is not None:
            self._observer.moved(move)
        return move[1]

    def transition_to(self, target: S, reason: str | None = None) -> S:
        """Apply the only event that leads to the target state, for callers that name states instead of events."""
        with _transition_lock:
            before = self.state
            events = self.machine.events_between(before, target)
            move = self._move(events[0], reason) if len(events) == 1 else None
        if move is None:
            which = f" by one of {', '.join(events)}" if events else ""
            raise self._refusal(before, f"-> {target}{which}", reason)
        if self._observer is not None:
            self._observer.moved(move)
        return move.to_state

    def _move(self, event: E, reason: str | None, at: float | None = None) -> Move[S, E] | None:
        """Change state and history; None when the table refuses. The caller holds the lock."""
        before = self.state
        after = self.machine.transitions.get((before, event))
        if after is None:
            return None
        now = self._clock() if at is None else at
        # tuple.__new__ costs a third of the named constructor, and this is the hottest path of the worker.
        move: Move[S, E] = tuple.__new__(Move, (before, after, event, reason, now, now - self._since))
        history = self._history
        history.append(move)
        if len(history) > self._kept:
            del history[0]
        self.state = after
        self._since = now
        return move

    def _refusal(self, state: S, event: str, reason: str | None) -> InvalidTransitionError:
        error = InvalidTransitionError(self.machine.name, state, event, self.machine.allowed_events(state))
        if self._observer is not None:
            self._observer.refused(error, reason)
        return error

    def can_transition(self, event: E) -> bool:
        """Return whether the event is allowed now."""
        return self.machine.can(self.state, event)

    def is_terminal(self) -> bool:
        """Return whether the state is final."""
        return self.machine.is_terminal(self.state)

    def is_in_state(self, *states: S) -> bool:
        """Return whether the current state is one of these."""
        return self.state in states

    def require_state(self, expected: S) -> None:
        """Raise UnexpectedStateError unless the current state is the expected one."""
        if self.state is not expected:
            raise UnexpectedStateError(self.machine.name, expected, self.state)

    @property
    def history(self) -> tuple[Move[S, E], ...]:
        """The latest transitions, oldest first."""
        with _transition_lock:
            return tuple(self._history)

    def __repr__(self) -> str:
        return f"<StateMachine {self.machine.name}: {self.state}>"


def _only_initial(machine: Machine[S, E]) -> S:
    if len(machine.initial) != 1:
        names = ", ".join(sorted(machine.initial))
        raise ValueError(f"{machine.name} has several initial states ({names}); pass one as `state`")
    return next(iter(machine.initial))
