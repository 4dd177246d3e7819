"""What a running worker can be told over NOTIFY, each group of commands answered by the side that it concerns.

Invariant: the two event systems stay apart: a command of the orchestration side never reaches the handler side, nor the
other way round; whatever a command asks for, it is answered, an error included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from interlock.errors import InputError
from interlock.store.control import Enable, EventStatus, Refresh, Status, Subscribe, Unsubscribe, read_command
from interlock.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from interlock.store.control import Command, HandlerCommand, OrchestrationCommand, SystemCommand


class OrchestrationSide(Protocol):
    """Event system 1: which tasks come to this worker."""

    def subscribe(self, namespace: str, /) -> Sequence[str]:
        """Take tasks of a namespace too; give all namespaces that are served now."""

    def unsubscribe(self, namespace: str, /) -> Sequence[str]:
        """Take no more tasks of a namespace; give those that are still served. InputError if none would be."""


class HandlerSide(Protocol):
    """Event system 2: what goes on between this worker and its handlers."""

    def event_status(self) -> dict[str, Any]:
        """Give the statistics of the event system."""


class SystemSide(Protocol):
    """The process as a whole."""

    def status(self) -> dict[str, Any]:
        """Tell how the worker is."""

    def refresh(self) -> None:
        """Read anew what is kept in memory of the database, and look for tasks."""

    def enable(self, enabled: bool, /) -> None:  # noqa: FBT001 - the one word of the command
        """Take on new tasks, or none until told otherwise."""


class Answer(NamedTuple):
    """What is to be said to whoever asked; without a token nobody waits for it."""

    token: str | None
    document: dict[str, Any]


class Control:
    """Takes the commands of one worker and hands each to its side."""

    def __init__(
        self, worker_id: str, *, orchestration: OrchestrationSide, handlers: HandlerSide, system: SystemSide
    ) -> None:
        self._worker_id = worker_id
        self._orchestration = orchestration
        self._handlers = handlers
        self._system = system

    def hear(self, payload: str) -> Answer | None:
        """Obey a notification that is a command to this worker; None when it is not."""
        try:
            request = read_command(payload, self._worker_id)
        except InputError as error:
            log.warning("command_refused", worker_id=self._worker_id, error=str(error))
            return None
        if request is None:
            return None
        try:
            document = self.execute(request.command)
        except InputError as error:
            document = {"error": str(error)}
        log.info("command_executed", worker_id=self._worker_id, command=repr(request.command), answer=document)
        return Answer(request.token, document)

    def execute(self, command: Command) -> dict[str, Any]:
        """Hand a command to the side that it concerns, and give the answer."""
        match command:
            case Subscribe() | Unsubscribe():
                return self._of_orchestration(command)
            case EventStatus():
                return self._of_handlers(command)
            case Status() | Refresh() | Enable():
                return self._of_system(command)

    def _of_orchestration(self, command: OrchestrationCommand) -> dict[str, Any]:
        act = self._orchestration.subscribe if isinstance(command, Subscribe) else self._orchestration.unsubscribe
        return {"namespaces": list(act(command.namespace))}

    def _of_handlers(self, _: HandlerCommand) -> dict[str, Any]:
        return self._handlers.event_status()

    def _of_system(self, command: SystemCommand) -> dict[str, Any]:
        if isinstance(command, Status):
            return self._system.status()
        if isinstance(command, Refresh):
            self._system.refresh()
            return {"refreshed": True}
        self._system.enable(command.enabled)
        return {"enabled": command.enabled}
