"""Failures of a worker that no master knows of, since the worker had no place in a sort yet.

Invariant: whoever started the worker gets the reason, because nobody else can tell it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from interlock.errors import SortError, SortInputError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Untold(SortError):  # noqa: N818 - a named outcome
    """A worker failed before it had a master to tell."""


class UntoldInput(SortInputError, Untold):  # noqa: N818 - a named outcome
    """A worker was given something wrong, and found it before it had a master to tell."""


@contextmanager
def untold() -> Iterator[None]:
    """Have what fails in the block say that no master knows of it."""
    try:
        yield
    except Untold:
        raise
    except SortInputError as error:
        raise UntoldInput(str(error)) from error
    except SortError as error:
        raise Untold(str(error)) from error
    except OSError as error:
        raise Untold(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error
