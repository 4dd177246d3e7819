"""Sparse histograms of durations: four positions per octave from 100 µs, so that a percentile is right within 9 %."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_S = 0.0001
PER_OCTAVE = 4
MAX_POSITION = 140  # 100 µs times 2^35: about 40 days


def position_of(seconds: float) -> int:
    """Return the position of a duration."""
    if seconds <= FIRST_S:
        return 0
    return min(int(PER_OCTAVE * math.log2(seconds / FIRST_S)), MAX_POSITION)


def middle_of(position: int) -> float:
    """Return the duration in the middle of a position, in seconds."""
    return FIRST_S * math.exp2((position + 0.5) / PER_OCTAVE)


def percentile(positions: Sequence[int], counts: Sequence[int], share: float) -> float | None:
    """Return the duration below which the share of all durations lies; None without any. Positions are ascending."""
    total = sum(counts)
    if not total:
        return None
    left = share * total
    for position, count in zip(positions, counts, strict=True):
        left -= count
        if left <= 0:
            return middle_of(position)
    return middle_of(positions[-1])
