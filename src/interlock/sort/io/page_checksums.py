"""Checksums of the pages of a spill file: computed while it is written, verified whenever some of it is read back.

Direct I/O reads whole pages anyway, so that any range of rows can be verified without reading more than before.
"""

from __future__ import annotations

from array import array

import xxhash

from interlock.errors import SortError
from interlock.sort.io.direct_io import PAGE_BYTES


class DamagedFile(SortError):  # noqa: N818 - a named outcome
    """A spill file does not hold the bytes that were written to it."""


class PageChecksums:
    """The checksums of the pages of one file, in the order of the pages."""

    def __init__(self) -> None:
        self._sums = array("Q")
        self._partial_page = b""

    @classmethod
    def from_hex(cls, text: str) -> PageChecksums:
        """Read the checksums of a complete file."""
        found = cls()
        found._sums.frombytes(bytes.fromhex(text))
        return found

    def update(self, data: memoryview) -> None:
        """Add the bytes after those that were added before."""
        begin = 0
        if self._partial_page:
            begin = min(PAGE_BYTES - len(self._partial_page), len(data))
            self._partial_page += data[:begin]
            if len(self._partial_page) < PAGE_BYTES:
                return
            self._sums.append(xxhash.xxh3_64_intdigest(self._partial_page))
        end = begin + (len(data) - begin) // PAGE_BYTES * PAGE_BYTES
        self._sums.extend(_page_sums(data[begin:end]))
        self._partial_page = bytes(data[end:])

    def hexdigest(self) -> str:
        """Return the checksums of all pages; the last page may be a partial one."""
        last = array("Q", [xxhash.xxh3_64_intdigest(self._partial_page)] if self._partial_page else [])
        return (self._sums + last).tobytes().hex()

    def verify(self, pages: memoryview, offset: int, name: object) -> None:
        """Raise DamagedFile if the pages read from this offset, a multiple of a page, are not those written."""
        first = offset // PAGE_BYTES
        found = array("Q", _page_sums(pages))
        expected = self._sums[first : first + len(found)]
        if found == expected:
            return
        wrong = next(at for at, pair in enumerate(zip(found, [*expected, None], strict=False)) if pair[0] != pair[1])
        raise DamagedFile(
            f"the temporary file {name} is damaged: wrong checksum of the page at byte {offset + wrong * PAGE_BYTES:,}"
            "; check disk and memory of this machine, and sort again"
        )


def compute_checksums(data: memoryview) -> str:
    """Return the checksums of the pages of a whole file."""
    return array("Q", _page_sums(data)).tobytes().hex()


def _page_sums(data: memoryview) -> list[int]:
    checksum = xxhash.xxh3_64_intdigest
    return [checksum(data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES)]
