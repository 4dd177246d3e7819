"""The lifecycles against the requirements: every pair of a state and an event, expected from tables written by hand.

Nothing expected here is computed from `lifecycle.py`; a change of a table must be made twice, on purpose.
"""

from __future__ import annotations

from typing import Any

import pytest

from interlock.errors import InvalidTransitionError, UnexpectedStateError
from interlock.lifecycle import (
    JOB,
    MACHINES,
    SORT_WORKER,
    SUPERVISED_WORKER,
    TASK,
    TASK_TRANSITIONS,
    WORKER,
    WORKER_TRANSITIONS,
    JobState,
    SortWorkerState,
    SupervisedWorkerState,
    TaskEvent,
    TaskState,
    WorkerEvent,
    WorkerState,
)
from interlock.machine import Machine, StateMachine

pytestmark = pytest.mark.lifecycle

# Each line: the states (one, or several with |), the event, the state that it leads to. All else is refused.
EXPECTED = {
    "worker": """
        starting                                     initialized          connecting
        connecting                                   connected            recovering
        connecting                                   connection_failed    connecting
        recovering                                   recovery_complete    running
        running                                      no_tasks_available   backing_off
        running                                      poll_cycle_complete  running
        backing_off                                  backoff_complete     recovering
        running|backing_off|recovering|connecting    shutdown_requested   shutting_down
        shutting_down                                shutdown_complete    stopped
        running|recovering                           error                connecting
    """,
    "task-attempt": """
        pending                 claim_requested        claiming
        claiming                claim_succeeded        processing
        claiming                claim_failed           failed
        claiming                shutdown_requested     abandoned
        processing              processing_succeeded   reporting
        processing              processing_failed      reporting
        processing              shutdown_requested     reporting
        processing              lease_expired          abandoned
        reporting               report_succeeded       completed
        reporting               report_failed          failed
    """,
    "task": """
        waiting                    release    pending
        waiting                    skip       skipped
        waiting                    succeed    done
        waiting                    fail       error
        pending                    claim      running
        pending                    hold       waiting
        running                    succeed    done
        running                    fail       error
        running                    exhaust    error
        running                    retry      pending
        running                    expire     pending
        running                    return     pending
        waiting|pending|running    cancel     canceled
        error|canceled             requeue    pending
    """,
    "job": """
        SUBMITTED                    validate              PENDING
        SUBMITTED                    reject                FAILED
        PENDING                      allocate_resources    RUNNING
        RUNNING                      success               COMPLETED
        RUNNING                      error                 FAILED
        SUBMITTED|PENDING|RUNNING    cancel                CANCELED
    """,
    "supervised-worker": """
        IDLE                                    start_task             RUNNING
        RUNNING                                 pause                  PAUSED
        PAUSED                                  resume                 RUNNING
        RUNNING                                 complete_tasks         COMPLETED
        RUNNING                                 error_unrecoverable    FAILED
        IDLE|RUNNING|PAUSED|COMPLETED|FAILED    terminate              TERMINATED
    """,
    "sort-worker": """
        Initializing                 register          Sampling
        Sampling                     send_sample       WaitingForPartitionConfig
        WaitingForPartitionConfig    receive_config    Sorting
        Sorting                      finish_sorting    WaitingForShuffleSignal
        WaitingForShuffleSignal      start_shuffle     Shuffling
        Shuffling                    finish_shuffle    WaitingForMergeSignal
        WaitingForMergeSignal        start_merge       Merging
        Merging                      complete          Completed
        Initializing|Sampling|WaitingForPartitionConfig|Sorting    fail    Failed
        WaitingForShuffleSignal|Shuffling|WaitingForMergeSignal|Merging    fail    Failed
        Failed                       restart           Initializing
    """,
    "sort-master": """
        Registering                                        start_sampling    Sampling
        Sampling                                           set_boundaries    Sorting
        Sorting                                            start_shuffle     Shuffling
        Shuffling                                          start_merge       Merging
        Merging                                            complete          Completed
        Registering|Sampling|Sorting|Shuffling|Merging     fail              Failed
        Failed                                             restart           Registering
    """,
}

# For each machine: its states in the words of the requirements; where it begins; where its work ends.
STATES = {
    "worker": "starting connecting recovering running backing_off shutting_down stopped; starting; stopped",
    "task-attempt": """pending claiming processing reporting completed failed abandoned; pending;
        completed failed abandoned""",
    "task": "waiting pending running done error canceled skipped; waiting pending; done error canceled skipped",
    "job": "SUBMITTED PENDING RUNNING COMPLETED FAILED CANCELED; SUBMITTED; COMPLETED FAILED CANCELED",
    "supervised-worker": "IDLE RUNNING PAUSED COMPLETED FAILED TERMINATED; IDLE; COMPLETED FAILED TERMINATED",
    "sort-worker": """Initializing Sampling WaitingForPartitionConfig Sorting WaitingForShuffleSignal Shuffling
        WaitingForMergeSignal Merging Completed Failed; Initializing; Completed Failed""",
    "sort-master": "Registering Sampling Sorting Shuffling Merging Completed Failed; Registering; Completed Failed",
}

# The counts of moves, each written once more by itself: a line lost from a table above would not go unseen.
MOVES = {
    "worker": 14,
    "task-attempt": 10,
    "task": 17,
    "job": 8,
    "supervised-worker": 10,
    "sort-worker": 17,
    "sort-master": 11,
}


def expected(name: str) -> dict[tuple[str, str], str]:
    lines = [line.split() for line in EXPECTED[name].strip().splitlines()]
    return {(source, event): target for sources, event, target in lines for source in sources.split("|")}


def all_pairs() -> list[Any]:
    return [
        pytest.param(name, state, event, id=f"{name}-{state}-{event}")
        for name, machine in MACHINES.items()
        for state in machine.states
        for event in machine.events
    ]


def test_every_lifecycle_has_an_expectation_and_no_other() -> None:
    assert set(MACHINES) == set(EXPECTED) == set(STATES) == set(MOVES)


@pytest.mark.parametrize("name", EXPECTED)
def test_states_beginnings_ends_and_the_number_of_moves_are_those_required(name: str) -> None:
    machine = MACHINES[name]
    states, initial, final = (set(words.split()) for words in STATES[name].split(";"))
    assert set(machine.states) == states
    assert machine.initial == initial
    assert machine.final == final
    assert len(machine.transitions) == len(expected(name)) == MOVES[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_required_event_exists_and_no_other(name: str) -> None:
    assert set(MACHINES[name].events) == {event for _, event in expected(name)}


@pytest.mark.parametrize(("name", "state", "event"), all_pairs())
def test_each_event_in_each_state_does_what_is_required_or_is_refused(name: str, state: Any, event: Any) -> None:
    machine = MACHINES[name]
    moving = StateMachine(machine, state)
    target = expected(name).get((state, event))
    assert machine.can(state, event) is moving.can_transition(event) is (target is not None)
    if target is not None:
        assert machine.next(state, event) == moving.transition(event) == moving.state == target
        return
    with pytest.raises(InvalidTransitionError):
        machine.next(state, event)
    with pytest.raises(InvalidTransitionError):
        moving.transition(event)
    assert (moving.state, moving.history) == (state, ())


def test_the_transition_tables_are_public_by_their_names() -> None:
    assert dict(WORKER_TRANSITIONS) == expected("worker")
    assert dict(TASK_TRANSITIONS) == expected("task-attempt")


def test_only_the_declared_events_reopen_what_has_ended() -> None:
    leaving = {
        (name, source, event)
        for name, machine in MACHINES.items()
        for source, event, _ in machine.rows
        if source in machine.final
    }
    assert leaving == {
        ("task", "error", "requeue"),
        ("task", "canceled", "requeue"),
        ("supervised-worker", "COMPLETED", "terminate"),
        ("supervised-worker", "FAILED", "terminate"),
        ("sort-worker", "Failed", "restart"),
        ("sort-master", "Failed", "restart"),
    }


@pytest.mark.parametrize("state", [TaskState.COMPLETED, TaskState.FAILED, TaskState.ABANDONED])
def test_an_attempt_that_has_ended_does_not_move(state: TaskState) -> None:
    assert TASK.is_terminal(state)
    assert [event for event in TaskEvent if TASK.can(state, event)] == []


@pytest.mark.parametrize(
    "state", [WorkerState.RUNNING, WorkerState.BACKING_OFF, WorkerState.RECOVERING, WorkerState.CONNECTING]
)
def test_a_worker_shuts_down_from_every_active_state(state: WorkerState) -> None:
    machine = StateMachine(WORKER, state)
    machine.transition(WorkerEvent.SHUTDOWN_REQUESTED)
    assert machine.transition(WorkerEvent.SHUTDOWN_COMPLETE) is WorkerState.STOPPED


def is_valid_transition(machine: Machine[Any, Any], source: Any, target: Any) -> bool:
    by_sentence = machine.validate_transition(source, target) is None
    assert by_sentence is bool(machine.events_between(source, target))
    return by_sentence


class TestWorkerStateMachine:
    """The supervised worker."""

    def test_valid_transition_idle_to_running(self) -> None:
        assert is_valid_transition(SUPERVISED_WORKER, SupervisedWorkerState.IDLE, SupervisedWorkerState.RUNNING)

    def test_invalid_transition_idle_to_paused(self) -> None:
        assert not is_valid_transition(SUPERVISED_WORKER, SupervisedWorkerState.IDLE, SupervisedWorkerState.PAUSED)

    def test_terminal_state_completed(self) -> None:
        assert SUPERVISED_WORKER.is_terminal(SupervisedWorkerState.COMPLETED)
        assert not is_valid_transition(
            SUPERVISED_WORKER, SupervisedWorkerState.COMPLETED, SupervisedWorkerState.RUNNING
        )

    def test_force_terminate_from_any_state(self) -> None:
        for state in SupervisedWorkerState:
            if state is not SupervisedWorkerState.TERMINATED:
                assert is_valid_transition(SUPERVISED_WORKER, state, SupervisedWorkerState.TERMINATED)

    @pytest.mark.parametrize(
        ("source", "target"),
        [
            ("IDLE", "PAUSED"),
            ("IDLE", "COMPLETED"),
            ("COMPLETED", "RUNNING"),
            ("COMPLETED", "PAUSED"),
            ("FAILED", "RUNNING"),
            *(("TERMINATED", state) for state in ("IDLE", "RUNNING", "PAUSED", "COMPLETED", "FAILED", "TERMINATED")),
        ],
    )
    def test_forbidden_transitions_are_refused(self, source: str, target: str) -> None:
        assert not is_valid_transition(SUPERVISED_WORKER, SupervisedWorkerState(source), SupervisedWorkerState(target))

    def test_refusals_say_why(self) -> None:
        why = SUPERVISED_WORKER.validate_transition
        assert why(SupervisedWorkerState.RUNNING, SupervisedWorkerState.RUNNING) == "Worker already in RUNNING state"
        assert why(SupervisedWorkerState.COMPLETED, SupervisedWorkerState.RUNNING) == (
            "Cannot transition from terminal state COMPLETED to RUNNING"
        )
        assert why(SupervisedWorkerState.IDLE, SupervisedWorkerState.PAUSED) == (
            "Invalid state transition: IDLE → PAUSED. Allowed transitions from IDLE: RUNNING, TERMINATED"
        )


class TestJobStateMachine:
    @pytest.mark.parametrize(
        ("source", "target"),
        [
            ("SUBMITTED", "RUNNING"),
            *(("COMPLETED", state) for state in ("SUBMITTED", "PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELED")),
            ("FAILED", "RUNNING"),
            ("CANCELED", "RUNNING"),
        ],
    )
    def test_forbidden_transitions_are_refused(self, source: str, target: str) -> None:
        assert not is_valid_transition(JOB, JobState(source), JobState(target))

    def test_a_job_can_be_canceled_until_it_has_ended(self) -> None:
        cancelable = {state for state in JobState if is_valid_transition(JOB, state, JobState.CANCELED)}
        assert cancelable == {JobState.SUBMITTED, JobState.PENDING, JobState.RUNNING}

    def test_a_job_that_is_not_valid_fails_at_once(self) -> None:
        assert is_valid_transition(JOB, JobState.SUBMITTED, JobState.FAILED)

    def test_refusals_say_why(self) -> None:
        why = JOB.validate_transition
        assert why(JobState.PENDING, JobState.PENDING) == "Job already in PENDING state"
        assert why(JobState.FAILED, JobState.RUNNING) == (
            "Cannot transition from terminal state FAILED. Create new job instead."
        )
        assert why(JobState.PENDING, JobState.COMPLETED) == (
            "Invalid transition: PENDING → COMPLETED. Allowed: RUNNING, CANCELED"
        )


class TestSortWorkerStateMachine:
    """The sort worker, moved by naming states."""

    def test_allows_valid_transitions(self) -> None:
        machine = StateMachine(SORT_WORKER)
        machine.require_state(SortWorkerState.INITIALIZING)
        assert machine.transition_to(SortWorkerState.SAMPLING, "test") is SortWorkerState.SAMPLING
        target = SortWorkerState.WAITING_FOR_PARTITION_CONFIG
        assert machine.transition_to(target, "test") is machine.state is target

    def test_rejects_invalid_transitions(self) -> None:
        machine = StateMachine(SORT_WORKER)
        machine.transition_to(SortWorkerState.SAMPLING, "test")
        with pytest.raises(InvalidTransitionError, match="Sampling"):
            machine.transition_to(SortWorkerState.SHUFFLING, "test")
        assert machine.is_in_state(SortWorkerState.SAMPLING)

    def test_tracks_state_history(self) -> None:
        machine = StateMachine(SORT_WORKER)
        machine.transition_to(SortWorkerState.SAMPLING, "reason1")
        machine.transition_to(SortWorkerState.WAITING_FOR_PARTITION_CONFIG, "reason2")
        machine.transition_to(SortWorkerState.SORTING, "reason3")
        assert [(move.from_state, move.to_state, move.reason) for move in machine.history] == [
            ("Initializing", "Sampling", "reason1"),
            ("Sampling", "WaitingForPartitionConfig", "reason2"),
            ("WaitingForPartitionConfig", "Sorting", "reason3"),
        ]

    def test_allows_failed_to_initializing_for_restart(self) -> None:
        machine = StateMachine(SORT_WORKER)
        machine.transition_to(SortWorkerState.SAMPLING, "test")
        machine.transition_to(SortWorkerState.FAILED, "error")
        assert machine.is_terminal()
        assert machine.transition_to(SortWorkerState.INITIALIZING, "restart") is SortWorkerState.INITIALIZING

    def test_restart_is_the_only_way_out_of_failed_and_nothing_leaves_completed(self) -> None:
        assert SORT_WORKER.allowed_targets(SortWorkerState.FAILED) == (SortWorkerState.INITIALIZING,)
        assert SORT_WORKER.allowed_targets(SortWorkerState.COMPLETED) == ()

    def test_require_state_names_both_states(self) -> None:
        with pytest.raises(UnexpectedStateError, match="expected state Sorting but was Initializing"):
            StateMachine(SORT_WORKER).require_state(SortWorkerState.SORTING)
