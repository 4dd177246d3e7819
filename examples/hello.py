"""A task, a worker and a result in one file, on the embedded PostgreSQL."""

import asyncio

from interlock import Interlock, serving

app = Interlock()


@app.task
async def greet(name: str) -> str:
    return f"Hello, {name}!"


async def main() -> None:
    async with app, serving(app):
        greeting = await greet.enqueue(name="Ada")
        print(await greeting.result())


if __name__ == "__main__":
    asyncio.run(main())
