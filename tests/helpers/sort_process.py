"""A master or worker of a sort as a process of its own, which can be told to kill itself when it reaches a state.

Its orders are one JSON argument. `die_at` lists states; at each of them the process dies once, by SIGKILL, as soon as
the state is saved. A state with a plus sign means: after a first piece of that phase's work is done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.errors import InterlockError
from interlock.sort.data.records import Source
from interlock.sort.engines.local import run_local
from interlock.sort.master.master import run_master
from interlock.sort.settings import Settings
from interlock.sort.workdir import Journal
from interlock.sort.worker.phases import Workshop
from interlock.sort.worker.worker import run_worker

if TYPE_CHECKING:
    from interlock.machine import Move


def mortal(die_at: list[str], marks: Path) -> None:
    """Make this process die at each of these states, once."""
    saved, counted = Journal.moved, Workshop.count
    now = {"state": ""}

    def die(state: str) -> None:
        mark = marks / state
        if state in die_at and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def moved(self: Journal, move: Move[Any, Any], /) -> None:
        saved(self, move)
        now["state"] = str(move.to_state)
        die(now["state"])

    def count(self: Workshop, size: int, *, reused: bool = False) -> None:
        counted(self, size, reused=reused)
        die(f"{now['state']}+")

    Journal.moved = moved  # type: ignore[method-assign]
    Workshop.count = count  # type: ignore[method-assign]


def main() -> int:
    orders = json.loads(sys.argv[1])
    settings = Settings(**orders["settings"])
    mortal(orders["die_at"], Path(orders["marks"]))
    try:
        if orders["role"] == "master":
            listening = Path(orders["listening"])

            def tell(address: str) -> None:
                part = listening.with_name("listening.part")
                part.write_text(address)
                part.rename(listening)

            report = run_master(
                orders["workers"],
                settings=settings,
                temp=Path(orders["temp"]),
                port=orders.get("port", 0),
                listening=tell,
            )
            document = report.json()
        elif orders["role"] == "local":
            source, output = Source.of(orders["source"]), Path(orders["output"])
            document = run_local(source, output, workers=orders["workers"], settings=settings).json()
        else:
            document = run_worker(
                orders["master"],
                Source.of(orders["source"]),
                Path(orders["output"]),
                settings=settings,
                temp=Path(orders["temp"]),
                index=orders["index"],
            ).json()
    except InterlockError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{json.dumps(document)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
