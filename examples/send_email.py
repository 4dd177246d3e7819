"""A task in ten lines, enqueued on the embedded PostgreSQL and run in this process, as in a test."""

import asyncio

from interlock import Interlock
from interlock.testing import drain

app = Interlock()


@app.task(max_tries=3)
async def send_email(to: str, subject: str = "Hello") -> str:
    """Stand for a mail server."""
    return f"sent {subject!r} to {to}"


async def main() -> None:
    """Enqueue, run, and wait for the result."""
    async with app:
        handle = await send_email.enqueue(to="ada@example.org")
        await drain(app)  # in production a worker runs it: interlock worker --app send_email:app
        print(await handle.result(timeout=10))


if __name__ == "__main__":
    asyncio.run(main())
