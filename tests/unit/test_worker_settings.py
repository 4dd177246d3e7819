"""The options of `serving(app, ...)` are those of WorkerSettings, typed and checked."""

from __future__ import annotations

from dataclasses import fields

import pytest

from interlock import Interlock, WorkerSettings, serving
from interlock.errors import ConfigError
from interlock.postgres.notifier import WakeMode
from interlock.worker.settings import WorkerOptions

pytestmark = pytest.mark.unit


def test_the_options_are_the_settings_that_do_not_belong_to_a_supervisor() -> None:
    assert set(WorkerOptions.__annotations__) == {field.name for field in fields(WorkerSettings)} - {
        "row",
        "generation",
    }


async def test_serving_takes_worker_settings_as_keyword_arguments(url: str) -> None:
    async with serving(Interlock(url), concurrency=8, namespaces=["mail"], mode="polling", duties=False) as worker:
        settings = worker.settings
    assert (settings.concurrency, settings.namespaces, settings.mode) == (8, ("mail",), WakeMode.POLLING)


async def test_options_replace_the_given_settings() -> None:
    settings = WorkerSettings(lease=7.0, concurrency=2).with_options(concurrency=3)
    assert (settings.lease, settings.concurrency) == (7.0, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurency": 8}, "unknown worker setting 'concurency'; did you mean 'concurrency'?"),
        ({"row": "1"}, "unknown worker setting 'row'"),
        ({"concurrency": 0}, "concurrency must be at least 1, got 0"),
        ({"concurrency": "8"}, "concurrency must be a whole number, got '8'"),
        ({"concurrency": 1.5}, "concurrency must be a whole number, got 1.5"),
        ({"concurrency": True}, "concurrency must be a whole number, got True"),
        ({"concurrency": None}, "concurrency must be a whole number, got None"),
        ({"lease": "30"}, "lease must be a number of seconds, got '30'"),
        ({"duties": "no"}, "duties must be True or False, got 'no'"),
        ({"namespaces": [1]}, "namespaces must be a list of names, got [1]"),
        ({"namespaces": "mail"}, "namespaces must be a list of names, got 'mail'"),
        ({"mode": "telepathy"}, "'telepathy' is not a valid WakeMode"),
    ],
)
async def test_unknown_and_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        async with serving(Interlock(), **options):  # type: ignore[arg-type]  # what the test is about
            pass
    assert message in str(caught.value)
