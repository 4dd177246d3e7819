"""A process that uses the embedded server: joins, prints one line of JSON, leaves when its standard input ends.

Its optional argument is the data directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psycopg

from interlock.errors import EmbeddedServerError
from interlock.postgres.embedded.server import EmbeddedServer


def main() -> None:
    server = EmbeddedServer(*map(Path, sys.argv[1:]), settings={"fsync": "off"})
    try:
        with server:
            with psycopg.connect(server.url()) as connection:
                role = connection.info.user
            status = server.status()
            said = {"pid": status.pid, "role": role, "data_dir": str(status.data_dir)}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
            sys.stdin.read()
    except EmbeddedServerError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")


if __name__ == "__main__":
    main()
