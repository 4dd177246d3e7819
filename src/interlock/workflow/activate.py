"""Activates ready steps: plain steps become pending; map, sleep, signal, approval and child steps enter their own wait.

`apply_batch` is the last stage of every orchestration transaction: it activates, finalizes jobs and writes.

Invariant: everything that the end of a step leads to (activated steps, parts, child jobs, steps skipped in turn) is
written in the same transaction that takes the end.
"""

from __future__ import annotations

from collections import Counter, deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from interlock.errors import PermanentError
from interlock.lifecycle import TaskRowState
from interlock.model.conditions import parse_condition
from interlock.model.graph import (
    INPUT_PATH_PREFIX,
    MAP,
    MAP_SOURCE_ERROR,
    MAX_MAP_PARTS,
    SIGNAL_KINDS,
    SINGLE_TASK_KINDS,
    require_approval,
    signal_name,
    too_many_parts_error,
)
from interlock.model.joins import (
    BRANCH_NOT_CHOSEN,
    MAX_NAMED_PARTS,
    Ruling,
    StepEnd,
    UpstreamEnd,
    decide,
    describe_failed_parts,
    describe_unmet,
    is_share_met,
    names_in,
)
from interlock.model.options import check_text
from interlock.model.timing import later, wake_at
from interlock.postgres.ids import new_id
from interlock.postgres.query import run, run_in_order
from interlock.store.jobs import JOBS, ORCHESTRATION, STEPS
from interlock.store.signals import SIGNALS
from interlock.store.step_results import SimpleStepMessage
from interlock.store.task_admin import (
    cancel_unfinished_tasks,
    request_cancel_of_running_tasks,
    request_cancel_of_waiting_steps,
)
from interlock.workflow.batch import Activation, KeptPart, lock_jobs
from interlock.workflow.child_jobs import prepare_children
from interlock.workflow.finalize import complete_jobs, finalize_jobs, jobs_without_open_steps
from interlock.workflow.new_job import (
    insert_jobs,
)
from interlock.workflow.resolve import EndedStep, SkippedStep, WaitingStep, chosen_names, step_end

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from uuid import UUID

    from interlock.postgres.connection import Connection
    from interlock.workflow.batch import Batch


async def apply_batch(connection: Connection, batch: Batch, messages: Sequence[int] = ()) -> None:
    """Activate the ready steps of a batch, finalize its jobs, write all of it and delete the handled messages."""
    await _activate_ready_steps(connection, batch)
    writes = batch.take_step_writes()
    if batch.racing:
        await run_in_order(connection, writes)
        await _cancel_rest(connection, batch)
        writes = []
    if _needs_reads(batch):
        # the reads that follow must see the writes so far
        await run_in_order(connection, writes)
        await _admit_by_worker_count(connection, batch)
        await finalize_jobs(connection, batch)
        writes = batch.take_step_writes()
    else:
        batch.completed += jobs_without_open_steps(batch)
    if batch.completed:
        await run_in_order(connection, writes)
        await complete_jobs(connection, batch)
        writes = batch.take_step_writes()
    await run_in_order(connection, [*writes, *batch.take_job_writes(messages)])


def _needs_reads(batch: Batch) -> bool:
    """Tell whether a job has a `worker_count`, a failure or an ending, so that its counters do not decide alone."""
    return any(
        job.changed
        and (job.worker_count is not None or job.ending is not None or (job.failed_steps and not job.open_steps))
        for job in batch.jobs.values()
    )


async def _cancel_rest(connection: Connection, batch: Batch) -> None:
    """Cancel the unfinished dependencies of ready steps with `cancel_rest`; their ends come as messages."""
    names = {step.id: step.step for step in batch.racing}
    batch.racing = []
    rest = [row["id"] for row in await run(connection, STEPS["supersede_upstream_steps"], {"ids": list(names)})]
    reason = f"step {', '.join(sorted(set(names.values())))} has what it needs"
    await cancel_steps(connection, batch, rest, reason=reason)


async def cancel_steps(connection: Connection, batch: Batch, ids: Sequence[UUID], *, reason: str) -> None:
    """Cancel waiting and pending steps of locked jobs, and ask running ones to stop.

    A step that waits for its parts or its child job ends when these have been canceled. In a job that is about to be
    canceled, nothing depends on the end of a map, so that it is canceled before its parts have stopped.
    """
    if not ids:
        return
    options: dict[str, Any] = {"actor": batch.actor, "reason": reason, "now": batch.now}
    await cancel_unfinished_tasks(connection, ids, **options)
    await request_cancel_of_running_tasks(connection, ids, reason=reason, now=batch.now)
    waiting = await request_cancel_of_waiting_steps(connection, ids, **options)
    await cancel_below_steps(connection, batch, [row["id"] for row in waiting])
    maps = [row["id"] for row in waiting if row["held_by"] == "parts" and batch.jobs[row["job_id"]].is_ending]
    await cancel_waiting_steps(connection, batch, maps, reason=reason)


async def cancel_waiting_steps(connection: Connection, batch: Batch, ids: Sequence[UUID], *, reason: str) -> None:
    """Cancel steps that waited for their parts or their child job."""
    if ids:
        await cancel_unfinished_tasks(connection, ids, actor=batch.actor, reason=reason, running=True, now=batch.now)


async def cancel_below_steps(connection: Connection, batch: Batch, ids: Sequence[UUID]) -> None:
    """Cancel the unfinished parts of these steps, and let their child jobs be canceled.

    A child gets a message: a transaction that locked a job and then its parent or child could deadlock. The message has
    ids only: the child is canceled because its parent or its step is.
    """
    if not ids:
        return
    parts = [row["id"] for row in await run(connection, STEPS["read_unfinished_parts"], {"ids": list(ids)})]
    await cancel_steps(connection, batch, parts, reason="the map was canceled")
    children = await run(connection, ORCHESTRATION["read_children_of_steps"], {"ids": list(ids)})
    batch.messages += [SimpleStepMessage(child["id"]) for child in children]


# --- From ended steps to ready ones -----------------------------------------------------------------------------


async def take_ended_steps(
    connection: Connection, *, ids: Sequence[UUID] = (), job_ids: Sequence[UUID] = (), skipped: Sequence[UUID] = ()
) -> list[dict[str, Any]]:
    """Take each ended step once, and return a row for each step that waits for it."""
    parameters = {"ids": list(ids), "job_ids": list(job_ids), "skipped": list(skipped)}
    return await run(connection, ORCHESTRATION["take_ended_steps"], parameters)


def distinct_ended_steps(rows: Iterable[dict[str, Any]]) -> list[EndedStep]:
    """Return the steps that `take_ended_steps` took, each once."""
    found = {
        row["upstream_id"]: EndedStep(
            row["upstream_id"],
            row["upstream_job_id"],
            row["upstream"],
            row["state"],
            part_of=row["part_of"],
            chosen=row["chosen"],
            superseded=row["superseded"],
        )
        for row in rows
    }
    return list(found.values())


async def resolve_ended_steps(
    connection: Connection, batch: Batch, ended: Collection[EndedStep], rows: Sequence[dict[str, Any]] | None = None
) -> None:
    """Resolve the edges of ended steps, then those of the steps that are skipped by it, and so on.

    `rows` are the waiting steps downstream of `ended`, if they have been read.
    """
    batch.count_ended(ended)
    frontier = {step.id: step for step in ended if batch.jobs[step.job_id].is_advancing}
    while frontier:
        if rows is None:
            rows = await take_ended_steps(connection, skipped=list(frontier))
        frontier = batch.resolution.resolve(frontier, rows)
        frontier |= await _apply_rules(connection, batch)
        rows = None
        batch.count_ended(frontier.values())
    await _add_skip_reasons(connection, batch)


async def _apply_rules(connection: Connection, batch: Batch) -> dict[UUID, EndedStep]:
    """Decide steps by their stored rules; return those that are skipped."""
    resolution = batch.resolution
    ruled, resolution.ruled = resolution.ruled, {}
    if not ruled:
        return {}
    wanted = [(step, name) for step in ruled.values() for name in names_in(step.rule or {})]
    parameters = {
        "ids": [step.id for step, _ in wanted],
        "job_ids": [step.job_id for step, _ in wanted],
        "upstreams": [name for _, name in wanted],
    }
    ends: dict[UUID, dict[str, UpstreamEnd]] = {id_: {} for id_ in ruled}
    for row in await run(connection, STEPS["read_upstream_ends"], parameters):
        end = step_end(
            row["state"],
            skipped_by_failure=row["skipped_by_failure"],
            superseded=row["superseded"],
            reused=row["reused"],
        )
        ends[row["id"]][row["step"]] = UpstreamEnd(end, chosen_names(row["chosen"]))
    for step, name in wanted:
        # decided in this batch, and perhaps not written yet
        known = resolution.ends.get((step.job_id, name))
        if known is not None:
            ends[step.id][name] = known
    skipped = {}
    for step in ruled.values():
        skip = resolution.apply(step, decide(step.rule or {}, ends[step.id]))
        if skip is not None:
            skipped[step.id] = skip.as_ended()
    return skipped


async def _add_skip_reasons(connection: Connection, batch: Batch) -> None:
    """Name the upstream step because of which a step is skipped, where that ended in an earlier batch."""
    ids = [skip.step.id for skip in batch.resolution.skipped if skip.reason is None]
    if not ids:
        return
    reasons = {}
    for row in await run(connection, ORCHESTRATION["read_unmet_dependencies"], {"ids": ids}):
        end = StepEnd.FAILED if row["has_failed"] else StepEnd.PASSED_OVER
        reasons[row["id"]] = describe_unmet(row["step"], row["condition"], end)
    batch.resolution.skipped = [
        skip if skip.reason is not None else skip._replace(reason=reasons.get(skip.step.id, BRANCH_NOT_CHOSEN))
        for skip in batch.resolution.skipped
    ]


# --- Root steps of a job that starts ----------------------------------------------------------------------------


async def start_pending_jobs(connection: Connection, ids: Collection[UUID], *, actor: str, now: datetime | None) -> int:
    """Start jobs, activate their root steps and return how many started. Must run in a transaction that locked them."""
    parameters = {"ids": list(ids), "reason": None, "actor": actor, "now": now}
    started = [row["id"] for row in await run(connection, JOBS["start_pending_jobs"], parameters)]
    if started:
        await activate_root_steps(connection, started, actor=actor, now=now)
    return len(started)


async def activate_root_steps(
    connection: Connection, ids: Iterable[UUID], *, actor: str, now: datetime | None
) -> Batch:
    """Activate the root steps of jobs that have started; skip steps that a retry does not run. In a transaction."""
    batch = await lock_jobs(connection, ids, actor=actor, now=now)
    await _resolve_steps_ended_before_start(connection, batch)
    roots = await run(connection, STEPS["read_root_steps"], {"ids": list(batch.jobs)})
    kept = [row for row in roots if row["reused"] or row["left_out"] is not None]
    await _skip_kept_steps(connection, batch, kept)
    kept_ids = {row["id"] for row in kept}
    batch.resolution.ready += [_root_step(row) for row in roots if row["id"] not in kept_ids]
    for job in batch.jobs.values():
        job.changed = True
    await apply_batch(connection, batch)
    return batch


async def _resolve_steps_ended_before_start(connection: Connection, batch: Batch) -> None:
    """Resolve steps that were canceled while their job was waiting to start."""
    found = await run(connection, ORCHESTRATION["read_ended_steps"], {"ids": list(batch.jobs)})
    if found:
        rows = await take_ended_steps(connection, ids=[row["id"] for row in found], job_ids=list(batch.jobs))
        await resolve_ended_steps(connection, batch, distinct_ended_steps(rows), rows)


async def _skip_kept_steps(connection: Connection, batch: Batch, rows: Sequence[dict[str, Any]]) -> None:
    """Skip steps whose ends the job takes over from an earlier job: with a result, failed, or passed over."""
    if not rows:
        return
    # written before they are resolved, so that none of them is read as waiting for another
    for row in rows:
        source = batch.jobs[row["job_id"]].retried_from
        reason = (
            f"result reused from job {source}" if row["reused"] else f"not run again: it was not needed in job {source}"
        )
        batch.resolution.skipped.append(
            SkippedStep(_root_step(row), skipped_by_failure=bool(row["left_out"]), reason=reason)
        )
    await run_in_order(connection, batch.take_step_writes())
    ended = [
        EndedStep(
            row["id"],
            row["job_id"],
            row["step"],
            TaskRowState.SKIPPED,
            chosen=row["chosen"],
            skipped_by_failure=bool(row["left_out"]),
            reused=row["reused"],
        )
        for row in rows
    ]
    await resolve_ended_steps(connection, batch, ended)


def _root_step(row: dict[str, Any]) -> WaitingStep:
    names = ("id", "job_id", "step", "kind", "namespace", "priority", "limit_keys", "condition")
    return WaitingStep(**{name: row[name] for name in names})


# --- Activation by kind -----------------------------------------------------------------------------------------


async def _activate_ready_steps(connection: Connection, batch: Batch) -> None:
    while batch.resolution.ready:  # a step that ends at once can make others ready
        ready, batch.resolution.ready = batch.resolution.ready, []
        if any(step.condition is not None for step in ready):
            ready = await _check_conditions(connection, batch, ready)
        special = {}
        for step in ready:
            if step.cancel_rest:
                batch.racing.append(step)
            if step.kind in SINGLE_TASK_KINDS:
                batch.activate(step)
            else:
                special[step.id] = step
        if special:
            await _activate_special_steps(connection, batch, special)


async def _check_conditions(connection: Connection, batch: Batch, ready: Sequence[WaitingStep]) -> list[WaitingStep]:
    """Pass over the steps whose condition is false, and return the others."""
    await run_in_order(connection, batch.take_step_writes())  # a result of this batch must be readable
    ids = [step.id for step in ready if step.condition is not None]
    inputs = {row["id"]: row["inputs"] for row in await run(connection, STEPS["read_condition_values"], {"ids": ids})}
    met, ended = [], []
    for step in ready:
        values = inputs.get(step.id)
        if step.condition is None or values is None:
            met.append(step)
        elif values.get("refused") is not None:
            ended.append(batch.fail(step, str(values["refused"])))
        elif parse_condition(step.condition).is_met({**values["results"], "input": values["job_input"]}):
            met.append(step)
        else:
            ruling = Ruling(StepEnd.PASSED_OVER, cause=f"its condition is false: {step.condition}")
            ended.append(batch.resolution.skip(step, ruling).as_ended())
    await resolve_ended_steps(connection, batch, ended)
    return met


async def _activate_special_steps(connection: Connection, batch: Batch, steps: dict[UUID, WaitingStep]) -> None:
    """Start the wait of steps that have no handler of their own, or end them at once."""
    await run_in_order(connection, batch.take_step_writes())  # a result of this batch must be readable
    ended = await _end_maps(connection, batch, {id_: step for id_, step in steps.items() if step.waits_for_parts})
    children = []
    ids = [id_ for id_, step in steps.items() if not step.waits_for_parts]
    rows = await run(connection, STEPS["read_special_steps"], {"ids": ids}) if ids else []
    signals = await _read_signals(connection, [row for row in rows if row["kind"] in SIGNAL_KINDS])
    for row in rows:
        if row["kind"] == "child":
            children.append(row)
        elif row["kind"] in SIGNAL_KINDS:
            ended.append(_activate_signal(batch, steps[row["id"]], row, signals.get(row["id"])))
        else:
            ended.append(_ACTIVATE_BY_KIND[row["kind"]](batch, steps[row["id"]], row))
    if children:
        ended += await _activate_children(connection, batch, steps, children)
    await resolve_ended_steps(connection, batch, [step for step in ended if step is not None])


async def _end_maps(connection: Connection, batch: Batch, maps: Mapping[UUID, WaitingStep]) -> list[EndedStep | None]:
    """End maps whose parts have all ended: done if enough parts are, in error otherwise.

    A map that is to be canceled is done only if all of its parts are.
    """
    if not maps:
        return []
    parameters = {"ids": list(maps), "names": MAX_NAMED_PARTS}
    parts = {row["id"]: row for row in await run(connection, STEPS["read_ended_parts"], parameters)}
    ended: list[EndedStep | None] = []
    for id_, step in maps.items():
        row = parts[id_]
        if row["is_to_be_canceled"] and row["done"] < row["parts"]:
            await cancel_waiting_steps(connection, batch, [id_], reason=row["reason"])
        elif is_share_met(row["strategy"], row["done"], row["parts"]):
            ended.append(batch.succeed(step))
        else:
            failed = row["parts"] - row["done"]
            message = describe_failed_parts(row["failed"], failed, row["parts"])
            ended.append(batch.fail(step, message, "PartsFailed"))
    return ended


def _activate_map(batch: Batch, step: WaitingStep, row: dict[str, Any]) -> EndedStep | None:
    """Insert the parts of a map, and let the map wait for those that run; a map without parts to run ends at once."""
    parts: int | None = row["parts"]
    if parts is None:
        return batch.fail(step, MAP_SOURCE_ERROR)
    if parts > MAX_MAP_PARTS:
        return batch.fail(step, too_many_parts_error(parts))
    if parts == 0:
        return batch.succeed(step)
    job = batch.jobs[step.job_id]
    kept = [KeptPart(new_id(), step.id, part, job.retried_from) for part in row["kept_parts"] if part < parts]
    batch.kept_parts += kept
    batch.maps.append(step.id)
    batch.created_count += parts
    running = parts - len(kept)
    if running == 0:
        return batch.succeed(step)
    reason = f"waits for {running} part{'s' if running > 1 else ''}"
    rest = row["input_without_source"]
    batch.keep_waiting(
        step.id, unresolved=running, taken=len(kept), failed=0, held_by="parts", reason=reason, parts_job_input=rest
    )
    job.open_steps += running
    job.changed = True
    return None


def _activate_sleep(batch: Batch, step: WaitingStep, row: dict[str, Any]) -> EndedStep | None:
    now = batch.moment or datetime.now(UTC)
    try:
        until = wake_at(row["spec"], row["until"], now)
    except ValueError as error:
        return batch.fail(step, str(error))
    if until <= now:
        return batch.succeed(step)
    batch.keep_waiting(step.id, held_by="sleep", reason=f"sleeps until {until:%Y-%m-%d %H:%M:%S %Z}", wait_until=until)
    return None


async def _read_signals(connection: Connection, rows: Sequence[dict[str, Any]]) -> dict[UUID, dict[str, Any]]:
    """Find a signal for each of these steps, which are in the order of the definition: the oldest unconsumed one."""
    if not rows:
        return {}
    counts = Counter((row["job_id"], signal_name(row["spec"])) for row in rows)
    parameters = {
        "job_ids": [job_id for job_id, _ in counts],
        "names": [name for _, name in counts],
        "counts": list(counts.values()),
    }
    queues: dict[tuple[UUID, str], deque[dict[str, Any]]] = {key: deque() for key in counts}
    for signal in await run(connection, SIGNALS["read_unconsumed_signals"], parameters):
        queues[signal["job_id"], signal["name"]].append(signal)
    found = {}
    for row in rows:
        queue = queues[row["job_id"], signal_name(row["spec"])]
        if queue:
            found[row["id"]] = queue.popleft()
    return found


def _activate_signal(
    batch: Batch, step: WaitingStep, row: dict[str, Any], signal: dict[str, Any] | None
) -> EndedStep | None:
    """Let a signal or approval step wait, with its timeout, unless the signal has been sent."""
    if signal is not None:
        return consume_signal(batch, step, signal)
    now = batch.moment or datetime.now(UTC)
    spec = row["spec"]
    try:
        assignee = _assignee(spec, row["assignee"])
        until = None if spec.get("timeout") is None else later(now, spec["timeout"])
    except ValueError as error:
        return batch.fail(step, str(error))
    reason = f"waits for signal {spec['signal']!r}" if row["kind"] == "signal" else "waits for approval"
    if assignee is not None:
        reason += f" {'from' if row['kind'] == 'signal' else 'by'} {assignee}"
    batch.keep_waiting(
        step.id, held_by="signal", reason=reason, wait_until=until, wait_started_at=now, assignee=assignee
    )
    return None


def _assignee(spec: dict[str, Any], given: Any) -> str | None:
    """Return who is to send the signal: a name, or the `given` value of the job's input; None is anyone."""
    named: str | None = spec.get("assignee")
    if named is None or not named.startswith(INPUT_PATH_PREFIX):
        return named
    return None if given is None else check_text(f"assignee: {named}", given)


def consume_signal(batch: Batch, step: WaitingStep, signal: Mapping[str, Any]) -> EndedStep:
    """Complete a signal step with the payload, and an approval step with the answer; a rejection fails it."""
    batch.consumed[signal["id"]] = step.step
    payload = signal["payload"]
    if step.kind == "approval":
        try:
            require_approval({"by": signal["sent_by"], **payload} if isinstance(payload, dict) else payload)
        except PermanentError as error:
            return batch.fail(step, str(error), "PermanentError")
    return batch.succeed(step, payload)


_ACTIVATE_BY_KIND = {
    MAP: _activate_map,
    "sleep": _activate_sleep,
}


async def _admit_by_worker_count(connection: Connection, batch: Batch) -> None:
    """Activate steps that wait for the `worker_count` of their job, as many as may run now."""
    ids = [job.id for job in batch.jobs.values() if job.worker_count is not None and job.changed and job.is_advancing]
    if not ids:
        return
    parameters = {"ids": ids, "paused": list(batch.paused), "now": batch.now}
    for row in await run(connection, STEPS["read_admissible_steps"], parameters):
        batch.activate_unless_held(Activation(row["id"], row["namespace"]), row["limit_keys"])


# --- Child jobs -------------------------------------------------------------------------------------------------


async def repeat_children(connection: Connection, batch: Batch, rows: Sequence[dict[str, Any]]) -> list[EndedStep]:
    """Start the next child jobs of steps that repeat theirs; return the steps whose next child is refused.

    The next job gets the input of the last one, updated with the fields of its output.
    """
    given = []
    steps = {}
    for row in rows:
        output = orjson.loads(row["output"]) if row["output"] is not None else None
        update = output if isinstance(output, dict) else {}
        given.append({**row, "inputs": {}, "iteration": row["iteration"] + 1, "next_input": {**row["input"], **update}})
        names = ("id", "job_id", "step", "namespace")
        steps[row["id"]] = WaitingStep(**{name: row[name] for name in names}, kind="child")
    return await _activate_children(connection, batch, steps, given) if given else []


async def _activate_children(
    connection: Connection, batch: Batch, steps: dict[UUID, WaitingStep], rows: Sequence[dict[str, Any]]
) -> list[EndedStep]:
    """Insert the child jobs of these steps; return the steps that do not wait, or whose child is refused."""
    rows, prepared = await prepare_children(connection, batch, rows)
    children = [child for child in prepared if not isinstance(child, str)]
    inserted = await insert_jobs(connection, children, actor=batch.actor, now=batch.now) or [] if children else []
    jobs = dict(zip((child["id"] for child in children), inserted, strict=True))
    ended = []
    for row, child in zip(rows, prepared, strict=True):
        step = steps[row["id"]]
        refusal = child if isinstance(child, str) else jobs[child["id"]].refusal
        if isinstance(child, str) or refusal is not None:
            ended.append(batch.fail(step, str(refusal)))
        elif row["spec"].get("wait", True):
            batch.keep_waiting(step.id, held_by="job", reason=f"waits for job {child['id']}")
        else:
            ended.append(batch.succeed(step, {"job_id": str(child["id"])}))
    batch.created_count += sum(job.created for job in inserted)
    ids = [job.id for job in inserted if job.needs_activation]
    if ids:
        await activate_root_steps(connection, ids, actor=batch.actor, now=batch.now)
    return ended
