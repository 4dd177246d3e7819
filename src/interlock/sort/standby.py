"""Worker processes that are started before anybody knows what they will do, since loading their libraries takes time.

Invariant: one that gets no orders ends when the pipe from this process closes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy's own would only be in the way
MOST = 16
waiting: list[subprocess.Popen[bytes]] = []


def foresee(arguments: list[str]) -> None:
    """Start the workers that the arguments of `sort run` will most likely ask for."""
    if any(one.startswith(("--engine", "-h", "--help")) for one in arguments):
        return
    for name, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if name in {"--workers", "-n"}:
            wanted = int(value) if value.isdecimal() else 0
            break
    else:
        wanted = os.cpu_count() or 1
    waiting.extend(_started() for _ in range(min(wanted, MOST)))


def take() -> subprocess.Popen[bytes]:
    """Give a worker process that waits for orders."""
    return waiting.pop() if waiting else _started()


def dismiss() -> None:
    """End those that nobody took; they have done nothing yet."""
    while waiting:
        with waiting.pop() as process:
            process.kill()


def _started() -> subprocess.Popen[bytes]:
    """Start one, deaf to a terminal's interrupt, which is for this process: it closes the pipe."""
    # A mask is inherited; an interrupt of this process that comes meanwhile is not lost, only late.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "interlock.sort"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
