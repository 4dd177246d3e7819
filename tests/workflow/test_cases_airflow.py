"""Airflow's published rules as tests: trigger rules, branching, setup and teardown, mapped tasks.

The expectations are those of Airflow's "Core Concepts: Dags" (docs/core-concepts/dags.rst), "Setup and Teardown"
(docs/howto/setup-and-teardown.rst), "Dynamic Task Mapping" (docs/authoring-and-scheduling/dynamic-task-mapping.rst) and
tests/unit/ti_deps/deps/test_trigger_rule_dep.py. Each docstring names the rule or the test. A signal step stands for an
upstream task that still runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from workflow_case import WorkflowCase

pytestmark = pytest.mark.store

SKIPPED = "input.never"  # the condition of a step that is skipped


# The trigger rule all_success (default) is `after`.


async def test_all_success_runs_when_all_upstreams_succeeded(case: WorkflowCase) -> None:
    """test_all_success_tr_success."""
    case.steps("a", "b")
    case.steps("task", after=["a", "b"])
    seen = await case.run()
    assert (seen.status, seen.states["task"], case.ran) == ("COMPLETED", "done", ["a", "b", "task"])


async def test_all_success_is_upstream_failed_after_a_failure(case: WorkflowCase) -> None:
    """test_all_success_tr_failure: UPSTREAM_FAILED, and the run fails."""
    case.steps("a")
    case.step("b", fails=True)
    case.steps("task", after=["a", "b"])
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("FAILED", "upstream failed")


async def test_all_success_is_skipped_after_a_skip(case: WorkflowCase) -> None:
    """test_all_success_tr_skip: SKIPPED; a run whose leaves are skipped succeeds."""
    case.steps("a")
    case.steps("b", when=SKIPPED)
    case.steps("task", after=["a", "b"])
    seen = await case.run()
    assert (seen.status, seen.states["b"], seen.states["task"]) == ("COMPLETED", "skipped", "skipped")


async def test_all_success_prefers_the_failure_to_the_skip(case: WorkflowCase) -> None:
    """TriggerRuleDep evaluates failed upstreams before skipped ones."""
    case.step("a", fails=True)
    case.steps("b", when=SKIPPED)
    case.steps("task", after=["a", "b"])
    assert (await case.run()).states["task"] == "upstream failed"


async def test_upstream_failed_cascades(case: WorkflowCase) -> None:
    """The state upstream_failed is a failure for the tasks below it."""
    case.step("a", fails=True)
    case.steps("b", after=["a"])
    case.steps("c", after=["b"])
    seen = await case.run()
    assert seen.states == {"a": "failed", "b": "upstream failed", "c": "upstream failed"}


async def test_skips_cascade(case: WorkflowCase) -> None:
    """Skipped tasks cascade through all_success."""
    case.steps("a", when=SKIPPED)
    case.steps("b", after=["a"])
    case.steps("c", after=["b"])
    seen = await case.run()
    assert (seen.status, set(seen.states.values())) == ("COMPLETED", {"skipped"})


# all_failed is `on_failure`.


async def test_all_failed_runs_when_all_upstreams_failed(case: WorkflowCase) -> None:
    """test_all_failed_tr_success; here the job still fails, since a handler only observes."""
    for name in ("a", "b"):
        case.step(name, fails=True)
    case.steps("task", on_failure=["a", "b"])
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("FAILED", "done")


async def test_all_failed_is_skipped_when_all_succeeded(case: WorkflowCase) -> None:
    """test_all_failed_tr_failure: SKIPPED."""
    case.steps("a", "b")
    case.steps("task", on_failure=["a", "b"])
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("COMPLETED", "skipped")


async def test_all_failed_is_skipped_when_one_succeeded(case: WorkflowCase) -> None:
    """all_failed: one success is enough for a skip."""
    case.steps("a")
    case.step("b", fails=True)
    case.steps("task", on_failure=["a", "b"])
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("FAILED", "skipped")


async def test_all_failed_counts_upstream_failed(case: WorkflowCase) -> None:
    """all_failed: all upstream tasks are in a failed or upstream_failed state."""
    case.step("a", fails=True)
    case.steps("b", after=["a"])
    case.steps("task", on_failure=["a", "b"])
    assert (await case.run()).states["task"] == "done"


async def test_all_failed_waits_for_all_upstreams(case: WorkflowCase) -> None:
    """all_failed is decided when all upstream tasks are done."""
    case.step("a", fails=True)
    case.wf.signal("b")
    case.steps("task", on_failure=["a", "b"])
    job = await case.submit()
    assert (await case.drain(job)).states["task"] == "waiting"
    await job.signal("b")
    assert (await case.drain(job)).states["task"] == "skipped"


# all_done is `always`.


@pytest.mark.parametrize(
    ("upstream", "status"),
    [({}, "COMPLETED"), ({"fails": True}, "FAILED"), ({"when": SKIPPED}, "COMPLETED")],
    ids=["success", "failed", "skipped"],
)
async def test_all_done_runs_after_any_end(case: WorkflowCase, upstream: dict[str, Any], status: str) -> None:
    """test_all_done_tr_success; all_done: all upstream tasks are done with their execution."""
    case.steps("a")
    case.step("b", **upstream)
    case.steps("task", always=["a", "b"])
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == (status, "done")


async def test_all_done_runs_after_upstream_failed(case: WorkflowCase) -> None:
    """all_done: upstream_failed is an end too."""
    case.step("a", fails=True)
    case.steps("b", after=["a"])
    case.steps("task", always=["b"])
    assert (await case.run()).states["task"] == "done"


async def test_all_done_waits_for_all_upstreams(case: WorkflowCase) -> None:
    """test_all_done_tr_failure: 1 of 2 is not done, so the task does not run yet."""
    case.steps("a")
    case.wf.signal("b")
    case.steps("task", always=["a", "b"])
    job = await case.submit()
    assert (await case.drain(job)).states["task"] == "waiting"
    await job.signal("b")
    assert (await case.drain(job)).states["task"] == "done"


@pytest.mark.parametrize("is_latest", [True, False])
async def test_latest_only_with_trigger(case: WorkflowCase, is_latest: bool) -> None:  # noqa: FBT001 - a parameter
    """example_latest_only_with_trigger: task3 receives the skip of task1, task4 (all_done) does not."""
    case.decision("latest_only", ["task1"] if is_latest else [], ["task1"])
    case.steps("task1", after=["latest_only"])
    case.steps("task2")
    case.steps("task3", after=["task1", "task2"])
    case.steps("task4", always=["task1", "task2"])
    seen = await case.run()
    skipped = {name for name, state in seen.states.items() if state == "skipped"}
    assert (seen.status, skipped) == ("COMPLETED", set() if is_latest else {"task1", "task3"})


# all_done_min_one_success is `always` behind a step with `join="any"`.


def declare_all_done_min_one_success(case: WorkflowCase, *, fails: tuple[bool, bool]) -> None:
    case.step("a", fails=fails[0])
    case.step("b", fails=fails[1])
    case.steps("one_succeeded", after=["a", "b"], join="any")
    case.steps("task", after=["one_succeeded"], always=["a", "b"])


@pytest.mark.parametrize("fails", [(False, True), (False, False)])
async def test_all_done_min_one_success_runs(case: WorkflowCase, fails: tuple[bool, bool]) -> None:
    """test_all_done_min_one_success_with_mixed_success_and_failure, ..._with_all_successful_upstreams."""
    declare_all_done_min_one_success(case, fails=fails)
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("COMPLETED", "done")


async def test_all_done_min_one_success_fails_without_success(case: WorkflowCase) -> None:
    """test_all_done_min_one_success_with_all_failed_upstreams: UPSTREAM_FAILED."""
    declare_all_done_min_one_success(case, fails=(True, True))
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("FAILED", "upstream failed")


# one_success is `after` with `join="any"`.


async def test_one_success_does_not_wait_for_the_others(case: WorkflowCase) -> None:
    """test_one_success_tr_success; one_success: does not wait for all upstream tasks to be done."""
    case.steps("a")
    case.wf.signal("slow")
    case.steps("task", after=["a", "slow"], join="any")
    job = await case.submit()
    assert (await case.drain(job)).states == {"a": "done", "slow": "waiting", "task": "done"}
    await job.signal("slow")
    seen = await case.drain(job)
    assert (seen.status, case.ran) == ("COMPLETED", ["a", "task"])


async def test_one_success_tolerates_a_failure(case: WorkflowCase) -> None:
    """one_success with a failed upstream; the run succeeds because its leaf does."""
    case.step("a", fails=True)
    case.steps("b")
    case.steps("task", after=["a", "b"], join="any")
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("COMPLETED", "done")


async def test_one_success_is_upstream_failed_without_success(case: WorkflowCase) -> None:
    """test_one_success_tr_failure: UPSTREAM_FAILED."""
    case.step("a", fails=True)
    case.step("b", fails=True)
    case.steps("task", after=["a", "b"], join="any")
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("FAILED", "upstream failed")


async def test_one_success_is_skipped_when_all_are_skipped(case: WorkflowCase) -> None:
    """test_one_success_tr_failure_all_skipped: SKIPPED."""
    case.steps("a", "b", when=SKIPPED)
    case.steps("task", after=["a", "b"], join="any")
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("COMPLETED", "skipped")


# one_failed is `on_failure` with `join="any"`.


async def test_one_failed_does_not_wait_for_the_others(case: WorkflowCase) -> None:
    """test_one_failure_tr_success; one_failed: does not wait for all upstream tasks to be done."""
    case.step("a", fails=True)
    case.wf.signal("slow")
    case.steps("task", on_failure=["a", "slow"], join="any")
    job = await case.submit()
    assert (await case.drain(job)).states == {"a": "failed", "slow": "waiting", "task": "done"}
    await job.signal("slow")
    assert (await case.drain(job)).status == "FAILED"


async def test_one_failed_is_skipped_without_a_failure(case: WorkflowCase) -> None:
    """test_one_failure_tr_success_no_failed: the task does not run; Airflow marks it skipped when all are done."""
    case.steps("a", "b")
    case.steps("task", on_failure=["a", "b"], join="any")
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("COMPLETED", "skipped")


async def test_one_failed_runs_once_for_two_failures(case: WorkflowCase) -> None:
    """one_failed: at least one upstream task has failed."""
    case.step("a", fails=True)
    case.step("b", fails=True)
    case.steps("task", on_failure=["a", "b"], join="any")
    await case.run()
    assert case.ran.count("task") == 1


# one_done is `always` with `join="any"`. A skipped step counts as ended here; in Airflow it does not.


@pytest.mark.parametrize("fails", [False, True])
async def test_one_done_runs_after_the_first_end(case: WorkflowCase, fails: bool) -> None:  # noqa: FBT001 - a parameter
    """test_one_done_tr_success, test_one_done_tr_success_with_failed."""
    case.step("a", fails=fails)
    case.wf.signal("slow")
    case.steps("task", always=["a", "slow"], join="any")
    job = await case.submit()
    assert (await case.drain(job)).states["task"] == "done"


# none_failed: an optional step is one branch of a decision, and the other branch does nothing.


@pytest.mark.parametrize(
    ("chosen", "fails", "expected"),
    [
        ("optional", False, ("COMPLETED", "done")),
        ("otherwise", False, ("COMPLETED", "done")),
        ("optional", True, ("FAILED", "upstream failed")),
    ],
)
async def test_none_failed(case: WorkflowCase, chosen: str, fails: bool, expected: tuple[str, str]) -> None:  # noqa: FBT001
    """test_none_failed_tr_success, test_none_failed_tr_failure: succeeded or skipped, but not failed."""
    case.steps("a")
    case.decision("choose", chosen, ["optional", "otherwise"])
    case.step("optional", fails=fails, after=["choose"])
    case.steps("otherwise", after=["choose"])
    case.steps("task", after=["a", "optional", "otherwise"])
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == expected


# none_failed_min_one_success is the default for the alternatives of a decision.


async def test_branch_without_trigger(case: WorkflowCase) -> None:
    """branch_without_trigger of dags.rst, with the result that none_failed_min_one_success gives: join runs."""
    case.steps("run_this_first")
    case.decision("branching", "branch_a", ["branch_a", "branch_false"], after=["run_this_first"])
    case.steps("branch_a", after=["branching"])
    case.steps("follow_branch_a", after=["branch_a"])
    case.steps("branch_false", after=["branching"])
    case.steps("join", after=["follow_branch_a", "branch_false"])
    seen = await case.run()
    assert (seen.status, seen.states["branch_false"], seen.states["join"]) == ("COMPLETED", "skipped", "done")


async def test_none_failed_min_one_success_is_skipped_when_all_are_skipped(case: WorkflowCase) -> None:
    """test_none_failed_min_one_success_tr_skipped: SKIPPED."""
    case.decision("branching", [], ["a", "b"])
    case.steps("a", "b", after=["branching"])
    case.steps("join", after=["a", "b"])
    seen = await case.run()
    assert (seen.status, seen.states["join"]) == ("COMPLETED", "skipped")


async def test_none_failed_min_one_success_is_upstream_failed_after_a_failure(case: WorkflowCase) -> None:
    """test_none_failed_min_one_success_tr_failure: one success, one skip, one failure give UPSTREAM_FAILED."""
    case.decision("branching", ["good", "bad"], ["good", "bad", "other"])
    case.steps("good", "other", after=["branching"])
    case.step("bad", fails=True, after=["branching"])
    case.steps("join", after=["good", "bad", "other"])
    seen = await case.run()
    assert (seen.status, seen.states["other"], seen.states["join"]) == ("FAILED", "skipped", "upstream failed")


async def test_none_failed_min_one_success_is_upstream_failed_below_a_failure(case: WorkflowCase) -> None:
    """test_none_failed_min_one_success_tr_upstream_failure."""
    case.decision("branching", ["a", "b"], ["a", "b", "c"])
    case.steps("a", "c", after=["branching"])
    case.step("b", fails=True, after=["branching"])
    case.steps("below_b", after=["b"])
    case.steps("join", after=["a", "below_b", "c"])
    assert (await case.run()).states["join"] == "upstream failed"


# none_skipped: the task is itself a branch, and waits for the others with `always`.


@pytest.mark.parametrize(
    ("chosen", "fails", "state"),
    [(["a", "task"], False, "done"), (["a", "task"], True, "done"), (["other"], False, "skipped")],
)
async def test_none_skipped(case: WorkflowCase, chosen: list[str], fails: bool, state: str) -> None:  # noqa: FBT001
    """test_none_skipped_tr_success, test_none_skipped_tr_failure: runs after success or failure, not after a skip."""
    case.decision("choose", chosen, ["a", "task", "other"])
    case.step("a", fails=fails, after=["choose"])
    case.steps("other", after=["choose"])
    case.steps("task", after=["choose"], always=["a"])
    seen = await case.run()
    assert (seen.status, seen.states["task"]) == ("FAILED" if fails else "COMPLETED", state)


# all_skipped: a branch of its own for the case that the others are not chosen.


@pytest.mark.parametrize(("chosen", "state"), [("nothing_to_do", "done"), (["a", "b"], "skipped")])
async def test_all_skipped(case: WorkflowCase, chosen: Any, state: str) -> None:
    """test_all_skipped_tr_success, test_all_skipped_tr_failure."""
    case.decision("choose", chosen, ["a", "b", "nothing_to_do"])
    case.steps("a", "b", "nothing_to_do", after=["choose"])
    assert (await case.run()).states["nothing_to_do"] == state


# The trigger rule always is a step without dependencies.


async def test_always_runs_at_any_time(case: WorkflowCase) -> None:
    """test_always_tr, test_no_upstream_tasks: no dependencies at all."""
    case.wf.signal("slow")
    case.steps("task")
    job = await case.submit()
    assert (await case.drain(job)).states["task"] == "done"


# Branching is a decision.


@pytest.mark.parametrize(
    ("value", "expected"),
    [(5, ("done", "skipped")), (3, ("skipped", "done")), (1, ("skipped", "skipped"))],
)
async def test_branch_by_an_upstream_result(case: WorkflowCase, value: int, expected: tuple[str, str]) -> None:
    """The @task.branch example of dags.rst: XCom 5 continues, 3 stops, anything else skips all downstream tasks."""
    case.step("start_task", value)

    async def branch_func(start_task: int) -> list[str]:
        return ["continue_task"] if start_task >= 5 else ["stop_task"] if start_task >= 3 else []

    case.wf.decision(branches=["continue_task", "stop_task"], after=["start_task"], name="branch_task")(branch_func)
    case.steps("continue_task", "stop_task", after=["branch_task"])
    seen = await case.run()
    assert (seen.status, seen.states["continue_task"], seen.states["stop_task"]) == ("COMPLETED", *expected)


async def test_branch_to_a_list_of_tasks(case: WorkflowCase) -> None:
    """BaseBranchOperator example: on the first day of the month the daily and the monthly task run."""
    case.decision("branch", ["daily_task_id", "monthly_task_id"], ["daily_task_id", "monthly_task_id", "yearly"])
    case.steps("daily_task_id", "monthly_task_id", "yearly", after=["branch"])
    await case.run()
    assert case.ran == ["branch", "daily_task_id", "monthly_task_id"]


@pytest.mark.parametrize(("chosen", "state"), [("branch_a", "done"), ("branch_b", "skipped")])
async def test_join_below_the_branching_task_and_a_branch(case: WorkflowCase, chosen: str, state: str) -> None:
    """dags.rst, note on branching: a task downstream of the branching task and of a selected task is not skipped."""
    case.decision("branch", chosen, ["branch_a", "branch_b"])
    case.steps("branch_a", "branch_b", after=["branch"])
    case.steps("join", after=["branch", "branch_a"])
    assert (await case.run()).states["join"] == state


async def test_branch_that_is_not_chosen_does_not_run_for_another_upstream(case: WorkflowCase) -> None:
    """SkipMixin skips the tasks that were not followed, whatever other upstream tasks they have."""
    case.steps("price")
    case.decision("route", "ship", ["ship", "refund"], after=["price"])
    case.steps("ship", after=["route"])
    case.steps("refund", after=["route", "price"])
    case.steps("refund_mail", after=["refund", "price"])
    seen = await case.run()
    assert (seen.status, case.ran) == ("COMPLETED", ["price", "route", "ship"])
    assert (seen.states["refund"], seen.states["refund_mail"]) == ("skipped", "skipped")


async def test_failed_branching_task(case: WorkflowCase) -> None:
    """A branching task that fails makes everything below it upstream_failed."""

    async def branch() -> str:
        return "unknown_task"

    case.wf.decision(branches=["a", "b"], max_tries=1)(branch)
    case.steps("a", "b", after=["branch"])
    case.steps("join", after=["a", "b"])
    seen = await case.run()
    assert seen.status == "FAILED"
    assert {seen.states[name] for name in ("a", "b", "join")} == {"upstream failed"}


@pytest.mark.parametrize(
    ("choices", "ran"),
    [
        (("true_1", "true_2"), ["branch_1", "true_1", "join_1"]),
        (("false_1", "true_2"), ["branch_1", "false_1", "branch_2", "true_2", "join_2", "false_3", "join_1"]),
        (("false_1", "false_2"), ["branch_1", "false_1", "branch_2", "false_2", "join_2", "false_3", "join_1"]),
    ],
)
async def test_nested_branches(case: WorkflowCase, choices: tuple[str, str], ran: list[str]) -> None:
    """example_nested_branch_dag: join_1 and join_2 have none_failed_min_one_success."""
    case.decision("branch_1", choices[0], ["true_1", "false_1"])
    case.steps("true_1", "false_1", after=["branch_1"])
    case.decision("branch_2", choices[1], ["true_2", "false_2"], after=["false_1"])
    case.steps("true_2", "false_2", after=["branch_2"])
    case.steps("join_2", after=["true_2", "false_2"])
    case.steps("false_3", after=["join_2"])
    case.steps("join_1", after=["true_1", "false_3"])
    seen = await case.run()
    assert (seen.status, case.ran) == ("COMPLETED", ran)


async def test_short_circuit(case: WorkflowCase) -> None:
    """example_short_circuit_operator: a false condition skips everything below it and leaves the rest alone."""
    case.step("condition", returns=False)
    case.steps("ds_false_1", after=["condition"], when="condition")
    case.steps("ds_false_2", after=["ds_false_1"])
    case.steps("ds_true_1")
    seen = await case.run()
    assert (seen.status, case.ran) == ("COMPLETED", ["condition", "ds_true_1"])


# A teardown names its setup in `after` and the work in `always`.


async def test_teardown_runs_after_failed_work(case: WorkflowCase) -> None:
    """setup-and-teardown.rst: if run_query fails, then delete_cluster will still run; the run fails."""
    case.steps("create_cluster")
    case.step("run_query", fails=True, after=["create_cluster"])
    case.steps("delete_cluster", after=["create_cluster"], always=["run_query"])
    seen = await case.run()
    assert (seen.status, seen.states["delete_cluster"]) == ("FAILED", "done")


async def test_teardown_runs_after_successful_work(case: WorkflowCase) -> None:
    """test_teardown_tr_not_all_done[all success]."""
    case.steps("create_cluster")
    case.steps("run_query", after=["create_cluster"])
    case.steps("delete_cluster", after=["create_cluster"], always=["run_query"])
    seen = await case.run()
    assert (seen.status, case.ran) == ("COMPLETED", ["create_cluster", "run_query", "delete_cluster"])


async def test_teardown_is_upstream_failed_when_its_setup_failed(case: WorkflowCase) -> None:
    """test_teardown_tr_not_all_done[setup failed]: UPSTREAM_FAILED."""
    case.step("setup", fails=True)
    case.steps("work", after=["setup"])
    case.steps("teardown", after=["setup"], always=["work"])
    seen = await case.run()
    assert (seen.status, seen.states["teardown"]) == ("FAILED", "upstream failed")


async def test_teardown_is_skipped_when_its_setup_was_skipped(case: WorkflowCase) -> None:
    """test_teardown_tr_not_all_done[one setup; skipped]: SKIPPED."""
    case.steps("setup", when=SKIPPED)
    case.steps("work", after=["setup"])
    case.steps("teardown", after=["setup"], always=["work"])
    seen = await case.run()
    assert (seen.status, seen.states["teardown"]) == ("COMPLETED", "skipped")


async def test_teardown_waits_for_all_tasks_in_its_scope(case: WorkflowCase) -> None:
    """test_teardown_waits_for_in_scope_tasks, test_teardown_waits_for_parallel_branches."""
    case.steps("setup")
    case.steps("t1", after=["setup"])
    case.wf.signal("t2", after=["setup"])
    case.steps("t3", after=["t2"])
    case.steps("teardown", after=["setup"], always=["t1", "t3"])
    job = await case.submit()
    assert (await case.drain(job)).states["teardown"] == "waiting"
    await job.signal("t2")
    seen = await case.drain(job)
    assert (seen.status, case.ran) == ("COMPLETED", ["setup", "t1", "t3", "teardown"])


async def test_teardown_runs_when_tasks_in_its_scope_failed(case: WorkflowCase) -> None:
    """test_teardown_runs_when_in_scope_tasks_failed: setup >> t1 (fails) >> t2 >> teardown."""
    case.steps("setup")
    case.step("t1", fails=True, after=["setup"])
    case.steps("t2", after=["t1"])
    case.steps("teardown", after=["setup"], always=["t1", "t2"])
    seen = await case.run()
    assert (seen.states["t2"], seen.states["teardown"]) == ("upstream failed", "done")


async def test_teardown_of_two_setups_runs_when_one_succeeded(case: WorkflowCase) -> None:
    """test_teardown_tr_not_all_done[one setup failed one success]; the work needs both setups."""
    case.steps("s0")
    case.step("s1", fails=True)
    case.steps("one_set_up", after=["s0", "s1"], join="any")
    case.steps("work", after=["s0", "s1"])
    case.steps("teardown", after=["one_set_up"], always=["work"])
    seen = await case.run()
    assert (seen.status, seen.states["work"], seen.states["teardown"]) == ("FAILED", "upstream failed", "done")


async def test_setups_and_teardowns_in_parallel(case: WorkflowCase) -> None:
    """setup-and-teardown.rst, "Running setups and teardowns in parallel": each teardown belongs to its own setup."""
    case.steps("create_cluster")
    case.step("create_bucket", fails=True)
    case.steps("run_query", after=["create_cluster", "create_bucket"])
    case.steps("delete_cluster", after=["create_cluster"], always=["run_query"])
    case.steps("delete_bucket", after=["create_bucket"], always=["run_query"])
    seen = await case.run()
    assert (seen.states["delete_cluster"], seen.states["delete_bucket"]) == ("done", "upstream failed")


async def test_tasks_after_a_group_do_not_wait_for_its_teardown(case: WorkflowCase) -> None:
    """setup-and-teardown.rst, "Authoring with task groups": s1 >> w1 >> [t1, w2]; a failed t1 does not stop w2."""
    case.steps("s1")
    case.steps("w1", after=["s1"])
    case.step("t1", fails=True, after=["s1"], always=["w1"])
    case.steps("w2", after=["w1"])
    seen = await case.run()
    assert (seen.status, seen.states["w2"]) == ("FAILED", "done")


async def test_failed_teardown_fails_the_job(case: WorkflowCase) -> None:
    """setup-and-teardown.rst, on_failure_fail_dagrun=True; that is the rule here."""
    case.steps("setup")
    case.steps("work", after=["setup"])
    case.step("teardown", fails=True, after=["setup"], always=["work"])
    assert (await case.run()).status == "FAILED"


async def test_failed_teardown_that_is_recovered_does_not_count(case: WorkflowCase) -> None:
    """setup-and-teardown.rst, the default: teardown tasks are ignored for the state of the run."""
    case.steps("setup")
    case.steps("work", after=["setup"])
    case.step("teardown", fails=True, after=["setup"], always=["work"])
    case.steps("ignore", recovers=["teardown"])
    seen = await case.run()
    assert (seen.status, seen.states["teardown"]) == ("COMPLETED", "failed")


async def test_cleanup_when_the_run_is_ended_by_hand(case: WorkflowCase) -> None:
    """setup-and-teardown.rst, "manual Dag state changes": clean up although the run was stopped; here `compensate`."""
    case.step("create_cluster", undo="delete_cluster")
    case.wf.signal("run_query", after=["create_cluster"])
    job = await case.submit()
    await case.drain(job)
    await job.cancel()
    seen = await case.drain(job)
    assert (seen.status, case.ran) == ("CANCELED", ["create_cluster", "delete_cluster"])


# Dynamic task mapping is a map.


def declare_mapped(case: WorkflowCase, **options: Any) -> None:
    async def add_one(item: int) -> int:
        case.ran.append(f"add_one {item}")
        if item < 0:
            raise ValueError(f"{item} is negative")
        return item + 1

    async def sum_it(add_one: list[int]) -> int:
        return sum(add_one)

    case.wf.map(over_input="values", max_tries=1, **options)(add_one)
    case.wf.step(after=["add_one"])(sum_it)


async def test_mapped_task_and_reduce(case: WorkflowCase) -> None:
    """dynamic-task-mapping.rst, "Simple mapping": add_one.expand(x=[1, 2, 3]), sum_it gives 9."""
    declare_mapped(case)
    seen = await case.run(input={"values": [1, 2, 3]})
    assert (seen.status, seen.output) == ("COMPLETED", {"sum_it": 9})


async def test_failed_instance_of_a_mapped_task(case: WorkflowCase) -> None:
    """One failed instance of a mapped task makes the task below upstream_failed; the other instances run."""
    declare_mapped(case)
    seen = await case.run(input={"values": [1, -2, 3]})
    assert (seen.status, seen.states["add_one"], seen.states["sum_it"]) == ("FAILED", "failed", "upstream failed")
    assert sorted(case.ran) == ["add_one -2", "add_one 1", "add_one 3"]


async def test_mapped_task_over_an_empty_list(case: WorkflowCase) -> None:
    """dynamic-task-mapping.rst skips a task mapped over an empty list; here it is done with []."""
    declare_mapped(case)
    seen = await case.run(input={"values": []})
    assert (seen.status, seen.states["add_one"], seen.output) == ("COMPLETED", "done", {"sum_it": 0})


async def test_repeated_mapping(case: WorkflowCase) -> None:
    """dynamic-task-mapping.rst, "Repeated mapping": a mapped task over the results of a mapped task."""
    declare_mapped(case)

    async def twice(item: int) -> int:
        return item * 2

    case.wf.map(over="add_one")(twice)
    seen = await case.run(input={"values": [1, 2, 3]})
    assert seen.output == {"sum_it": 9, "twice": [4, 6, 8]}
