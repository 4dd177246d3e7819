"""Main program of a supervisor pool that tests kill: `python supervisor_process.py URL [SETTING=VALUE …]`."""

from __future__ import annotations

import asyncio
import json
import sys

from pool_support import config_at, pooling


async def main(url: str, *settings: str) -> None:
    given = {name: json.loads(value) for name, _, value in (setting.partition("=") for setting in settings)}
    async with pooling(url, config_at(url), **given):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
