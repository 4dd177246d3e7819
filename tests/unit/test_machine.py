"""The machine kernel: what a definition refuses, what a machine answers, and that a move is whole or not at all."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from interlock.errors import DefinitionError, InvalidTransitionError, UnexpectedStateError
from interlock.machine import Machine, Move, StateMachine

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

pytestmark = pytest.mark.unit


class Door(StrEnum):
    OPEN = "open"
    SHUT = "shut"
    BRICKED = "bricked"


class Act(StrEnum):
    SHUT = "shut"
    OPEN = "open"
    KNOCK = "knock"
    BRICK = "brick"
    PLASTER = "plaster"


Rows = tuple[tuple[Door, Act, Door], ...]
ROWS: Rows = (
    (Door.OPEN, Act.SHUT, Door.SHUT),
    (Door.SHUT, Act.OPEN, Door.OPEN),
    (Door.SHUT, Act.KNOCK, Door.SHUT),
    (Door.SHUT, Act.BRICK, Door.BRICKED),
    (Door.SHUT, Act.PLASTER, Door.BRICKED),
)


def door(
    rows: Sequence[tuple[Door, Act, Door]] = ROWS,
    *,
    initial: Collection[Door] = (Door.OPEN,),
    final: Collection[Door] = (Door.BRICKED,),
    reopening: Collection[Act] = (),
) -> Machine[Door, Act]:
    return Machine("door", Door, Act, rows, initial=initial, final=final, reopening=reopening)


class Heard:
    """An observer that records moves."""

    def __init__(self) -> None:
        self.moves: list[Move[Any, Any]] = []
        self.refusals: list[tuple[InvalidTransitionError, str | None]] = []

    def moved(self, move: Move[Any, Any], /) -> None:
        self.moves.append(move)

    def refused(self, error: InvalidTransitionError, reason: str | None, /) -> None:
        self.refusals.append((error, reason))


class TestDefinition:
    def test_a_repeated_pair_is_refused_with_both_targets(self) -> None:
        with pytest.raises(DefinitionError, match=r"door: \(open, shut\) is declared twice: -> shut and -> bricked"):
            door((*ROWS, (Door.OPEN, Act.SHUT, Door.BRICKED)))

    def test_a_state_that_cannot_be_reached_is_named(self) -> None:
        rows = tuple(row for row in ROWS if row[2] is not Door.OPEN)
        with pytest.raises(DefinitionError, match="door: state open cannot be reached"):
            door(rows, initial=[Door.SHUT])

    def test_an_event_that_no_transition_uses_is_named(self) -> None:
        with pytest.raises(DefinitionError, match="door: event knock is not used"):
            door(tuple(row for row in ROWS if row[1] is not Act.KNOCK))

    def test_leaving_a_final_state_is_refused_with_the_culprit(self) -> None:
        with pytest.raises(DefinitionError, match=r"door: \(bricked, open\) -> open leaves bricked, .* final"):
            door((*ROWS, (Door.BRICKED, Act.OPEN, Door.OPEN)))

    def test_a_reopening_event_may_leave_a_final_state(self) -> None:
        machine = door((*ROWS, (Door.BRICKED, Act.OPEN, Door.OPEN)), reopening=[Act.OPEN])
        assert machine.next(Door.BRICKED, Act.OPEN) is Door.OPEN
        assert machine.is_terminal(Door.BRICKED)

    def test_a_dead_end_that_is_not_final_is_named(self) -> None:
        with pytest.raises(DefinitionError, match="door: state bricked is not final, but nothing leaves it"):
            door(final=[])

    def test_a_machine_without_a_beginning_is_refused(self) -> None:
        with pytest.raises(DefinitionError, match="door: no initial state"):
            door(initial=[])


class TestQuestions:
    def test_next_gives_the_state_of_the_table(self) -> None:
        assert [door().next(source, event) for source, event, _ in ROWS] == [target for _, _, target in ROWS]

    def test_next_refuses_what_is_not_in_the_table_and_says_what_is(self) -> None:
        with pytest.raises(InvalidTransitionError) as caught:
            door().next(Door.OPEN, Act.KNOCK)
        error = caught.value
        assert (error.machine, error.state, error.event, error.allowed) == ("door", "open", "knock", ("shut",))
        assert str(error) == "door: 'knock' is not allowed in state 'open'; allowed events: shut"

    def test_a_refusal_in_a_final_state_says_that_it_is_final(self) -> None:
        with pytest.raises(InvalidTransitionError, match="allowed events: none, the state is final"):
            door().next(Door.BRICKED, Act.KNOCK)

    def test_can_agrees_with_next_on_every_pair(self) -> None:
        machine = door()
        allowed = {(source, event) for source, event, _ in ROWS}
        assert {(state, event) for state in Door for event in Act if machine.can(state, event)} == allowed

    def test_allowed_events_and_targets_keep_the_order_of_the_table(self) -> None:
        machine = door()
        assert machine.allowed_events(Door.SHUT) == (Act.OPEN, Act.KNOCK, Act.BRICK, Act.PLASTER)
        assert machine.allowed_targets(Door.SHUT) == (Door.OPEN, Door.SHUT, Door.BRICKED)
        assert machine.allowed_events(Door.BRICKED) == ()
        assert machine.events_between(Door.SHUT, Door.BRICKED) == (Act.BRICK, Act.PLASTER)

    def test_the_table_cannot_be_changed(self) -> None:
        table: Any = door().transitions
        with pytest.raises(TypeError):
            table[Door.OPEN, Act.BRICK] = Door.BRICKED

    def test_validate_transition_accepts_every_move_of_the_table_loops_included(self) -> None:
        assert [door().validate_transition(source, target) for source, _, target in ROWS] == [None] * len(ROWS)

    def test_validate_transition_says_why_a_move_is_refused(self) -> None:
        machine = door()
        assert machine.validate_transition(Door.OPEN, Door.OPEN) == "Door already in open state"
        assert machine.validate_transition(Door.BRICKED, Door.OPEN) == (
            "Cannot transition from terminal state bricked to open"
        )
        assert machine.validate_transition(Door.OPEN, Door.BRICKED) == (
            "Invalid state transition: open → bricked. Allowed transitions from open: shut"
        )


class TestInstance:
    def test_it_starts_in_the_only_initial_state(self) -> None:
        assert StateMachine(door()).state is Door.OPEN

    def test_it_must_be_told_where_to_start_when_there_are_several_beginnings(self) -> None:
        machine = door(initial=[Door.OPEN, Door.SHUT])
        with pytest.raises(ValueError, match=r"several initial states \(open, shut\)"):
            StateMachine(machine)
        assert StateMachine(machine, Door.SHUT).state is Door.SHUT

    def test_transition_moves_and_returns_the_new_state(self) -> None:
        machine = StateMachine(door())
        assert machine.transition(Act.SHUT) is Door.SHUT
        assert machine.state is Door.SHUT

    def test_questions_are_about_the_present_state(self) -> None:
        machine = StateMachine(door())
        assert machine.can_transition(Act.SHUT)
        assert not machine.can_transition(Act.BRICK)
        machine.transition(Act.SHUT)
        assert machine.can_transition(Act.BRICK)
        assert not machine.is_terminal()
        machine.transition(Act.BRICK)
        assert machine.is_terminal()
        assert machine.is_in_state(Door.OPEN, Door.BRICKED)
        assert not machine.is_in_state(Door.OPEN, Door.SHUT)

    def test_require_state_names_what_was_expected_and_what_is(self) -> None:
        machine = StateMachine(door())
        machine.require_state(Door.OPEN)
        with pytest.raises(UnexpectedStateError, match="expected state shut but was open"):
            machine.require_state(Door.SHUT)

    def test_transition_to_makes_the_one_move_that_leads_there(self) -> None:
        machine = StateMachine(door())
        assert machine.transition_to(Door.SHUT, "draught") is Door.SHUT
        assert (machine.history[0].event, machine.history[0].reason) == (Act.SHUT, "draught")

    @pytest.mark.parametrize(
        ("start", "target", "asked"),
        [(Door.OPEN, Door.BRICKED, "-> bricked"), (Door.SHUT, Door.BRICKED, "-> bricked by one of brick, plaster")],
        ids=["no move leads there", "two moves lead there"],
    )
    def test_transition_to_needs_exactly_one_move(self, start: Door, target: Door, asked: str) -> None:
        heard = Heard()
        machine = StateMachine(door(initial=[Door.OPEN, Door.SHUT]), start, observer=heard)
        with pytest.raises(InvalidTransitionError) as caught:
            machine.transition_to(target, "why not")
        assert caught.value.event == asked
        assert (machine.state, machine.history) == (start, ())
        assert heard.refusals == [(caught.value, "why not")]


class TestHistory:
    def test_it_tells_from_to_event_reason_time_and_how_long_the_state_before_lasted(self) -> None:
        times = iter([100.0, 102.5, 110.0])
        machine = StateMachine(door(), clock=lambda: next(times))
        machine.transition(Act.SHUT, "cold")
        machine.transition(Act.KNOCK)
        assert machine.history == (
            Move(Door.OPEN, Door.SHUT, Act.SHUT, "cold", 102.5, 2.5),
            Move(Door.SHUT, Door.SHUT, Act.KNOCK, None, 110.0, 7.5),
        )
        assert machine.history[0].at == datetime(1970, 1, 1, 0, 1, 42, 500000, tzinfo=UTC)

    def test_it_keeps_only_the_latest_moves(self) -> None:
        machine = StateMachine(door(), history=3)
        machine.transition(Act.SHUT)
        for number in range(10):
            machine.transition(Act.KNOCK, f"knock {number}")
        assert [move.reason for move in machine.history] == ["knock 7", "knock 8", "knock 9"]

    def test_returned_values_do_not_change_afterwards(self) -> None:
        machine = StateMachine(door())
        before = machine.history
        machine.transition(Act.SHUT)
        assert before == ()


class TestObserver:
    def test_an_observer_is_called_once_after_each_move(self) -> None:
        seen: list[tuple[Door, int]] = []

        class Looks(Heard):
            def moved(self, move: Move[Any, Any], /) -> None:
                super().moved(move)
                seen.append((machine.state, len(machine.history)))

        heard = Looks()
        machine = StateMachine(door(), observer=heard)
        machine.transition(Act.SHUT)
        machine.transition(Act.KNOCK)
        assert tuple(heard.moves) == machine.history
        # It could read state and history, so it was called outside the lock, with the move already in place.
        assert seen == [(Door.SHUT, 1), (Door.SHUT, 2)]

    def test_a_refused_move_changes_nothing_and_is_heard(self) -> None:
        heard = Heard()
        machine = StateMachine(door(), observer=heard)
        machine.transition(Act.SHUT)
        before = machine.state, machine.history
        with pytest.raises(InvalidTransitionError) as caught:
            machine.transition(Act.SHUT, "again")
        assert (machine.state, machine.history) == before
        assert heard.refusals == [(caught.value, "again")]
        assert len(heard.moves) == 1

    def test_one_that_fails_does_not_undo_the_move(self) -> None:
        class Fails(Heard):
            def moved(self, move: Move[Any, Any], /) -> None:
                raise RuntimeError(move.event)

        machine = StateMachine(door(), observer=Fails())
        with pytest.raises(RuntimeError, match="shut"):
            machine.transition(Act.SHUT)
        assert machine.state is Door.SHUT
        assert len(machine.history) == 1


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Switch threads almost everywhere, so that a move without a lock is interrupted."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_switches")
class TestThreads:
    def test_exactly_one_of_many_wins_a_move_that_can_happen_once(self) -> None:
        threads = 16
        for _ in range(50):
            heard = Heard()
            machine = StateMachine(door(), observer=heard)
            gate = threading.Barrier(threads)

            def race(machine: StateMachine[Door, Act] = machine, gate: threading.Barrier = gate) -> bool:
                gate.wait()
                try:
                    machine.transition(Act.SHUT)
                except InvalidTransitionError:
                    return False
                return True

            with ThreadPoolExecutor(threads) as pool:
                won = [future.result() for future in [pool.submit(race) for _ in range(threads)]]
            assert won.count(True) == 1
            assert (len(machine.history), len(heard.moves), len(heard.refusals)) == (1, 1, threads - 1)

    @pytest.mark.parametrize("by_target", [False, True], ids=["by event", "by target"])
    def test_history_is_an_unbroken_chain_whatever_the_threads_do(self, by_target: bool) -> None:  # noqa: FBT001 - a parameter of the test
        machine = StateMachine(door(), history=100_000)
        gate = threading.Barrier(8)

        def play(event: Act, target: Door) -> int:
            made = 0
            gate.wait()
            for _ in range(2_000):
                try:
                    made += (machine.transition_to(target) if by_target else machine.transition(event)) is target
                except InvalidTransitionError:
                    continue
            return made

        plays = [(Act.SHUT, Door.SHUT), (Act.OPEN, Door.OPEN)] * 4
        with ThreadPoolExecutor(8) as pool:
            made = sum(future.result() for future in [pool.submit(play, *each) for each in plays])
        moves = machine.history
        assert len(moves) == made > 0
        assert moves[0].from_state is Door.OPEN
        assert moves[-1].to_state is machine.state
        assert all(earlier.to_state is later.from_state for earlier, later in pairwise(moves))
        assert all(machine.machine.next(move.from_state, move.event) is move.to_state for move in moves)
