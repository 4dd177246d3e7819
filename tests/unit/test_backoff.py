"""Backoff policies: the delays that they promise, within their bounds, and the same after being stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock import Backoff
from interlock.errors import DefinitionError, InputError
from interlock.model.backoff import KINDS, MAX_BACKOFF_S

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        (Backoff.none(), [0, 0, 0, 0, 0]),
        (Backoff.linear(2, jitter=0), [2, 4, 6, 8, 10]),
        (Backoff.exponential(2, jitter=0), [2, 4, 8, 16, 32]),
        (Backoff.exponential(2, cap=10, jitter=0), [2, 4, 8, 10, 10]),
        (Backoff.exponential(2, jitter=0, factor=3), [2, 6, 18, 54, 162]),
        (Backoff.fibonacci(2, jitter=0), [2, 2, 4, 6, 10]),
    ],
    ids=["none", "linear", "exponential", "capped", "factor", "fibonacci"],
)
def test_each_kind_grows_as_its_name_says(policy: Backoff, delays: list[float]) -> None:
    assert [policy.delay(tries) for tries in range(1, 6)] == delays


policies = st.builds(
    Backoff,
    kind=st.sampled_from(KINDS),
    base=st.floats(0, MAX_BACKOFF_S),
    cap=st.floats(0, MAX_BACKOFF_S),
    jitter=st.floats(0, 1),
)


@given(policy=policies, tries=st.integers(-1, 2**31))
def test_no_delay_is_negative_or_above_the_cap(policy: Backoff, tries: int) -> None:
    assert 0 <= policy.delay(tries) <= policy.cap


@given(policy=policies)
def test_a_policy_is_the_same_after_being_stored(policy: Backoff) -> None:
    again = Backoff.from_json(policy.to_json())
    assert again == policy or policy.kind == again.kind == "none"


def test_jitter_spreads_the_delays_below_the_full_one() -> None:
    delays = {Backoff.linear(10, jitter=0.5).delay(1) for _ in range(50)}
    assert len(delays) > 1
    assert all(5 <= delay <= 10 for delay in delays)


def test_a_factor_is_bounded_and_cannot_be_stored() -> None:
    assert Backoff.exponential(1, cap=7, jitter=0, factor=100).delay(2**31) == 7
    with pytest.raises(DefinitionError, match=r"factor must be a number from 1 to 100, got 0\.5"):
        Backoff.exponential(factor=0.5)
    with pytest.raises(DefinitionError, match="other than 2 cannot be stored, got 3"):
        Backoff.exponential(factor=3).to_json()


def test_a_function_decides_alone() -> None:
    policy = Backoff.of(lambda tries: tries * 7)
    assert [policy.delay(1), policy.delay(3)] == [7, 21]
    with pytest.raises(DefinitionError, match="cannot be stored"):
        policy.to_json()


def test_an_invalid_function_result_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must return seconds from 0 .* got -1"):
        Backoff.of(lambda _: -1).delay(1)


def test_a_kind_alone_is_a_policy() -> None:
    assert Backoff.of("fibonacci") == Backoff("fibonacci")
    assert Backoff.of("none").delay(9) == 0


@pytest.mark.parametrize(
    "stored",
    [{"kind": "later"}, {"base": -1}, {"jitter": 2}, {"base": "1"}, {"cap": True}, {"unit": "s"}, [], {"base": 1e300}],
)
def test_an_invalid_stored_policy_is_refused(stored: dict[str, object]) -> None:
    with pytest.raises(InputError, match="backoff"):
        Backoff.from_json(stored)


def test_omitted_sql_arguments_have_defaults() -> None:
    assert Backoff.from_json({"kind": "linear", "base": 3}) == Backoff("linear", 3)


def test_an_invalid_definition_is_refused() -> None:
    with pytest.raises(DefinitionError, match="kind"):
        Backoff.of("quadratic")  # type: ignore[arg-type]  # the point
    with pytest.raises(DefinitionError, match="must be a Backoff"):
        Backoff.of(5)  # type: ignore[arg-type]  # the point
