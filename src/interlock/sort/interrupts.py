"""Ctrl-C during a sort: it gives the sort up, and everybody who takes part ends in order.

Invariant: the first interrupt raises nothing where it strikes. An exception in the midst of a lock, or in a callback
that swallows it, would leave threads that wait for ever; so the sort is told, and the exception follows when it has
ended.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextmanager
def heeding_interrupts(stop: threading.Event) -> Iterator[None]:
    """Have Ctrl-C set `stop` while the block runs; what the block then raises becomes KeyboardInterrupt.

    A second Ctrl-C does not wait for that. A block that was done before it heard keeps what it has done.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            before(number, frame)
        interrupted = True
        stop.set()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        if interrupted:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
