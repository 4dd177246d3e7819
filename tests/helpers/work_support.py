"""Jobs and tasks in many states, for the tests of the dashboard's work pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from factories import add_live_worker, claim_tasks, enqueue, step
from interlock.lifecycle import TaskRowEvent
from interlock.store.tasks import Outcome, settle_running_tasks
from job_driver import JobDriver

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.postgres.connection import Connection

TRACEBACK = (
    'Traceback (most recent call last):\n  File "shop/pay.py", line 41, in charge_card\n    await psp.charge()\n'
)


def order_steps(name: str) -> tuple[dict[str, Any], ...]:
    """Return the steps of an order; the types of its tasks are its own."""
    return (
        step("validate", type=f"{name}.validate"),
        step("reserve_stock", "validate", type=f"{name}.reserve_stock"),
        step("price", "validate", type=f"{name}.price"),
        step("fraud_check", "validate", type=f"{name}.fraud_check"),
        step("charge_card", "price", type=f"{name}.charge_card", max_tries=5),
        step("boss", "fraud_check", kind="approval", timeout=3600),
        step("pack", "reserve_stock", type=f"{name}.pack", kind="map", over_input="boxes"),
        step("refund", type=f"{name}.refund", on_failure=["charge_card"]),
        step("ship", "charge_card", "pack", "boss", type=f"{name}.ship"),
        step("notify", "ship", type=f"{name}.notify"),
    )


async def submit_order(database: Connection, *, name: str = "order", **more: Any) -> tuple[JobDriver, UUID]:
    """Submit an order; let it go on until its card is to be charged again and an approval waits."""
    await add_live_worker(database, worker=f"w_{name}")
    driver = JobDriver(database)
    order = {"order": 88213, "amount": "129.90", "currency": "EUR", "boxes": ["a", "b", "c"]}
    job = await driver.submit(*order_steps(name), name=name, input=order, **more)
    await driver.advance()
    common: Any = {"actor": "w_1", "limit": 10, "namespaces": ["default"]}
    for types in (("validate",), ("reserve_stock", "price", "fraud_check")):
        for claimed in await claim_tasks(database, types=[f"{name}.{each}" for each in types], **common):
            await driver.settle(claimed)
        await driver.advance()
    (charging,) = await claim_tasks(database, types=[f"{name}.charge_card"], **common)
    await fail_attempt(database, charging.id, charging.attempt)
    return driver, job


async def fail_attempt(
    database: Connection, id_: UUID, attempt: int, *, event: TaskRowEvent = TaskRowEvent.RETRY
) -> None:
    """End an attempt with an error that has a traceback."""
    error = {"type": "ConnectTimeout", "message": "psp.example:443 did not answer in 10 s", "traceback": TRACEBACK}
    outcome = Outcome(id_, attempt, event, error=error)
    _, lost = await settle_running_tasks(database, [outcome], actor="w_1")
    assert not lost


async def fail_task(database: Connection, type_: str = "charge_card", **options: Any) -> UUID:
    """Enqueue a task, and let its only try fail."""
    id_ = await enqueue(database, type_, {"order": 88213}, max_tries=1, **options)
    (claimed,) = await claim_tasks(
        database, actor="w_1", types=[type_], namespaces=[options.get("namespace", "default")]
    )
    await fail_attempt(database, claimed.id, claimed.attempt, event=TaskRowEvent.FAIL)
    return id_
