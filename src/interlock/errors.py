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


class ConfigError(InterlockError):
    """A setting is missing or makes no sense; the message names it and where it came from."""


class StoreError(InterlockError):
    """The database refused or could not be used."""


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
