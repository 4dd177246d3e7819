"""Doctor: what an examination of the database found, how bad it is, and the command that helps."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from starlette.responses import Response

from interlock.dashboard.attention import TONES
from interlock.dashboard.format import seconds
from interlock.dashboard.live import EXAMINATION_INTERVAL_S
from interlock.dashboard.pages import View, page_router
from interlock.dashboard.render import render_macro
from interlock.dashboard.topics import Moment, Topic, always, topics
from interlock.store.doctor import CODES, DoctorReport, Finding, Severity

router = page_router(whole_system=True)
PARTS = "doctor_parts.html"
PLACEHOLDER = re.compile(r"\b(ID|NAME|KEY)\b")  # in a command: the row that it is about


class Shown(NamedTuple):
    """A finding with its tone and icon, and the commands within its remedy."""

    finding: Finding
    tone: str
    icon: str
    meaning: str
    remedy: list[tuple[str, bool]]  # parts of the text, and whether each is a command

    @property
    def commands(self) -> list[str]:
        """The commands that can be run as they are."""
        return [
            text
            for text, is_code in self.remedy
            if is_code and text.startswith("interlock") and not PLACEHOLDER.search(text)
        ]


def shown_findings(report: DoctorReport) -> list[Shown]:
    """Prepare the findings for the page, the most severe first."""
    return [
        Shown(
            finding,
            *TONES[finding.severity],
            CODES[finding.code].meaning if finding.code in CODES else "",
            split_remedy(finding),
        )
        for finding in report.findings
    ]


def split_remedy(finding: Finding) -> list[tuple[str, bool]]:
    """Split a remedy at its backquotes; the commands name the row if there is one only."""
    parts = [(text, at % 2 == 1) for at, text in enumerate(finding.remedy.split("`")) if text]
    if finding.rows != 1 or len(finding.sample) != 1:
        return parts
    row = shlex.quote(finding.sample[0])
    return [(PLACEHOLDER.sub(lambda _: row, text) if is_code else text, is_code) for text, is_code in parts]


def summary(report: DoctorReport) -> str:
    """Say how many findings there are of each severity."""
    counts = {severity: sum(found.severity == severity for found in report.findings) for severity in Severity}
    parts = [f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items() if count]
    return ", ".join(parts) or "no finding"


@router.get("/doctor")
async def show_doctor(view: View, again: bool = False) -> Response:  # noqa: FBT001, FBT002 - a parameter of the URL
    """Show the findings of the latest examination; `again`: of a new one, if that is older than ten seconds."""
    report = await view.dashboard.hub.doctor.read(0.0 if again else EXAMINATION_INTERVAL_S)
    return await view.page(
        "doctor.html",
        key="doctor",
        title="Doctor",
        topics=("doctor",),
        command="interlock doctor",
        report=report,
        findings=shown_findings(report),
        summary=summary(report),
        took=seconds(report.duration_s),
    )


def _render(moment: Moment) -> dict[str, str]:
    report = moment.report
    if report is None:
        return {}
    return {
        "examined": render_macro(PARTS, "examined_line", report, moment.now),
        "findings": render_macro(PARTS, "findings_card", shown_findings(report), summary(report)),
        "checked": render_macro(PARTS, "checked_card", report, seconds(report.duration_s)),
    }


topics.add(
    Topic(name="doctor", render=_render, every_s=EXAMINATION_INTERVAL_S, whole_system=always, shows_findings=True)
)
