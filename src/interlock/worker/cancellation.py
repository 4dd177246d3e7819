"""Hears a cancellation that an error has drowned."""

from __future__ import annotations

import asyncio


def heed_cancellation() -> None:
    """Stop, if that is asked for: when a connection dies at that moment, the driver tells of its death instead."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
