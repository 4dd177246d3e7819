"""Backoff: the delay between a failed try and the next one, by a stored policy or by a function of the task.

Invariant: the delay of a policy is a finite number of seconds from 0 to its cap. A policy without a function or a
factor of its own is stored with a task and read back unchanged; those stay in the definition of the task.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from interlock.errors import DefinitionError, InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["none", "linear", "exponential", "fibonacci"]
BackoffFunction = Callable[[int], float]

KINDS: tuple[str, ...] = get_args(Kind)
FIELDS = ("kind", "base", "cap", "jitter")
DEFAULT_FACTOR, MAX_FACTOR = 2.0, 100.0
HOUR = 3600.0
MAX_BACKOFF_S = 10 * 365 * 24 * HOUR  # between two tries: 10 years


@dataclass(frozen=True, slots=True)
class Backoff:
    """A backoff policy. `base` and `cap` are seconds; `jitter` is the fraction of each delay that is random."""

    kind: Kind = "exponential"
    base: float = 1.0
    cap: float = HOUR
    jitter: float = 0.2
    function: BackoffFunction | None = None
    factor: float = DEFAULT_FACTOR  # from each delay of an exponential policy to the next

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DefinitionError(f"backoff: the kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, most in (("base", MAX_BACKOFF_S), ("cap", MAX_BACKOFF_S), ("jitter", 1)):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= most:
                raise DefinitionError(f"backoff: {name} must be a number from 0 to {most:g}, got {value!r}")
        if not _is_number(self.factor) or not 1 <= self.factor <= MAX_FACTOR:
            raise DefinitionError(f"backoff: factor must be a number from 1 to {MAX_FACTOR:g}, got {self.factor!r}")

    @classmethod
    def none(cls) -> Backoff:
        """Retry without a delay."""
        return cls("none", 0.0, 0.0, 0.0)

    @classmethod
    def linear(cls, base: float = 1.0, *, cap: float = HOUR, jitter: float = 0.2) -> Backoff:
        """Wait 1, 2, 3, 4 … times the base."""
        return cls("linear", base, cap, jitter)

    @classmethod
    def exponential(
        cls, base: float = 1.0, *, cap: float = HOUR, jitter: float = 0.2, factor: float = DEFAULT_FACTOR
    ) -> Backoff:
        """Wait 1, 2, 4, 8 … times the base, or the powers of another factor."""
        return cls("exponential", base, cap, jitter, factor=factor)

    @classmethod
    def fibonacci(cls, base: float = 1.0, *, cap: float = HOUR, jitter: float = 0.2) -> Backoff:
        """Wait 1, 1, 2, 3, 5 … times the base."""
        return cls("fibonacci", base, cap, jitter)

    @classmethod
    def of(cls, given: Backoff | Kind | BackoffFunction) -> Backoff:
        """Make a policy from a `Backoff`, a kind or a function."""
        if isinstance(given, Backoff):
            return given
        if isinstance(given, str):
            return cls.none() if given == "none" else cls(given)
        if callable(given):
            return cls("none", 0.0, 0.0, 0.0, given)
        raise DefinitionError(f"backoff must be a Backoff, one of {', '.join(KINDS)}, or a function, not {given!r}")

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Backoff:
        """Read a policy that was stored with a task, possibly by another client."""
        if not isinstance(stored, dict) or not stored.keys() <= set(FIELDS):
            raise InputError(f"backoff must be an object of {', '.join(FIELDS)}, not {stored!r}")
        if stored.get("kind") == "none":
            return cls.none()
        try:
            return cls(**stored)
        except DefinitionError as error:
            raise InputError(str(error)) from None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that is stored with a task."""
        if self.function is not None:
            raise DefinitionError("a backoff function cannot be stored; give it in the definition of the task")
        if self.factor != DEFAULT_FACTOR:
            raise DefinitionError(
                f"a backoff factor other than {DEFAULT_FACTOR:g} cannot be stored, got {self.factor!r}"
            )
        return {name: getattr(self, name) for name in FIELDS}

    def delay(self, tries: int) -> float:
        """Compute the delay in seconds after this many tries."""
        if self.function is not None:
            return self._call_function(tries)
        spread = 1 - self.jitter * random.random()  # noqa: S311 - jitter spreads load and needs no secrecy
        return min(self.cap, self.base * _multiple(self.kind, max(tries, 1), self.factor)) * spread

    def _call_function(self, tries: int) -> float:
        assert self.function is not None  # noqa: S101 - delay() has checked
        seconds = self.function(tries)
        if not _is_number(seconds) or not 0 <= seconds <= MAX_BACKOFF_S:
            raise ValueError(f"the backoff function must return seconds from 0 to {MAX_BACKOFF_S:g}, got {seconds!r}")
        return float(seconds)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _multiple(kind: Kind, tries: int, factor: float) -> float:
    """Return the multiple of the base after this many tries."""
    if kind == "none":
        return 0.0
    if kind == "linear":
        return float(tries)
    if kind == "exponential":
        try:
            return float(factor) ** (tries - 1)
        except OverflowError:
            return sys.float_info.max  # not infinity: a base of 0 stays 0
    before, now = 0, 1
    for _ in range(min(tries - 1, 1000)):
        before, now = now, before + now
    return float(now)


DEFAULT_BACKOFF = Backoff()  # of a task whose definition names none
