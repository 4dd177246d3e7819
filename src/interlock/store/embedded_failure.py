"""Says what went wrong with the embedded server, and what to do about it.

Every failure of the operating system or of PostgreSQL leaves here as one EmbeddedServerError that names the directory.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from interlock.errors import EmbeddedServerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAY_OUT = "choose another directory with INTERLOCK_DATA_DIR, or set INTERLOCK_DATABASE_URL to use a server of your own"

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL_WORDS = ("No space left on device", "Disk quota exceeded", "Disc quota exceeded")
_FORBIDDEN_WORDS = ("Permission denied", "Operation not permitted", "Read-only file system")
_LINES = 12


def disk_full(data_dir: Path, detail: str) -> EmbeddedServerError:
    """Describe a full disk."""
    return EmbeddedServerError(
        f"The disk that holds {data_dir} is full: {detail}. Free some space there; or {WAY_OUT}."
    )


def forbidden(data_dir: Path, detail: str) -> EmbeddedServerError:
    """Describe a missing permission."""
    return EmbeddedServerError(
        f"No permission to keep the embedded PostgreSQL in {data_dir}: {detail}. "
        f"Give this user the directory; or {WAY_OUT}."
    )


def failed_program(data_dir: Path, what: str, output: str) -> EmbeddedServerError:
    """Describe what a program of PostgreSQL, or the server itself, said before it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for words, describe in ((_FULL_WORDS, disk_full), (_FORBIDDEN_WORDS, forbidden)):
        telling = [line for line in lines if any(word in line for word in words)]
        if telling:
            return describe(data_dir, telling[0])
    said = "\n  ".join(lines[-_LINES:]) or "it said nothing"
    return EmbeddedServerError(f"{what} failed in {data_dir}:\n  {said}")


@contextmanager
def explained(data_dir: Path) -> Iterator[None]:
    """Turn the operating system's errors into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(data_dir, str(error)) from error
        if error.errno in _FORBIDDEN:
            raise forbidden(data_dir, str(error)) from error
        raise EmbeddedServerError(f"The embedded PostgreSQL in {data_dir} cannot be used: {error}") from error
