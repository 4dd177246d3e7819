"""Errors of the embedded server: each says what failed, in which directory, and what to do about it.

Every failure of the operating system or of PostgreSQL becomes one EmbeddedServerError that names the data directory.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from interlock.errors import EmbeddedServerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALTERNATIVES = (
    "choose another directory with INTERLOCK_DATA_DIR, or set INTERLOCK_DATABASE_URL to use a server of your own"
)
MAX_OUTPUT_LINES = 12  # of a failed program, quoted in the error

_DISK_FULL_CODES = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN_CODES = {errno.EACCES, errno.EPERM, errno.EROFS}
_DISK_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded", "Disc quota exceeded")
_FORBIDDEN_MESSAGES = ("Permission denied", "Operation not permitted", "Read-only file system")


def disk_full(data_dir: Path, detail: str) -> EmbeddedServerError:
    """Make the error for a full disk."""
    return EmbeddedServerError(
        f"The disk that holds {data_dir} is full: {detail}. Free some space there; or {ALTERNATIVES}."
    )


def forbidden(data_dir: Path, detail: str) -> EmbeddedServerError:
    """Make the error for a missing permission."""
    return EmbeddedServerError(
        f"No permission to keep the embedded PostgreSQL in {data_dir}: {detail}. "
        f"Give this user the directory; or {ALTERNATIVES}."
    )


def failed_program(data_dir: Path, what: str, output: str) -> EmbeddedServerError:
    """Make the error for a failed program of PostgreSQL, or the server itself, from its output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for messages, make_error in ((_DISK_FULL_MESSAGES, disk_full), (_FORBIDDEN_MESSAGES, forbidden)):
        matching = [line for line in lines if any(message in line for message in messages)]
        if matching:
            return make_error(data_dir, matching[0])
    quoted = "\n  ".join(lines[-MAX_OUTPUT_LINES:]) or "it said nothing"
    return EmbeddedServerError(f"{what} failed in {data_dir}:\n  {quoted}")


@contextmanager
def translated_os_errors(data_dir: Path) -> Iterator[None]:
    """Turn errors of the operating system into EmbeddedServerErrors."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL_CODES:
            raise disk_full(data_dir, str(error)) from error
        if error.errno in _FORBIDDEN_CODES:
            raise forbidden(data_dir, str(error)) from error
        raise EmbeddedServerError(f"The embedded PostgreSQL in {data_dir} cannot be used: {error}") from error
