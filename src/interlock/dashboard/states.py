"""Tone, icon and word of every state of every lifecycle.

Invariant: each state of `lifecycle.MACHINES` has a tone of the palette and an icon, and no icon repeats within one
lifecycle, so that a state is recognized without its colour.
"""

from __future__ import annotations

from typing import NamedTuple

TONES = ("slate", "violet", "amber", "blue", "orange", "green", "red", "teal")


class StateStyle(NamedTuple):
    """How a state is shown: the tone of the palette, and the icon of the sprite."""

    tone: str
    icon: str


def _styles(text: str) -> dict[str, StateStyle]:
    styles = {}
    for entry in text.split(","):
        state, tone, icon = entry.split()
        styles[state] = StateStyle(tone, icon)
    return styles


STYLES: dict[str, dict[str, StateStyle]] = {
    "task": _styles(
        "waiting violet hourglass, pending amber clock, running blue play, done green check, error red cross, "
        "canceled slate slash, skipped teal chevrons"
    ),
    "task-attempt": _styles(
        "pending amber clock, claiming violet hand, processing blue play, reporting teal arrow-up, "
        "completed green check, failed red cross, abandoned slate broken"
    ),
    "job": _styles(
        "SUBMITTED violet inbox, PENDING amber clock, RUNNING blue play, COMPLETED green check, FAILED red cross, "
        "CANCELED slate slash"
    ),
    "supervised-worker": _styles(
        "IDLE amber moon, RUNNING blue play, PAUSED orange pause, COMPLETED green check, FAILED red cross, "
        "TERMINATED slate square"
    ),
    "worker": _styles(
        "starting violet spark, connecting amber plug, recovering orange ring, running blue play, "
        "backing_off teal wave, shutting_down slate power, stopped slate square"
    ),
    "sort-worker": _styles(
        "Initializing slate spark, Sampling teal dropper, WaitingForPartitionConfig violet hourglass-1, "
        "Sorting blue bars, WaitingForShuffleSignal violet hourglass-2, Shuffling blue arrows, "
        "WaitingForMergeSignal violet hourglass-3, Merging blue funnel, Completed green check, Failed red cross"
    ),
    "sort-master": _styles(
        "Registering slate list, Sampling teal dropper, Sorting blue bars, Shuffling blue arrows, Merging blue funnel, "
        "Completed green check, Failed red cross"
    ),
}
UNKNOWN_STYLE = StateStyle("slate", "ring")  # a state of a newer release, read from the database


def state_style(machine: str, state: str) -> StateStyle:
    """Return the style of a state."""
    return STYLES.get(machine, {}).get(state, UNKNOWN_STYLE)


def state_word(state: str) -> str:
    """Return the word for a state: its own name, with spaces in place of underscores."""
    return state.replace("_", " ")
