"""All settings in one frozen value, read once: defaults < file < environment < flags.

Invariant: a Config that exists is valid. A setting that is unknown or makes no sense is refused with its name, where
it came from and what would be right; a database URL never appears in a message.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PREFIX = "INTERLOCK_"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("console", "json")


@dataclass(frozen=True, slots=True)
class Config:
    """What a user can set. Each field is `[name]` in interlock.toml and `INTERLOCK_NAME` in the environment."""

    database_url: str | None = None
    data_dir: Path | None = None
    log_level: str = "info"
    log_format: str = "console"

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> Config:
        """Read all sources. The file is INTERLOCK_CONFIG, else interlock.toml in this directory, if it is there."""
        env = os.environ if environment is None else environment
        if file is None and env.get(PREFIX + "CONFIG"):
            file = Path(env[PREFIX + "CONFIG"])
        names = {field.name for field in fields(cls)}
        values = {
            **_checked_all(_read_file(file, names), lambda _: str(file or "interlock.toml")),
            **_checked_all({name: env.get(_variable(name)) or None for name in names}, _variable),
            **_checked_all(flags or {}, lambda name: f"--{name.replace('_', '-')}"),
        }
        return cls(**values)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _checked_all(given: Mapping[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    return {name: _checked(name, value, place(name)) for name, value in given.items() if value is not None}


def _read_file(named: Path | None, names: set[str]) -> dict[str, Any]:
    path = named or Path("interlock.toml")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named is None:
            return {}
        raise ConfigError(f"the configuration file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for name in values:
        if name not in names:
            raise ConfigError(f"{path}: unknown setting {name!r}; known are {', '.join(sorted(names))}")
    return values


def _checked(name: str, value: Any, source: str) -> Any:
    if name == "data_dir" and isinstance(value, str | Path):
        return Path(value).expanduser()
    if not isinstance(value, str):
        raise ConfigError(f"{source}: {name} must be a string, not {type(value).__name__}")
    if name == "database_url" and not value.startswith(("postgresql://", "postgres://")):
        raise ConfigError(f"{source}: the database URL must begin with postgresql://")
    choices = {"log_level": LOG_LEVELS, "log_format": LOG_FORMATS}.get(name)
    if choices is not None and value.lower() not in choices:
        raise ConfigError(f"{source}: {name} must be one of {', '.join(choices)}, not {value!r}")
    return value if choices is None else value.lower()
