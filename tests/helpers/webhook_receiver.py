"""An HTTP receiver for webhooks that answers with given statuses and records requests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator


class Received(NamedTuple):
    """One received request."""

    line: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """Answers with the statuses of `answers` in turn, then with 200; 0 means no answer."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.received: list[Received] = []
        self.port = 0

    @asynccontextmanager
    async def listen(self, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
        server = await asyncio.start_server(self._serve, host, 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
            headers = {name.lower(): value for name, value in (text.split(": ", 1) for text in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.received.append(Received(line, headers, body))
            status = self.answers.pop(0) if self.answers else 200
            if status == 0:
                await reader.read()  # until the client closes
                return
            writer.write(f"HTTP/1.1 {status} X\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n".encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
