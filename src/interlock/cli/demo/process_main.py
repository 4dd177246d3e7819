"""One process of the demo: a real worker or orchestrator with short intervals.

Invariant: it shuts down when its standard input ends, so that a killed demo leaves no process behind.
"""

from __future__ import annotations

import asyncio
import sys

from interlock.client.app import Interlock, load_app
from interlock.config import Config
from interlock.errors import InterlockError
from interlock.orchestrator.process import Orchestrator
from interlock.postgres.notifier import WakeMode
from interlock.process_groups import terminate_at_stdin_eof
from interlock.telemetry import configure_logging
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WorkerSettings, get_instance_name

APP = "interlock.cli.demo.orders:app"
LEASE_S = 1.5  # the default is 30, which is long to watch
POLL_INTERVAL_S = 0.25


def run_worker(config: Config) -> None:
    """Run a worker of the demo's workflow."""
    settings = WorkerSettings(
        namespaces=config.namespaces,
        lease=LEASE_S,
        grace=0.5,
        shutdown_limit=3,  # the embedded server may be gone with the demo
        cancel_grace=0.1,
        mode=WakeMode(config.wake_mode),
        poll_cap=POLL_INTERVAL_S,
        recovery_interval=POLL_INTERVAL_S,
        duties=False,  # maintenance concerns the whole database, which may belong to others
    )
    WorkerStateMachine(get_instance_name(config.worker_name), load_app(APP), settings).run()


def run_orchestrator(config: Config) -> None:
    """Run an orchestrator."""
    asyncio.run(Orchestrator(Interlock(config=config)).serve())


def main(role: str) -> None:
    """Run the role `worker` or `orchestrator` until SIGTERM or the end of the demo."""
    terminate_at_stdin_eof()
    try:
        config = Config.load()
        configure_logging("warning")
        (run_worker if role == "worker" else run_orchestrator)(config)
    except InterlockError as error:
        sys.exit(f"interlock: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
