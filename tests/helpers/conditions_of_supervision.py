"""Conditions of the writes of supervisors to worker rows and to the tasks of dead processes: supervision.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from condition_scenarios import HOUR, MINUTE, NOBODY, NOW, SECOND, GuardedWrite, Needed, by_id, task, worker

if TYPE_CHECKING:
    from condition_scenarios import MakeRow

SPEC: dict[str, Any] = {"spec": {}}


def held(status: str = "RUNNING", **columns: Any) -> MakeRow:
    """Make a row that the supervisor `one` holds, whose process is the second one."""
    lease = {"supervisor_id": "one", "supervised_until": NOW + MINUTE}
    return worker(status, **{"metadata": SPEC, "generation": 2, **lease, **columns})


def free(status: str = "RUNNING", **columns: Any) -> MakeRow:
    """Make a row that no supervisor holds."""
    return held(status, **{"supervisor_id": None, "supervised_until": None, **columns})


WRONG_ROW = {"id": NOBODY}
WRONG_SUPERVISOR = {"supervisor": "two"}
OLD_PROCESS = {"generation": 1}

TABLE = (
    GuardedWrite(
        "lease_workers",
        row=free(),
        call=lambda _: {"supervisor": "two", "host": "here", "lease": MINUTE},
        conditions=(
            Needed("id = any (array(…))", "a supervisor takes every row", row=held()),
            Needed(
                "metadata ? 'spec'",
                "a supervisor takes a process that registered itself, and starts a second one",
                row=free(metadata={}),
            ),
            Needed(
                "(status = 'RUNNING' or pid is not null)",
                "a supervisor takes rows that need no process and have none",
                row=free("PAUSED"),
            ),
            Needed(
                "(supervisor_id is null or supervised_until <= now)",
                "two supervisors keep one worker, and each starts a process",
                row=held(),
            ),
            Needed(
                "(pid is null or host = %(host)s or seen_until is null or seen_until <= now)",
                "a second process is started while the first one works on another host",
                row=free(pid=7, host="there", seen_until=NOW + SECOND),
            ),
            Needed(
                "coalesce(metadata ->> 'bound_to', %(supervisor)s) = %(supervisor)s",
                "a row that belongs to one supervisor is taken by another",
                row=free(metadata={**SPEC, "bound_to": "one"}),
            ),
        ),
    ),
    GuardedWrite(
        "renew_held_workers",
        row=held(),
        call=lambda _: {"supervisor": "one", "lease": HOUR},
        conditions=(
            Needed(
                "supervisor_id = %(supervisor)s",
                "the rows of a dead supervisor are never taken by another",
                call=WRONG_SUPERVISOR,
            ),
            Needed(
                "metadata ? 'spec'",
                "a row that is not supervised is returned as one to keep",
                row=held(metadata={}),
            ),
        ),
    ),
    GuardedWrite(
        "announce_process",
        row=held(),
        call=by_id(supervisor="one", generation=2, instance="i", host="here"),
        conditions=(
            Needed("id = %(id)s", "the processes of all workers lose their rows", call=WRONG_ROW),
            Needed(
                "supervisor_id = %(supervisor)s",
                "a supervisor that lost the row starts a process beside that of the present one",
                call=WRONG_SUPERVISOR,
            ),
            Needed(
                "supervised_until > now",
                "a supervisor whose lease has expired starts a process while another one takes the row",
                row=held(supervised_until=NOW),
            ),
            Needed("generation = %(generation)s", "a process is replaced by two", call=OLD_PROCESS),
            Needed("status = 'RUNNING'", "a process is started for a worker that was paused", row=held("PAUSED")),
        ),
    ),
    GuardedWrite(
        "record_process",
        row=held(),
        call=by_id(supervisor="one", generation=2, pid=7, birth="then"),
        conditions=(
            Needed("id = %(id)s", "all rows get the process of one", call=WRONG_ROW),
            Needed(
                "supervisor_id = %(supervisor)s",
                "a supervisor that lost the row overwrites the process of the present one",
                call=WRONG_SUPERVISOR,
            ),
            Needed("generation = %(generation)s", "an old process is taken for the current one", call=OLD_PROCESS),
        ),
    ),
    GuardedWrite(
        "record_memory",
        row=held(),
        call=lambda row: {"ids": [row["id"]], "bytes": [1], "supervisor": "one"},
        conditions=(
            Needed("workers.id = used.id", "all workers show the memory of one", call={"ids": [NOBODY]}),
            Needed(
                "supervisor_id = %(supervisor)s",
                "a supervisor that lost the row writes the memory of a process on another host",
                call=WRONG_SUPERVISOR,
            ),
        ),
    ),
    GuardedWrite(
        "record_process_end",
        row=held(pid=7),
        call=by_id(supervisor="one", generation=2, crashes=1, delay=1.0),
        conditions=(
            Needed("id = %(id)s", "the processes of all workers count as ended", call=WRONG_ROW),
            Needed(
                "supervisor_id = %(supervisor)s",
                "a supervisor that lost the row reports the end of a process that runs",
                call=WRONG_SUPERVISOR,
            ),
            Needed(
                "generation = %(generation)s",
                "the end of an old process counts as the end of the current one, and a second one is started",
                call=OLD_PROCESS,
            ),
        ),
    ),
    GuardedWrite(
        "reset_crashes",
        row=held(crashes=3),
        call=by_id(supervisor="one", generation=2),
        conditions=(
            Needed("id = %(id)s", "workers that crash at every start are restarted without a pause", call=WRONG_ROW),
            Needed(
                "supervisor_id = %(supervisor)s",
                "a supervisor that lost the row forgets crashes that the present one counts",
                call=WRONG_SUPERVISOR,
            ),
            Needed(
                "generation = %(generation)s",
                "the long life of an old process makes the crashes of the current one forgotten",
                call=OLD_PROCESS,
            ),
            Needed("crashes > 0", "the rows of all healthy workers are written on every tick", row=held(crashes=0)),
        ),
    ),
    GuardedWrite(
        "release_held_worker",
        row=held(),
        call=by_id(supervisor="one", generation=2),
        conditions=(
            Needed("id = %(id)s", "a supervisor gives up all of its rows", call=WRONG_ROW),
            Needed(
                "supervisor_id = %(supervisor)s",
                "a supervisor that lost the row takes it from the present one",
                call=WRONG_SUPERVISOR,
            ),
            Needed(
                "generation = %(generation)s",
                "a row is given up while its current process runs",
                call=OLD_PROCESS,
            ),
        ),
    ),
    GuardedWrite(
        "release_held_workers",
        row=held(),
        call=lambda _: {"supervisor": "one"},
        conditions=(
            Needed(
                "supervisor_id = %(supervisor)s",
                "a supervisor that stops takes the rows of the others from them",
                call=WRONG_SUPERVISOR,
            ),
        ),
    ),
    GuardedWrite(
        "expire_leases_of_workers",
        row=task("running", worker_id="dead"),
        call=lambda _: {"holders": ["dead"]},
        conditions=(
            Needed(
                "lease_expires_at >= now",
                "a lease that has expired is moved forward, so that its record tells a wrong time",
                row=task("running", worker_id="dead", lease_expires_at=NOW - MINUTE),
            ),
            Needed(
                "worker_id = any (%(holders)s)",
                "the tasks of live workers are taken from them",
                row=task("running", worker_id="alive"),
            ),
        ),
    ),
    GuardedWrite(
        "detach_process",
        row=worker("RUNNING", generation=2, seen_until=NOW + MINUTE),
        call=by_id(generation=2),
        conditions=(
            Needed("id = %(id)s", "every worker counts as gone", call=WRONG_ROW),
            Needed(
                "generation = %(generation)s",
                "an old process that ends late makes the current one count as gone",
                call=OLD_PROCESS,
            ),
        ),
    ),
)
