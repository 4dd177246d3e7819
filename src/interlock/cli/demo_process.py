"""One process of the demo: a real worker or orchestrator, set up to be quick.

Invariant: it ends when its standard input does, so that nothing is left of a demo that was itself killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

from interlock.client.app import Interlock
from interlock.client.loading import load_app
from interlock.config import Config
from interlock.errors import InterlockError
from interlock.orchestrator.process import Orchestrator
from interlock.telemetry import configure_logging
from interlock.worker.process import WorkerStateMachine
from interlock.worker.settings import WakeMode, WorkerSettings, get_instance_name

APP = "interlock.cli.demo_orders:app"
LEASE = 1.5  # seconds; 30 unless told otherwise, but nobody wants to watch that
LOOK = 0.25  # seconds between two looks for what dead workers left


def run_worker(config: Config) -> None:
    """Be a worker of the demo's workflow."""
    settings = WorkerSettings(
        namespaces=config.namespaces,
        lease=LEASE,
        grace=0.5,
        shutdown_limit=3,  # the embedded server may be gone with the demo
        cancel_grace=0.1,
        mode=WakeMode(config.wake_mode),
        poll_cap=LOOK,
        recovery_interval=LOOK,
        duties=False,  # they concern the whole database, which may be somebody's
    )
    WorkerStateMachine(get_instance_name(config.worker_name), load_app(APP), settings).run()


def run_orchestrator(config: Config) -> None:
    """Be the orchestrator."""
    asyncio.run(Orchestrator(Interlock(config=config)).serve())


def _end_with_the_demo() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main(role: str) -> None:
    """Be what the demo asks for, until it says stop or is gone."""
    threading.Thread(target=_end_with_the_demo, name="interlock-demo", daemon=True).start()
    try:
        config = Config.load()
        configure_logging("warning")
        (run_worker if role == "worker" else run_orchestrator)(config)
    except InterlockError as error:
        sys.exit(f"interlock: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
