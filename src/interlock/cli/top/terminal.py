"""Keys of a terminal: single key presses without Enter and echo, and a terminal that is restored on every exit."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import termios
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

READ_SIZE = 1024
# names of keys that are more than one character, as terminals send them
KEYS = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[Z": "back tab",
    "\x1b": "escape",
    "\t": "tab",
    "\r": "enter",
    "\n": "enter",
}
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
LOCAL_FLAGS = 3  # index of the local modes in the list of tcgetattr
CONTROL_CHARACTERS = 6


def split_keys(text: str) -> Iterator[str]:
    """Yield the names of the keys in what a terminal sent; one read may have several."""
    for match in _KEY.finditer(text):
        yield KEYS.get(match[0], match[0])


class Terminal:
    """Reads keys in the event loop. Ctrl-C stays an interrupt; Ctrl-Z is off, because it would leave the screen."""

    def __init__(
        self, fd: int, *, on_key: Callable[[str], None], on_resize: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        self._fd = fd
        self._on_key = on_key
        self._on_resize = on_resize
        self._on_stop = on_stop
        self._saved: list[Any] | None = None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._saved = termios.tcgetattr(self._fd)
        modes = termios.tcgetattr(self._fd)
        modes[LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO)
        modes[CONTROL_CHARACTERS] = list(modes[CONTROL_CHARACTERS])
        modes[CONTROL_CHARACTERS][termios.VSUSP] = b"\x00"
        termios.tcsetattr(self._fd, termios.TCSADRAIN, modes)
        loop.add_reader(self._fd, self._read)
        loop.add_signal_handler(signal.SIGWINCH, self._on_resize)
        loop.add_signal_handler(signal.SIGTERM, self._on_stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._fd)
        loop.remove_signal_handler(signal.SIGWINCH)
        loop.remove_signal_handler(signal.SIGTERM)
        if self._saved is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_SIZE)
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(self._fd)
            self._on_stop()
            return
        for key in split_keys(data.decode(errors="replace")):
            self._on_key(key)
