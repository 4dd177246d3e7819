"""The workflows of the guide run in the database as the guide says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from guides import run_page
from interlock.testing import drain

if TYPE_CHECKING:
    from interlock import Interlock

pytestmark = pytest.mark.flow


async def run_job(app: Interlock, workflow: str, given: dict[str, Any], **options: Any) -> tuple[Any, dict[str, str]]:
    job = await app.submit(workflow, given, **options)
    await drain(app)
    status = await job.status()
    assert status.status == "COMPLETED", status.reason
    return status.output, {step.step: str(step.state) for step in await job.steps()}


async def test_the_workflows_of_the_guides_end_as_they_say(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_DATABASE_URL", url)
    async with run_page("workflows.md", monkeypatch).app as app:
        output, states = await run_job(app, "order_fulfillment", {"number": 7, "boxes": ["a"]}, version="1")
        assert output == {"ship": "1 boxes with truck"}
        assert [name for name, state in states.items() if state == "skipped"] == ["by_air", "tell_support"]

    async with run_page("control-flow.md", monkeypatch).app as app:
        output, states = await run_job(app, "payment", {})
        assert (states["charge"], states["deliver"], states["alert"]) == ("error", "done", "done")
        assert output["deliver"] == "delivered against invoice, because the card was refused"

        output, states = await run_job(app, "insurance_claim", {"amount": 700})
        assert output == {"close": "closed: to be repaired"}
        assert [name for name, state in states.items() if state == "skipped"] == ["pay", "refuse"]

        output, states = await run_job(app, "find_carrier", {"country": "CH"})
        assert (output, states["insure"]) == ({"insure": "north, insured"}, "done")
        _, states = await run_job(app, "find_carrier", {"country": "US"})
        assert (states["book"], states["insure"]) == ("done", "skipped")
