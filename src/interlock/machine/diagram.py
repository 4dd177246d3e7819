"""A machine as a picture, drawn from its table: Mermaid text, or an SVG that stands on its own.

Invariant: whatever is in the table is in the picture, and nothing else.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from interlock.machine.svg import (
    DOT,
    HEADING,
    JOINED,
    LABEL_FONT,
    LABEL_HEIGHT,
    LINE,
    LOOP,
    MARGIN,
    STATE_FONT,
    Box,
    Canvas,
    Spot,
    arrange,
    arrows,
    place,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from interlock.machine.definition import Machine
    from interlock.machine.svg import Piece


FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
PAPER = "#fbfcfe"
INK = "#1e293b"
ONWARD = "#475569"
BACK = "#2563eb"
STATE = "#e8eef7"
FINAL = "#e7f3ea"


def mermaid(machine: Machine[Any, Any]) -> str:
    """Draw the machine as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    lines += [f"    [*] --> {state}" for state in machine.states if state in machine.initial]
    lines += [f"    {arrow.source} --> {arrow.target} : {arrow.label}" for arrow in arrows(machine)]
    lines += [f"    {state} --> [*]" for state in machine.states if state in machine.final]
    return "\n".join(lines) + "\n"


def svg(machine: Machine[Any, Any]) -> str:
    """Draw the machine as an SVG picture: states in rows from top to bottom, moves back in another colour."""
    canvas = place(arrange(machine), machine.name)
    width, height = math.ceil(canvas.width), math.ceil(canvas.height)
    size = f'width="{width}" height="{height}"'
    finals = {str(state) for state in machine.final}
    name = escape(machine.name)
    # Several pictures may stand in one page, where an id must not repeat.
    key = re.sub(r"\W+", "-", machine.name)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" role="img"',
        f'  aria-labelledby="{key}-title {key}-desc" font-family="{FONT}">',
        f'<title id="{key}-title">Lifecycle: {name}</title>',
        f'<desc id="{key}-desc">{escape(_described(machine))}</desc>',
        f'<rect class="paper" {size} rx="8" fill="{PAPER}"/>',
        f'<text x="{MARGIN}" y="{HEADING}" font-size="{STATE_FONT + 2}" font-weight="bold" fill="{INK}">{name}</text>',
        *_lines(canvas),
        *(part for spot, box in canvas.boxes.items() for part in _shape(spot, box, final=spot.text in finals)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _described(machine: Machine[Any, Any]) -> str:
    """Say the picture in words, for those who hear it."""
    begins = ", ".join(state for state in machine.states if state in machine.initial)
    ends = ", ".join(state for state in machine.states if state in machine.final)
    moves = "; ".join(f"{arrow.source} to {arrow.target} on {arrow.label}" for arrow in arrows(machine))
    return f"Begins in {begins}. Ends in {ends}. Moves: {moves}."


def _lines(canvas: Canvas) -> Iterator[str]:
    for piece in canvas.pieces:
        yield from _line(piece, canvas.boxes[piece.link.upper], canvas.boxes[piece.link.lower])
    for spot, box in canvas.boxes.items():
        if spot.kind in {"label", "bend"}:
            yield _stroke(f"M{box.x:.1f} {box.top:.1f}V{box.bottom:.1f}", BACK if spot.back else ONWARD)


def _line(piece: Piece, upper: Box, lower: Box) -> Iterator[str]:
    """Draw one piece as a curve that leaves and arrives upright, so that all pieces of an arrow join smoothly."""
    colour = BACK if piece.link.back else ONWARD
    start, end, top, bottom = piece.start, piece.end, upper.bottom, lower.top
    middle = (top + bottom) / 2
    yield _stroke(
        f"M{start:.1f} {top:.1f}C{start:.1f} {middle:.1f} {end:.1f} {middle:.1f} {end:.1f} {bottom:.1f}", colour
    )
    if piece.link.tip:
        x, y, step = (start, top, 9) if piece.link.back else (end, bottom, -9)
        yield f'<path d="M{x:.1f} {y:.1f}l-4.5 {step}h9z" fill="{colour}"/>'


def _stroke(path: str, colour: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-linecap="round"/>'


def _shape(spot: Spot, box: Box, *, final: bool) -> Iterator[str]:
    if spot.kind == "dot":
        yield f'<circle cx="{box.x:.1f}" cy="{box.y:.1f}" r="{DOT}" fill="{INK}"/>'
    elif spot.kind == "label":
        yield from _events(spot, box)
    elif spot.kind == "state":
        yield from _state(spot, box, final=final)


def _events(spot: Spot, box: Box) -> Iterator[str]:
    """Write the events of an arrow one below the other, on paper that covers the line behind them."""
    lines = spot.text.split(JOINED)
    high = LABEL_HEIGHT + LINE * (len(lines) - 1)
    yield (
        f'<rect class="label" x="{box.left:.1f}" y="{box.y - high / 2:.1f}" width="{box.width:.1f}" height="{high}"'
        f' fill="{PAPER}"/>'
    )
    for number, line in enumerate(lines):
        yield _label(line, box.x, box.y + LINE * (number - (len(lines) - 1) / 2), BACK if spot.back else ONWARD)


def _state(spot: Spot, box: Box, *, final: bool) -> Iterator[str]:
    yield (
        f'<rect class="state" x="{box.left:.1f}" y="{box.top:.1f}" width="{box.width:.1f}" height="{box.height}" rx="9"'
        f' fill="{FINAL if final else STATE}" stroke="{INK}" stroke-width="1.5"/>'
    )
    if final:
        yield (
            f'<rect x="{box.left + 4:.1f}" y="{box.top + 4:.1f}" width="{box.width - 8:.1f}" height="{box.height - 8}"'
            f' rx="6" fill="none" stroke="{INK}"/>'
        )
    yield (
        f'<text x="{box.x:.1f}" y="{box.y + STATE_FONT * 0.35:.1f}" font-size="{STATE_FONT}" font-weight="bold"'
        f' fill="{INK}" text-anchor="middle">{escape(spot.text)}</text>'
    )
    if spot.loop:
        x, y = box.right, box.y
        yield _stroke(f"M{x:.1f} {y - 9:.1f}h8a9 9 0 0 1 0 18h-8", BACK)
        yield f'<path d="M{x:.1f} {y + 9:.1f}l9 -4.5v9z" fill="{BACK}"/>'
        yield _label(spot.loop, x + LOOP, y, BACK, anchor="start")


def _label(text: str, x: float, y: float, colour: str, anchor: str = "middle") -> str:
    return (
        f'<text class="event" x="{x:.1f}" y="{y + LABEL_FONT * 0.35:.1f}" font-size="{LABEL_FONT}" fill="{colour}"'
        f' text-anchor="{anchor}">{escape(text)}</text>'
    )


# SECTION machine/document
# The documentation of lifecycles as a Markdown page, written from their tables.
#
# Invariant: the page says nothing that is not in a table, so it can be made again and compared at any time.

MADE_BY = "interlock diagram --docs docs/lifecycles.md"


def document(machines: Mapping[str, Machine[Any, Any]], enforced: Mapping[str, str]) -> str:
    """Write the page; `enforced` says for each machine what holds things to its table."""
    lines = [
        f"<!-- Generated by `{MADE_BY}` from src/interlock/lifecycle.py. Do not edit. -->",
        "",
        "# Lifecycles",
        "",
        f"Every lifecycle of Interlock, as declared in `lifecycle.py`. This page is generated by `{MADE_BY}`,",
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
    """Say what the table does not allow: how many pairs, and which states can never follow which."""
    pairs, moves = len(machine.states) * len(machine.events), len(machine.rows)
    yield from ("", f"Of {pairs} pairs of a state and an event, {moves} are moves; {pairs - moves} are refused.")
    yield from ("", "| state | never directly followed by |", "| --- | --- |")
    for state in machine.states:
        allowed = machine.allowed_targets(state)
        never = [other for other in machine.states if other is not state and other not in allowed]
        yield f"| `{state}` | {'anything' if not allowed else _code(never) or '-'} |"


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)
