"""Settings: one frozen value from four sources, and clear words for what makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlock.config import Config
from interlock.errors import ConfigError

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
        ({}, "log_levle = 'info'", r"unknown setting 'log_levle'; known are data_dir"),
        ({}, "log_level = 3", "log_level must be a string, not int"),
        ({}, "log_level = ", "is not valid TOML"),
    ],
)
def test_nonsense_is_refused_with_its_place(
    tmp_path: Path, environment: dict[str, str], text: str, message: str
) -> None:
    file = tmp_path / "interlock.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        Config.load(environment=environment, file=file)
    assert "hunter2" not in str(refused.value)


def test_a_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Config.load(environment={"INTERLOCK_CONFIG": str(tmp_path / "none.toml")})
