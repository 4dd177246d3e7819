"""The app of the tests of logs and hooks: handlers that fail and that log, in every executor."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import structlog

from interlock import FailedAttempt, Interlock
from interlock.model.backoff import Backoff

app = Interlock()
reported: list[tuple[BaseException, FailedAttempt]] = []
logger = logging.getLogger("shop.mail")
structured = structlog.get_logger("shop")


@app.on_error
async def remember(error: BaseException, failed: FailedAttempt) -> None:
    reported.append((error, failed))


@app.on_error
def break_down(_error: BaseException, _failed: FailedAttempt) -> None:
    raise RuntimeError("the hook is broken")


def _deeper(message: str) -> Any:
    secret = "the value of a local variable"  # noqa: F841, S105 - which must not be logged
    raise ValueError(message)


@app.task(max_tries=2, backoff=Backoff.none())
async def fail_in_coroutine(message: str) -> None:
    _deeper(message)


@app.task(max_tries=2, backoff=Backoff.none())
def fail_in_thread(message: str) -> None:
    _deeper(message)


@app.task(executor="process", max_tries=2, backoff=Backoff.none())
def fail_in_process(message: str) -> None:
    _deeper(message)


fail_in_command = app.command_task(
    "fail_in_command", [sys.executable, "-c", "raise SystemExit('no such file')"], max_tries=2, backoff=Backoff.none()
)


@app.task
async def sleep_on() -> None:
    await asyncio.sleep(3600)


@app.task
async def log_in_coroutine(number: int) -> None:
    logger.warning("standard %s", number, extra={"number": number})
    structured.warning("structured", number=number)
    await asyncio.sleep(0)
    logger.info("after a wait %s", number)


@app.task
async def log_without_waiting(number: int) -> None:
    structured.warning("structured", number=number)


@app.task
def log_in_thread(number: int) -> None:
    logger.warning("standard %s", number)
    structured.warning("structured", number=number)


@app.task(executor="process")
def log_in_process(number: int) -> None:
    logger.warning("standard %s", number)
    structured.warning("structured", number=number)


@app.task
async def print_only() -> None:
    print("plain output")  # noqa: T201 - what handlers print
