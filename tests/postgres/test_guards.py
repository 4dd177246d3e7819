"""The database refuses every illegal move and records every legal one, for any client."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from interlock.errors import FenceError, IllegalTransition, ImmutableRecordError, UnfinishedWorkError
from interlock.postgres.connection import translated
from interlock.postgres.guards import GUARDS, Guard

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.store, pytest.mark.lifecycle]

COLUMNS = {"tasks": "type", "jobs": "task_description", "workers": "workspace_id"}
BY_TABLE = {guard.table: guard for guard in GUARDS}
TASKS = BY_TABLE["tasks"]
every_guard = pytest.mark.parametrize("guard", GUARDS, ids=[guard.table for guard in GUARDS])


@pytest.fixture
def raw(url: str) -> Iterator[psycopg.Connection]:
    """Connect as any client would, without a line of Interlock in between."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def insert(raw: psycopg.Connection, guard: Guard, state: str) -> str:
    row = raw.execute(
        f"insert into interlock.{guard.table} ({COLUMNS[guard.table]}, {guard.column}) "
        "values ('x', %s) returning id".encode(),
        [state],
    ).fetchone()
    assert row is not None
    return str(row[0])


def place(raw: psycopg.Connection, guard: Guard, state: str) -> str:
    """Put a row into a state by the shortest legal path from an initial one."""
    paths: dict[str, list[tuple[str | None, str]]] = {state: [(None, state)] for state in guard.machine.initial}
    while state not in paths:
        for source, event, target in guard.machine.rows:
            if source in paths:
                paths.setdefault(target, [*paths[source], (event, target)])
    (_, initial), *moves = paths[state]
    row = insert(raw, guard, initial)
    for event, target in moves:
        move(raw, guard, row, target, event)
    return row


def move(raw: psycopg.Connection, guard: Guard, row: str, target: str, event: str | None = None) -> None:
    """Write the state with plain SQL, with the lease and attempt that a task's checks require."""
    extra = ", event = %(event)s" if event else ""
    if guard is TASKS:
        extra += ", lease_expires_at = case when %(target)s = 'running' then now() end, worker_id = 'w'"
        extra += ", attempt = attempt + (%(target)s = 'running')::int"
        extra += ", settled_attempt = case when state = 'running' then attempt else settled_attempt end"
    raw.execute(
        f"update interlock.{guard.table} set {guard.column} = %(target)s{extra} where id = %(row)s".encode(),
        {"target": target, "row": row, "event": event},
    )


def state_of(raw: psycopg.Connection, guard: Guard, row: str) -> str:
    found = raw.execute(f"select {guard.column} from interlock.{guard.table} where id = %s".encode(), [row]).fetchone()
    assert found is not None
    return str(found[0])


def records(raw: psycopg.Connection, guard: Guard, row: str) -> list[tuple[Any, ...]]:
    query = f"select from_state, to_state, event from interlock.{guard.records} where {guard.key} = %s order by id"
    return raw.execute(query.encode(), [row]).fetchall()


@every_guard
def test_state_pairs_are_allowed_exactly_by_the_table(raw: psycopg.Connection, guard: Guard) -> None:
    for source, target in itertools.permutations(guard.machine.states, 2):
        row = place(raw, guard, source)
        before = records(raw, guard, row)
        events = guard.machine.events_between(source, target)
        if events:
            move(raw, guard, row, target, events[0])
            assert state_of(raw, guard, row) == target
            assert records(raw, guard, row) == [*before, (source, target, events[0])]
            continue
        with pytest.raises(IllegalTransition) as refused, translated(raw):
            move(raw, guard, row, target)
        assert refused.value.sqlstate == "IL001"
        assert (refused.value.from_state, refused.value.to_state) == (source, target)
        assert refused.value.allowed == guard.machine.allowed_targets(source)
        assert refused.value.row == row
        assert guard.machine.name in str(refused.value)
        assert records(raw, guard, row) == before


@every_guard
def test_events_are_allowed_exactly_by_the_table(raw: psycopg.Connection, guard: Guard) -> None:
    for source, event, target in itertools.product(guard.machine.states, guard.machine.events, guard.machine.states):
        if source == target:
            continue
        row = place(raw, guard, source)
        if guard.machine.transitions.get((source, event)) == target:
            move(raw, guard, row, target, event)
            assert records(raw, guard, row)[-1] == (source, target, event)
        elif event != records(raw, guard, row)[-1][2]:
            with pytest.raises(IllegalTransition), translated(raw):
                move(raw, guard, row, target, event)


@every_guard
def test_rows_begin_only_in_an_initial_state(raw: psycopg.Connection, guard: Guard) -> None:
    for state in guard.machine.states:
        if state in guard.machine.initial:
            row = insert(raw, guard, state)
            assert records(raw, guard, row) == [(None, state, "create")]
        else:
            with pytest.raises(IllegalTransition, match="cannot begin") as refused, translated(raw):
                insert(raw, guard, state)
            assert refused.value.sqlstate == "IL003"
            assert set(refused.value.allowed) == set(guard.machine.initial)


@every_guard
def test_a_value_outside_the_states_is_refused(raw: psycopg.Connection, guard: Guard) -> None:
    with pytest.raises(IllegalTransition) as refused, translated(raw):
        insert(raw, guard, "sleeping")
    assert refused.value.sqlstate == "IL002"
    row = place(raw, guard, next(iter(guard.machine.initial)))
    with pytest.raises(IllegalTransition) as refused, translated(raw):
        move(raw, guard, row, "sleeping")
    assert refused.value.sqlstate == "IL002"


@every_guard
def test_guards_and_records_hold_for_a_replica_session(raw: psycopg.Connection, guard: Guard) -> None:
    raw.execute("set session_replication_role = replica")
    first = next(iter(guard.machine.initial))
    row = insert(raw, guard, first)
    bad = next(s for s in guard.machine.states if s not in guard.machine.allowed_targets(first) and s != first)
    with pytest.raises(IllegalTransition), translated(raw):
        move(raw, guard, row, bad)
    with pytest.raises(IllegalTransition), translated(raw):
        insert(raw, guard, bad)
    with pytest.raises(ImmutableRecordError), translated(raw):
        raw.execute(f"delete from interlock.{guard.records}".encode())
    assert records(raw, guard, row) == [(None, first, "create")]


@every_guard
def test_records_cannot_be_changed_deleted_truncated_or_forged(raw: psycopg.Connection, guard: Guard) -> None:
    insert(raw, guard, next(iter(guard.machine.initial)))
    partitions = raw.execute(
        "select inhrelid::regclass::text from pg_inherits where inhparent = %s::regclass order by 1",
        [f"interlock.{guard.records}"],
    ).fetchall()
    assert len(partitions) >= 5
    for table in [f"interlock.{guard.records}", *(name for (name,) in partitions)]:
        extra, value = (", attempt", ", 0") if guard is TASKS else ("", "")
        extra, value = f"{extra}, database_role, recorded_at", f"{value}, 'me', now()"
        key = "'x'" if guard.table == "workers" else "interlock.new_id()"
        attempts = [
            f"insert into {table} ({guard.key}, to_state, event, actor{extra}) values ({key}, 'x', 'x', 'x'{value})",
            f"truncate {table}",
        ]
        count = raw.execute(f"select count(*) from {table}".encode()).fetchone()
        if count is not None and count[0]:
            attempts += [f"update {table} set actor = 'nobody'", f"delete from {table}"]
        for attempt in attempts:
            with pytest.raises(ImmutableRecordError), translated(raw):
                raw.execute(attempt.encode())


@every_guard
def test_unfinished_work_cannot_be_deleted_and_finished_work_can(raw: psycopg.Connection, guard: Guard) -> None:
    with pytest.raises(UnfinishedWorkError, match="truncated"), translated(raw):
        raw.execute(f"truncate interlock.{guard.table} cascade".encode())
    for state in guard.machine.states:
        row = place(raw, guard, state)
        if state in guard.machine.final:
            raw.execute(f"delete from interlock.{guard.table} where id = %s".encode(), [row])
            assert records(raw, guard, row)[-1][1] == state
        else:
            with pytest.raises(UnfinishedWorkError), translated(raw):
                raw.execute(f"delete from interlock.{guard.table} where id = %s".encode(), [row])


@every_guard
def test_an_id_never_changes(raw: psycopg.Connection, guard: Guard) -> None:
    row = insert(raw, guard, next(iter(guard.machine.initial)))
    new = "'other'" if guard.table == "workers" else "interlock.new_id()"
    with pytest.raises(FenceError, match="id never changes"), translated(raw):
        raw.execute(f"update interlock.{guard.table} set id = {new} where id = %s".encode(), [row])


def test_the_fence_rises_with_every_claim_and_never_falls(raw: psycopg.Connection) -> None:
    row = insert(raw, TASKS, "pending")
    claim = "update interlock.tasks set state = 'running', event = 'claim', lease_expires_at = now(), worker_id = 'w'"
    with pytest.raises(FenceError), translated(raw):
        raw.execute(f"{claim} where id = %s".encode(), [row])
    raw.execute(f"{claim}, attempt = attempt + 1 where id = %s".encode(), [row])
    with pytest.raises(FenceError), translated(raw):
        raw.execute("update interlock.tasks set attempt = 0 where id = %s", [row])


def test_a_running_task_has_a_lease_and_an_owner_and_no_other_has_a_lease(raw: psycopg.Connection) -> None:
    row = insert(raw, TASKS, "pending")
    claim = b"update interlock.tasks set state = 'running', event = 'claim', attempt = attempt + 1"
    with pytest.raises(psycopg.errors.CheckViolation):
        raw.execute(claim)
    with pytest.raises(psycopg.errors.CheckViolation):
        raw.execute(claim + b", lease_expires_at = now()")
    with pytest.raises(psycopg.errors.CheckViolation):
        raw.execute("update interlock.tasks set lease_expires_at = now() where id = %s", [row])


def test_an_event_that_follows_from_the_states_need_not_be_named(raw: psycopg.Connection) -> None:
    row = insert(raw, TASKS, "pending")
    raw.execute("update interlock.tasks set reason = 'because' where id = %s", [row])
    move(raw, TASKS, row, "running")
    assert records(raw, TASKS, row)[-1] == ("pending", "running", "claim")
    found = raw.execute("select event, reason from interlock.tasks where id = %s", [row]).fetchone()
    assert found == ("claim", None), "what belonged to the move before is not carried over"


def test_an_ambiguous_move_must_name_its_event(raw: psycopg.Connection) -> None:
    row = place(raw, TASKS, "running")
    with (
        pytest.raises(IllegalTransition, match=r"setting \"event\" to one of \{retry,expire,return\}"),
        translated(raw),
    ):
        move(raw, TASKS, row, "pending")
    move(raw, TASKS, row, "pending", "return")
    assert records(raw, TASKS, row)[-1] == ("running", "pending", "return")


def test_a_move_refreshes_updated_at_if_the_client_did_not(raw: psycopg.Connection) -> None:
    row = insert(raw, TASKS, "pending")
    raw.execute("update interlock.tasks set updated_at = '2000-01-01' where id = %s", [row])
    move(raw, TASKS, row, "canceled", "cancel")
    found = raw.execute("select updated_at > now() - interval '1 minute' from interlock.tasks").fetchone()
    assert found == (True,)


def test_the_record_names_the_actor_or_else_the_database_role(raw: psycopg.Connection) -> None:
    row = insert(raw, TASKS, "pending")
    raw.execute("set interlock.actor = 'ada'")
    move(raw, TASKS, row, "canceled", "cancel")
    actors = raw.execute("select actor from interlock.audit_logs order by id").fetchall()
    assert actors == [("interlock",), ("ada",)]


def test_one_statement_records_all_its_moves_and_only_moves(raw: psycopg.Connection) -> None:
    raw.execute("insert into interlock.tasks (type) select 'x' from generate_series(1, 500)")
    raw.execute("update interlock.tasks set priority = 1")
    raw.execute("update interlock.tasks set state = 'canceled' where id in (select id from interlock.tasks limit 200)")
    counts = raw.execute("select event, count(*) from interlock.audit_logs group by 1 order by 1").fetchall()
    assert counts == [("cancel", 200), ("create", 500)]


def test_copy_and_upsert_are_guarded_and_recorded(raw: psycopg.Connection) -> None:
    with raw.cursor().copy("copy interlock.tasks (type) from stdin") as copy:
        for _ in range(10):
            copy.write_row(("x",))
    with (
        pytest.raises(IllegalTransition),
        translated(raw),
        raw.cursor().copy("copy interlock.tasks (type, state) from stdin") as copy,
    ):
        copy.write_row(("x", "done"))
    raw.execute(
        "insert into interlock.tasks (id, type) select id, type from interlock.tasks "
        "on conflict (id) do update set state = 'canceled', event = 'cancel', updated_at = clock_timestamp()"
    )
    counts = raw.execute("select event, count(*) from interlock.audit_logs group by 1 order by 1").fetchall()
    assert counts == [("cancel", 10), ("create", 10)]


def test_an_operator_in_the_search_path_does_not_change_the_guard(raw: psycopg.Connection) -> None:
    row = place(raw, TASKS, "done")
    raw.execute("create schema evil")
    raw.execute("create function evil.yes(text, text) returns bool language sql immutable as 'select true'")
    raw.execute("create operator evil.= (leftarg = text, rightarg = text, function = evil.yes)")
    raw.execute("set search_path = evil, pg_catalog")
    with pytest.raises(IllegalTransition), translated(raw):
        move(raw, TASKS, row, "error")


def test_retention_drops_whole_partitions_and_only_old_ones(raw: psycopg.Connection) -> None:
    insert(raw, TASKS, "pending")
    gone = raw.execute("select interlock.drop_records_before(now())").fetchall()
    assert gone == [], "the partition of this month is still in use"
    raw.execute("select interlock.add_record_partitions(5)")
    gone = raw.execute("select interlock.drop_records_before(now() + interval '2 years')").fetchall()
    assert len(gone) == 3 * 6
    insert(raw, TASKS, "pending")
    assert raw.execute("select count(*) from interlock.audit_logs_default").fetchone() == (1,)
    assert raw.execute("select count(*) from interlock.audit_logs").fetchone() == (1,)


def test_the_recording_function_is_refused_as_a_trigger_of_another_table(raw: psycopg.Connection) -> None:
    raw.execute("create temp table fake (id uuid, state text, event text, reason text, attempt int)")
    hang = (
        b"create trigger forge after insert on fake referencing new table as now_row "
        b"for each statement execute function interlock.record_tasks()"
    )
    raw.execute(hang)
    with pytest.raises(ImmutableRecordError, match=r"a trigger of interlock\.tasks only"), translated(raw):
        raw.execute("insert into fake values (interlock.new_id(), 'pending', 'x', 'forged', 7)")
    raw.execute("create role stranger")
    try:
        raw.execute("grant usage on schema interlock to stranger")
        raw.execute("grant all on fake to stranger")
        raw.execute("set role stranger")
        raw.execute("create temp table mine (id uuid, state text, event text, reason text, attempt int)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            raw.execute(hang.replace(b"on fake", b"on mine"))
    finally:
        raw.execute("reset role")
        raw.execute("drop owned by stranger")
        raw.execute("drop role stranger")


def test_a_record_cannot_be_forged_from_within_another_trigger(raw: psycopg.Connection) -> None:
    raw.execute("create temp table bait (id int)")
    raw.execute(
        "create function pg_temp.forge() returns trigger language plpgsql as $$ begin "
        "insert into interlock.audit_logs (task_id, to_state, event, actor, attempt) "
        "values (interlock.new_id(), 'done', 'succeed', 'me', 1); return new; end $$"
    )
    raw.execute("create trigger spring before insert on bait for each row execute function pg_temp.forge()")
    with pytest.raises(ImmutableRecordError), translated(raw):
        raw.execute("insert into bait values (1)")


def test_event_and_attempt_change_only_with_a_move(raw: psycopg.Connection) -> None:
    row = insert(raw, TASKS, "pending")
    with pytest.raises(IllegalTransition, match="stays 'pending'"), translated(raw):
        raw.execute("update interlock.tasks set event = 'claim' where id = %s", [row])
    for attempt in (1, 2_147_483_647):
        with pytest.raises(FenceError), translated(raw):
            raw.execute("update interlock.tasks set attempt = %s where id = %s", [attempt, row])
        with pytest.raises(FenceError, match="begins at attempt 0"), translated(raw):
            raw.execute("insert into interlock.tasks (type, attempt) values ('x', %s)", [attempt])


def test_records_in_the_default_partition_do_not_stop_maintenance(raw: psycopg.Connection) -> None:
    partitions = raw.execute(
        "select inhrelid::regclass::text from pg_inherits where inhparent = 'interlock.audit_logs'::regclass"
    ).fetchall()
    for (name,) in partitions:
        if not name.endswith("_default"):
            raw.execute(f"drop table {name}".encode())
    insert(raw, TASKS, "pending")
    raw.execute("select interlock.add_record_partitions()")
    insert(raw, TASKS, "pending")
    assert raw.execute("select count(*) from interlock.audit_logs").fetchone() == (2,)
