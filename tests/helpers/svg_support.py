"""Reads drawings in tests: their rectangles and texts, and the output of the command without colours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from xml.etree import ElementTree as ET

SVG = "{http://www.w3.org/2000/svg}"


class Rectangle(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Rectangle) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def holds(self, other: Rectangle) -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )


def rectangles(picture: ET.Element, kind: str) -> list[Rectangle]:
    found = [element for element in picture.iter(f"{SVG}rect") if element.get("class") == kind]
    sizes = [tuple(float(element.get(key, "nan")) for key in ("x", "y", "width", "height")) for element in found]
    return [Rectangle(x, y, x + width, y + height) for x, y, width, height in sizes]


def texts(picture: ET.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def plain(text: str) -> str:
    """Take the colours out, which some environments force on."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)
