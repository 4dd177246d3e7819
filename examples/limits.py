"""Limits: two tenants share an SMTP relay in turn, each with a limit of its own."""

import asyncio
from collections import Counter
from datetime import timedelta

from interlock import Interlock, TaskContext, serving

app = Interlock()
app.limit("mail:*", max_running=2)  # each tenant: at most 2 at once
app.limit("smtp", max_starts=20, per=timedelta(seconds=1))  # all tenants together: at most 20 starts in any second
app.limit("llm", max_weight=1000, max_cost=5.0, per=timedelta(minutes=1))  # tokens and money per minute

sent: list[tuple[str, str]] = []


@app.task(limit_key=["mail:{tenant}", "smtp"])
async def send(tenant: str, to: str) -> None:
    sent.append((tenant, to))


@app.task(limit_key="llm", limit_weight="{max_tokens}")
async def summarize(text: str, max_tokens: int, ctx: TaskContext) -> str:
    words = text.split()[:max_tokens]
    ctx.weight = len(words)  # what was used replaces the estimate
    ctx.cost = 0.01
    return " ".join(words)


async def main() -> None:
    async with app, serving(app):
        await send.enqueue_many([{"tenant": "big", "to": f"{n}@example.org"} for n in range(100)])
        small = await send.enqueue_many([{"tenant": "small", "to": f"{n}@example.org"} for n in range(10)])
        for handle in small:
            await handle.result()
        print("sent when the small tenant was done:", dict(Counter(tenant for tenant, _ in sent)))
        summary = await summarize.enqueue(text="A long report on limits", max_tokens=200)
        print(await summary.result())


if __name__ == "__main__":
    asyncio.run(main())
