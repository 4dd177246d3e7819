"""How a person writes a number of bytes."""

from __future__ import annotations

import re

from interlock.errors import SortInputError

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read_size(name: str, text: str) -> int:
    """Read a number of bytes: 64MB, 2GB, 1.5GiB, 1000."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise SortInputError(f"{name} {text!r} is not a size; write 64MB, 2GB, 1.5GiB or a number of bytes")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** POWERS[unit.lower()])
