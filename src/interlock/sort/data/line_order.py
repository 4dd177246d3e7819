"""The order of lines by keys with the options of GNU sort: fields, characters, numbers, reverse, unique, stable.

Invariant: two lines compare as `LC_ALL=C sort` with the same options compares them.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from interlock.errors import SortInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY = re.compile(r"(\d+)(?:\.(\d+))?([a-zA-Z]*)(?:,(\d+)(?:\.(\d+))?([a-zA-Z]*))?")
FIELD = re.compile(rb"[ \t]*[^ \t]+|[ \t]+")  # without a separator
OPTIONS = "bfnr"
MAX_FIELD = 1 << 31  # a larger number of a field or character means the same: none has so many
SEPARATORS = frozenset(range(256)) - {ord("\n")}
SEPARATOR_NAMES = {"\\0": 0, "\\t": 9}


@dataclass(frozen=True, slots=True)
class LineKey:
    """One key: from a character of a field on, to the end of a field or to a character of it; all numbers from 0.

    Without `last_field`, the key extends to the end of the line. `last_characters` is the number of characters of the
    last field that belong to the key; 0 stands for all of them.
    """

    first_field: int = 0
    first_character: int = 0
    last_field: int | None = None
    last_characters: int = 0
    skips_blanks: bool = False
    skips_blanks_at_end: bool = False
    numeric: bool = False
    folded: bool = False
    reverse: bool = False

    @property
    def needs_fields(self) -> bool:
        """Whether the ends of fields must be known to find the key."""
        return self.first_field > 0 or (
            self.last_field is not None and self.last_field + (not self.last_characters) > 0
        )

    def __str__(self) -> str:
        named = (("b", self.skips_blanks), ("f", self.folded), ("n", self.numeric), ("r", self.reverse))
        begin = f"{self.first_field + 1}.{self.first_character + 1}" + "".join(
            name for name, applies in named if applies
        )
        if self.last_field is None:
            return begin
        return f"{begin},{self.last_field + 1}.{self.last_characters}" + "b" * self.skips_blanks_at_end

    @property
    def is_valid(self) -> bool:
        """Whether all values have their types and ranges."""
        last_field = 0 if self.last_field is None else self.last_field
        numbers = (self.first_field, self.first_character, last_field, self.last_characters)
        flags = (self.skips_blanks, self.skips_blanks_at_end, self.numeric, self.folded, self.reverse)
        return all(type(number) is int and 0 <= number <= MAX_FIELD for number in numbers) and all(
            type(flag) is bool for flag in flags
        )

    @property
    def is_plain(self) -> bool:
        """Whether the key has no options of its own, and so takes those of all keys."""
        return not (self.skips_blanks or self.skips_blanks_at_end or self.numeric or self.folded or self.reverse)


@dataclass(frozen=True, slots=True)
class LineOrder:
    """The order of lines: keys, then whole lines unless `stable` or `unique`; `reverse` is for whole lines only."""

    keys: tuple[LineKey, ...] = ()
    separator: int | None = None
    reverse: bool = False
    unique: bool = False
    stable: bool = False

    @property
    def comparisons(self) -> tuple[LineKey, ...]:
        """The keys to compare one after the other, including the whole line where it decides."""
        if self.keys and (self.unique or self.stable):
            return self.keys
        return (*self.keys, LineKey(reverse=self.reverse))

    @property
    def needs_fields(self) -> bool:
        """Whether the ends of fields must be known to find the keys."""
        return any(key.needs_fields for key in self.keys)

    def shorten(self, line: bytes, limit: int) -> bytes:
        """Return a line of at most so many bytes that belongs near a longer one: it has only the fields of the keys."""
        if len(line) <= limit or not self.needs_fields:
            return line[:limit]
        joint = b"" if self.separator is None else bytes([self.separator])
        fields = line.split(joint) if joint else FIELD.findall(line)
        kept = [b"" if joint else b" x"] * len(fields)  # a field without a separator consists of blanks and more
        end = 0
        for key in self.keys:
            last = len(fields) if key.last_field is None else key.last_field + 1
            kept[key.first_field : last] = fields[key.first_field : last]
            end = max(end, last)
        return joint.join(kept[:end])[:limit]

    def json(self) -> dict[str, Any]:
        """Return the order as a JSON document."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> LineOrder:
        """Read the order from its JSON document."""
        return cls(**{**document, "keys": tuple(LineKey(**key) for key in document["keys"])})

    @classmethod
    def from_text(cls, text: str) -> LineOrder:
        """Read the order from JSON text of another process; ValueError if it is not one that can be sorted by."""
        try:
            order = cls.from_json(orjson.loads(text))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not an order of lines: {error}") from error
        is_separator = order.separator is None or (type(order.separator) is int and order.separator in SEPARATORS)
        are_flags = all(type(flag) is bool for flag in (order.reverse, order.unique, order.stable))
        if not (is_separator and are_flags and all(key.is_valid for key in order.keys)):
            raise ValueError("not an order of lines: it has a value that no option gives")
        return order

    def __str__(self) -> str:
        options = [f"-k {key}" for key in self.keys]
        if self.separator is not None:
            options.insert(0, f"-t {chr(self.separator)!r}")
        named = (("-r", self.reverse), ("-u", self.unique), ("-s", self.stable))
        options += [name for name, applies in named if applies]
        return f"lines ({' '.join(options)})" if options else "lines"


def parse_line_order(
    keys: Sequence[str] = (),
    *,
    separator: str | None = None,
    numeric: bool = False,
    reverse: bool = False,
    unique: bool = False,
    stable: bool = False,
    skip_blanks: bool = False,
    fold: bool = False,
) -> LineOrder:
    """Parse keys as GNU sort's `-k` takes them (`2,2n`, `1.3,1.5r`), and its options -t, -n, -r, -u, -s, -b and -f."""
    common = LineKey(
        numeric=numeric, reverse=reverse, skips_blanks=skip_blanks, skips_blanks_at_end=skip_blanks, folded=fold
    )
    parsed = [_parse_key(text) for text in keys]
    effective = [_with_options_of(common, key) if key.is_plain else key for key in parsed]
    if not keys and not replace(common, reverse=False).is_plain:
        effective = [common]
    return LineOrder(tuple(effective), _parse_separator(separator), reverse, unique, stable)


def _with_options_of(common: LineKey, key: LineKey) -> LineKey:
    return replace(
        common,
        first_field=key.first_field,
        first_character=key.first_character,
        last_field=key.last_field,
        last_characters=key.last_characters,
    )


def _parse_key(text: str) -> LineKey:
    match = KEY.fullmatch(text)
    if match is None:
        raise SortInputError(
            f"{text!r} is not a sort key; write FIELD[.CHARACTER][OPTIONS][,FIELD[.CHARACTER][OPTIONS]], as in 2,2n "
            "or 1.3,1.5r"
        )
    field, character, options, last_field, last_character, last_options = match.groups()
    for name in options + (last_options or ""):
        if name not in OPTIONS:
            raise SortInputError(
                f"sort key {text!r}: there is no option {name!r}; there are b (ignore leading blanks), "
                "f (ignore case), n (numeric) and r (reverse)"
            )
    if 0 in (int(field), int(last_field or 1)):
        raise SortInputError(f"sort key {text!r}: fields are numbered from 1")
    if character is not None and not int(character):
        raise SortInputError(f"sort key {text!r}: characters are numbered from 1")
    either = options + (last_options or "")
    return LineKey(
        first_field=min(int(field) - 1, MAX_FIELD),
        first_character=min(int(character or 1) - 1, MAX_FIELD),
        last_field=None if last_field is None else min(int(last_field) - 1, MAX_FIELD),
        last_characters=min(int(last_character or 0), MAX_FIELD),
        skips_blanks="b" in options,
        skips_blanks_at_end="b" in (last_options or ""),
        numeric="n" in either,
        folded="f" in either,
        reverse="r" in either,
    )


def _parse_separator(separator: str | None) -> int | None:
    if separator is None:
        return None
    if separator in SEPARATOR_NAMES:
        return SEPARATOR_NAMES[separator]
    encoded = separator.encode(errors="surrogateescape")
    if len(encoded) != 1 or encoded == b"\n":
        raise SortInputError(
            f"the field separator {separator!r} must be one byte, and not a line feed; a tab may be written \\t"
        )
    return encoded[0]
