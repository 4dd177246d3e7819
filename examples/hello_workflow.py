"""A workflow of three steps, two of them parallel, with a worker and an orchestrator in one file."""

import asyncio

from interlock import Interlock, serving
from interlock.orchestrator.run import orchestrating

app = Interlock()
wf = app.workflow("order")


@wf.step
async def reserve(item: str) -> str:
    return f"{item} from shelf 3"


@wf.step
async def price(item: str) -> float:
    return 1.5 * len(item)


@wf.step(after=[reserve, price])  # their results are passed as parameters of the same name
async def ship(reserve: str, price: float) -> str:
    return f"{reserve} is on its way, for {price} euros"


async def main() -> None:
    async with app, serving(app), orchestrating(app):
        job = await app.submit("order", {"item": "a kettle"})
        print(await job.wait())


if __name__ == "__main__":
    asyncio.run(main())
