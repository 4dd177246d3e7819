"""Overrides of limits: an operator sets a rule beside the declared one, and takes it back; records say who and why."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from interlock import Interlock
from interlock.errors import StatementError
from interlock.store.limit_overrides import override_limit, read_limit_changes, read_limit_holders, restore_limit
from interlock.store.limits import Limit, delete_limits, put_limits
from interlock.store.stats import LimitUse, list_limits

if TYPE_CHECKING:
    from interlock.postgres.connection import Connection

pytestmark = pytest.mark.store
HOUR = timedelta(hours=1)


async def limit(database: Connection, key: str) -> LimitUse:
    (found,) = [each for each in await list_limits(database) if each.key == key]
    return found


async def test_an_override_outlives_the_declaration_and_is_shown_beside_it(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=5, max_starts=10, period=HOUR, share=2)])
    await override_limit(database, Limit("mail", max_running=1), actor="eva", reason="the relay is slow")
    found = await limit(database, "mail")
    assert (found.max_running, found.max_starts, found.period, found.share) == (1, None, None, 1)
    assert (found.overridden_by, found.override_reason) == ("eva", "the relay is slow")
    assert found.overridden_at is not None
    assert found.declared == {
        "max_running": 5,
        "max_starts": 10,
        "max_weight": None,
        "max_cost": None,
        "period": 3600,
        "share": 2,
    }
    same = [Limit("mail", max_running=5, max_starts=10, period=HOUR, share=2)]
    assert await put_limits(database, same) == [], "nothing changes, nobody is woken"
    await put_limits(database, [Limit("mail", max_running=7)])  # the app opens, with another declaration
    found = await limit(database, "mail")
    assert (found.max_running, (found.declared or {})["max_running"]) == (1, 7)
    assert await restore_limit(database, "mail", actor="ada", reason="fast again")
    found = await limit(database, "mail")
    assert (found.max_running, found.declared, found.overridden_by, found.override_reason) == (7, None, None, None)
    assert not await restore_limit(database, "mail", actor="ada")


async def test_an_override_of_a_key_that_no_app_declares_ends_with_it(database: Connection) -> None:
    await override_limit(database, Limit("mail:*", max_starts=3, period=HOUR), actor="eva")
    await override_limit(database, Limit("mail:*", max_starts=4, period=HOUR), actor="eva")
    assert (await limit(database, "mail:*")).declared is None
    assert await restore_limit(database, "mail:*", actor="eva")
    assert await list_limits(database) == []


async def test_a_declaration_after_an_override_is_what_a_restore_brings_back(database: Connection, url: str) -> None:
    await override_limit(database, Limit("mail", max_running=1), actor="eva")
    app = Interlock(url)
    app.limit("mail", max_running=9)
    async with app:
        assert (await limit(database, "mail")).max_running == 1
    await restore_limit(database, "mail", actor="eva")
    assert (await limit(database, "mail")).max_running == 9


async def test_every_change_is_recorded_and_the_record_cannot_be_changed(database: Connection) -> None:
    await put_limits(database, [Limit("mail", max_running=5)])
    await override_limit(database, Limit("mail", max_running=1), actor="eva", reason="slow")
    await restore_limit(database, "mail", actor="ada", reason="fast")
    await delete_limits(database, ["mail"], actor="bob", reason="unused")
    changes = await read_limit_changes(database, "mail")
    assert [(c.event, c.actor, c.reason) for c in changes] == [
        ("delete", "bob", "unused"),
        ("restore", "ada", "fast"),
        ("override", "eva", "slow"),
    ]
    running = [tuple(None if rule is None else rule["max_running"] for rule in (c.before, c.after)) for c in changes]
    assert running == [(5, None), (1, 5), (5, 1)]
    for statement in ("update interlock.limit_changes set actor = 'x'", "delete from interlock.limit_changes"):
        with pytest.raises(Exception, match="is a record of what happened"):
            await database.execute(statement)


async def test_the_holders_of_a_key_and_of_a_pattern_are_shown(database: Connection) -> None:
    await put_limits(database, [Limit("mail:*", share=1), Limit("smtp", share=1)])
    for keys in ("{mail:a,smtp}", "{mail:b}"):
        await database.execute("select interlock.enqueue('x', limit_keys => %s::text[])", [keys])
    await database.execute("update interlock.tasks set state = 'pending', event = 'release', held_by = null")
    assert [holder.limit_keys for holder in await read_limit_holders(database, "smtp")] == [["mail:a", "smtp"]]
    assert len(await read_limit_holders(database, "mail:*")) == 2
    assert await read_limit_holders(database, "mail") == []


async def test_an_override_that_the_table_refuses_changes_nothing(database: Connection) -> None:
    await override_limit(database, Limit("mail", max_running=1), actor="eva")
    with pytest.raises(StatementError):
        await override_limit(database, Limit("mail", max_running=2), actor=None)  # type: ignore[arg-type]
    assert (await limit(database, "mail")).max_running == 1
    assert len(await read_limit_changes(database, "mail")) == 1
