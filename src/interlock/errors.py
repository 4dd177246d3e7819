"""Every error Interlock raises on purpose, each with a message that says what was wrong and what would be right.

All derive from InterlockError, so that a program can catch the engine's errors and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class InterlockError(Exception):
    """The root of all errors that Interlock raises on purpose."""


class DefinitionError(InterlockError):
    """A lifecycle table contradicts itself; the message names the culprit."""


class InvalidTransitionError(InterlockError):
    """An in-memory machine was asked for a move that its table does not hold."""

    def __init__(self, machine: str, state: str, event: str, allowed: Sequence[str]) -> None:
        self.machine = machine
        self.state = state
        self.event = event
        self.allowed = tuple(allowed)
        options = ", ".join(self.allowed) or "none, the state is final"
        super().__init__(f"{machine}: '{event}' is not allowed in state '{state}'; allowed events: {options}")


class UnexpectedStateError(InterlockError):
    """A machine is not in the state that the caller relies on."""

    def __init__(self, machine: str, expected: str, actual: str) -> None:
        self.machine = machine
        self.expected = expected
        self.actual = actual
        super().__init__(f"{machine}: expected state {expected} but was {actual}")


class InvariantError(InterlockError):
    """Interlock caught itself breaking a rule of its own; this is a bug to be reported."""


class ConfigError(InterlockError):
    """A setting is missing or makes no sense; the message names it and where it came from."""


class RetryableError(InterlockError):
    """Raised by a handler: try again, after `retry_after` seconds if given, else after the task's backoff."""

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class PermanentError(InterlockError):
    """Raised by a handler: trying again is of no use; the task ends in error, whatever tries are left."""


class InputError(PermanentError):
    """Arguments that do not fit the task's signature; the message names the argument."""


class TaskFailedError(InterlockError):
    """A task that was waited for ended without a result: in error, canceled or skipped."""

    def __init__(self, message: str, *, state: str, error: dict[str, object] | None = None) -> None:
        self.state = state
        self.error = error
        super().__init__(message)


class UnknownTaskError(InterlockError):
    """There is no task with this id: it was never stored, its transaction is still open, or it was pruned."""


class JobFailedError(InterlockError):
    """A job that was waited for ended without an output: it failed or was canceled."""

    def __init__(self, message: str, *, status: str, error: dict[str, object] | None = None) -> None:
        self.status = status
        self.error = error
        super().__init__(message)


class UnknownJobError(InterlockError):
    """There is no job with this id: it was never submitted, its transaction is still open, or it was pruned."""


class UnknownWorkerError(InterlockError):
    """There is no worker with this id: it was never made, or its row was deleted."""


class SortError(InterlockError):
    """A distributed sort could not be done; the message names the worker, the phase and the reason."""


class SortInputError(SortError):
    """A sort was given something that it cannot sort or must not write to; nothing was changed."""


class StoreError(InterlockError):
    """The database refused or could not be used."""


class DisconnectedError(StoreError):
    """The connection to the database was lost; what was under way may or may not have happened."""


class StatementError(StoreError):
    """The database refused a statement; the connection is still usable. `sqlstate` is the server's code, or empty."""

    def __init__(self, message: str, *, sqlstate: str = "") -> None:
        self.sqlstate = sqlstate
        super().__init__(message)


class EmbeddedServerError(StoreError):
    """The embedded PostgreSQL server could not be started, reached or stopped."""


class MigrationError(StoreError):
    """The schema in the database and the migrations of this release do not fit together."""


class IllegalTransition(StoreError):  # noqa: N818 - the public name of the refusal, as the design gives it
    """The database refused a move, an insert or a value outside a lifecycle table (SQLSTATE IL001 to IL003)."""

    def __init__(
        self,
        message: str,
        *,
        machine: str,
        row: str,
        from_state: str | None,
        to_state: str,
        allowed: Sequence[str],
        sqlstate: str,
    ) -> None:
        self.machine = machine
        self.row = row
        self.from_state = from_state
        self.to_state = to_state
        self.allowed = tuple(allowed)
        self.sqlstate = sqlstate
        super().__init__(message)


class ImmutableRecordError(StoreError):
    """Something tried to change, delete or forge a record that only grows (SQLSTATE IL004)."""


class FenceError(StoreError):
    """An attempt number would have gone back, or a claim did not raise it (SQLSTATE IL005)."""


class UnfinishedWorkError(StoreError):
    """Something tried to delete work that is not finished (SQLSTATE IL006)."""
