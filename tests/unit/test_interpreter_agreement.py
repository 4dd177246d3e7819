"""Python and PostgreSQL never disagree about a lifecycle, whatever happens in whatever order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from interlock.errors import IllegalTransition, InvalidTransitionError
from interlock.machine import StateMachine
from interlock.postgres.connection import translated
from interlock.postgres.guards import GUARDS, Guard

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.store, pytest.mark.lifecycle]

COLUMNS = {"tasks": "type", "jobs": "task_description", "workers": "workspace_id"}
T = TypeVar("T")
FENCED = """, attempt = attempt + (%(target)s = 'running')::int, worker_id = 'w',
    lease_expires_at = case when %(target)s = 'running' then now() end,
    settled_attempt = case when state = 'running' and %(target)s <> 'running' then attempt else settled_attempt end"""


def pick(options: Sequence[T], choice: int) -> T:
    return options[choice % len(options)]


class Comparison(RuleBasedStateMachine):
    """Walks one in-memory machine and one row of a guarded table side by side."""

    guard: ClassVar[Guard]
    connection: ClassVar[psycopg.Connection]

    @initialize(choice=st.integers(0, 100))
    def begin(self, choice: int) -> None:
        guard = self.guard
        state = pick(sorted(guard.machine.initial), choice)
        self.memory: StateMachine[Any, Any] = StateMachine(guard.machine, state, history=1000)
        columns = f"{COLUMNS[guard.table]}, {guard.column}"
        query = f"insert into interlock.{guard.table} ({columns}) values ('x', %s) returning id"
        (self.row,) = self.connection.execute(query.encode(), [state]).fetchall()[0]

    @rule(choice=st.integers(0, 100))
    def name_an_event(self, choice: int) -> None:
        event = pick(self.guard.machine.events, choice)
        try:
            target = self.memory.transition(event)
        except InvalidTransitionError:
            if event == self.stored("event"):
                return  # to the database this is a writer that names no event
            for elsewhere in self.guard.machine.states:
                assert elsewhere is self.memory.state or not self.write(elsewhere, event)
        else:
            assert self.write(target, event)

    @rule(choice=st.integers(0, 100))
    def name_only_a_state(self, choice: int) -> None:
        target = pick(self.guard.machine.states, choice)
        if target is self.memory.state:
            return
        try:
            self.memory.transition_to(target)
        except InvalidTransitionError:
            assert not self.write(target, None)
        else:
            assert self.write(target, None)

    @invariant()
    def both_are_in_the_same_state(self) -> None:
        assert self.stored(self.guard.column) == self.memory.state

    @invariant()
    def the_records_replay_to_the_present_state(self) -> None:
        guard = self.guard
        query = f"select from_state, event, to_state from interlock.{guard.records} where {guard.key} = %s order by id"
        (_, _, state), *moves = self.connection.execute(query.encode(), [self.row]).fetchall()
        assert state in guard.machine.initial
        by_name = {(str(a), str(e)): str(b) for a, e, b in guard.machine.rows}
        for source, event, target in moves:
            assert source == state
            state = by_name[source, event]
            assert state == target
        assert state == self.memory.state
        assert [(m.from_state, m.event, m.to_state) for m in self.memory.history] == moves

    def write(self, target: str, event: str | None) -> bool:
        """Write the row with plain SQL; return whether the database allowed it."""
        guard = self.guard
        extra = (FENCED if guard.fenced else "") + (", event = %(event)s" if event else "")
        query = f"update interlock.{guard.table} set {guard.column} = %(target)s{extra} where id = %(row)s"
        try:
            with translated(self.connection):
                self.connection.execute(query.encode(), {"target": target, "row": self.row, "event": event})
        except IllegalTransition:
            return False
        return True

    def stored(self, column: str) -> Any:
        query = f"select {column} from interlock.{self.guard.table} where id = %s"
        return self.connection.execute(query.encode(), [self.row]).fetchall()[0][0]


@pytest.mark.parametrize("guard", GUARDS, ids=[guard.table for guard in GUARDS])
def test_random_events_never_make_python_and_the_database_diverge(url: str, guard: Guard) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        walk = type("Walk", (Comparison,), {"guard": guard, "connection": connection})
        checks = settings(max_examples=25, stateful_step_count=25, deadline=None, database=None)
        run_state_machine_as_test(walk, settings=checks)
