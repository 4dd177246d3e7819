"""Findings of `interlock doctor`: the codes with their severity, meaning and remedy, and the report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

SAMPLE_SIZE = 5  # ids that a finding names


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"  # a rule of the engine is violated, or the engine cannot work
    WARNING = "warning"  # work waits, or will
    NOTE = "note"  # worth knowing; no action is needed


class FindingCode(NamedTuple):
    """A kind of finding. The remedy is the command to run, and what to do where no command is enough."""

    severity: Severity
    meaning: str
    remedy: str
    is_fixable: bool = False  # by `interlock doctor --fix`


_RESTORE = (
    "`interlock doctor --fix` as the role that owns the schema applies the functions and guards of this release again"
)
_RECORDS = (
    "find out who wrote as superuser or owner (column database_role of the records, server log); restore the rows from "
    "a backup; `interlock history` shows the records that are left"
)

CODES: Mapping[str, FindingCode] = {
    # the server and the schema
    "database_unreachable": FindingCode(
        Severity.ERROR,
        "The database cannot be reached.",
        "check that the server runs and that this role may connect: `interlock db url`",
    ),
    "server_too_old": FindingCode(
        Severity.ERROR, "The server is older than PostgreSQL 15.", "upgrade the server to PostgreSQL 15 or newer"
    ),
    "server_read_only": FindingCode(
        Severity.ERROR,
        "The server is a standby, or its transactions are read-only: no task can be claimed or settled.",
        "connect to the primary server, or `alter database … reset default_transaction_read_only`",
    ),
    "replication_role_set": FindingCode(
        Severity.WARNING,
        "session_replication_role is set for a role or the database: no notifications are sent, and foreign keys do "
        "not hold. The guards hold nevertheless.",
        "`alter database … reset session_replication_role`, or `alter role …`, and restart the processes",
    ),
    "schema_outdated": FindingCode(
        Severity.ERROR, "The schema is missing, incomplete or of another release.", "`interlock migrate`"
    ),
    "table_damaged": FindingCode(
        Severity.ERROR,
        "A table or a column of this release is missing.",
        "restore it from a backup, or add it as `sql/schema.sql` of this release defines it",
    ),
    "guard_missing": FindingCode(
        Severity.ERROR, "A trigger that enforces or records moves is missing.", _RESTORE, is_fixable=True
    ),
    "guard_disabled": FindingCode(
        Severity.ERROR,
        "A trigger is disabled, or a guard is not enabled ALWAYS: illegal moves are not refused, or not recorded.",
        _RESTORE,
        is_fixable=True,
    ),
    "guard_changed": FindingCode(
        Severity.ERROR,
        "The definition of a trigger is not the one that this release generates.",
        _RESTORE,
        is_fixable=True,
    ),
    "function_changed": FindingCode(
        Severity.ERROR,
        "A function is missing, its source or attributes are not those of this release, or another has its name.",
        _RESTORE,
        is_fixable=True,
    ),
    "trigger_unknown": FindingCode(
        Severity.WARNING,
        "A table of Interlock has a trigger that this release does not know.",
        "check who added it and that it changes no rows of Interlock; otherwise drop it",
    ),
    "table_changed": FindingCode(
        Severity.ERROR,
        "A column has another type, nullability or default, or a table is unlogged, so that a crash of the server "
        "empties it.",
        "`alter table` to what `sql/schema.sql` of this release defines; `alter table interlock.TABLE set logged`",
    ),
    "object_unknown": FindingCode(
        Severity.WARNING,
        "A table of Interlock has a constraint, a unique index, a mandatory column or an inheriting table that this "
        "release does not know: rows of the engine may be refused, or rows may be without guards.",
        "check who added it and why; otherwise drop it",
    ),
    "view_changed": FindingCode(
        Severity.ERROR,
        "The view of the queue of step results is missing or not the one of this release: results may stay unseen.",
        "`interlock doctor --fix` or `interlock migrate` as the role that owns the schema creates it again",
        is_fixable=True,
    ),
    "sequence_behind": FindingCode(
        Severity.ERROR,
        "The sequence of a table gives ids that rows have already: inserts are refused.",
        "`select setval(pg_get_serial_sequence('interlock.TABLE', 'id'), max(id)) from interlock.TABLE` as the role "
        "that owns the schema",
    ),
    "rule_unknown": FindingCode(
        Severity.ERROR,
        "A table of Interlock has a rule or row security: rows are changed, or hidden, past the guards.",
        "`drop rule NAME on interlock.TABLE`; `alter table interlock.TABLE disable row level security`",
    ),
    "index_missing": FindingCode(
        Severity.ERROR, "An index is missing or has another definition.", "create it with the statement of the message"
    ),
    "index_invalid": FindingCode(
        Severity.ERROR,
        "An index is invalid, so that it is not used and, if it is unique, may not hold.",
        "`reindex index concurrently interlock.NAME`",
    ),
    "constraint_missing": FindingCode(
        Severity.ERROR,
        "A constraint is missing or has another definition.",
        "add it as `sql/schema.sql` of this release defines it; `interlock doctor --fix` adds those of states",
        is_fixable=True,
    ),
    "constraint_disabled": FindingCode(
        Severity.ERROR,
        "The triggers of a foreign key are disabled: rows may name others that do not exist.",
        "`alter table interlock.TABLE enable trigger all`, then `interlock doctor --fix`, both as superuser",
    ),
    "constraint_invalid": FindingCode(
        Severity.WARNING,
        "A constraint was never validated, so that old rows may violate it.",
        "`alter table interlock.TABLE validate constraint NAME`",
    ),
    "partition_missing": FindingCode(
        Severity.WARNING,
        "A table of records lacks the partition of this month or the next, one between others, or the default one.",
        "`interlock doctor --fix` or `interlock migrate` as the role that owns the schema; a gap means that records "
        "were dropped by hand; add a default one as `sql/schema.sql` of this release defines it",
        is_fixable=True,
    ),
    "privilege_missing": FindingCode(
        Severity.ERROR,
        "This role lacks rights that a role which runs the engine needs, or may not read what a check reads.",
        "`interlock migrate --grant-to ROLE` as the role that owns the schema",
    ),
    "autovacuum_off": FindingCode(
        Severity.WARNING,
        "Autovacuum is off, for the server or for a table: the queue gets slower with every claim.",
        "`alter system set autovacuum = on`, or `alter table interlock.TABLE reset (autovacuum_enabled)`",
    ),
    "table_bloated": FindingCode(
        Severity.WARNING,
        "Most rows of a table are dead, and no vacuum has removed them for 10 minutes.",
        "`vacuum interlock.TABLE`; look for old transactions and replication slots that keep the rows",
    ),
    "clock_skewed": FindingCode(
        Severity.WARNING,
        "The clocks of this host and of the database differ by more than 5 seconds.",
        "synchronize the clocks (NTP) of this host and of the database server",
    ),
    "check_unfinished": FindingCode(
        Severity.WARNING,
        "A check took longer than its statement timeout, or failed: its part of the database was not examined.",
        "`interlock doctor --timeout` with more seconds, at a quiet hour; after an error, correct what it names",
    ),
    # records
    "records_missing": FindingCode(
        Severity.ERROR, "A row has no records, or its first ones were deleted.", _RECORDS
    ),
    "records_broken": FindingCode(
        Severity.ERROR,
        "A record does not begin in the state in which the one before it ends: one was deleted or inserted.",
        _RECORDS,
    ),
    "records_illegal": FindingCode(Severity.ERROR, "A record shows a move that the lifecycle does not have.", _RECORDS),
    "records_misnumbered": FindingCode(
        Severity.ERROR,
        "The attempt does not rise by one with every claim, or the task has or settled another than the last one.",
        _RECORDS,
    ),
    "records_mistimed": FindingCode(
        Severity.WARNING,
        "A record is older than the one before it or than its task, or lies in the future, by more than a minute.",
        "check the clock of the database server; records are immutable and stay as they are",
    ),
    "row_mistimed": FindingCode(
        Severity.WARNING,
        "A task or a job ended before it began, has ended at no time, or was made in the future: retention and figures "
        "of it are wrong.",
        "check the clock of the database server; otherwise find out who wrote as superuser or owner",
    ),
    "state_unrecorded": FindingCode(
        Severity.ERROR,
        "The state of a row is not that of its last record: it was changed past the guards, or a record was deleted.",
        _RECORDS,
    ),
    "row_deleted": FindingCode(
        Severity.ERROR,
        "The records of a row end in an unfinished state, and the row is gone (`--full` only).",
        _RECORDS,
    ),
    # jobs and steps
    "job_not_finished": FindingCode(
        Severity.ERROR,
        "A job is RUNNING although all of its steps have ended.",
        "`interlock doctor --fix` lets an orchestrator look at it again",
        is_fixable=True,
    ),
    "job_ended_with_open_steps": FindingCode(
        Severity.ERROR,
        "A job has ended, and one of its steps has not.",
        "`interlock tasks cancel ID` for the steps that `interlock jobs show ID` lists as unfinished",
    ),
    "job_counters_wrong": FindingCode(
        Severity.ERROR,
        "The stored number of open or failed steps of a job is not the counted one: the job ends too early or never.",
        "`interlock doctor --fix` counts them again",
        is_fixable=True,
    ),
    "job_postponed": FindingCode(
        Severity.ERROR,
        "A running job is hidden from orchestrators for longer than after any failure: its waits and its deadline are "
        "not looked at.",
        "`interlock doctor --fix` lets orchestrators look at it again",
        is_fixable=True,
    ),
    "job_steps_missing": FindingCode(
        Severity.ERROR,
        "A running job lacks a step of its workflow.",
        "`interlock jobs cancel ID`, then `interlock jobs retry ID`",
    ),
    "job_orphaned": FindingCode(
        Severity.ERROR,
        "The workflow, the parent or the parent step of a job is gone.",
        "`interlock jobs cancel ID`; submit it again if it is needed",
    ),
    "step_orphaned": FindingCode(
        Severity.ERROR,
        "The job of a step, or the map of a part, is gone, or the workflow of the job has no such step.",
        "`interlock tasks cancel ID`; restore the job from a backup if its result is needed",
    ),
    "step_ended_early": FindingCode(
        Severity.ERROR,
        "A step that has not ended counts as ended: its job may end without it, and the steps after it never start.",
        "`interlock jobs cancel ID`, then `interlock jobs retry ID`",
    ),
    "step_not_released": FindingCode(
        Severity.ERROR,
        "A step waits although what it waits for has ended or is there, and no message leads an orchestrator to it.",
        "`interlock explain ID`; `interlock jobs cancel ID` and `interlock jobs retry ID` run the rest again",
    ),
    "step_counters_wrong": FindingCode(
        Severity.ERROR,
        "The stored counts of a step's dependencies or parts are not those of the steps before it.",
        "`interlock jobs cancel ID`, then `interlock jobs retry ID`",
    ),
    "hold_outdated": FindingCode(
        Severity.WARNING,
        "A task has been held for more than a minute by a pause that has ended or a limit that is gone.",
        "check that a worker leads: it releases them: `interlock workers list`",
    ),
    "row_orphaned": FindingCode(
        Severity.ERROR,
        "The job of a signal, the workflow of a step or an edge, or the token of a session is gone, or the step that "
        "has consumed a signal waits for none.",
        "find out who deleted rows as superuser; delete the rows that are left, or restore the others from a backup",
    ),
    "hold_missing": FindingCode(
        Severity.ERROR,
        "A waiting task does not say what it waits for, or nothing known, so that nothing will release it.",
        "`interlock tasks cancel ID`, then `interlock tasks requeue ID`",
    ),
    "workflow_damaged": FindingCode(
        Severity.ERROR,
        "The stored steps or edges of a workflow are not those of its definition.",
        "restore them from a backup; register the workflow under a new version for new jobs",
    ),
    "key_duplicated": FindingCode(
        Severity.ERROR,
        "Two unfinished tasks have one unique key, or two running jobs one key.",
        "`interlock tasks cancel ID` or `interlock jobs cancel ID` for all but one",
    ),
    # leases, messages, schedules, limits, webhooks
    "lease_too_long": FindingCode(
        Severity.ERROR,
        "A lease of a task, a leader, a process or a supervisor is longer than any that can be asked for.",
        "`interlock doctor --fix` lets it end now",
        is_fixable=True,
    ),
    "lease_expired": FindingCode(
        Severity.WARNING,
        "A lease ended more than a minute ago and the task was not recovered.",
        "check that a worker runs: any live one recovers it: `interlock workers list`",
    ),
    "owner_gone": FindingCode(
        Severity.WARNING,
        "A task runs, and the worker that holds its lease is unknown, ended or silent for 5 minutes.",
        "wait for the end of the lease: the task is recovered then; `interlock explain ID`",
    ),
    "settings_missing": FindingCode(
        Severity.ERROR,
        "The row of table settings is missing: no step can send its result.",
        "`insert into interlock.settings default values` as the role that owns the schema",
    ),
    "queue_missing": FindingCode(
        Severity.ERROR,
        "PGMQ or its queue is missing: tasks work without it, jobs do not.",
        "`interlock migrate` as a role that may create the schema pgmq",
    ),
    "queue_stalled": FindingCode(
        Severity.WARNING,
        "A message has been in the queue of step results for more than a minute.",
        "check that orchestrators run (`interlock orchestrator`), and read their logs",
    ),
    "message_unknown": FindingCode(
        Severity.WARNING,
        "A message in the queue names a step that does not exist.",
        "nothing has to be done: an orchestrator drops it; find out who sent it",
    ),
    "message_failed": FindingCode(
        Severity.WARNING,
        "A message failed repeatedly and was set aside (dead letter).",
        "fix the cause of the error; `interlock jobs replay` sends it again at once",
    ),
    "message_ownerless": FindingCode(
        Severity.NOTE,
        "A message that names no job failed repeatedly. It blocks nothing.",
        "nothing has to be done: retention deletes it",
    ),
    "result_not_sent": FindingCode(
        Severity.ERROR,
        "A step of a running job ended more than a minute ago, and no message tells the orchestrator.",
        "`interlock jobs replay ID` or `interlock doctor --fix` sends the results again",
        is_fixable=True,
    ),
    "wait_overdue": FindingCode(
        Severity.WARNING,
        "A sleep, the timeout of a signal or the deadline of a job was over more than a minute ago.",
        "check that orchestrators run (`interlock orchestrator`), and read their logs",
    ),
    "schedule_failed": FindingCode(
        Severity.WARNING,
        "A schedule is stopped, or failed at its last tick.",
        "correct its declaration and restart the workers, or fix the cause: `interlock schedules list`",
    ),
    "schedule_overdue": FindingCode(
        Severity.WARNING,
        "A schedule should have fired more than 5 minutes ago.",
        "check that a worker runs: the leading one fires schedules: `interlock workers list`",
    ),
    "schedule_misplaced": FindingCode(
        Severity.ERROR,
        "The next tick of a schedule is later than the next one of its rhythm: ticks will be left out.",
        "`interlock schedules pause NAME`, then `interlock schedules resume NAME`; `--fix` does that",
        is_fixable=True,
    ),
    "schedule_unknown": FindingCode(
        Severity.WARNING,
        "A schedule names a workflow or version that is not stored, or a type that no live worker there has.",
        "start a worker whose app defines it, or `interlock schedules delete NAME`",
    ),
    "limit_undeclared": FindingCode(
        Severity.WARNING,
        "Tasks name a limit key for which no limit is declared; they run without one.",
        "`interlock limits set KEY`, or declare it with app.limit(...)",
    ),
    "limit_usage_misplaced": FindingCode(
        Severity.ERROR,
        "Usage of a limit is stored for a time in the future: tasks of its keys wait for room until then.",
        "`interlock doctor --fix` deletes it",
        is_fixable=True,
    ),
    "limit_usage_unknown": FindingCode(
        Severity.NOTE,
        "Usage of a limit is stored for a key that has no limit.",
        "nothing has to be done: the leading worker deletes it",
    ),
    "webhook_given_up": FindingCode(
        Severity.WARNING,
        "A webhook was given up after its last try.",
        "check that the receiver answers, then `interlock webhooks retry`",
    ),
    "webhook_overdue": FindingCode(
        Severity.WARNING,
        "A webhook should have been sent more than 5 minutes ago, or is postponed for longer than any backoff.",
        "check that a worker runs: the leading one sends webhooks: `interlock workers list`",
    ),
    # processes
    "workers_missing": FindingCode(
        Severity.WARNING,
        "No worker is live and active while there is work.",
        "`interlock worker`, or resume the paused ones",
    ),
    "orchestrators_missing": FindingCode(
        Severity.WARNING,
        "No orchestrator is live and active while jobs are unfinished.",
        "`interlock orchestrator`, or resume the paused ones",
    ),
    "namespace_unserved": FindingCode(
        Severity.WARNING,
        "Tasks are due, and no live worker serves their namespace.",
        "`interlock worker --namespaces NAME`",
    ),
    "type_unserved": FindingCode(
        Severity.WARNING,
        "Tasks are due, and no live worker has a handler for their type.",
        "start a worker whose app defines it, or cancel the tasks: `interlock tasks cancel --type TYPE`",
    ),
    "worker_vanished": FindingCode(
        Severity.WARNING,
        "A process sent no heartbeat for 5 minutes and did not deregister; reported for a day.",
        "find out why its process ended; its tasks were recovered: `interlock workers show ID`",
    ),
    "handler_leaked": FindingCode(
        Severity.WARNING,
        "A handler ignored being stopped and still runs although its attempt was settled.",
        "make the handler end when it is cancelled (see the log event handler_leaked), and restart the worker",
    ),
    "retention_behind": FindingCode(
        Severity.WARNING,
        "Retention deletes ended rows more than an hour later than their age says: a backlog, or more tasks than one "
        "connection can delete.",
        "wait if `retention_overdue_seconds` falls, as after a shorter age was set; else look for a long transaction "
        "or a slow disk, or shorten the ages of states that you do not read",
    ),
    "transaction_long": FindingCode(
        Severity.WARNING,
        "A transaction has been open for more than a minute and locks jobs or tasks.",
        "end that transaction, or its session: `select pg_terminate_backend(PID)`",
    ),
    "job_not_started": FindingCode(
        Severity.WARNING,
        "A job has not started for more than a minute, and not because of its time or its key.",
        "`interlock explain ID`",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: how many rows it concerns, the first of them, and what to do."""

    code: str
    severity: Severity
    rows: int
    message: str
    remedy: str
    is_fixable: bool
    sample: tuple[str, ...] = ()  # ids or names


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The result of an examination. `checked` has the names of the checks that were made, `facts` what they saw."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    facts: Mapping[str, str]
    is_full: bool
    examined_at: datetime
    duration_s: float

    @property
    def severity(self) -> Severity | None:
        """The severity of the worst finding."""
        return min((finding.severity for finding in self.findings), key=list(Severity).index, default=None)

    def document(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        return {
            "severity": self.severity,
            "full": self.is_full,
            "examined_at": self.examined_at,
            "duration_s": round(self.duration_s, 3),
            "checked": list(self.checked),
            "facts": dict(self.facts),
            "findings": [
                {
                    "code": finding.code,
                    "severity": finding.severity,
                    "rows": finding.rows,
                    "message": finding.message,
                    "remedy": finding.remedy,
                    "fixable": finding.is_fixable,
                    "sample": list(finding.sample),
                }
                for finding in self.findings
            ],
        }


def make_finding(
    code: str, message: str, *, rows: int = 1, sample: Iterable[Any] = (), remedy: str | None = None
) -> Finding:
    """Make a finding of a known code; the remedy can be more precise than that of the code."""
    known = CODES[code]
    names = tuple(str(each) for each in sample)[:SAMPLE_SIZE]
    return Finding(code, known.severity, rows, message, remedy or known.remedy, known.is_fixable, names)


def number(count: int, word: str) -> str:
    """Write a count with its noun."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
