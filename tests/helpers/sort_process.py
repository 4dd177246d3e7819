"""Main program of a master or worker process of a sort that can kill itself when it reaches a state.

Its instructions are one JSON argument. `die_at` lists states; at each of them the process sends itself SIGKILL once, as
soon as the state is saved. A state with a plus sign means: after the first part of that phase's work.
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
from interlock.sort.engines import prefork
from interlock.sort.engines.local import run_local
from interlock.sort.master.master import run_master
from interlock.sort.settings import Settings
from interlock.sort.workdir import Journal
from interlock.sort.worker.phases import PhaseRunner
from interlock.sort.worker.worker import run_worker

if TYPE_CHECKING:
    from interlock.machine import Move


def mortal(die_at: list[str], marks: Path) -> None:
    """Make this process kill itself at each of these states, once."""
    saved, counted = Journal.moved, PhaseRunner.count
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

    def count(self: PhaseRunner, size: int, *, reused: bool = False) -> None:
        counted(self, size, reused=reused)
        die(f"{now['state']}+")

    Journal.moved = moved  # type: ignore[method-assign]
    PhaseRunner.count = count  # type: ignore[method-assign]


def main() -> int:
    instructions = json.loads(sys.argv[1])
    settings = Settings(**instructions["settings"])
    mortal(instructions["die_at"], Path(instructions["marks"]))
    try:
        if instructions["role"] == "master":
            address_file = Path(instructions["address_file"])

            def tell(address: str) -> None:
                part = address_file.with_name("address.part")
                part.write_text(address)
                part.rename(address_file)

            report = run_master(
                instructions["workers"],
                settings=settings,
                work_dir=Path(instructions["temp"]),
                port=instructions.get("port", 0),
                on_listening=tell,
            )
            document = report.json()
        elif instructions["role"] == "local":
            source, output = Source.from_json(instructions["source"]), Path(instructions["output"])
            prefork.start_workers(["-w", str(instructions["workers"])])
            document = run_local(source, output, workers=instructions["workers"], settings=settings).json()
        else:
            document = run_worker(
                instructions["master"],
                Source.from_json(instructions["source"]),
                Path(instructions["output"]),
                settings=settings,
                work_dir=Path(instructions["temp"]),
                index=instructions["index"],
            ).json()
    except InterlockError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{json.dumps(document)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
