"""Guard of a sort that runs as a job: a process of its own that cancels the job if the command is killed.

The command holds the other end of its standard input. Until that closes, the guard has imported nothing of the engine.

Invariant: a job whose command ended in any way but with the machine is not left running.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from uuid import UUID

    from interlock.config import Config

REASON = "the command of this sort was killed"
MODULE = "interlock.sort.engines.job_guard"
END_TIMEOUT_S = 120.0  # for the steps of the canceled job: their leases have to expire first
DATABASE_FIELDS = ("database_url", "data_dir", "profile", "embedded")


class JobGuard:
    """The guard of one command, for as long as the context lasts."""

    def __init__(self, config: Config) -> None:
        self._database = {name: getattr(config, name) for name in DATABASE_FIELDS}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # or a signal to the command's process group would end it too
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Dismiss the guard."""
        if self._process is not None:
            self._write(b"\n")
            self._process.communicate()

    def watch(self, job: UUID) -> None:
        """Cancel this job if this process ends without dismissing the guard."""
        self._write(json.dumps({"job": str(job), **self._database}, default=str).encode() + b"\n")

    def _write(self, line: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except BrokenPipeError:
                return  # it was killed; the next sort on this machine cancels the job


def main() -> None:
    """Wait for the end of the command; cancel its job unless the guard was dismissed."""
    lines = sys.stdin.buffer.read().split(b"\n")
    if len(lines) == 2 and lines[0]:  # noqa: PLR2004 - the job, and no further line
        asyncio.run(cancel_job(json.loads(lines[0])))


async def cancel_job(watched: dict[str, Any]) -> None:
    """Cancel the job of a killed command, and run the engine until its steps have ended."""
    from interlock.config import Config  # noqa: PLC0415 - only when it is needed
    from interlock.errors import JobFailedError  # noqa: PLC0415 - as above
    from interlock.orchestrator.run import orchestrating  # noqa: PLC0415 - as above
    from interlock.postgres.connection import database_url  # noqa: PLC0415 - as above
    from interlock.sort.engines.interlock import app, engine_settings  # noqa: PLC0415 - as above
    from interlock.worker.run import serving  # noqa: PLC0415 - as above

    directory = watched["data_dir"]
    config = Config(**{**{name: watched[name] for name in DATABASE_FIELDS}, "data_dir": directory and Path(directory)})
    with database_url(config) as url:
        app.config = replace(config, database_url=url)
        async with app:
            job = app.job(watched["job"])
            await job.cancel(REASON)
            async with orchestrating(app), serving(app, engine_settings(1)):
                with suppress(JobFailedError):
                    await job.wait(END_TIMEOUT_S)


if __name__ == "__main__":
    main()
