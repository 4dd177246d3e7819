"""GNU sort as the reference for the order of lines, and random lines, keys and options to compare with it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

GNU_SORT = shutil.which("sort")
FLAGS = {"numeric": "-n", "reverse": "-r", "unique": "-u", "stable": "-s", "skip_blanks": "-b", "fold": "-f"}
IS_GNU = (
    GNU_SORT is not None and b"GNU" in subprocess.run([GNU_SORT, "--version"], capture_output=True, check=True).stdout
)

ODD_FIELDS = (
    b"-0", b"0", b"0.0", b"-0.00", b".5", b"-.5", b"1e3", b"1000", b" 7", b"\t7", b"7.", b"7.000", b"-7", b"--7", b"+7",
    b"00000000000000000000007.00000000000000000000000000000000001", b"0.000000000000000000001", b"9" * 127, b"9" * 128,
    b"1" + b"0" * 300, b"-1" + b"0" * 300, b"a" * 7, b"a" * 8, b"a" * 9, b"a" * 8 + b"\0", b"\0", b"\0\0", b"A", b"a",
    b"x\r", b"",
)  # fmt: skip


def arguments(keys: Sequence[str], separator: str | None, options: dict[str, bool]) -> list[str]:
    """Return the options of an order as GNU sort and the sort take them."""
    found = [part for key in keys for part in ("-k", key)]
    found += [] if separator is None else ["-t", separator.replace("\\t", "\t")]
    return [*found, *(FLAGS[name] for name, is_set in options.items() if is_set)]


def gnu_sort(
    text: bytes | Sequence[Path], keys: Sequence[str], separator: str | None, options: dict[str, bool]
) -> bytes:
    """Sort a text or files with GNU sort by the bytes."""
    assert GNU_SORT is not None
    files = [] if isinstance(text, bytes) else [str(path) for path in text]
    done = subprocess.run(
        [GNU_SORT, *arguments(keys, separator, options), *files],
        input=text if isinstance(text, bytes) else b"",
        capture_output=True,
        env={**os.environ, "LC_ALL": "C"},
        check=True,
    )
    return done.stdout


def separator_byte(separator: str | None) -> bytes:
    """Return a byte that separates the fields of random lines for a separator option."""
    return {None: b" ", "\\t": b"\t"}.get(separator, (separator or "").encode())


def seeded(seed: float) -> random.Random:
    return random.Random(seed)  # noqa: S311 - no cryptography


def random_field(source: random.Random) -> bytes:
    kind = source.random()
    if kind < 0.25:
        return source.choice(ODD_FIELDS)
    if kind < 0.5:
        sign = source.choice([b"", b"-", b" ", b"0", b"00"])
        return sign + bytes(source.choices(b"0159.e", k=source.choice([0, 1, 2, 3, 8, 20])))
    if kind < 0.6:
        return bytes(source.choices([0, 1, 32, 9, 13, 255, 200, 97], k=source.randrange(12)))
    return bytes(source.choices(b"abAB" if kind < 0.8 else b"abcdefgh", k=source.randrange(1, 30)))


def random_text(source: random.Random, separator: bytes, count: int) -> bytes:
    lines = [separator.join(random_field(source) for _ in range(source.randrange(6))) for _ in range(count)]
    if lines and source.random() < 0.1:  # equal for longer than words are compared
        lines += [b"ab" * 1200 + source.choice([b"", b"a", b"b"]) for _ in range(4)]
    if source.random() < 0.3:
        lines = [source.choice(lines) for _ in lines]
    return b"\n".join(line.replace(b"\n", b"") for line in lines) + b"\n" * (source.random() < 0.8)


def random_key(source: random.Random) -> str:
    key = str(source.randrange(1, 5)) + (f".{source.randrange(1, 4)}" if source.random() < 0.4 else "")
    key += "".join(option for option in "bfnr" if source.random() < 0.15)
    if source.random() < 0.6:
        key += f",{source.randrange(1, 6)}" + (f".{source.randrange(4)}" if source.random() < 0.4 else "")
        key += "".join(option for option in "bfnr" if source.random() < 0.1)
    return key


def random_options(source: random.Random) -> tuple[list[str], str | None, dict[str, bool]]:
    keys = [random_key(source) for _ in range(source.choice([0, 0, 1, 1, 1, 2, 3]))]
    separator = source.choice([None, None, ",", "\\t", " ", "a", "0"])
    return keys, separator, {name: source.random() < 0.25 for name in FLAGS}
