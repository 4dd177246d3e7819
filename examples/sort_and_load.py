"""A workflow that sorts measurements by sensor and time, and loads them into a database in that order."""

import asyncio
import sqlite3
import tempfile
from pathlib import Path

from interlock import Interlock, StepContext, serving
from interlock.orchestrator.run import orchestrating
from interlock.sort import sort

app = Interlock()
wf = app.workflow("load_measurements")


@wf.step(max_tries=3)
async def ordered(source: str, place: str, ctx: StepContext) -> list[str]:
    """Sort the lines; the step has the progress and the history of the sort, and a retry resumes or replaces it."""
    output = Path(place, "sorted")
    report = await sort(source, output, key=["1,1", "2,2n"], separator=",", memory="512MB", overwrite=True, context=ctx)
    return [partition.path for partition in report.partitions]


@wf.step(after=[ordered])
def loaded(ordered: list[str], place: str) -> int:
    """Load the partitions one after the other."""
    database = sqlite3.connect(Path(place, "measurements.db"))
    with database:
        database.execute("create table measurements (sensor text, at integer, value real)")
        for path in ordered:
            with Path(path).open(encoding="utf-8") as lines:
                rows = (line.rstrip("\n").split(",") for line in lines)
                database.executemany("insert into measurements values (?, ?, ?)", rows)
    (count,) = database.execute("select count(*) from measurements").fetchone()
    database.close()
    return int(count)


def measure(source: Path) -> None:
    """Write lines as sensors might send them: sensor, time and value."""
    lines = [f"sensor-{at % 7},{at * 7919 % 100_000},{at / 10}\n" for at in range(20_000)]
    source.write_text("".join(lines), encoding="utf-8")


async def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "measurements.csv")
        measure(source)
        async with app, serving(app), orchestrating(app):
            job = await app.submit(wf, {"source": str(source), "place": place})
            print((await job.wait(120))["loaded"], "rows")
            step = next(step for step in await job.steps() if step.step == "ordered")
            print("the sort was", (step.progress or {})["message"])
        database = sqlite3.connect(Path(place, "measurements.db"))
        print(*database.execute("select sensor, at from measurements order by rowid limit 3"), sep="\n")
        database.close()


if __name__ == "__main__":
    asyncio.run(main())
