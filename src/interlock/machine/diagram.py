"""Renders a machine from its table: as Mermaid, as a standalone SVG, and all machines as a Markdown page.

Invariant: the output contains everything in the table and nothing else, so it can be generated again and compared.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from interlock.machine.svg import (
    DOT_RADIUS,
    EVENT_SEPARATOR,
    HEADING_HEIGHT,
    LABEL_FONT,
    LABEL_HEIGHT,
    LINE_HEIGHT,
    LOOP_WIDTH,
    MARGIN,
    STATE_FONT,
    arrows,
    layered_layout,
    place,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from interlock.machine.definition import Machine
    from interlock.machine.svg import ArrowSegment, Box, Canvas, Node


FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
BACKGROUND_COLOUR = "#fbfcfe"
TEXT_COLOUR = "#1e293b"
FORWARD_COLOUR = "#475569"
BACKWARD_COLOUR = "#2563eb"
STATE_COLOUR = "#e8eef7"
FINAL_STATE_COLOUR = "#e7f3ea"
DOCS_COMMAND = "interlock diagram --docs docs/lifecycles.md"


def mermaid(machine: Machine[Any, Any]) -> str:
    """Draw the machine as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    lines += [f"    [*] --> {state}" for state in machine.states if state in machine.initial]
    lines += [f"    {arrow.source} --> {arrow.target} : {arrow.label}" for arrow in arrows(machine)]
    lines += [f"    {state} --> [*]" for state in machine.states if state in machine.final]
    return "\n".join(lines) + "\n"


def svg(machine: Machine[Any, Any]) -> str:
    """Draw the machine as an SVG: states in rows from top to bottom, backward transitions in another colour."""
    finals = {str(state) for state in machine.final}
    return picture(
        place(layered_layout(machine), machine.name),
        machine.name,
        title=f"Lifecycle: {machine.name}",
        description=_described(machine),
        shape=lambda node, box: _state(node, box, final=node.text in finals),
    )


def picture(
    canvas: Canvas, heading: str, *, title: str, description: str, shape: Callable[[Node, Box], Iterable[str]]
) -> str:
    """Write a canvas as an SVG; `shape` draws the boxes."""
    width, height = math.ceil(canvas.width), math.ceil(canvas.height)
    size = f'width="{width}" height="{height}"'
    # One page may embed several SVGs, and an id must be unique in it.
    key = re.sub(r"\W+", "-", heading)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" role="img"',
        f'  aria-labelledby="{key}-title {key}-desc" font-family="{FONT}">',
        f'<title id="{key}-title">{escape(title)}</title>',
        f'<desc id="{key}-desc">{escape(description)}</desc>',
        f'<rect class="paper" {size} rx="8" fill="{BACKGROUND_COLOUR}"/>',
        f'<text x="{MARGIN}" y="{HEADING_HEIGHT}" font-size="{STATE_FONT + 2}" font-weight="bold"',
        f'  fill="{TEXT_COLOUR}">{escape(heading)}</text>',
        *_lines(canvas),
    ]
    for node, box in canvas.boxes.items():
        if node.kind == "dot":
            parts.append(f'<circle cx="{box.x:.1f}" cy="{box.y:.1f}" r="{DOT_RADIUS}" fill="{TEXT_COLOUR}"/>')
        elif node.kind == "label":
            parts += _events(node, box)
        elif node.kind == "box":
            parts += shape(node, box)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _described(machine: Machine[Any, Any]) -> str:
    """Describe the diagram in text, for screen readers."""
    begins = ", ".join(state for state in machine.states if state in machine.initial)
    ends = ", ".join(state for state in machine.states if state in machine.final)
    moves = "; ".join(f"{arrow.source} to {arrow.target} on {arrow.label}" for arrow in arrows(machine))
    return f"Begins in {begins}. Ends in {ends}. Moves: {moves}."


def _lines(canvas: Canvas) -> Iterator[str]:
    for segment in canvas.segments:
        yield from _line(segment, canvas.boxes[segment.link.upper], canvas.boxes[segment.link.lower])
    for node, box in canvas.boxes.items():
        if node.kind in {"label", "bend"}:
            path = f"M{box.x:.1f} {box.top:.1f}V{box.bottom:.1f}"
            yield stroke(path, BACKWARD_COLOUR if node.back else FORWARD_COLOUR, dashed=node.dashed)


def _line(segment: ArrowSegment, upper: Box, lower: Box) -> Iterator[str]:
    """Draw one segment as a curve that starts and ends vertically, so that the segments of an arrow join smoothly."""
    colour = BACKWARD_COLOUR if segment.link.back else FORWARD_COLOUR
    start, end, top, bottom = segment.start, segment.end, upper.bottom, lower.top
    middle = (top + bottom) / 2
    path = f"M{start:.1f} {top:.1f}C{start:.1f} {middle:.1f} {end:.1f} {middle:.1f} {end:.1f} {bottom:.1f}"
    yield stroke(path, colour, dashed=segment.link.dashed)
    if segment.link.tip:
        x, y, step = (start, top, 9) if segment.link.back else (end, bottom, -9)
        yield f'<path d="M{x:.1f} {y:.1f}l-4.5 {step}h9z" fill="{colour}"/>'


def stroke(path: str, colour: str, *, dashed: bool = False) -> str:
    """Draw a line."""
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-linecap="round"{dashes}/>'


def _events(node: Node, box: Box) -> Iterator[str]:
    """Write the events of an arrow one below the other, on a background that covers the line behind them."""
    lines = node.text.split(EVENT_SEPARATOR)
    high = LABEL_HEIGHT + LINE_HEIGHT * (len(lines) - 1)
    yield (
        f'<rect class="label" x="{box.left:.1f}" y="{box.y - high / 2:.1f}" width="{box.width:.1f}" height="{high}"'
        f' fill="{BACKGROUND_COLOUR}"/>'
    )
    for number, line in enumerate(lines):
        yield label(
            line,
            box.x,
            box.y + LINE_HEIGHT * (number - (len(lines) - 1) / 2),
            BACKWARD_COLOUR if node.back else FORWARD_COLOUR,
        )


def _state(node: Node, box: Box, *, final: bool) -> Iterator[str]:
    yield (
        f'<rect class="state" x="{box.left:.1f}" y="{box.top:.1f}" width="{box.width:.1f}" height="{box.height}" rx="9"'
        f' fill="{FINAL_STATE_COLOUR if final else STATE_COLOUR}" stroke="{TEXT_COLOUR}" stroke-width="1.5"/>'
    )
    if final:
        yield (
            f'<rect x="{box.left + 4:.1f}" y="{box.top + 4:.1f}" width="{box.width - 8:.1f}" height="{box.height - 8}"'
            f' rx="6" fill="none" stroke="{TEXT_COLOUR}"/>'
        )
    yield heading_text(node.text, box.x, box.y)
    if node.loop:
        x, y = box.right, box.y
        yield stroke(f"M{x:.1f} {y - 9:.1f}h8a9 9 0 0 1 0 18h-8", BACKWARD_COLOUR)
        yield f'<path d="M{x:.1f} {y + 9:.1f}l9 -4.5v9z" fill="{BACKWARD_COLOUR}"/>'
        yield label(node.loop, x + LOOP_WIDTH, y, BACKWARD_COLOUR, anchor="start")


def heading_text(text: str, x: float, y: float) -> str:
    """Write the name of a box at a place."""
    return (
        f'<text x="{x:.1f}" y="{y + STATE_FONT * 0.35:.1f}" font-size="{STATE_FONT}" font-weight="bold"'
        f' fill="{TEXT_COLOUR}" text-anchor="middle">{escape(text)}</text>'
    )


def label(text: str, x: float, y: float, colour: str, anchor: str = "middle") -> str:
    """Write a line of small text at a place."""
    return (
        f'<text class="event" x="{x:.1f}" y="{y + LABEL_FONT * 0.35:.1f}" font-size="{LABEL_FONT}" fill="{colour}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )


def document(machines: Mapping[str, Machine[Any, Any]], enforced: Mapping[str, str]) -> str:
    """Write the Markdown page; `enforced` says for each machine where its table is enforced."""
    lines = [
        f"<!-- Generated by `{DOCS_COMMAND}` from src/interlock/lifecycle.py. Do not edit. -->",
        "",
        "# Lifecycles",
        "",
        f"Every lifecycle of Interlock, as declared in `lifecycle.py`. This page is generated by `{DOCS_COMMAND}`,",
        "and a test holds it to the tables. What a table does not list is refused.",
        "",
        "| lifecycle | states | moves | enforced |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| [{name}](#{name}) | {len(machine.states)} | {len(machine.rows)} | {enforced[name]} |"
        for name, machine in machines.items()
    ]
    for name, machine in machines.items():
        lines += _section(name, machine, enforced[name])
    return "\n".join(lines) + "\n"


def _section(name: str, machine: Machine[Any, Any], enforced: str) -> Iterator[str]:
    yield from ("", f"## {name}", "")
    yield f"- Enforced {enforced}."
    yield f"- Begins in: {_code(state for state in machine.states if state in machine.initial)}."
    yield f"- Ends in: {_code(state for state in machine.states if state in machine.final)}."
    reopening = [event for event in machine.events if event in machine.reopening]
    yield f"- Events that leave a final state: {_code(reopening) or 'none'}."
    yield from ("", "```mermaid", mermaid(machine).rstrip(), "```", "")
    yield from ("| from | event | to |", "| --- | --- | --- |")
    yield from (f"| `{source}` | `{event}` | `{target}` |" for source, event, target in machine.rows)
    yield from _forbidden(machine)


def _forbidden(machine: Machine[Any, Any]) -> Iterator[str]:
    """List what the table does not allow: the number of pairs, and the states that never follow each state."""
    pairs, moves = len(machine.states) * len(machine.events), len(machine.rows)
    yield from ("", f"Of {pairs} pairs of a state and an event, {moves} are moves; {pairs - moves} are refused.")
    yield from ("", "| state | never directly followed by |", "| --- | --- |")
    for state in machine.states:
        allowed = machine.allowed_targets(state)
        never = [other for other in machine.states if other is not state and other not in allowed]
        yield f"| `{state}` | {'anything' if not allowed else _code(never) or '-'} |"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
