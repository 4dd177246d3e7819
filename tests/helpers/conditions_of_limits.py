"""Conditions of the functions that take the tokens of limited tasks: sql/functions/limits.sql."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from condition_scenarios import (
    HOUR,
    MINUTE,
    NOW,
    SECOND,
    GuardedRead,
    GuardedWrite,
    Needed,
    Redundant,
    beside,
    record,
    task,
)

if TYPE_CHECKING:
    from condition_scenarios import MakeRow


def limited(state: str = "pending", **columns: Any) -> MakeRow:
    """Make a task that a claim can start if it takes a token of the key `k`."""
    return task(state, **{"limit_keys": ["k"], **columns})


def used_up(rule: str, **usage: Any) -> MakeRow:
    """Make a task of a key whose rule allows five, and of which so much was used a minute ago."""
    return beside(
        limited(),
        before=(
            record("limits", "key", key="k", period=HOUR, **{rule: 5}),
            record("limit_usage", key="k", used_at=NOW - MINUTE, **usage),
        ),
    )


TABLE = (
    GuardedRead(
        "take_limited_tasks()",
        row=limited(),
        call=lambda _: {"least": 0, "most": 0},
        sql="select interlock.take_limited_tasks(array['default'], array['x'], %(least)s::smallint, "
        "%(most)s::smallint, 100, 100, %(now)s::timestamptz) as id",
        conditions=(
            Needed(
                "state = 'pending'",
                "a task that waits is taken, and its tokens are used up for nothing",
                row=limited("waiting"),
            ),
            Needed(
                "limit_keys is not null",
                "a task without a limit stops the claims of all that have one",
                row=task("pending"),
                caught_by="function",
            ),
            Needed(
                "tasks.namespace = served.namespace",
                "a worker runs tasks of a namespace that it does not serve",
                row=limited(namespace="elsewhere"),
            ),
            Needed(
                "crashes >= least_crashes",
                "a worker that runs nothing else takes a task that needs no isolation",
                call={"least": 1, "most": 9},
            ),
            Needed(
                "crashes <= most_crashes",
                "a task that is suspected of killing its worker runs beside others",
                row=limited(crashes=1),
            ),
            Needed("run_at <= checked_at", "a delayed task starts at once", row=limited(run_at=NOW + SECOND)),
            Needed("type = any (types)", "a worker claims tasks that it has no handler for", row=limited(type="y")),
            Needed(
                "starts_left[place] >= 1 and",
                "more tasks start in a period than the limit allows",
                row=used_up("max_starts", starts=5),
                instead="",
            ),
            Needed(
                "and (weight_left[place] >= candidate.weight or untouched[place])",
                "tasks of more weight start in a period than the limit allows",
                row=used_up("max_weight", starts=1, weight=5),
                instead="",
            ),
            Needed(
                "used.cost >= rule.max_cost",
                "tasks start although the budget is used up",
                row=used_up("max_cost", cost=5),
                instead="false",
            ),
        ),
    ),
    GuardedWrite(
        "stamp_limit_starts()",
        row=record("limit_usage", key="k", used_at="infinity", starts=1),
        call=lambda _: {},
        sql="select from interlock.stamp_limit_starts(%(now)s::timestamptz)",
        conditions=(
            Redundant("used_at = 'infinity'", "repeated for the row that is written; here it chooses the rows to lock"),
        ),
    ),
)
