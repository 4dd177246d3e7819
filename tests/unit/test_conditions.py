"""Conditions by the table of the guide: what they mean for every kind of value, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.model.conditions import MAX_CONDITION_LENGTH, parse_condition

pytestmark = pytest.mark.unit

VALUES: dict[str, Any] = {
    "price": {"total": 120.5, "paid": True, "note": None},
    "rows": [{"id": 1}, {"id": 2}],
    "my-step": ["a"],
    "input": {"country": "CH", "test": False, "n": 1, "empty": [], "text": "abc", "nested": {"k": [0, [7]]}},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("price.total > 100", True),
        ("rows[0].id == 1", True),
        ("rows[-1].id == 2", True),
        ("rows[2] == null", True),
        ("rows[-3] == null", True),
        ("rows['id'] == null", True),
        ("input.nested.k[1][0] == 7", True),
        ("results['my-step'][0] == 'a'", True),
        ("price['total'] == 120.5", True),
        ("input.country in ['CH', 'DE']", True),
        ("input.country not in ('CH', 'DE')", False),
        ("'total' in price", True),
        ("'b' in input.text", True),
        ("1 in input.text", False),
        ("1 in input.n", False),
        ("1 not in input.n", True),
        ("0 < input.n <= 1", True),
        ("0 < input.n < 1", False),
        ("-1.5 < input.n", True),
        ("-input.country == null", True),
        ("not input.test", True),
        ("input.test or (price.paid and input.n)", True),
        ("price.missing", False),
        ("missing.at.all == null", True),
        ("price.note == null", True),
        ("price.missing < 3", False),
        ("price.missing >= 3", False),
        ("input.n < '2'", False),
        ("input.country < 'DE'", True),
        ("price.paid == true", True),
        ("price.paid == 1", False),
        ("input.n == true", False),
        ("input.n == 1.0", True),
        ("price.paid > 0", False),
        ("true and True and not (false or False or null or None)", True),
        ("len(rows) == 2", True),
        ("len(price) == 3", True),
        ("len(input.n) == 0", True),
        ("len(missing)", False),
        ("input.empty", False),
        ("input.text", True),
    ],
)
def test_a_condition_means_what_the_guide_says(text: str, *, expected: bool) -> None:
    assert parse_condition(text).is_met(VALUES) is expected


def test_the_names_of_a_condition_are_the_steps_that_it_needs() -> None:
    text = "price.total > 1 and results['my-step'] and input.a.b in [rows[0], true, null, len(other)]"
    assert parse_condition(text).names == {"price", "my-step", "input", "rows", "other"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "price.total >",
        "price.total + 1",
        "price.total if true else 1",
        "price.total is None",
        "f(price)",
        "len(price, 1)",
        "len(*rows)",
        "rows[0:1]",
        "rows[input.n]",
        "rows[1.5]",
        "[x for x in rows]",
        "lambda: 1",
        "(x := 1)",
        "f'{price}'",
        "b'x' == price",
        "1j == price",
        "{'a': 1} == price",
        "__import__('os')",
        "price.total == 1; 2",
        "results",
        "~price",
        "(" * 300 + "1" + ")" * 300,
        "-" * 1500 + "1",
        "not " * 450 + "x",
        "x" + ".a" * 900,
        "x" + "[0]" * 600,
        "a" * (MAX_CONDITION_LENGTH + 1),
        "'\0' == price",
    ],
)
def test_anything_else_is_refused_with_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="condition"):
        parse_condition(text)


@given(st.text(alphabet="pricetols.[]()'0123456789 <>=!-andornotintruelenx,", max_size=60))
def test_a_condition_is_refused_or_can_be_evaluated(text: str) -> None:
    try:
        condition = parse_condition(text)
    except ValueError:
        return
    assert condition.is_met(VALUES) in {True, False}
