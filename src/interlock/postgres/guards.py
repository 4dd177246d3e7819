"""Generates `sql/guards.sql`: the triggers by which PostgreSQL enforces and records every move of a lifecycle.

Invariant: `sql/guards.sql` is exactly what `render()` returns for the tables in `lifecycle.py`.

Cost: the trigger's WHEN clause accepts a legal move that names its event and presents the fence, in the executor.
PL/pgSQL runs only for writes that are refused, for moves of a client that did not name the event, for a time that goes
back, and for writes to the outcome of an ended row. PostgreSQL parses the stored clauses anew for each statement, so
they are short. Columns that stay as recorded have triggers of their own, with a list of columns: an UPDATE that does
not set one of these columns does not compare them. The functions set their own search_path: an operator in the caller's
search_path cannot change what they compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Template
from typing import TYPE_CHECKING, Any

from interlock.errors import DefinitionError
from interlock.lifecycle import JOB, SUPERVISED_WORKER, TASK_ROW, TaskRowEvent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

    from interlock.machine import Machine


@dataclass(frozen=True, slots=True)
class Guard:
    """A table whose state column obeys a machine, the table that records its moves, and the columns that stay.

    `fixed` columns never change. Columns of the `outcome` of an ended row change only with a move, which is recorded;
    `documents` are those of them that hold JSON.
    """

    machine: Machine[Any, Any]
    table: str
    column: str
    records: str
    key: str
    fixed: tuple[str, ...]
    outcome: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    settling: tuple[str, ...] = ()  # events by which an attempt ends itself: they present it, as the fence

    @property
    def fenced(self) -> bool:
        """Whether the rows have attempts."""
        return bool(self.settling)


GUARDS = (
    Guard(
        TASK_ROW,
        "tasks",
        "state",
        "audit_logs",
        "task_id",
        fixed=("type", "input", "job_id", "step", "part", "part_of", "compensates", "request_id", "created_at"),
        outcome=("reason", "tries", "crashes", "worker_id", "cost", "started_at", "finished_at"),
        documents=("output", "error", "progress"),
        settling=(TaskRowEvent.SUCCEED, TaskRowEvent.FAIL, TaskRowEvent.RETRY, TaskRowEvent.RETURN),
    ),
    Guard(
        JOB,
        "jobs",
        "status",
        "job_state_transitions",
        "job_id",
        fixed=(
            "task_description",
            "workflow_id",
            "input",
            "parent_job_id",
            "parent_task_id",
            "request_id",
            "created_at",
        ),
        outcome=("reason", "failed_steps", "started_at", "completed_at"),
        documents=("output", "error"),
    ),
    Guard(SUPERVISED_WORKER, "workers", "status", "worker_state_transitions", "worker_id", fixed=("created_at",)),
)

_HEAD = """\
-- Generated from lifecycle.py by `interlock migrate --generate`. Do not edit: change the table and generate anew.

-- Counts a refused move, for any client. Each pair of states has an unlogged sequence, because a rollback does not undo
-- nextval, and an unlogged sequence writes no WAL. Runs as the owner, so that a client needs no right on the sequences.
-- A value that is not a state has no sequence and is not counted.
create or replace function interlock.count_refused_move(machine text, from_state text, to_state text)
    returns void language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    counter constant regclass := to_regclass(
        format('interlock.%I', concat('refused ', machine, ' ', from_state, '>', to_state)));
begin
    if counter is not null then
        perform nextval(counter);
    end if;
end
$$;

create or replace function interlock.refused_moves()
    returns table (machine text, from_state text, to_state text, count bigint)
    language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select part[1], part[2], part[3], pg_sequence_last_value(seqrelid)
    from pg_sequence join pg_class on pg_class.oid = seqrelid
        cross join regexp_match(relname, '^refused (.+) ([^ >]+)>([^ >]+)$') as part
    where relnamespace = 'interlock'::regnamespace and part is not null
        and pg_sequence_last_value(seqrelid) is not null
    order by 1, 2, 3
$$;

create or replace function interlock.refuse_move(
    machine text, row_id text, from_state text, to_state text, allowed text[], code text, problem text
) returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    if code <> 'IL006' then
        perform interlock.count_refused_move(machine, from_state, to_state);
    end if;
    raise exception '% %: %; allowed%: %', machine, row_id, problem,
            case when from_state is null then '' else ' from ' || from_state end,
            coalesce(nullif(array_to_string(allowed, ', '), ''), 'none')
        using errcode = code,
            detail = jsonb_build_object('machine', machine, 'row', row_id, 'from', from_state, 'to', to_state,
                'allowed', to_jsonb(allowed))::text;
end
$$;

-- The arguments of the trigger are the name of the machine, why the columns stay, and the columns.
create or replace function interlock.refuse_rewrite() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$
declare
    changed constant text := array_to_string(array(
        select name
        from unnest(tg_argv[2:]) as name
        where to_jsonb(new) -> name is distinct from to_jsonb(old) -> name
    ), ', ');
begin
    if changed = '' then
        return new;
    end if;
    raise exception '% %: cannot change %: %', tg_argv[0], old.id, changed, tg_argv[1]
        using errcode = 'IL004', schema = tg_table_schema, table = tg_table_name;
end
$$;

create or replace function interlock.actor() returns text language sql stable parallel safe as $$
    select coalesce(nullif(pg_catalog.current_setting('interlock.actor', true), ''), session_user::text)
$$;
"""

_BODY = Template("""
-- $table: the $machine lifecycle

alter table interlock.$table drop constraint if exists ${table}_$column;
alter table interlock.$table add constraint ${table}_$column
    check ($column = any ('{$listed_states}'::text[])) not valid;
alter table interlock.$table validate constraint ${table}_$column;

do $$$$
declare
    counter text;
begin
    for counter in
        select format('refused $machine %s>%s', source, target)
        from unnest(array[$states]) as source cross join unnest(array[$states]) as target
    loop
        execute format('create unlogged sequence if not exists interlock.%I', counter);
    end loop;
end
$$$$;

create or replace function interlock.guard_$table() returns trigger language plpgsql
    set search_path = pg_catalog, pg_temp as $$$$
declare
    known constant text[] := array[$states];
    events text[];
    allowed text[];
begin$fence_insert
    if tg_op = 'INSERT' then
        perform interlock.refuse_move('$machine', new.id::text, null, new.$column, array[$initial],
            case when new.$column = any (known) then 'IL003' else 'IL002' end,
            format('cannot begin as %L', new.$column));
    elsif tg_op = 'DELETE' then
        perform interlock.refuse_move('$machine', old.id::text, old.$column, old.$column, array[$final], 'IL006',
            format('cannot be deleted while %L, only when it has ended', old.$column));
    end if;
    if new.id is distinct from old.id then
        perform interlock.refuse_move('$machine', old.id::text, old.$column, new.$column, array[]::text[], 'IL005',
            'an id never changes');
    end if;
    if new.$column is distinct from old.$column then
        case old.$column
$targets
            else allowed := array[]::text[];
        end case;
        case old.$column || '>' || new.$column
$pairs
            else
                perform interlock.refuse_move('$machine', old.id::text, old.$column, new.$column, allowed,
                    case when new.$column = any (known) then 'IL001' else 'IL002' end,
                    format('cannot move from %L to %L', old.$column, new.$column));
        end case;
        if (new.event = any (events)) is not true then
            -- The client did not name the event: it follows from the two states if only one fits. A reason that the
            -- client did not set belongs to the move before and is cleared.
            if new.event is distinct from old.event or cardinality(events) > 1 then
                perform interlock.refuse_move('$machine', old.id::text, old.$column, new.$column, allowed, 'IL001',
                    format('moves from %L to %L by setting "event" to one of %s, not to %L',
                        old.$column, new.$column, events, new.event));
            end if;
            new.event := events[1];
            if new.reason is not distinct from old.reason then
                new.reason := null;
            end if;
        end if;
        if new.updated_at is not distinct from old.updated_at then
            new.updated_at := clock_timestamp();
        end if;
    elsif new.event is distinct from old.event then
        perform interlock.refuse_move('$machine', old.id::text, old.$column, new.$column, array[]::text[], 'IL001',
            format('stays %L, so that its event cannot become %L', old.$column, new.event));
    end if;
$fence
    -- The later time stays: a transaction that began long ago and a clock that was set back do not fail for it.
    new.updated_at := greatest(new.updated_at, old.updated_at);
    return new;
end
$$$$;

drop trigger if exists guard_insert on interlock.$table;
create trigger guard_insert before insert on interlock.$table for each row
    when ((new.$column = any ('{$listed_initial}'::text[])) is not true$fence_insert_when)
    execute function interlock.guard_$table();
alter table interlock.$table enable always trigger guard_insert;

drop trigger if exists guard_update on interlock.$table;
create trigger guard_update before update on interlock.$table for each row
    when (
        new.id is distinct from old.id
        or case
            when new.$column = old.$column
                then new.event is distinct from old.event or new.updated_at < old.updated_at$fence_stays
            else (old.$column || ' ' || new.event || ' ' || new.$column = any ('{
$moves
                }'::text[])) is not true
                or new.updated_at <= old.updated_at$fence_moves
        end
    )
    execute function interlock.guard_$table();
alter table interlock.$table enable always trigger guard_update;
$rewrites
drop trigger if exists guard_delete on interlock.$table;
create trigger guard_delete before delete on interlock.$table for each row
    when ((old.$column = any ('{$listed_final}'::text[])) is not true)
    execute function interlock.guard_$table();
alter table interlock.$table enable always trigger guard_delete;

create or replace function interlock.refuse_truncate_$table() returns trigger language plpgsql as $$$$
begin
    raise exception '$table cannot be truncated: it may hold unfinished work'
        using errcode = 'IL006', schema = 'interlock', table = '$table',
            hint = 'Delete rows that have ended: delete from interlock.$table where $column in ($final_hint)';
end
$$$$;

drop trigger if exists guard_truncate on interlock.$table;
create trigger guard_truncate before truncate on interlock.$table for each statement
    execute function interlock.refuse_truncate_$table();
alter table interlock.$table enable always trigger guard_truncate;

-- Writes the records as the owner, so that a client that moves a row needs no right to insert records. Refuses to run
-- for another table: a trigger on a client's own table could write any record, as the owner.
-- enable_nestloop is off because the plan is made for the session's first statement and kept: a nested loop is fine for
-- one row, but compares a million pairs for a thousand.
create or replace function interlock.record_$table() returns trigger language plpgsql
    security definer set search_path = pg_catalog, pg_temp set enable_nestloop = off as $$$$
declare
    who constant text := interlock.actor();
    session_role constant text := session_user;
    moment constant timestamptz := clock_timestamp();
begin
    if tg_relid <> 'interlock.$table'::regclass then
        raise exception 'record_$table() is a trigger of interlock.$table only' using errcode = 'IL004';
    end if;
    -- refuse_forgery() accepts an INSERT while this is set. An error sets it back, with its (sub)transaction.
    perform set_config('interlock.recording', token, true) from interlock.record_token;
    if tg_op = 'INSERT' then
        insert into interlock.$records ($key, from_state, to_state, event, reason, actor, database_role,
            recorded_at$attempt_into)
        select now_row.id, null, now_row.$column, 'create', now_row.reason, who, session_role, moment$attempt_from
        from now_row;
    else
        insert into interlock.$records ($key, from_state, to_state, event, reason, actor, database_role,
            recorded_at$attempt_into)
        select now_row.id, was_row.$column, now_row.$column, now_row.event, now_row.reason, who, session_role,
            moment$attempt_from
        from now_row join was_row on was_row.id = now_row.id
        where was_row.$column <> now_row.$column;
    end if;
    perform set_config('interlock.recording', '', true);
    return null;
end
$$$$;

revoke execute on function interlock.record_$table() from public;

drop trigger if exists record_insert on interlock.$table;
create trigger record_insert after insert on interlock.$table
    referencing new table as now_row for each statement execute function interlock.record_$table();
alter table interlock.$table enable always trigger record_insert;

drop trigger if exists record_update on interlock.$table;
create trigger record_update after update on interlock.$table
    referencing old table as was_row new table as now_row for each statement
    execute function interlock.record_$table();
alter table interlock.$table enable always trigger record_update;
""")

_REWRITE = Template("""
drop trigger if exists $trigger on interlock.$table;
create trigger $trigger before update of $columns on interlock.$table for each row
    when ($condition)
    execute function interlock.refuse_rewrite('$machine', '$why', $arguments);
alter table interlock.$table enable always trigger $trigger;
""")

_FENCE = Template("""\
    if new.attempt <> old.attempt + (new.state = 'running' and old.state <> 'running')::int then
        perform interlock.refuse_move('task', old.id::text, old.state, new.state, coalesce(allowed, '{}'), 'IL005',
            format('attempt %s cannot follow attempt %s; the fence rises by one with every claim, and only then',
                new.attempt, old.attempt));
    end if;
    if $breach then
        perform interlock.refuse_move('task', old.id::text, old.state, new.state, coalesce(allowed, '{}'), 'IL005',
            case
                when old.state = 'running' and new.state is distinct from old.state
                    then format('%L settles attempt %s: set "settled_attempt" to %s, not to %s; '
                            'a worker that holds an earlier attempt has lost the task',
                        new.event, old.attempt, old.attempt, coalesce(new.settled_attempt::text, 'null'))
                else format('"settled_attempt" changes only when a running task moves, not from %s to %s',
                        coalesce(old.settled_attempt::text, 'null'), coalesce(new.settled_attempt::text, 'null'))
            end);
    end if;""")

_FENCE_STAYS = """
                    or new.attempt <> old.attempt or new.settled_attempt is distinct from old.settled_attempt"""

# The function accepts more: a move that others make may present the attempt, too.
_FENCE_MOVES = Template("""
                or new.attempt <> old.attempt + (new.state = 'running')::int
                or new.settled_attempt is distinct from case
                    when old.state = 'running' and new.event = any ('{$settling}'::text[]) then old.attempt
                    else old.settled_attempt
                end""")

# What an earlier settle left in the row is lower than the attempt that runs now: a writer that forgets to present its
# attempt is refused like one that presents another one. Moves that others make (cancel, expire, exhaust) may present
# it: a worker that cancels its own attempt does.
_BREACH = Template("""\
(case
            when old.state = 'running' and new.state is distinct from old.state
                then new.settled_attempt is distinct from old.attempt
                    and (new.event = any (array[$settling])
                        or new.settled_attempt is distinct from old.settled_attempt)
            else new.settled_attempt is distinct from old.settled_attempt
        end)""")

_FENCE_INSERT = """
    if tg_op = 'INSERT' and (new.attempt <> 0 or new.settled_attempt is not null) then
        perform interlock.refuse_move('task', new.id::text, null, new.state, array[]::text[], 'IL005',
            format('begins at attempt 0, not %s, and without a settled attempt', new.attempt));
    end if;"""

_FENCE_INSERT_WHEN = " or new.attempt <> 0 or new.settled_attempt is not null"


def render() -> str:
    """Return the SQL by which the database enforces and records all guarded lifecycles."""
    return _HEAD + "".join(_render(guard) for guard in GUARDS)


def generate(path: Path) -> bool:
    """Write the guards to a file; return False if they were up to date."""
    text = render()
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _render(guard: Guard) -> str:
    machine = guard.machine
    _check_stale_events_can_be_told_apart(machine)
    final = _in_order(machine, machine.final)
    breach = _BREACH.substitute(settling=_quoted(guard.settling))
    return _BODY.substitute(
        machine=machine.name,
        table=guard.table,
        column=guard.column,
        records=guard.records,
        key=guard.key,
        states=_quoted(machine.states),
        initial=_quoted(_in_order(machine, machine.initial)),
        final=_quoted(final),
        final_hint=_quoted(final).replace("'", "''"),
        targets="\n".join(_target_cases(machine)),
        pairs="\n".join(_pair_cases(machine)),
        listed_states=_listed(machine.states),
        listed_initial=_listed(_in_order(machine, machine.initial)),
        listed_final=_listed(final),
        moves=",\n".join(f"                    {source} {event} {target}" for source, event, target in machine.rows),
        rewrites="".join(_rewrite_triggers(guard)),
        fence=_FENCE.substitute(breach=breach) if guard.fenced else "",
        fence_stays=_FENCE_STAYS if guard.fenced else "",
        fence_moves=_FENCE_MOVES.substitute(settling=_listed(guard.settling)) if guard.fenced else "",
        fence_insert=_FENCE_INSERT if guard.fenced else "",
        fence_insert_when=_FENCE_INSERT_WHEN if guard.fenced else "",
        attempt_into=", attempt" if guard.fenced else "",
        attempt_from=", now_row.attempt" if guard.fenced else "",
    )


def _rewrite_triggers(guard: Guard) -> Iterator[str]:
    """Render the triggers that refuse to change what is recorded.

    Documents have a trigger of their own: comparing them means reading them, and they may be large. Of an ended row
    only the function compares the columns: few statements write them then.
    """
    column = guard.column
    final = _listed(_in_order(guard.machine, guard.machine.final))
    ended = f"new.{column} = old.{column} and old.{column} = any ('{{{final}}}'::text[])"
    changed = "\n        or ".join(f"new.{name} is distinct from old.{name}" for name in guard.fixed)
    stays = f"the outcome of a {guard.machine.name} that has ended changes only with a move, which is recorded"
    for trigger, columns, condition, why in (
        ("guard_fixed", guard.fixed, changed, f"a {guard.machine.name} keeps what it was created with"),
        ("guard_outcome", guard.outcome, ended, stays),
        ("guard_documents", guard.documents, ended, stays),
    ):
        if columns:
            yield _REWRITE.substitute(
                trigger=trigger,
                table=guard.table,
                columns=", ".join(columns),
                condition=condition,
                machine=guard.machine.name,
                why=why,
                arguments=_quoted(columns),
            )


def _in_order(machine: Machine[Any, Any], chosen: Collection[str]) -> list[str]:
    return [state for state in machine.states if state in chosen]


def _target_cases(machine: Machine[Any, Any]) -> Iterator[str]:
    for source in machine.states:
        if targets := machine.allowed_targets(source):
            yield f"            when '{source}' then allowed := array[{_quoted(targets)}];"


def _pair_cases(machine: Machine[Any, Any]) -> Iterator[str]:
    for source in machine.states:
        for target in machine.allowed_targets(source):
            events = _quoted(machine.events_between(source, target))
            yield f"            when '{source}>{target}' then events := array[{events}];"


def _check_stale_events_can_be_told_apart(machine: Machine[Any, Any]) -> None:
    """Raise if an event both enters and leaves a state.

    The guard relies on this to tell an event that the client set from one that the previous move left in the row.
    """
    for _, event, target in machine.rows:
        if machine.can(target, event):
            raise DefinitionError(f"{machine.name}: {event} both enters and leaves {target}; the guard needs two names")


def _listed(names: Iterable[str]) -> str:
    """Return the elements of an array literal: one constant, which each statement reads faster than an ARRAY."""
    return ", ".join(names)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
