"""Settings: one frozen value from four sources, and clear words for what makes no sense."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from interlock.config import FOREVER, Config
from interlock.errors import ConfigError
from interlock.postgres.connection import database_url, validate_database_url

pytestmark = pytest.mark.unit


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "interlock.toml"
    file.write_text('log_level = "error"\nlog_format = "json"\ndata_dir = "/from/file"\n')
    environment = {"INTERLOCK_LOG_LEVEL": "warning", "INTERLOCK_DATA_DIR": "/from/environment"}
    config = Config.load({"data_dir": Path("/from/flag"), "log_level": None}, environment=environment, file=file)
    assert config == Config(data_dir=Path("/from/flag"), log_level="warning", log_format="json")


def test_without_any_source_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config.load(environment={}) == Config()


def test_the_file_in_this_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("interlock.toml").write_text('log_level = "debug"\n')
    assert Config.load(environment={}).log_level == "debug"


@pytest.mark.parametrize(
    ("environment", "text", "message"),
    [
        ({"INTERLOCK_LOG_LEVEL": "loud"}, "", "INTERLOCK_LOG_LEVEL: log_level must be one of debug, info"),
        ({"INTERLOCK_DATABASE_URL": "mysql://u:hunter2@h/d"}, "", "must begin with postgresql://"),
        ({}, "log_levle = 'info'", "unknown setting 'log_levle'; did you mean log_level?"),
        ({}, "x = 1", "unknown setting 'x'; known are app, callback_allow_private"),
        (
            {"INTERLOCK_DATABSE_URL": "x"},
            "",
            "unknown variable INTERLOCK_DATABSE_URL; did you mean INTERLOCK_DATABASE_URL?",
        ),
        ({"INTERLOCK_DB_URL": "x"}, "", "did you mean INTERLOCK_DATABASE_URL?"),
        ({"INTERLOCK_Z": "x"}, "", "unknown variable INTERLOCK_Z; known are INTERLOCK_APP, INTERLOCK_CALLBACK"),
        ({"INTERLOCK_PORT": "8321"}, "", "unknown variable INTERLOCK_PORT"),
        ({"INTERLOCK_DATABASE_URL": ""}, "", "INTERLOCK_DATABASE_URL is empty; set it, or unset it"),
        ({"INTERLOCK_PROFILE": ""}, "", "INTERLOCK_PROFILE is empty"),
        ({"INTERLOCK_PROFILE": "prod"}, "", "profile must be one of development, production, not 'prod'"),
        ({}, "log_level = 3", "log_level must be a string, not int"),
        ({}, "log_level = ", "is not valid TOML"),
        (
            {"INTERLOCK_LARGEST_RESULT": "268435456"},
            "",
            "INTERLOCK_LARGEST_RESULT: largest_result must be a whole number from 1024 to 268435455, not '268435456'",
        ),
        ({"INTERLOCK_CONCURRENCY": "many"}, "", "concurrency must be a whole number from 1 to 10000, not 'many'"),
        ({}, "lease = 0", "lease must be a number from 1 to 86400, not 0"),
        ({"INTERLOCK_NAMESPACES": "a,,b"}, "", "namespaces must be a comma-separated list of names"),
        ({"INTERLOCK_RETENTION_DONE": "a while"}, "", "retention_done must be a number with a unit of s, m, h, d or w"),
        ({}, "wake_mode = 'sometimes'", "wake_mode must be one of hybrid, events, polling"),
        (
            {"INTERLOCK_ORCHESTRATION_QUEUE": "My Queue"},
            "",
            "orchestration_queue must be 1 to 47 characters of a-z, 0-9 and _",
        ),
    ],
)
def test_invalid_settings_name_their_source(
    tmp_path: Path, environment: dict[str, str], text: str, message: str
) -> None:
    file = tmp_path / "interlock.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        Config.load(environment=environment, file=file)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://interlock@/interlock?host=%2Fvar%2Flib&port=5432",
        "postgres://u:p%40ss%2F%20@h1:1,h2:2/d?sslmode=require",
        "postgresql://u:[odd]?#@[::1]:5432/d",
        "postgresql://u@h?host=/tmp&user=a@b",
        "postgresql:///d",
        "postgresql://",
    ],
)
def test_a_url_that_libpq_reads_is_taken_as_it_is(url: str) -> None:
    validate_database_url(url)
    assert Config.load(environment={"INTERLOCK_DATABASE_URL": url}).database_url == url


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2@[bad/x",
        "postgresql://u:hunter2 x@h/d",
        "postgresql://u:hunter2%x@h/d",
        "postgresql://u:1/hunter2@h/d",
        "postgresql://u:x@hunter2@h/d",
    ],
)
def test_a_url_with_an_unescaped_password_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="INTERLOCK_DATABASE_URL: database_url is not a valid URL") as refused:
        Config.load(environment={"INTERLOCK_DATABASE_URL": url})
    assert "hunter2" not in str(refused.value)


def test_variables_of_services_and_of_the_tests_are_no_settings() -> None:
    links = {
        "INTERLOCK_SERVICE_HOST": "10.0.0.1",
        "INTERLOCK_SERVICE_PORT": "5432",
        "INTERLOCK_SERVICE_PORT_HTTP": "5432",
        "INTERLOCK_PORT": "tcp://10.0.0.1:5432",
        "INTERLOCK_DB_PORT_5432_TCP": "tcp://10.0.0.1:5432",
        "INTERLOCK_DB_PORT_5432_TCP_ADDR": "10.0.0.1",
        "INTERLOCK_SUPERVISOR_PORT": "tcp://10.0.0.1:8321",
        "INTERLOCK_TEST_EXAMPLES": "3",
        "INTERLOCK_APP": "",  # empty is unset, where the default is no other database
    }
    assert Config.load(environment=links) == Config()


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({}, True),
        ({"INTERLOCK_PROFILE": "production"}, False),
        ({"INTERLOCK_EMBEDDED": "false"}, False),
        ({"INTERLOCK_PROFILE": "production", "INTERLOCK_EMBEDDED": "true"}, True),
    ],
)
def test_production_forbids_the_embedded_server_unless_it_is_allowed(settings: dict[str, str], allowed: bool) -> None:  # noqa: FBT001 - an expected value
    config = Config.load(environment=settings)
    assert config.allows_embedded is allowed
    if not allowed:
        with pytest.raises(ConfigError, match="set INTERLOCK_DATABASE_URL to postgresql://"), database_url(config):
            pass


def test_ages_are_written_with_a_unit_or_last_forever() -> None:
    config = Config.load(environment={"INTERLOCK_RETENTION_DONE": "12h", "INTERLOCK_RETENTION_RECORDS": "forever"})
    assert (config.retention_done, config.retention_records) == (timedelta(hours=12), FOREVER)


def test_a_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Config.load(environment={"INTERLOCK_CONFIG": str(tmp_path / "none.toml")})
