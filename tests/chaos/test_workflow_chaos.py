"""Workers and orchestrators that are killed at random lose no result and finalize no job twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chaos_support import Chaos

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.flow, pytest.mark.chaos]

STEPS = 400
HARMS = 16


async def test_no_kill_loses_a_result(url: str, tmp_path: Path) -> None:
    chaos = Chaos(url, tmp_path, seed=7, at_once=8)
    found = await chaos.run(STEPS, every=0.5, harms=HARMS, within=90)
    assert found.faults == [], chaos.counts
    assert found.steps == chaos.counts["steps"] >= STEPS
    assert chaos.counts["killed"] > 3
    assert chaos.counts["hung"] == 0
