"""The workflow of the demo: that of examples/order_workflow.py, in a namespace of its own.

Invariant: each demo has its own version and namespace, so that several can run on one database.
"""

import asyncio
from dataclasses import dataclass

from interlock import Interlock, PermanentError, StepContext


@dataclass
class Order:
    """The input of a job; it is validated before anything is stored."""

    number: int
    items: list[str]
    days: int


EXPRESS_BELOW = 3  # days

app = Interlock()
NAMESPACE = app.config.namespaces[0]  # the demo sets INTERLOCK_NAMESPACES for its workers
wf = app.workflow("demo_order_fulfillment", namespace=NAMESPACE, version=NAMESPACE, input=Order)


@wf.step
async def validate(number: int, items: list[str]) -> int:
    """Reject an empty order with an error that is not retried."""
    await asyncio.sleep(0.2)  # stands for the work of the shop, here and below
    if not items:
        raise PermanentError(f"order {number} is empty")
    return len(items)


async def put_back(result: list[str]) -> int:
    """Compensate the reservation if the job fails or is canceled later; `result` is the result of reserve."""
    await asyncio.sleep(0.2)
    return len(result)


@wf.step(after=[validate], max_tries=3, timeout=30, compensate=put_back)
async def reserve(items: list[str]) -> list[str]:
    """Find each item on its shelf; runs in parallel with price."""
    await asyncio.sleep(0.5)
    return [f"{item} from shelf {number}" for number, item in enumerate(items, start=1)]


@wf.step(after=[validate])
async def price(validate: int, days: int) -> float:
    """Receive the result of validate by its name, and a field of the job's input."""
    await asyncio.sleep(0.3)
    return 12.5 * validate + (9.9 if days < EXPRESS_BELOW else 0)


@wf.decision(after=[reserve, price], branches=["express", "standard"])
async def route(days: int) -> str:
    """Choose one of the branches; the other is skipped."""
    return "express" if days < EXPRESS_BELOW else "standard"


@wf.step(after=[route])
async def express() -> str:
    """Book a flight."""
    await asyncio.sleep(0.3)
    return "the night flight"


@wf.step(after=[route])
async def standard() -> str:
    """Book a truck."""
    await asyncio.sleep(0.3)
    return "the truck on Monday"


@wf.map(over=reserve, after=[express, standard])
async def pack(item: str, index: int) -> str:
    """Run once for each element of the result of reserve, each as a separate task."""
    await asyncio.sleep(0.8)
    if "piano" in item:
        raise PermanentError("a piano does not fit into a parcel")
    return f"parcel {index + 1}: {item}"


@wf.step(after=[pack, express, standard])
async def ship(pack: list[str], express: str | None = None, standard: str | None = None) -> str:
    """Run after all parcels and the chosen branch are done."""
    await asyncio.sleep(0.4)
    return f"{len(pack)} parcels are on {express or standard}"


@wf.step(on_failure=[ship])
async def tell_support(ctx: StepContext, number: int) -> str:
    """Run when ship failed, or was skipped because of a failure; the job still fails and is compensated."""
    return f"order {number} was not shipped: {ctx.get_dependency_error('ship')['message']}"


@wf.step(after=[ship, price])
async def notify(number: int, ship: str, price: float) -> str:
    """Notify the customer; the result of the last step is the output of the job."""
    await asyncio.sleep(0.2)
    return f"Order {number}: {ship}. That is {price:.2f} euros."
