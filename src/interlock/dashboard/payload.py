"""JSON values, errors and explanations as the pages of tasks and jobs show them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.dashboard.states import state_style
from interlock.lifecycle import JOB, TASK_ROW, TaskRowState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from interlock.client.explain import Explanation, Fact

MAX_PAYLOAD = 64 * 1024  # characters of a value that a page shows
MAX_CAUSES = 6
MAX_REMEDIES = 3


class Payload(NamedTuple):
    """A value as text; `left_out` characters are not shown."""

    title: str
    text: str
    left_out: int = 0


class ErrorView(NamedTuple):
    """An error: its kind, its message and its traceback."""

    kind: str
    message: str
    traceback: Payload | None


class ReasonView(NamedTuple):
    """One reason: the tone of its state, the name of the step or job, and the sentence."""

    tone: str
    name: str
    text: str


class RemedyView(NamedTuple):
    """A remedy, and the command for it."""

    text: str
    command: str


class ExplainView(NamedTuple):
    """An explanation: one sentence, the causes in order, and what helps."""

    title: str
    lead: str
    causes: list[ReasonView]
    remedies: list[RemedyView]


def cut(title: str, text: str) -> Payload:
    """Cut a text at 64 KB."""
    return Payload(title, text[:MAX_PAYLOAD], max(0, len(text) - MAX_PAYLOAD))


def payload(title: str, value: Any) -> Payload | None:
    """Write a JSON value; None if there is none."""
    if value is None:
        return None
    compact = json.dumps(value, ensure_ascii=False)
    # a short value is one line
    text = compact if len(compact) <= 100 else json.dumps(value, ensure_ascii=False, indent=2)  # noqa: PLR2004 - characters of a line
    return cut(title, text)


def error_view(error: Mapping[str, Any] | None, reason: str | None = None) -> ErrorView | None:
    """Show a stored error."""
    if not error:
        return None
    traceback = error.get("traceback")
    lines = "".join(traceback) if isinstance(traceback, list) else traceback
    return ErrorView(
        str(error.get("type") or "error"),
        cut("message", str(error.get("message") or reason or "")).text,
        None if not lines else cut("traceback", str(lines)),
    )


def explain_view(found: Explanation) -> ExplainView:
    """Turn an explanation into sentences."""
    machine = "job" if found.kind == "job" else "task"
    has_ended = found.state in (JOB.final if machine == "job" else TASK_ROW.final)
    is_running = machine == "task" and found.state == TaskRowState.RUNNING
    title = "How did it end?" if has_ended else "What is it doing?" if is_running else "Why is it not moving?"
    first, *rest = found.facts or (None,)
    lead = f"It is {found.state}." if first is None else _sentence(first.text)
    tone = state_style(machine, found.state).tone
    causes = [ReasonView(tone, "", _sentence(_with_remedy(fact))) for fact in rest]
    causes += [
        ReasonView(
            state_style("job" if cause.kind == "job" else "task", cause.state).tone,
            cause.name,
            "; ".join(_with_remedy(fact) for fact in cause.facts[:2]) or f"is {cause.state}",
        )
        for cause in _behind(found)
    ]
    return ExplainView(title, lead, causes[:MAX_CAUSES], _remedies(found))


def _behind(found: Explanation) -> Iterator[Explanation]:
    """Walk the causes, each before those behind it."""
    for cause in found.causes:
        yield cause
        yield from _behind(cause)


def _with_remedy(fact: Fact) -> str:
    return fact.text if fact.remedy is None or fact.command is not None else f"{fact.text}; {fact.remedy}"


def _remedies(found: Explanation) -> list[RemedyView]:
    facts = [*found.facts, *(fact for cause in _behind(found) for fact in cause.facts)]
    remedies = dict.fromkeys(
        RemedyView(fact.remedy or "run", fact.command) for fact in facts if fact.command is not None
    )
    return list(remedies)[:MAX_REMEDIES]


def _sentence(text: str) -> str:
    start = text if re.match(r"\w+_", text) else text[:1].upper() + text[1:]  # an id stays as it is
    return start + ("" if text.endswith((".", "!", "?")) else ".")
