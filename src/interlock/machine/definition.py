"""A state machine as data: the transition table, checked on construction, and queries on it.

Invariant: every constructed Machine is sound. No (state, event) repeats, every state is reachable, every event is
used, only the declared reopening events leave a final state, and no other state is a dead end.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

from interlock.errors import DefinitionError, InvalidTransitionError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

Row = tuple[S, E, S]


class Machine(Generic[S, E]):
    """One lifecycle: its states, its events and its table of (state, event) -> state.

    Work ends in a `final` state; every other state is `unfinished`. Only the events in `reopening` may leave a final
    state: an operator's requeue, a forced termination, a restart.
    """

    __slots__ = (
        "_allowed",
        "_phrases",
        "events",
        "final",
        "initial",
        "name",
        "reopening",
        "rows",
        "states",
        "transitions",
        "unfinished",
    )

    def __init__(
        self,
        name: str,
        states: type[S],
        events: type[E],
        rows: Sequence[Row[S, E]],
        *,
        initial: Collection[S],
        final: Collection[S],
        reopening: Collection[E] = (),
        phrases: Phrases | None = None,
    ) -> None:
        self.name = name
        self.states: tuple[S, ...] = tuple(states)
        self.events: tuple[E, ...] = tuple(events)
        self.rows: tuple[Row[S, E], ...] = tuple(rows)
        self.initial = frozenset(initial)
        self.final = frozenset(final)
        self.unfinished = frozenset(self.states) - self.final
        self.reopening = frozenset(reopening)
        self.transitions: Mapping[tuple[S, E], S] = MappingProxyType(self._table())
        self._allowed: Mapping[S, tuple[E, ...]] = {
            state: tuple(event for source, event, _ in self.rows if source is state) for state in self.states
        }
        self._phrases = phrases or Phrases(name.capitalize())
        self._check_use()
        self._check_ends()

    def _table(self) -> dict[tuple[S, E], S]:
        table: dict[tuple[S, E], S] = {}
        for source, event, target in self.rows:
            if (source, event) in table:
                raise DefinitionError(
                    f"{self.name}: ({source}, {event}) is declared twice: -> {table[source, event]} and -> {target}"
                )
            table[source, event] = target
        return table

    def _check_use(self) -> None:
        if not self.initial:
            raise DefinitionError(f"{self.name}: no initial state is declared")
        for state in self._unreachable():
            raise DefinitionError(f"{self.name}: state {state} cannot be reached from an initial state")
        used = {event for _, event, _ in self.rows}
        for event in self.events:
            if event not in used:
                raise DefinitionError(f"{self.name}: event {event} is not used by any transition")

    def _check_ends(self) -> None:
        for source, event, target in self.rows:
            if source in self.final and event not in self.reopening:
                raise DefinitionError(
                    f"{self.name}: ({source}, {event}) -> {target} leaves {source}, which is declared final"
                )
        for state in self.states:
            if state not in self.final and not self._allowed[state]:
                raise DefinitionError(f"{self.name}: state {state} is not final, but nothing leaves it")

    def _unreachable(self) -> list[S]:
        reached = set(self.initial)
        while True:
            more = {target for source, _, target in self.rows if source in reached} - reached
            if not more:
                return [state for state in self.states if state not in reached]
            reached |= more

    def next(self, state: S, event: E) -> S:
        """Return the state that the event leads to, or raise InvalidTransitionError."""
        try:
            return self.transitions[state, event]
        except KeyError:
            raise InvalidTransitionError(self.name, state, event, self.allowed_events(state)) from None

    def can(self, state: S, event: E) -> bool:
        """Return whether the event is allowed in the state."""
        return (state, event) in self.transitions

    def allowed_events(self, state: S) -> tuple[E, ...]:
        """List the events allowed in the state, in the order of the table."""
        return self._allowed[state]

    def allowed_targets(self, state: S) -> tuple[S, ...]:
        """List the states reachable from the state in one transition, in the order of the table."""
        return tuple(dict.fromkeys(target for source, _, target in self.rows if source is state))

    def events_between(self, source: S, target: S) -> tuple[E, ...]:
        """List the events that lead from one state directly to another."""
        return tuple(event for state, event, to in self.rows if state is source and to is target)

    def is_terminal(self, state: S) -> bool:
        """Return whether the state is final."""
        return state in self.final

    def validate_transition(self, source: S, target: S) -> str | None:
        """Return the message that refuses a transition, or None when it is allowed."""
        if self.events_between(source, target):
            return None
        if source is target:
            return self._phrases.same(target)
        if source in self.final:
            return self._phrases.terminal(source, target)
        return self._phrases.invalid(source, target, self.allowed_targets(source))

    def __repr__(self) -> str:
        return f"<Machine {self.name}: {len(self.states)} states, {len(self.rows)} transitions>"


class Phrases:
    """The messages with which a machine refuses a transition."""

    __slots__ = ("_noun",)

    def __init__(self, noun: str) -> None:
        self._noun = noun

    def same(self, target: str) -> str:
        """Refuse a transition to the current state."""
        return f"{self._noun} already in {target} state"

    def terminal(self, source: str, target: str) -> str:
        """Refuse to leave a final state."""
        return f"Cannot transition from terminal state {source} to {target}"

    def invalid(self, source: str, target: str, allowed: Sequence[str]) -> str:
        """Refuse any other transition that is not in the table."""
        return f"Invalid state transition: {source} → {target}. Allowed transitions from {source}: {', '.join(allowed)}"
