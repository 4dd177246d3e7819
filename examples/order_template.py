"""The workflow of order_workflow.py as a YAML template; its handlers are the functions of that file."""

import asyncio
from pathlib import Path

from interlock import Interlock, serving
from interlock.orchestrator.run import orchestrating
from interlock.worker.settings import WorkerSettings

app = Interlock()
(orders,) = app.load_templates(Path(__file__).with_suffix(".yaml"))


async def main() -> None:
    settings = WorkerSettings(namespaces=("fulfillment",), concurrency=10)
    async with app, serving(app, settings), orchestrating(app):
        job = await app.submit(orders, {"number": 8, "items": ["cups", "plates"], "days": 5})
        print((await job.wait(60))["notify"])


if __name__ == "__main__":
    asyncio.run(main())
