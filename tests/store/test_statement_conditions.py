"""Every condition of a guarded or fenced statement is needed: without it, the statement takes a row that it must not.

The tables are in tests/helpers/conditions_of_*.py, one entry for each condition of each statement. A scenario is played
twice on a real database: with the statement as shipped, which must do right, and with the condition replaced by `true`,
which must not. So a scenario that proves nothing fails, and so does a condition that nothing needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

import conditions_of_advance
import conditions_of_jobs
import conditions_of_limits
import conditions_of_reads
import conditions_of_steps
import conditions_of_supervision
import conditions_of_tasks
import conditions_of_workers
from condition_scenarios import STATEMENTS, Guarded, Needed, Redundant, Scene, play
from interlock.postgres.connection import connect
from interlock.postgres.guards import GUARDS
from statement_conditions import conditional_statements, parse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from conftest import Clones

    from interlock.postgres.connection import Connection
    from interlock.postgres.embedded.server import EmbeddedServer

# The tables with a lifecycle, and those whose rows one process takes at a time, fenced by a holder or a number.
TABLES = frozenset({guard.table for guard in GUARDS} | {"callbacks", "leaders", "orchestration_messages", "signals"})
# Functions that decide which job of a key starts or ends.
FUNCTIONS = frozenset({"job_ahead()", "replaced_by()"})
SQL = conditional_statements(TABLES, FUNCTIONS)
TABLE: tuple[Guarded, ...] = (
    *conditions_of_tasks.TABLE,
    *conditions_of_steps.TABLE,
    *conditions_of_advance.TABLE,
    *conditions_of_jobs.TABLE,
    *conditions_of_workers.TABLE,
    *conditions_of_supervision.TABLE,
    *conditions_of_reads.TABLE,
    *conditions_of_limits.TABLE,
)
APPLIED = [pytest.param(guarded, id=guarded.name) for guarded in TABLE]
REDUNDANT = [
    pytest.param(guarded, conditions, id=guarded.name)
    for guarded in TABLE
    if (conditions := [each for each in guarded.conditions if isinstance(each, Redundant)])
]
NEEDED = [(guarded, each) for guarded in TABLE for each in guarded.conditions if isinstance(each, Needed)]
ALONE = [pytest.param(*each, id=f"{each[0].name}: {each[1].text}") for each in NEEDED if each[1].meanwhile is None]
RACED = [pytest.param(*each, id=f"{each[0].name}: {each[1].text}") for each in NEEDED if each[1].meanwhile is not None]


def is_part(condition: Needed | Redundant) -> bool:
    """Tell whether a condition is given by a part of the SQL that the parser does not look at."""
    return isinstance(condition, Needed) and condition.instead is not None


def without(guarded: Guarded, needed: Needed) -> str:
    """Return the SQL without one condition and its repetitions."""
    statement = SQL[guarded.name]
    if needed.instead is not None:
        return statement.sql.replace(needed.text, needed.instead)
    return statement.without(needed.text, *needed.along_with)


@pytest.mark.unit
def test_the_table_lists_every_condition_of_every_guarded_statement() -> None:
    listed = {(guarded.name, condition.text) for guarded in TABLE for condition in guarded.conditions}
    missing = [
        f"sql/{guarded.file}: {guarded.name}: no scenario for the condition  {condition.text}"
        for guarded in SQL.values()
        for condition in guarded.conditions
        if (guarded.name, condition.text) not in listed
    ]
    assert missing == [], "add a Needed or a Redundant to tests/helpers/conditions_of_*.py:\n" + "\n".join(missing)


@pytest.mark.unit
def test_the_table_lists_nothing_that_is_not_in_the_sql() -> None:
    known = {(guarded.name, condition.text) for guarded in SQL.values() for condition in guarded.conditions}
    gone = [
        f"{guarded.name}: the SQL has no condition  {condition.text}"
        for guarded in TABLE
        for condition in guarded.conditions
        if (guarded.name, condition.text) not in known
        and not (is_part(condition) and SQL[guarded.name].sql.count(condition.text) == 1)
    ]
    assert gone == [], "the conditions that the SQL has now:\n" + "\n".join(
        f"{name}: {text}" for name, text in sorted(known) if any(line.startswith(f"{name}:") for line in gone)
    )


@pytest.mark.unit
def test_every_statement_that_makes_a_move_is_in_the_table() -> None:
    names = {guarded.name.removesuffix("()") for guarded in TABLE}
    assert {name for name, statement in STATEMENTS.items() if statement.moves} <= names


@pytest.mark.unit
def test_every_statement_that_makes_a_move_names_the_actor() -> None:
    """The one term of their WHERE that chooses no rows, and that the tables leave out."""
    moving = [statement for statement in STATEMENTS.values() if statement.moves]
    named = "(select set_config('interlock.actor', %(actor)s, true)) is not null"
    assert [statement.name for statement in moving if named not in statement.sql] == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(server: EmbeddedServer, clones: Clones, template: str) -> AsyncIterator[Connection]:
    """Connect to a database in which every scenario is rolled back: one for all of them saves most of the time."""
    name = clones.take(template)
    async with connect(server.url(name)) as connection:
        yield connection
    clones.drop(name)


def check_caught(needed: Needed, outcome: str) -> None:
    """Check what became of the row without the condition."""
    assert outcome != "right", f"nothing goes wrong without the condition; the table says that {needed.risk}"
    assert outcome == needed.caught_by, f"a missing condition is caught by the {outcome}: write that into the table"


async def played(stage: Connection, guarded: Guarded, needed: Needed, text: str) -> str:
    """Play a scenario and roll it back."""
    async with stage.transaction(force_rollback=True):
        return await play(Scene(stage), guarded, needed, text)


@pytest.mark.store
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("guarded", "needed"), ALONE)
async def test_a_condition_is_needed(stage: Connection, guarded: Guarded, needed: Needed) -> None:
    assert await played(stage, guarded, needed, SQL[guarded.name].sql) == "right", "the statement as shipped"
    check_caught(needed, await played(stage, guarded, needed, without(guarded, needed)))


@pytest.mark.store
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("guarded", APPLIED)
async def test_a_statement_applies_to_its_row(stage: Connection, guarded: Guarded) -> None:
    """So that each scenario differs from a row and a call that fit."""
    assert await played(stage, guarded, Needed("", ""), SQL[guarded.name].sql) == "row"


@pytest.mark.store
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("guarded", "redundant"), REDUNDANT)
async def test_redundant_conditions_change_no_outcome(
    stage: Connection, guarded: Guarded, redundant: list[Redundant]
) -> None:
    """All at once, so that none of them is redundant only because of another one."""
    text = SQL[guarded.name].without(*(each.text for each in redundant))
    for needed in guarded.conditions:
        if isinstance(needed, Needed) and needed.meanwhile is None:
            assert await played(stage, guarded, needed, text) == "right", f"{needed.text}: {needed.risk}"


@pytest.mark.store
@pytest.mark.parametrize(("guarded", "needed"), RACED)
async def test_a_condition_is_needed_against_a_concurrent_change(
    make_database: Callable[[str], str], template: str, guarded: Guarded, needed: Needed
) -> None:
    async def race(text: str) -> str:
        url = make_database(template)
        async with connect(url) as connection, connect(url) as other:
            return await play(Scene(connection), guarded, needed, text, other)

    assert await race(SQL[guarded.name].sql) == "right", "the statement as shipped"
    check_caught(needed, await race(without(guarded, needed)))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("sql", "conditions"),
    [
        (
            "update interlock.tasks set a = 1 where id = %(id)s::uuid and state='x' returning id",
            ["id = %(id)s", "state = 'x'"],
        ),
        ("delete from interlock.tasks where at <= coalesce(%(now)s::timestamptz, now())", ["at <= now"]),
        ("update interlock.tasks set a = 1 where case when x = 1 and y then z else false end", ["x = 1", "y", "z"]),
        ("update interlock.tasks set a = 1 where (x or y and z)", ["(x or y and z)", "y", "z"]),
        ("update interlock.tasks set a = 1 where n between 1 and 2 and x", ["n between 1 and 2", "x"]),
        (
            "update interlock.tasks set a = 1 where id = any (array(select id from interlock.tasks where x and y))",
            ["id = any (array(…))", "x", "y"],
        ),
        (
            (
                "with found as (select id from interlock.tasks join b on b.c = d where x) "
                "update interlock.tasks set a = 1 from found where tasks.id = found.id"
            ),
            ["b.c = d", "x", "tasks.id = found.id"],
        ),
        (
            (
                "update interlock.tasks set state = case when n < m then 'pending' else 'error' end, "
                "event = case when n < m then 'expire' else 'exhaust' end"
            ),
            ["n < m"],
        ),
        (
            "update interlock.tasks set a = 1 where not exists (select from interlock.jobs where x)",
            ["not exists (interlock.jobs …)"],
        ),
        (
            "insert into interlock.tasks (id) values (1) on conflict (id) do update set a = 1 where tasks.b = 2",
            ["tasks.b = 2"],
        ),
        ("update interlock.tasks set a = 1 where (select set_config('interlock.actor', 'x', true)) is not null", []),
        ("select id from interlock.tasks where x for update", ["x"]),
        ("select id from interlock.tasks where x", []),
        ("update interlock.namespaces set a = 1 where x", []),
    ],
)
def test_the_conditions_of_a_text_are_found(sql: str, conditions: list[str]) -> None:
    assert [each.text for each in parse("name", "file", sql, TABLES).conditions] == conditions


@pytest.mark.unit
def test_a_condition_is_replaced_where_it_stands() -> None:
    text = (
        "update interlock.tasks set state = case when n < m then 'a' else 'b' end, b = case when n < m then 1 end "
        "where x and n < m"
    )
    guarded = parse("name", "file", text, TABLES)
    assert guarded.without("n < m") == text.replace("when n < m", "when true")
    assert guarded.without("x").endswith("where true and n < m")
    assert guarded.without("n < m [2]").endswith("where x and true")


@pytest.mark.unit
def test_every_condition_has_a_reason() -> None:
    for guarded in TABLE:
        for each in guarded.conditions:
            assert (each.reason if isinstance(each, Redundant) else each.risk).strip(), f"{guarded.name}: {each.text}"
