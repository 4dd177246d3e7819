"""All settings in one frozen value, read once; precedence: defaults < file < environment < flags.

Invariant: every constructed Config is valid. An unknown or invalid setting raises ConfigError with its name, its
source and what would be right; a database URL never appears in a message.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from interlock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

PREFIX = "INTERLOCK_"
# Variables with our prefix that are no settings: the name of the file, a secret, and what the tests of this project
# read.
OTHER_VARIABLES = frozenset(
    {"INTERLOCK_CONFIG", "INTERLOCK_SORT_TOKEN", "INTERLOCK_TEST_EXAMPLES", "INTERLOCK_TEST_SEED"}
)
# Kubernetes and Docker set such variables in every container beside a service whose name begins with "interlock".
_SERVICE_LINK = re.compile(r"INTERLOCK_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_LINK_URL = re.compile(r"(tcp|udp|sctp)://")
# Empty, these are refused: the variable was meant to be set, and the default is another database.
_NEVER_EMPTY = ("database_url", "embedded", "profile")
MAX_NAME_LENGTH = 200  # characters of a name that is part of addresses, such as that of a namespace
ADDRESSABLE = f"a name of at most {MAX_NAME_LENGTH} characters without slashes and control characters, and not . or .."
_UNADDRESSABLE = re.compile(r"[/\x00-\x1f\x7f]")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")
PROFILES = ("development", "production")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("console", "json")
WAKE_MODES = ("hybrid", "events", "polling")
_INVALID_IN_DATABASE_URL = re.compile(r"[\x00-\x20\x7f]|%(?![0-9A-Fa-f]{2})|%00")
_INVALID_IN_WEB_URL = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
_QUEUE_NAME = re.compile(r"[a-z0-9_]{1,47}")
FOREVER = timedelta.max
MAX_IDEMPOTENCY_LIFETIME = timedelta(days=365)
AGE_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
BOOLEAN_WORDS = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of a user. Each field is a key of interlock.toml and `INTERLOCK_<NAME>` in the environment."""

    database_url: str | None = field(default=None, repr=False)
    data_dir: Path | None = None
    profile: str = "development"
    embedded: bool | None = None
    log_level: str = "info"
    log_format: str = "console"
    callback_secret: str | None = field(default=None, repr=False)
    callback_allow_private: bool = False
    callback_url: str | None = None
    app: str | None = None
    dev: bool = False
    namespaces: tuple[str, ...] = ("default",)
    concurrency: int = 1
    worker_name: str | None = None
    wake_mode: str = "hybrid"
    lease: float = 30.0
    grace: float = 20.0
    largest_result: int = 67_108_864
    largest_input: int = 16_777_216
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    tracing: bool = True
    orchestration_queue: str = "orchestration_step_results"
    retention_done: timedelta = timedelta(days=7)
    retention_canceled: timedelta = timedelta(days=7)
    retention_skipped: timedelta = timedelta(days=7)
    retention_error: timedelta = timedelta(days=30)
    retention_records: timedelta = timedelta(days=90)
    supervisor_host: str = "127.0.0.1"
    supervisor_port: int = 8321
    supervisor_names: tuple[str, ...] = ()
    supervisor_no_token: bool = False
    supervisor_body_limit: int = 1_048_576
    supervisor_timeout: float = 30.0
    supervisor_connections: int = 10
    supervisor_http_connections: int = 2000
    supervisor_proxies: tuple[str, ...] = ()
    idempotency_lifetime: timedelta = timedelta(days=1)

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> Config:
        """Read all sources. The file is INTERLOCK_CONFIG, else interlock.toml in the current directory if it exists."""
        env = os.environ if environment is None else environment
        if file is None and env.get(PREFIX + "CONFIG"):
            file = Path(env[PREFIX + "CONFIG"])
        names = {field.name for field in fields(cls)}
        _check_variables(env, names)
        values = {
            **_checked_all(_read_file(file, names), lambda _: str(file or "interlock.toml")),
            **_checked_all({name: _read_variable(env, name) for name in names}, _variable),
            **_checked_all(flags or {}, _flag),
        }
        return cls(**values)

    @property
    def allows_embedded(self) -> bool:
        """Whether the embedded server may be used when no database URL is set: not in production, unless allowed."""
        return self.profile != "production" if self.embedded is None else self.embedded

    def with_flags(self, flags: Mapping[str, Any]) -> Config:
        """Return a copy with some settings replaced; None leaves a setting as it is."""
        return replace(self, **_checked_all(flags, _flag))


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name, or empty, which binds every address


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _check_variables(env: Mapping[str, str], names: Iterable[str]) -> None:
    """Refuse unknown variables with our prefix: a misspelled setting must not silently be its default."""
    known = {*map(_variable, names), *OTHER_VARIABLES}
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in known and not _is_service_link(name, env[name]):
            raise ConfigError(f"unknown variable {name}; {_suggestion(name.removeprefix(PREFIX), names, _variable)}")


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_LINK_URL.match(value)))


def _suggestion(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """Name the known setting that is nearest to a misspelled one, else all."""
    near = get_close_matches(name.lower(), known, n=1)
    return f"did you mean {shown(near[0])}?" if near else f"known are {', '.join(map(shown, sorted(known)))}"


def _read_variable(env: Mapping[str, str], name: str) -> str | None:
    value = env.get(_variable(name))
    if value == "" and name in _NEVER_EMPTY:
        raise ConfigError(f"{_variable(name)} is empty; set it, or unset it to use the default")
    if not value or _is_service_link(_variable(name), value):  # a service interlock-supervisor sets ..._PORT to a URL
        return None
    return value


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
            raise ConfigError(f"{path}: unknown setting {name!r}; {_suggestion(name, names)}")
    return values


def _checked(name: str, value: Any, source: str) -> Any:
    read: Callable[[Any], Any] = _READERS.get(name, _text)
    try:
        return read(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {name} {error}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {type(value).__name__}")  # noqa: TRY004 - one kind of error for all
    return value


def _path(value: Any) -> Path:
    if value == "":
        raise ValueError("must not be empty")
    try:
        return (value if isinstance(value, Path) else Path(_text(value))).expanduser()
    except RuntimeError:
        raise ValueError(f"names an unknown home directory: {str(value)!r}") from None


def _url(value: Any) -> str:
    # The value may contain a password, so no message shows it.
    if not isinstance(value, str) or not value.startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://")
    rest = value.partition("://")[2]
    # As libpq parses it: credentials end at the first @, unless a / comes before it; then the host list follows.
    place = (rest.partition("@")[2] if "@" in rest.partition("/")[0] else rest).partition("?")[0]
    if _INVALID_IN_DATABASE_URL.search(value) or "@" in place or place.count("[") != place.count("]"):
        raise ValueError("is not a valid URL; in a password, write a space as %20, % as %25, / as %2F and @ as %40")
    return value


def checked_web_url(value: Any) -> str:
    """Return an http(s) URL that is fit for a webhook; ValueError says what is wrong, without the URL."""
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one or _INVALID_IN_WEB_URL.search(value):
        raise ValueError("must be an http or https URL that names a host")
    return str(value)


def _queue(value: Any) -> str:
    if not _QUEUE_NAME.fullmatch(_text(value)):
        raise ValueError(f"must be 1 to 47 characters of a-z, 0-9 and _, not {value!r}")
    return _text(value)


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in BOOLEAN_WORDS:
        raise ValueError(f"must be true or false, not {value!r}")
    return BOOLEAN_WORDS[value.lower()]


def is_addressable(name: str) -> bool:
    """Tell whether a name can be part of an address.

    A slash divides a path, however it is encoded; `.` and `..` are removed from it. All others are percent-encoded.
    """
    return not _UNADDRESSABLE.search(name) and name not in {".", ".."} and len(name) <= MAX_NAME_LENGTH


def ends_addresses(name: str) -> bool:
    """Tell whether a name can be the last part of an address, slashes included, as that of a token or a limit is."""
    return not _CONTROL_CHARACTERS.search(name) and name not in {".", ".."}


def _name(value: Any) -> str:
    name = _text(value)
    if not name.strip() or not is_addressable(name):
        raise ValueError(f"must be {ADDRESSABLE}, not {value!r}")
    return name


def _namespaces(value: Any) -> tuple[str, ...]:
    return tuple(_name(name) for name in _names(value))


def _names(value: Any) -> tuple[str, ...]:
    parts = _text(value).split(",") if isinstance(value, str) else value
    names = tuple(dict.fromkeys(_text(part).strip() for part in parts))
    if not names or "" in names:
        raise ValueError(f"must be a comma-separated list of names, not {value!r}")
    return names


def _networks(value: Any) -> tuple[str, ...]:
    names = _names(value)
    for name in names:
        try:
            ipaddress.ip_network(name)
        except ValueError:
            raise ValueError(f"must be addresses or networks such as 10.0.0.7 and 10.1.0.0/16, not {name!r}") from None
    return names


def _age(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    said = _text(value).strip().lower()
    if said == "forever":
        return FOREVER
    if not said[:-1].isdecimal() or said[-1] not in AGE_UNIT_S or len(said) > len("99999999d"):
        raise ValueError(f"must be a number with a unit of s, m, h, d or w, such as 7d, or forever, not {value!r}")
    return timedelta(seconds=int(said[:-1]) * AGE_UNIT_S[said[-1]])


def _lifetime(value: Any) -> timedelta:
    if not timedelta(0) < _age(value) <= MAX_IDEMPOTENCY_LIFETIME:
        raise ValueError(f"must be from 1s to {MAX_IDEMPOTENCY_LIFETIME.days}d, not {value!r}")
    return _age(value)


def _choice(*options: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if _text(value).lower() not in options:
            raise ValueError(f"must be one of {', '.join(options)}, not {value!r}")
        return _text(value).lower()

    return read


def _number(kind: type[int | float], least: float, most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        try:
            number = kind(value)
        except (TypeError, ValueError):
            number = None
        if number is None or isinstance(value, bool) or not least <= number <= most:
            name = "a whole number" if kind is int else "a number"
            raise ValueError(f"must be {name} from {_plain(least)} to {_plain(most)}, not {value!r}")
        return number

    return read


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "database_url": _url,
    "data_dir": _path,
    "profile": _choice(*PROFILES),
    "embedded": _switch,
    "log_level": _choice(*LOG_LEVELS),
    "log_format": _choice(*LOG_FORMATS),
    "callback_allow_private": _switch,
    "callback_url": checked_web_url,
    "dev": _switch,
    "namespaces": _namespaces,
    "worker_name": _name,
    "concurrency": _number(int, 1, 10_000),
    "wake_mode": _choice(*WAKE_MODES),
    "lease": _number(float, 1, 86_400),
    "grace": _number(float, 0, 25),
    "largest_result": _number(int, 1024, 268_435_455),  # the limit of a jsonb value in PostgreSQL
    "largest_input": _number(int, 1024, 268_435_455),
    "metrics_port": _number(int, 0, 65_535),
    "orchestration_queue": _queue,
    "retention_done": _age,
    "retention_canceled": _age,
    "retention_skipped": _age,
    "retention_error": _age,
    "retention_records": _age,
    "supervisor_port": _number(int, 0, 65_535),
    "supervisor_names": _names,
    "supervisor_no_token": _switch,
    "tracing": _switch,
    "supervisor_body_limit": _number(int, 1024, 1_073_741_824),
    "supervisor_timeout": _number(float, 1, 3600),
    "supervisor_connections": _number(int, 2, 1000),
    "supervisor_http_connections": _number(int, 16, 100_000),
    "supervisor_proxies": _networks,
    "idempotency_lifetime": _lifetime,
}
