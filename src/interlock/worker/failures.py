"""An exception as the task row has it: a document, and a line of words.

Invariant: whatever a handler raises can be described and stored, also what cannot be shown, and what would fill a book.
"""

from __future__ import annotations

import traceback
from typing import Any

from interlock.client.values import storable_text
from interlock.errors import PermanentError, RetryableError
from interlock.worker.handlers import TRACEBACK_LENGTH, HandlerError

TRACEBACK_LINES = 50
MESSAGE_LENGTH = 10_000  # characters: it is stored with the task, with its job, and in both records


def error_document(error: BaseException) -> dict[str, Any]:
    """Describe an exception for the task row. One that crossed a process boundary brings its own description."""
    if isinstance(error, HandlerError):
        known = error.document
        trace = None if known["traceback"] is None else storable_text(known["traceback"])
        return {**known, "type": _shown(known["type"]), "message": _shown(known["message"]), "traceback": trace}
    lines = traceback.format_exception(error)
    return {
        "type": type(error).__qualname__,
        "message": _words(error),
        "traceback": storable_text("".join(lines[-TRACEBACK_LINES:])[-TRACEBACK_LENGTH:]),
        "retryable": isinstance(error, RetryableError) or not isinstance(error, PermanentError),
    }


def described(error: BaseException) -> str:
    """Say in a line what was raised."""
    if isinstance(error, HandlerError):
        return _shown(f"{error.document['type']}: {error.document['message']}")
    return f"{type(error).__qualname__}: {_words(error)}"


def _words(error: BaseException) -> str:
    try:
        return _shown(str(error))
    except Exception as worse:  # noqa: BLE001 - an exception that cannot be shown must not break its own report
        return f"(it cannot be shown: {type(worse).__qualname__})"


def _shown(text: str) -> str:
    """Give a text as it is stored: its beginning, if it is very long."""
    cut = "" if len(text) <= MESSAGE_LENGTH else f"… ({len(text):,} characters in all)"
    return storable_text(text[:MESSAGE_LENGTH] + cut)
