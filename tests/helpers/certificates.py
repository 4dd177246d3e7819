"""Certificates for tests of TLS, made with the program `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def openssl(place: Path, *arguments: str) -> None:
    subprocess.run([shutil.which("openssl") or "openssl", *arguments], cwd=place, check=True, capture_output=True)


def make_certificates(place: Path, *names: str) -> None:
    """Make an authority, and a certificate for 127.0.0.1 that it signed for each name."""
    openssl(place, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj",
            "/CN=authority", "-days", "2", "-addext", "basicConstraints=critical,CA:TRUE")  # fmt: skip
    (place / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in names:
        openssl(place, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr",
                "-subj", f"/CN={name}")  # fmt: skip
        openssl(place, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-days", "2", "-extfile", "names")  # fmt: skip
