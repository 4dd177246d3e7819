"""Ids that a client makes itself: version 7 of the UUID, which sorts by the time of its making.

Invariant: within one process every id is greater than the one before, whatever the clock does; a forked process begins
with chance of its own.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from typing import TYPE_CHECKING
from uuid import UUID, SafeUUID

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHANCE = 74  # bits below the 48 of the time: 12 and 62, with the version and the variant between and above
_LOW = 62
_LOW_BITS = (1 << _LOW) - 1
_VERSION = 0x7 << 76
_VARIANT = 0b10 << 62

_lock = threading.Lock()
_latest = 0


def new_id() -> UUID:
    """Make one id."""
    return as_id(next(new_numbers(1)))


def new_numbers(count: int) -> Iterator[int]:
    """Make ids in a row, as the numbers that their 128 bits are: much cheaper than one by one."""
    global _latest  # noqa: PLW0603 - the point of it is that the whole process shares it
    with _lock:
        now = time.time_ns() // 1_000_000 << _CHANCE
        # the highest bit of chance stays free, so that a busy millisecond has room to count on
        first = now | secrets.randbits(_CHANCE - 1) if now > _latest else _latest + 1
        _latest = first + count - 1
    for ordered in range(first, first + count):
        high = ordered >> _LOW
        yield (high >> 12) << 80 | _VERSION | (high & 0xFFF) << 64 | _VARIANT | ordered & _LOW_BITS


def as_id(number: int) -> UUID:
    """Make a UUID of a number that is known to be one, at a third of the price of UUID(int=...)."""
    made = object.__new__(UUID)
    object.__setattr__(made, "int", number)
    object.__setattr__(made, "is_safe", SafeUUID.unknown)
    return made


def _forget() -> None:
    """Begin anew in a forked process, in which a shared count would make the parent's ids again."""
    global _latest, _lock  # noqa: PLW0603 - the same
    _lock = threading.Lock()
    _latest = 0


os.register_at_fork(after_in_child=_forget)
