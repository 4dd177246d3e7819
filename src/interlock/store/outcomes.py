"""Outcomes as the parameters of the statement that writes them.

Invariant: what is sent can be read by the server. PostgreSQL holds no larger JSON than LARGEST_JSON, and closes the
connection on a message of a gigabyte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from interlock.errors import StatementError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from interlock.store.tasks import Outcome

MIB = 1024 * 1024
LARGEST_JSON = 256 * MIB - 1  # bytes that PostgreSQL holds of one JSON document
DEFAULT_LARGEST = 64 * MIB
LARGEST_TOGETHER = 64 * MIB  # characters of several outcomes; as many more are as well written one by one
LARGEST_ALONE = 640 * MIB  # twice the largest document, for what is escaped in it, and something around it


def written_outcomes(outcomes: Sequence[Outcome], largest: int) -> dict[str, str]:
    """Write outcomes as parameters; StatementError tells of a result of more than `largest` bytes.

    A success is three values, which go in arrays; whatever has more to say goes in one JSON document. The driver is
    three times slower at arrays of nine columns, and so is the server at documents.
    """
    ids: list[UUID] = []
    attempts: list[int] = []
    outputs: list[str | None] = []
    others: list[dict[str, Any]] = []
    for outcome in outcomes:
        id_, attempt, event, output, _, _, cost, _, progress = outcome
        if event == "succeed" and cost is None and progress is None:
            ids.append(id_)
            attempts.append(attempt)
            outputs.append(None if output is None else _json(output))
        else:
            others.append(_said(outcome))
    written = {"ids": _array(ids), "attempts": _array(attempts), "outputs": _array(outputs), "others": _json(others)}
    size = len(written["outputs"]) + len(written["others"])
    # four bytes for a character at most: what is less than a quarter need not be looked at
    if size > min(largest // 4, LARGEST_TOGETHER):
        _check(outcomes, size, largest)
    return written


def _check(outcomes: Sequence[Outcome], size: int, largest: int) -> None:
    for outcome in outcomes:
        result = len(orjson.dumps(outcome.output, default=str))
        if result > largest:
            raise StatementError(
                f"the result has {result:,} bytes of JSON, and at most {largest:,} are stored (`largest_result` of the "
                "settings); keep it elsewhere, and return where it is"
            )
    most = LARGEST_ALONE if len(outcomes) == 1 else LARGEST_TOGETHER
    if size > most:
        raise StatementError(f"{size:,} characters are to be stored at once, and at most {most:,} can be")


def _json(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _array(values: list[Any]) -> str:
    """Write an array as PostgreSQL reads it: JSON's, in which only the brackets differ, as no value is one itself."""
    return "{" + orjson.dumps(values).decode()[1:-1] + "}"


def _said(outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in zip(outcome._fields, outcome, strict=True) if value is not None}
