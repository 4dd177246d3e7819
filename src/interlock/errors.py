"""The errors that Interlock raises. All derive from InterlockError.

Each message says what was wrong, where, and what would be right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID


class InterlockError(Exception):
    """Base class of all errors that Interlock raises."""


class DefinitionError(InterlockError):
    """A definition (lifecycle table, task or workflow) contradicts itself; the message names the place."""


class DefinitionChangedError(DefinitionError):
    """A workflow differs from the definition that is stored under its name and version; the message shows how."""


class InvalidTransitionError(InterlockError):
    """An in-memory machine received an event that its table does not allow in its state."""

    def __init__(self, machine: str, state: str, event: str, allowed: Sequence[str]) -> None:
        self.machine = machine
        self.state = state
        self.event = event
        self.allowed = tuple(allowed)
        options = ", ".join(self.allowed) or "none, the state is final"
        super().__init__(f"{machine}: '{event}' is not allowed in state '{state}'; allowed events: {options}")


class UnexpectedStateError(InterlockError):
    """A machine is not in the state that the caller requires."""

    def __init__(self, machine: str, expected: str, actual: str) -> None:
        self.machine = machine
        self.expected = expected
        self.actual = actual
        super().__init__(f"{machine}: expected state {expected} but was {actual}")


class InvariantError(InterlockError):
    """An internal invariant does not hold; this is a bug in Interlock."""


class ConfigError(InterlockError):
    """A setting is missing or invalid; the message names the setting and its source."""


class LifespanError(InterlockError):
    """The lifespan of an app failed before its worker claimed anything; the message names the place."""


class AppImportError(InterlockError):
    """The module of an app raised an error while it was imported; the message shows the place in the user's code."""


class RetryableError(InterlockError):
    """Raised by a handler to retry the task, after `retry_after` seconds or after the backoff of the task."""

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class PermanentError(InterlockError):
    """Raised by a handler to end the task in error without further tries."""


class InputError(PermanentError):
    """Invalid arguments or input; the message names the argument or field."""


class ElementsError(InputError):
    """Elements of a list are invalid, and none of the list was stored; `errors` has the place and message of each."""

    def __init__(self, errors: Sequence[tuple[int, str]]) -> None:
        self.errors = tuple(errors)
        shown = "; ".join(f"element {place}: {message}" for place, message in self.errors[:5])
        more = len(self.errors) - 5
        super().__init__(f"{shown}; and {more} more" if more > 0 else shown)


class RequestReusedError(InputError):
    """A request id was used before for a job with another workflow, input or option."""


class JobConflictError(InterlockError):
    """A job was not submitted: the unfinished job `job_id` has its key, and the policy is to reject."""

    def __init__(self, message: str, *, job_id: UUID | None = None) -> None:
        self.job_id = job_id
        super().__init__(message)


class TaskFailedError(InterlockError):
    """An awaited task ended without a result: in error, canceled or skipped."""

    def __init__(self, message: str, *, state: str, error: dict[str, object] | None = None) -> None:
        self.state = state
        self.error = error
        super().__init__(message)


class UnknownTaskError(InterlockError):
    """No task has this id: it was never stored, its transaction is not committed, or retention deleted it."""


class JobFailedError(InterlockError):
    """An awaited job ended without an output: it failed or was canceled."""

    def __init__(self, message: str, *, status: str, error: dict[str, object] | None = None) -> None:
        self.status = status
        self.error = error
        super().__init__(message)


class UnknownJobError(InterlockError):
    """No job has this id: it was never submitted, its transaction is not committed, or retention deleted it."""


class UnknownWorkerError(InterlockError):
    """No worker has this id: it was never created, or its row was deleted."""


class UnknownNameError(InterlockError):
    """No worker, namespace, schedule or limit has this name."""


class UnknownNamespaceError(UnknownNameError):
    """No task, worker or pause names this namespace."""


class UnknownScheduleError(UnknownNameError):
    """No schedule has this name."""


class UnknownLimitError(UnknownNameError):
    """No limit has this key."""


class UnknownPoolError(InterlockError):
    """No pool of workers has this name."""


class SortError(InterlockError):
    """A distributed sort failed; the message names the worker, the phase and the reason."""


class SortInputError(SortError):
    """The input or output of a sort is invalid; nothing was changed."""


class StoreError(InterlockError):
    """The database refused an operation or is not usable."""


class DisconnectedError(StoreError):
    """The connection to the database was lost; the statement in flight may or may not have taken effect."""


class StatementError(StoreError):
    """The database refused a statement; the connection is still usable. `sqlstate` is the server's code, or empty."""

    def __init__(self, message: str, *, sqlstate: str = "") -> None:
        self.sqlstate = sqlstate
        super().__init__(message)


class EmbeddedServerError(StoreError):
    """The embedded PostgreSQL server could not be started, reached or stopped."""


class MigrationError(StoreError):
    """The schema in the database does not match this release."""


class IllegalTransition(StoreError):  # noqa: N818 - the public name of the refusal, as the design gives it
    """The database refused a transition, insert or value outside a lifecycle table (SQLSTATE IL001 to IL003)."""

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
    """A client tried to change, delete or forge a record, or to rewrite what is recorded (SQLSTATE IL004)."""


class FenceError(StoreError):
    """A settle did not present the current attempt (the fence), or a claim did not raise it (SQLSTATE IL005)."""


class UnfinishedWorkError(StoreError):
    """A client tried to delete unfinished work (SQLSTATE IL006)."""
