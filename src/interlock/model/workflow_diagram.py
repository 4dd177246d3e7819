"""Draws the definition of a workflow as Mermaid and as a standalone SVG, optionally with the states of a job's steps.

Invariant: the output contains every step and every dependency of the document and nothing else.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from interlock.lifecycle import TaskRowState
from interlock.machine.diagram import FORWARD_COLOUR, STATE_COLOUR, TEXT_COLOUR, heading_text, label, picture, stroke
from interlock.machine.svg import LINE_HEIGHT, STATE_HEIGHT, Arrow, Node, lay_out, place
from interlock.model.graph import AFTER, ALWAYS, DEPENDENCY_FIELDS, ON_FAILURE, RECOVERS, RECOVERY, edges
from interlock.model.joins import needed_dependencies

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from interlock.machine.svg import Box

MAX_TEXT_LENGTH = 60
MAX_SVG_STEPS = 150  # the layout of more takes too long and is not readable

# the opening and the closing of a node in Mermaid
_MERMAID_SHAPES = {
    "plain": ("[", "]"),
    "decision": ("{", "}"),
    "map": ("[/", "/]"),
    "child": ("[[", "]]"),
    "sleep": ("([", "])"),
    "signal": (">", "]"),
    "approval": ("{{", "}}"),
}
_EDGE_LABELS = {AFTER: "", ON_FAILURE: "on failure", ALWAYS: "always", RECOVERS: "recovered by"}
_BRANCH_LABEL = "if chosen"
_STATE_COLOURS: dict[str, str] = {
    TaskRowState.WAITING: STATE_COLOUR,
    TaskRowState.PENDING: "#dbeafe",
    TaskRowState.RUNNING: "#93c5fd",
    TaskRowState.DONE: "#bbf7d0",
    TaskRowState.ERROR: "#fecaca",
    TaskRowState.CANCELED: "#f5d0fe",
    TaskRowState.SKIPPED: "#e5e7eb",
}


class DrawnStep(NamedTuple):
    """A step as it is drawn: its name, its kind, and what is written below the name."""

    name: str
    kind: str
    details: tuple[str, ...]
    state: str | None


def workflow_mermaid(document: Mapping[str, Any], states: Mapping[str, str] | None = None) -> str:
    """Draw a workflow as a Mermaid flowchart; `states` has the states of the steps of a job."""
    steps = _drawn_steps(document, states or {})
    # names of steps may be words that Mermaid reserves
    ids = {step.name: f"s{number}" for number, step in enumerate(steps)}
    lines = ["flowchart TD"]
    for step in steps:
        opening, closing = _MERMAID_SHAPES[step.kind]
        text = "<br/>".join(map(_escape_mermaid, (step.name, *step.details)))
        class_ = f":::{step.state}" if step.state else ""
        lines.append(f'    {ids[step.name]}{opening}"{text}"{closing}{class_}')
    for arrow in _arrows(document):
        line = "-.->" if arrow.dashed else "-->"
        text = f'|"{arrow.label}"|' if arrow.label else ""
        lines.append(f"    {ids[arrow.source]} {line}{text} {ids[arrow.target]}")
    shown = {step.state for step in steps}
    lines += [f"    classDef {state} fill:{colour}" for state, colour in _STATE_COLOURS.items() if state in shown]
    return "\n".join(lines) + "\n"


def workflow_svg(document: Mapping[str, Any], states: Mapping[str, str] | None = None) -> str:
    """Draw a workflow as an SVG, steps in rows from top to bottom; ValueError if it has too many steps."""
    steps = {step.name: step for step in _drawn_steps(document, states or {})}
    if len(steps) > MAX_SVG_STEPS:
        raise ValueError(
            f"workflow {document['name']} has {len(steps)} steps, and an SVG has at most {MAX_SVG_STEPS}; use mermaid"
        )
    arrows = _arrows(document)
    boxes = [Node("box", 0, step.name, details=step.details) for step in steps.values()]
    heading = f"{document['name']}, version {document['version']}"
    return picture(
        place(lay_out(boxes, arrows), heading),
        heading,
        title=f"Workflow: {heading}",
        description=_describe(steps.values(), arrows),
        shape=lambda node, box: _shape(steps[node.text], box),
    )


def _drawn_steps(document: Mapping[str, Any], states: Mapping[str, str]) -> list[DrawnStep]:
    steps = []
    for step in document["steps"]:
        kind, state = step.get("kind") or "plain", states.get(step["name"])
        details = [*_kind_details(kind, step), *_step_details(step), *([f"state: {state}"] if state else [])]
        steps.append(DrawnStep(step["name"], kind, tuple(map(_shorten, details)), state))
    return steps


def _kind_details(kind: str, step: Mapping[str, Any]) -> Iterator[str]:
    """Say what a step of this kind does."""
    if kind == "map":
        yield f"for each of {step['over']}" if step.get("over") else f"for each of input.{step['over_input']}"
        if step.get("strategy", "all") != "all":
            yield f"strategy: {step['strategy']}"
    elif kind == "child":
        version = f" {step['workflow_version']}" if step.get("workflow_version") else ""
        yield f"child job: {step['workflow']}{version}" + ("" if step.get("wait", True) else ", not awaited")
        if step.get("repeat_until"):
            yield f"until {step['repeat_until']}, at most {step['max_repeats']} times"
    elif kind == "sleep":
        yield f"sleep: {step['seconds']:g} s" if step.get("until") is None else f"sleep until {step['until']}"
    elif kind == "signal":
        yield f"signal: {step['signal']}"
    elif kind != "plain":
        yield kind


def _step_details(step: Mapping[str, Any]) -> Iterator[str]:
    """Say how many dependencies a step needs, its condition, and how it is undone."""
    dependencies = sum(len(step.get(field) or ()) for field in DEPENDENCY_FIELDS)
    needed = needed_dependencies(step.get("join"), dependencies)
    if needed is not None:
        yield f"join: {needed} of {dependencies}" + (", cancels the rest" if step.get("cancel_rest") else "")
    if step.get("when"):
        yield f"when {step['when']}"
    if step.get("compensate"):
        is_own = step["compensate"].endswith(f"/{step['name']}:compensate")
        yield "with compensation" if is_own else f"compensation: {step['compensate']}"


def _arrows(document: Mapping[str, Any]) -> list[Arrow]:
    return [
        Arrow(
            edge.upstream,
            edge.downstream,
            _BRANCH_LABEL if edge.branch else _EDGE_LABELS[edge.condition],
            dashed=edge.condition != AFTER,
        )
        for edge in edges(document)
        if edge.condition != RECOVERY
    ]


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT_LENGTH else f"{line[: MAX_TEXT_LENGTH - 1]}…"


def _escape_mermaid(text: str) -> str:
    """Write characters that mean something to Mermaid as its entities."""
    return re.sub(r"[^\w .,:;/…=+*-]", lambda found: f"#{ord(found[0])};", text)


def _describe(steps: Iterable[DrawnStep], arrows: list[Arrow]) -> str:
    """Describe the diagram in text, for screen readers."""
    boxes = "; ".join(", ".join((step.name, *step.details)) for step in steps)
    moves = "; ".join(f"{arrow.source} to {arrow.target}" + f" {arrow.label}".rstrip() for arrow in arrows)
    return f"Steps: {boxes}." + (f" Dependencies: {moves}." if moves else "")


def _shape(step: DrawnStep, box: Box) -> Iterator[str]:
    """Draw the outline of a step by its kind, and its texts."""
    left, right, top, bottom = box.left, box.right, box.top, box.bottom
    outline = f'fill="{_STATE_COLOURS.get(step.state or "", STATE_COLOUR)}" stroke="{TEXT_COLOUR}" stroke-width="1.5"'
    corner = {"decision": 14, "approval": 8}.get(step.kind)
    if corner:
        points = (
            (left + corner, top),
            (right - corner, top),
            (right, box.y),
            (right - corner, bottom),
            (left + corner, bottom),
            (left, box.y),
        )
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + "Z"
        yield f'<path class="step" d="{path}" {outline}/>'
    else:
        radius = {"sleep": STATE_HEIGHT / 2, "plain": 9}.get(step.kind, 0)
        yield (
            f'<rect class="step" x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{box.height}"'
            f' rx="{radius:g}" {outline}/>'
        )
    if step.kind == "child":
        yield stroke(f"M{left + 6:.1f} {top:.1f}V{bottom:.1f}M{right - 6:.1f} {top:.1f}V{bottom:.1f}", TEXT_COLOUR)
    elif step.kind == "map":
        yield stroke(f"M{left + 5:.1f} {bottom + 4:.1f}H{right + 4:.1f}V{top + 5:.1f}", TEXT_COLOUR)
    elif step.kind == "signal":
        yield stroke(f"M{left:.1f} {top:.1f}L{left + 10:.1f} {box.y:.1f}L{left:.1f} {bottom:.1f}", TEXT_COLOUR)
    y = top + STATE_HEIGHT / 2
    yield heading_text(step.name, box.x, y)
    for number, line in enumerate(step.details, start=1):
        yield label(line, box.x, y + LINE_HEIGHT * number, FORWARD_COLOUR)
