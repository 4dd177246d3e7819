"""An exception as the task row has it: a document, and a line of words.

Invariant: whatever a handler raises can be described and stored, also what cannot be shown.
"""

from __future__ import annotations

import traceback
from typing import Any

from interlock.client.values import storable_text
from interlock.errors import PermanentError, RetryableError
from interlock.worker.handlers import HandlerError

TRACEBACK_LINES = 50


def error_document(error: BaseException) -> dict[str, Any]:
    """Describe an exception for the task row. One that crossed a process boundary brings its own description."""
    if isinstance(error, HandlerError):
        return {
            name: storable_text(value) if isinstance(value, str) else value for name, value in error.document.items()
        }
    lines = traceback.format_exception(error)
    return {
        "type": type(error).__qualname__,
        "message": _words(error),
        "traceback": storable_text("".join(lines[-TRACEBACK_LINES:])),
        "retryable": isinstance(error, RetryableError) or not isinstance(error, PermanentError),
    }


def described(error: BaseException) -> str:
    """Say in a line what was raised."""
    if isinstance(error, HandlerError):
        return storable_text(f"{error.document['type']}: {error.document['message']}")
    return f"{type(error).__qualname__}: {_words(error)}"


def _words(error: BaseException) -> str:
    try:
        return storable_text(str(error))
    except Exception as worse:  # noqa: BLE001 - an exception that cannot be shown must not break its own report
        return f"(it cannot be shown: {type(worse).__qualname__})"
