"""Advancing jobs in the database: order, joins, decisions, failures, compensations and the end of the job."""

from __future__ import annotations

from typing import Any

import pytest

from factories import step
from interlock.store.jobs import read_job_history
from interlock.store.limits import pause_namespace, resume_namespace
from job_driver import Failed, JobDriver, name_of

pytestmark = pytest.mark.store


async def test_a_chain_runs_in_order_and_passes_results_downstream(driver: JobDriver) -> None:
    driver.outcomes = {"a": {"x": 1}, "b": [2], "c": "last"}
    job = await driver.submit(step("a"), step("b", "a"), step("c", "b", config={"k": "v"}), input={"order": 7})
    for name in "abc":
        (task,) = await driver.claim()
        assert name_of(task) == name
        if name == "c":
            inputs = await driver.inputs(task.id)
            assert inputs["results"] == {"b": [2]}, "of direct upstream steps only"
            assert (inputs["job_input"], inputs["config"]) == ({"order": 7}, {"k": "v"})
            assert (inputs["workflow"], inputs["version"], inputs["kind"], inputs["errors"]) == ("w", "1", "plain", {})
        await driver.settle(task)
        done = await driver.advance()
        assert (done.received, done.advanced, done.duplicates) == (1, 1, 0)
        assert (done.released, done.finalized) == ((0, 1) if name == "c" else (1, 0))
    row = await driver.job(job)
    assert (row["status"], row["output"], row["open_steps"]) == ("COMPLETED", {"c": "last"}, 0)
    assert [record["event"] for record in await read_job_history(driver.connection, job)][-1] == "success"


async def test_a_join_waits_for_all_upstream_steps_in_any_order_and_batch(driver: JobDriver) -> None:
    names = [f"b{i}" for i in range(7)]
    job = await driver.submit(step("a"), *(step(name, "a") for name in names), step("z", *names))
    await driver.settle((await driver.claim())[0])
    assert (await driver.advance()).released == 7
    for task in reversed(await driver.claim()):
        await driver.settle(task)
    assert (await driver.advance(limit=3)).released == 0
    assert (await driver.steps(job))["z"]["unresolved"] == 4
    assert (await driver.advance(limit=3)).released == 0
    assert (await driver.advance(limit=3)).released == 1
    await driver.run()
    assert (await driver.job(job))["output"] == {"z": None}


async def test_a_decision_skips_unchosen_branches_and_a_join_waits_for_the_chosen_ones(driver: JobDriver) -> None:
    driver.outcomes = {"d": "express", "express": 1, "join": "ok"}
    job = await driver.submit(
        step("d", kind="decision", branches=["express", "standard"]),
        step("express", "d"),
        step("standard", "d"),
        step("after_standard", "standard"),
        step("always", "d"),
        step("join", "express", "after_standard"),
    )
    await driver.run()
    steps = await driver.steps(job)
    assert {name: found["state"] for name, found in steps.items()} == {
        "d": "done",
        "express": "done",
        "standard": "skipped",
        "after_standard": "skipped",
        "always": "done",
        "join": "done",
    }
    assert (steps["standard"]["reason"], steps["standard"]["skipped_by_failure"]) == ("branch not chosen", False)
    assert steps["after_standard"]["reason"] == "step standard was skipped"
    assert (await driver.job(job))["output"] == {"always": None, "join": "ok"}


async def test_a_decision_may_choose_several_or_none(driver: JobDriver) -> None:
    driver.outcomes = {"d": ["x", "y"], "e": []}
    job = await driver.submit(
        step("d", kind="decision", branches=["x", "y", "z"]),
        step("e", "d", kind="decision", branches=["p"]),
        *(step(name, "d") for name in "xyz"),
        step("p", "e"),
    )
    await driver.run()
    assert await driver.states(job) == {
        **dict.fromkeys("dexy", "done"),
        **dict.fromkeys("zp", "skipped"),
    }
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_an_unhandled_failure_skips_downstream_steps_and_fails_the_job_at_its_end(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("boom")}
    job = await driver.submit(step("a"), step("b", "a"), step("c", "b"), step("x"), step("y", "x"))
    await driver.run()
    steps = await driver.steps(job)
    assert {name: found["state"] for name, found in steps.items()} == {
        "a": "error",
        "b": "skipped",
        "c": "skipped",
        "x": "done",
        "y": "done",
    }
    assert (steps["b"]["reason"], steps["b"]["skipped_by_failure"]) == ("step a failed", True)
    assert (steps["c"]["reason"], steps["c"]["skipped_by_failure"]) == ("step b failed", True)
    row = await driver.job(job)
    assert (row["status"], row["reason"], row["output"]) == ("FAILED", "step a failed: boom", None)
    assert row["error"] == {"steps": {"a": {"type": "ValueError", "message": "boom"}}}


async def test_the_reason_of_a_skip_names_the_failed_step_of_any_batch(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("boom")}
    job = await driver.submit(step("a"), step("b"), step("c", "a", "b"), step("d", "c"))
    tasks = {name_of(task): task for task in await driver.claim()}
    for name in ("a", "b"):
        await driver.settle(tasks[name])
        await driver.advance()
    steps = await driver.steps(job)
    assert (steps["c"]["reason"], steps["d"]["reason"]) == ("step a failed", "step c failed")
    assert (await driver.job(job))["reason"] == "step a failed: boom"


async def test_the_reason_of_a_handler_that_is_not_needed_names_the_step_of_any_batch(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("boom")}
    job = await driver.submit(step("a"), step("s", "a"), step("b"), step("x"), step("c", "x", on_failure=["s", "b"]))
    tasks = {name_of(task): task for task in await driver.claim()}
    for name in ("a", "b", "x"):
        await driver.settle(tasks[name])
        await driver.advance()
    assert (await driver.steps(job))["c"]["reason"] == "step b did not fail", "s failed: it was skipped because of a"


async def test_a_recovering_step_replaces_the_failed_one_and_is_passed_over_without_a_failure(
    driver: JobDriver,
) -> None:
    driver.outcomes = {"a": Failed("boom"), "mend": "mended"}
    declared = [step("a", compensate="undo"), step("mend", recovers=["a"]), step("b", "a")]
    job = await driver.submit(*declared)
    await driver.run(until=lambda: "a" in driver.ran)
    (task,) = await driver.claim()
    assert (await driver.inputs(task.id))["errors"] == {"a": {"type": "ValueError", "message": "boom"}}
    await driver.settle(task)
    await driver.advance()
    (task,) = await driver.claim()
    assert (await driver.inputs(task.id))["results"] == {"a": "mended"}, "the result of the step that recovered it"
    await driver.settle(task)
    await driver.run()
    row = await driver.job(job)
    assert (row["status"], row["output"]) == ("COMPLETED", {"mend": "mended", "b": None})
    driver.outcomes = {"a": "well"}
    well = await driver.submit(*declared)
    await driver.run()
    steps = await driver.steps(well)
    assert [steps[name]["state"] for name in ("a", "mend", "b")] == ["done", "skipped", "done"]
    assert (steps["mend"]["reason"], steps["mend"]["skipped_by_failure"]) == ("step a did not fail", False)
    assert (await driver.job(well))["status"] == "COMPLETED"


async def test_a_recovery_that_fails_leaves_the_failure_standing(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("boom"), "mend": Failed("broken too")}
    job = await driver.submit(
        step("z", compensate="undo"), step("a", "z"), step("mend", recovers=["a"]), step("b", "a")
    )
    await driver.run()
    assert await driver.states(job) == {
        "z": "done",
        "a": "error",
        "mend": "error",
        "b": "skipped",
        "compensate:z": "done",
    }
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == ("FAILED", "step a failed: boom")
    assert row["error"]["steps"].keys() == {"a", "mend"}


async def test_observers_run_and_leave_the_job_to_fail_and_to_compensate(driver: JobDriver) -> None:
    driver.outcomes = {"charge": Failed("no funds")}
    declared = [
        step("reserve", compensate="release"),
        step("charge", "reserve"),
        step("ship", "charge"),
        step("notify", on_failure=["charge"]),
        step("tidy", "reserve", always=["charge"]),
    ]
    job = await driver.submit(*declared)
    await driver.run()
    assert await driver.states(job) == {
        "reserve": "done",
        "charge": "error",
        "ship": "skipped",
        "notify": "done",
        "tidy": "done",
        "compensate:reserve": "done",
    }
    assert driver.ran[-1] == "compensate:reserve", "after everything that still ran"
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == ("FAILED", "step charge failed: no funds")
    driver.outcomes = {}
    well = await driver.submit(*declared)
    await driver.run()
    steps = await driver.steps(well)
    assert {name: found["state"] for name, found in steps.items()} == {
        **dict.fromkeys(("reserve", "charge", "ship", "tidy"), "done"),
        "notify": "skipped",
    }
    assert steps["notify"]["reason"] == "step charge did not fail"
    assert (await driver.job(well))["status"] == "COMPLETED"


@pytest.mark.parametrize(
    ("join", "failing", "released"),
    [
        ("any", ["a", "b"], True),
        ("any", ["a", "b", "c"], False),
        (0.6, ["a"], True),
        (0.7, ["a"], False),
        ("all", ["a"], False),
        (1.0, [], True),
    ],
)
async def test_a_join_needs_its_share(driver: JobDriver, join: Any, failing: list[str], *, released: bool) -> None:
    driver.outcomes = {name: Failed("no") for name in failing}
    job = await driver.submit(*(step(name) for name in "abc"), step("z", *"abc", join=join))
    await driver.run()
    assert (await driver.states(job))["z"] == ("done" if released else "skipped")
    assert (await driver.job(job))["status"] == ("COMPLETED" if released else "FAILED")


async def test_a_failure_handler_that_is_not_needed_is_skipped_and_not_poisoned(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("m", on_failure=["a"]), step("n", "m"), step("o", on_failure=["m"]))
    await driver.run()
    steps = await driver.steps(job)
    assert [(steps[name]["state"], steps[name]["skipped_by_failure"]) for name in "mno"] == [("skipped", False)] * 3
    assert [steps[name]["reason"] for name in "mno"] == [
        "step a did not fail",
        "step m was skipped",
        "step m did not fail",
    ]
    row = await driver.job(job)
    assert (row["status"], row["output"]) == ("COMPLETED", {"a": None}), "a step with observers only is a last step"


async def test_a_step_that_was_skipped_because_of_a_failure_counts_as_failed(driver: JobDriver) -> None:
    driver.outcomes = {"a": Failed("boom")}
    observed = await driver.submit(step("a"), step("b", "a"), step("c", on_failure=["b"]), name="observed")
    recovered = await driver.submit(step("a"), step("b", "a"), step("c", recovers=["b"]), name="recovered")
    await driver.run()
    for job, status in ((observed, "FAILED"), (recovered, "COMPLETED")):
        assert await driver.states(job) == {"a": "error", "b": "skipped", "c": "done"}
        assert (await driver.job(job))["status"] == status


async def test_compensations_run_in_reverse_order_of_completion(driver: JobDriver) -> None:
    driver.outcomes = {"a": {"id": 1}, "b": {"id": 2}, "c": Failed("boom"), "compensate:b": Failed("stuck")}
    job = await driver.submit(
        step("a", compensate="undo_a"), step("b", "a", compensate="undo_b"), step("c", "b", compensate="undo_c")
    )
    await driver.run(until=lambda: "c" in driver.ran)
    row = await driver.job(job)
    assert (row["status"], row["ending"]) == ("RUNNING", "FAILED")
    assert row["reason"] == "compensating after: step c failed: boom"
    states = await driver.states(job)
    assert (states["compensate:b"], states["compensate:a"]) == ("pending", "waiting"), "one after the other"
    (task,) = await driver.claim()
    assert (name_of(task), task.type, task.input) == ("compensate:b", "undo_b", {"result": {"id": 2}})
    inputs = await driver.inputs(task.id)
    assert (inputs["kind"], inputs["result"], inputs["results"]) == ("compensation", {"id": 2}, {})
    await driver.settle(task)
    await driver.run()
    assert driver.ran == ["a", "b", "c", "compensate:b", "compensate:a"]
    row = await driver.job(job)
    assert (row["status"], row["reason"]) == ("FAILED", "step c failed: boom")
    assert row["error"]["steps"].keys() == {"c"}
    assert row["error"]["compensations"] == {"b": {"type": "ValueError", "message": "stuck"}}


async def test_a_compensation_has_the_tries_and_timeout_of_its_own_task(driver: JobDriver) -> None:
    driver.outcomes = {"c": Failed("boom")}
    own = {"compensate": "undo", "compensate_tries": 7, "compensate_timeout": 3.5}
    job = await driver.submit(
        step("a", max_tries=1, timeout=9, backoff={"kind": "none"}, **own),
        step("b", "a", max_tries=2, timeout=9, compensate="undo"),
        step("c", "b"),
    )
    await driver.run()
    query = "select step, max_tries, timeout_seconds, backoff from interlock.tasks where job_id = %s order by step"
    rows = await (await driver.connection.execute(query, [job])).fetchall()
    assert [tuple(row.values()) for row in rows if row["step"].startswith("comp")] == [
        ("compensate:a", 7, 3.5, None),
        ("compensate:b", 2, 9.0, None),
    ]


async def test_a_completed_job_and_a_job_without_done_steps_compensate_nothing(driver: JobDriver) -> None:
    driver.outcomes = {"b": Failed("boom")}
    await driver.submit(step("a", compensate="undo"))
    await driver.submit(step("b", compensate="undo"), name="other")
    await driver.run()
    assert sorted(driver.ran) == ["a", "b"]


async def test_worker_count_limits_the_steps_that_run_at_once(driver: JobDriver) -> None:
    names = [f"b{i}" for i in range(5)]
    job = await driver.submit(step("a"), *(step(name, "a") for name in names), step("z", *names), worker_count=2)
    await driver.settle((await driver.claim())[0])
    await driver.advance()
    for left in (3, 2, 1, 0):
        steps = await driver.steps(job)
        held = [found for found in steps.values() if found["held_by"] == "worker_count"]
        assert len(held) == left
        assert all(found["reason"] == "the job runs at most 2 steps at once" for found in held)
        active = [name for name, found in steps.items() if found["state"] in {"pending", "running"}]
        assert len(active) == 2
        await driver.settle((await driver.claim(limit=1))[0])
        await driver.advance()
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_worker_count_applies_to_root_steps_parts_and_priorities(driver: JobDriver) -> None:
    driver.outcomes = {"a": [1, 2, 3, 4]}
    roots = [step("a"), step("r1", priority=5), step("r2", priority=9)]
    job = await driver.submit(*roots, step("m", "a", kind="map", over="a"), worker_count=1)
    seen = []
    while claimed := await driver.claim():
        assert len(claimed) == 1
        seen.append(name_of(claimed[0]))
        await driver.settle(claimed[0])
        await driver.advance()
    assert seen == ["r2", "r1", "a", "m[0]", "m[1]", "m[2]", "m[3]"]
    assert (await driver.job(job))["status"] == "COMPLETED"


async def test_a_paused_namespace_holds_steps_that_become_ready(driver: JobDriver) -> None:
    job = await driver.submit(step("a"), step("b", "a", namespace="inventory"))
    await pause_namespace(driver.connection, "inventory", "stocktaking", "ada")
    await driver.run()
    found = (await driver.steps(job))["b"]
    assert (found["state"], found["held_by"]) == ("waiting", "namespace")
    await resume_namespace(driver.connection, "inventory", "ada")
    await driver.run()
    assert (await driver.job(job))["status"] == "COMPLETED"
