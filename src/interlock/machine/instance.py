"""One thing that lives through a Machine: its state, its bounded history, and the single way to move it.

Invariant: state and history change together under one lock, or not at all; the observer is told of a move
after it, outside the lock, so that it can neither block nor undo it.
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

HISTORY = 64

# One for all: a move takes less than a microsecond, and a lock for each of a thousand machines costs more than it.
_moving = threading.Lock()


class Move(NamedTuple, Generic[S, E]):
    """A move that was made: what, when (seconds since the epoch), why, and how long the state before lasted."""

    from_state: S
    to_state: S
    event: E
    reason: str | None
    timestamp: float
    lasted: float

    @property
    def at(self) -> datetime:
        """The time of the move as an aware datetime."""
        return datetime.fromtimestamp(self.timestamp, UTC)


class Observer(Protocol):
    """Sees every move that is made and every one that is refused; telemetry is made of this."""

    def moved(self, move: Move[S, E], /) -> None:
        """See a move that was made."""

    def refused(self, error: InvalidTransitionError, reason: str | None, /) -> None:
        """See a move that was refused."""


class StateMachine(Generic[S, E]):
    """A state, the table it obeys and the moves it made."""

    __slots__ = ("_clock", "_history", "_kept", "_observer", "_since", "machine", "state")

    def __init__(
        self,
        machine: Machine[S, E],
        state: S | None = None,
        *,
        observer: Observer | None = None,
        history: int = HISTORY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.machine = machine
        self.state: S = state if state is not None else _only_initial(machine)
        self._observer = observer
        self._history: list[Move[S, E]] = []
        self._kept = history
        self._clock = clock
        self._since = clock()

    def transition(self, event: E, reason: str | None = None) -> S:
        """Make the move that the event stands for and return the new state, or raise InvalidTransitionError."""
        with _moving:
            before = self.state
            move = self._move(event, reason)
        if move is None:
            raise self._refusal(before, event, reason)
        if self._observer is not None:
            self._observer.moved(move)
        return move[1]

    def transition_to(self, target: S, reason: str | None = None) -> S:
        """Make the one move that leads to the target state, for callers that name states, not events."""
        with _moving:
            before = self.state
            events = self.machine.events_between(before, target)
            move = self._move(events[0], reason) if len(events) == 1 else None
        which = f" by one of {', '.join(events)}" if events else ""
        return self._told(move, before, f"-> {target}{which}", reason)

    def _move(self, event: E, reason: str | None) -> Move[S, E] | None:
        """Change state and history, which only the holder of the lock may; None when the table refuses."""
        before = self.state
        after = self.machine.transitions.get((before, event))
        if after is None:
            return None
        now = self._clock()
        # The tuple's own constructor: a third of the price of the named one, on the hottest path there is.
        move: Move[S, E] = tuple.__new__(Move, (before, after, event, reason, now, now - self._since))
        history = self._history
        history.append(move)
        if len(history) > self._kept:
            del history[0]
        self.state = after
        self._since = now
        return move

    def _told(self, move: Move[S, E] | None, before: S, asked: str, reason: str | None) -> S:
        """Let the observer see what came of it, with the lock released."""
        if move is None:
            raise self._refusal(before, asked, reason)
        if self._observer is not None:
            self._observer.moved(move)
        return move.to_state

    def _refusal(self, state: S, event: str, reason: str | None) -> InvalidTransitionError:
        error = InvalidTransitionError(self.machine.name, state, event, self.machine.allowed_events(state))
        if self._observer is not None:
            self._observer.refused(error, reason)
        return error

    def can_transition(self, event: E) -> bool:
        """Tell whether the event is allowed now."""
        return self.machine.can(self.state, event)

    def is_terminal(self) -> bool:
        """Tell whether the work has ended."""
        return self.machine.is_terminal(self.state)

    def is_in_state(self, *states: S) -> bool:
        """Tell whether the present state is one of these."""
        return self.state in states

    def require_state(self, expected: S) -> None:
        """Raise UnexpectedStateError unless the present state is the expected one."""
        if self.state is not expected:
            raise UnexpectedStateError(self.machine.name, expected, self.state)

    @property
    def history(self) -> tuple[Move[S, E], ...]:
        """The latest moves, oldest first."""
        with _moving:
            return tuple(self._history)

    def __repr__(self) -> str:
        return f"<StateMachine {self.machine.name}: {self.state}>"


def _only_initial(machine: Machine[S, E]) -> S:
    if len(machine.initial) != 1:
        names = ", ".join(sorted(machine.initial))
        raise ValueError(f"{machine.name} can start in several states ({names}); say which one")
    return next(iter(machine.initial))
