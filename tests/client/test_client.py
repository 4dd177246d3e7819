"""Defining tasks: what a definition gives, what it refuses, what mypy knows of it, and how an app is found."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from interlock import Backoff, Interlock, TaskContext
from interlock.client.app import load_app
from interlock.errors import AppImportError, ConfigError, DefinitionError, InputError, MigrationError, StoreError
from interlock.postgres.connection import UnreadableJson
from interlock.postgres.embedded.server import EmbeddedServer
from interlock.postgres.ids import new_id

ROOT = Path(__file__).parents[2]
app = Interlock("postgresql://nowhere")


@app.task
async def send_email(to: str, subject: str = "hi") -> str:
    """Send it."""
    return f"{subject} {to}"


@app.task(name="resize_image", executor="process", max_tries=2, timeout=timedelta(minutes=1), tags=["cpu"])
def resize(path: str) -> int:
    return len(path)


@app.task
async def with_context(ctx: TaskContext, to: str) -> str:
    return f"{ctx.task_type} {to}"


@pytest.mark.unit
async def test_a_task_is_still_the_function_that_it_was() -> None:
    assert await send_email("x") == "hi x"
    assert resize("abc") == 3
    assert await with_context("x") == "with_context x"
    assert await with_context(TaskContext(task_type="mine"), "x") == "mine x"  # type: ignore[arg-type, call-arg]
    assert (send_email.__name__, send_email.__doc__) == ("send_email", "Send it.")


@pytest.mark.unit
def test_a_definition_has_what_it_was_given_and_good_defaults() -> None:
    assert (send_email.name, send_email.namespace, send_email.executor) == ("send_email", "default", "coroutine")
    assert (send_email.max_tries, send_email.timeout, send_email.priority) == (5, None, 0)
    assert send_email.backoff == Backoff()
    assert (resize.name, resize.executor, resize.max_tries, resize.timeout) == ("resize_image", "process", 2, 60)
    assert resize.tags == ("cpu",)
    assert with_context.context_parameter == "ctx"
    assert app.tasks["send_email"] is send_email
    assert set(app.tasks) == {"send_email", "resize_image", "with_context"}


@pytest.mark.unit
def test_a_task_goes_to_another_process_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, send_email.__module__, sys.modules.get(__name__, _this_module()))
    assert pickle.loads(pickle.dumps(send_email)) is send_email  # noqa: S301 - our own bytes


def _this_module() -> Any:
    return type("Module", (), {"send_email": send_email})


@pytest.mark.unit
def test_a_command_takes_any_json_by_name() -> None:
    task = Interlock("postgresql://nowhere").command_task("shell", ["sh", "-c", "cat"], timeout=5)
    assert (task.executor, task.command, task.timeout) == ("command", ("sh", "-c", "cat"), 5)
    assert task.encode(a=[1, {"b": None}]) == task.decode({"a": [1, {"b": None}]}) == {"a": [1, {"b": None}]}
    with pytest.raises(InputError, match="by name"):
        task.encode(1)
    with pytest.raises(InputError, match="nested too deeply"):
        task.decode(UnreadableJson())
    with pytest.raises(InputError, match="not a JSON value"):
        task.encode(a=object())


async def coroutine() -> None: ...
def function() -> None: ...
async def coroutine_with_context(ctx: TaskContext) -> None: ...


@pytest.mark.unit
@pytest.mark.parametrize(
    ("handler", "options", "told"),
    [
        (coroutine, {"executor": "thread"}, "an async function runs as a coroutine, not as 'thread'"),
        (function, {"executor": "coroutine"}, "a plain function runs in a thread or process"),
        (function, {"executor": "magic"}, "executor must be one of"),
        (function, {"executor": "command"}, "command_task"),
        (function, {"transactional": True}, "only a coroutine can be transactional"),
        (coroutine, {"transactional": True}, "needs a TaskContext parameter"),
        (function, {"retries": 3}, "unknown option 'retries'"),
        (function, {"max_tries": 0}, "max_tries must be a whole number from 1"),
        (function, {"timeout": -1}, "timeout must be a positive number of seconds"),
        (function, {"priority": 40000}, "priority must be a whole number"),
        (function, {"backoff": "often"}, "kind must be one of"),
        (function, {"namespace": ""}, "namespace must be a non-empty string"),
        (function, {"tags": "abc"}, "tags must be a sequence"),
        (function, {"callback_url": "file:///etc"}, "http or https"),
    ],
)
def test_an_invalid_task_definition_is_refused_by_name(handler: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(DefinitionError, match=rf"task {handler.__name__}: .*{told}"):
        Interlock("postgresql://nowhere").task(**options)(handler)


@pytest.mark.unit
def test_two_tasks_of_one_name_are_refused() -> None:
    here = Interlock("postgresql://nowhere")
    here.task(function)
    with pytest.raises(DefinitionError, match=r"two tasks 'function'; the other is .*function"):
        here.task(name="function")(coroutine)
    with pytest.raises(DefinitionError, match="a command is a list"):
        here.command_task("x", "sh handler.sh")
    with pytest.raises(DefinitionError, match="a task is a function, got 3"):
        here.task(name="y")(3)  # type: ignore[call-overload]


@pytest.mark.unit
def test_periodic_tasks_and_limits_are_checked_at_definition() -> None:
    here = Interlock("postgresql://nowhere")

    @here.periodic(cron="0 4 * * *", timezone="Europe/Berlin", arguments={"to": "all"})
    @here.task(priority=3)
    async def report(to: str) -> None: ...

    schedule = here.schedules["report"]
    assert (schedule.type, schedule.cron, schedule.input) == ("report", "0 4 * * *", {"to": "all"})
    assert schedule.options["priority"] == 3
    nonsense: list[tuple[dict[str, Any], str]] = [
        ({"cron": "whenever"}, "cron"),
        ({"cron": "0 4 * * *", "timezone": "Mars/Base"}, "time zone"),
        ({"every": 0}, "every must be"),
        ({}, "either a cron expression or an interval"),
        ({"every": 5, "arguments": {}}, "missing a required argument"),
        ({"every": 5, "missed": "maybe", "arguments": {"to": "x"}}, "missed"),
    ]
    for wrong, told in nonsense:
        arguments: dict[str, Any] = {"arguments": {"to": "x"}, **wrong}
        with pytest.raises(DefinitionError, match=told):
            here.periodic(name="other", **arguments)(report)
    with pytest.raises(DefinitionError, match="schedule 'report' is declared twice"):
        here.periodic(every=5, arguments={"to": "x"})(report)
    with pytest.raises(DefinitionError, match=r"above @app\.task"):
        here.periodic(every=5)(function)  # type: ignore[type-var]
    here.limit("mail", max_running=3)
    for key, options in [("mail", {"max_running": 1}), ("a", {}), ("b", {"max_starts": 1}), ("c", {"max_running": 0})]:
        with pytest.raises(DefinitionError, match=key):
            here.limit(key, **options)


@pytest.mark.unit
async def test_an_app_that_is_not_open_says_how_to_open_it() -> None:
    with pytest.raises(StoreError, match="async with app"):
        await send_email.enqueue("x")


@pytest.mark.store
async def test_a_missing_schema_is_reported_first(make_database: Any) -> None:
    with pytest.raises(MigrationError, match="run `interlock migrate`"):
        await Interlock(make_database("template0")).open()


@pytest.mark.store
async def test_an_app_closes_with_the_last_who_opened_it_and_can_be_opened_again(url: str) -> None:
    here = Interlock(url)
    await asyncio.gather(*(here.open() for _ in range(5)))
    for _ in range(4):
        await here.close()
        assert here.is_open
    await here.close()
    await here.close()
    assert not here.is_open
    async with here:
        assert await here.find() == []


@pytest.mark.flow
async def test_without_a_url_the_embedded_server_is_brought_up_and_migrated(embedded_dir: Path) -> None:
    toml = embedded_dir / "interlock.toml"
    toml.write_text(f'data_dir = "{embedded_dir / "db"}"\n')
    program = (
        "import asyncio\nfrom interlock import Interlock\napp = Interlock()\n"
        "@app.task\nasync def hello(name: str) -> None: ...\n"
        "async def main():\n    async with app:\n"
        "        print((await (await hello.enqueue('x')).status()).state)\n"
        "asyncio.run(main())\n"
    )
    environment = {"INTERLOCK_CONFIG": str(toml), "PATH": "/usr/bin:/bin"}
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    EmbeddedServer(embedded_dir / "db").stop()  # wait for the unused server to stop
    assert done.stdout == "pending\n", done.stderr


@pytest.mark.unit
def test_an_app_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"shop_{new_id().hex}"
    (tmp_path / f"{name}.py").write_text("from interlock import Interlock\nmain = Interlock('postgresql://x')\nn = 3\n")
    (tmp_path / f"{name}_broken.py").write_text("import no_such_thing\n")
    assert isinstance(load_app(f"{name}:main"), Interlock)
    for reference, told in [
        (name, f"no 'app'; did you mean {name}:main"),
        (f"{name}:n", "is a int, not an Interlock app"),
        (f"{name}_absent:app", f"no module '{name}_absent'"),
        ("not a name", "does not name an app"),
    ]:
        with pytest.raises(ConfigError, match=told):
            load_app(reference)
    with pytest.raises(
        AppImportError, match=rf"'no_such_thing'\n  .*{name}_broken.py:1, in <module>\n    import no_such"
    ):
        load_app(f"{name}_broken:app")


@pytest.mark.unit
def test_ids_grow_also_when_many_are_made_in_one_millisecond() -> None:
    ids = [new_id() for _ in range(5000)]
    assert ids == sorted(set(ids))
    assert {id_.version for id_ in ids} == {7}
    assert {id_.variant for id_ in ids} == {"specified in RFC 4122"}
