"""Who may call the processes of a sort: a token in every call, TLS between them, and no public address without a token.

Invariant: the token is in no log, no argument of a command and no state file; tokens are compared in constant time.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import ssl
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from interlock.config import is_loopback
from interlock.errors import SortInputError
from interlock.sort.settings import TOKEN_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TOKEN_VARIABLE = "INTERLOCK_SORT_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_KEY = "x-interlock-sort-token"  # noqa: S105 - a key in the metadata of a call
MIN_TOKEN_LENGTH = 16
HASHED_NAME = re.compile(r"[0-9a-f]{8}\.\d+")  # of an authority in a directory of OpenSSL
HOW_TO_GIVE = f"give one with {TOKEN_VARIABLE} or --token-file, the same to the master and all workers"


@dataclass(frozen=True, slots=True)
class Security:
    """The token of a sort, and the files of TLS: its certificate and key, and the authority that signed all of them.

    Without an authority, servers are verified by the authorities of the system, as OpenSSL knows them, and clients by
    the token only; with one, both sides must present a certificate that it signed.
    """

    token: str = field(default="", repr=False)
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None

    def __post_init__(self) -> None:
        if self.token and (len(self.token) < MIN_TOKEN_LENGTH or not self.token.isascii() or " " in self.token):
            raise SortInputError(f"the token must have at least {MIN_TOKEN_LENGTH} ASCII characters without spaces")
        if (self.certificate is None) != (self.key is None):
            raise SortInputError("a certificate and its key belong together: give --tls-cert and --tls-key")
        if self.authority is not None and self.certificate is None:
            raise SortInputError("--tls-ca needs --tls-cert and --tls-key: every process also serves calls")

    @classmethod
    def generate(cls) -> Security:
        """Create the security of a sort whose processes all get it from this one."""
        return cls(token=secrets.token_urlsafe(32))

    def with_new_token(self) -> Security:
        """Return the same with a token for a sort whose processes all get it from this one."""
        return replace(self, token=secrets.token_urlsafe(32))

    def tls_files(self) -> list[Path | None]:
        """Return the paths of certificate, key and authority, for processes on other machines."""
        return [None if path is None else path.absolute() for path in (self.certificate, self.key, self.authority)]

    @classmethod
    def load(
        cls,
        token_file: Path | None = None,
        *,
        certificate: Path | None = None,
        key: Path | None = None,
        authority: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Security:
        """Read the token from a file that only its owner can read, or from the environment."""
        variables = os.environ if environment is None else environment
        token = read_token(token_file) if token_file is not None else variables.get(TOKEN_VARIABLE, "").strip()
        security = cls(token, certificate, key, authority)
        security.check_files()
        return security

    def check_files(self) -> None:
        """Refuse files that are missing, or no certificates; gRPC would only say that it cannot listen."""
        if self.certificate is None or self.key is None:
            return
        self._read_files()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            raise SortInputError(f"{self.certificate} with {self.key} is not a certificate and its key") from error
        try:
            if self.authority is not None:
                context.load_verify_locations(self.authority)
        except ssl.SSLError as error:
            raise SortInputError(f"{self.authority} is not the certificate of an authority") from error

    def check_host(self, host: str) -> None:
        """Refuse to listen on an address that others can reach without a token."""
        if not self.token and not is_loopback(host.strip("[]")):
            raise SortInputError(
                f"{host} can be reached from other machines, and this sort has no token: {HOW_TO_GIVE}"
            )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every call."""
        return ((TOKEN_KEY, self.token),) if self.token else ()

    def interceptors(self) -> list[grpc.ServerInterceptor]:
        """Return the checks of every call that a server receives."""
        return [TokenCheck(self.token)] if self.token else []

    def open_channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Open a channel to a server."""
        if self.certificate is None:
            return grpc.insecure_channel(address, options=options)
        certificate, key, authority = self._read_files()
        pair = {"private_key": key, "certificate_chain": certificate} if authority is not None else {}
        credentials = grpc.ssl_channel_credentials(authority or read_system_authorities(), **pair)
        return grpc.secure_channel(address, credentials, options=options)

    def add_port(self, server: grpc.Server, address: str) -> int:
        """Make a server listen on an address; return the port."""
        if self.certificate is None:
            return server.add_insecure_port(address)
        certificate, key, authority = self._read_files()
        credentials = grpc.ssl_server_credentials([(key, certificate)], authority, authority is not None)
        return server.add_secure_port(address, credentials)

    def _read_files(self) -> tuple[bytes, bytes, bytes | None]:
        certificate, key = _read(self.certificate), _read(self.key)
        return certificate or b"", key or b"", _read(self.authority)


class TokenCheck(grpc.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Refuses calls without the token, before any message of them is read."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._refusal: Any = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Let a call pass that has the token."""
        given = next((value for key, value in handler_call_details.invocation_metadata if key == TOKEN_KEY), "")
        given = given.encode() if isinstance(given, str) else given
        return continuation(handler_call_details) if hmac.compare_digest(given, self._token) else self._refusal


def read_system_authorities() -> bytes | None:
    """Read the authorities that OpenSSL uses on this machine; None if there are none, for gRPC's own.

    SSL_CERT_FILE and SSL_CERT_DIR name others. gRPC alone uses a list that comes with it.
    """
    paths = ssl.get_default_verify_paths()
    if paths.cafile is not None:
        return _read(Path(paths.cafile))
    files = sorted(Path(paths.capath).iterdir()) if paths.capath is not None else []
    found = [_read(path) or b"" for path in files if HASHED_NAME.fullmatch(path.name) and path.exists()]
    return b"\n".join(found) or None


def read_token(path: Path) -> str:
    """Read a token from a file; refuse one that others than its owner can read."""
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SortInputError(f"the token cannot be read from {path}: {getattr(error, 'strerror', error)}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SortInputError(f"the token file {path} can be read by others than its owner: chmod 600 {path}")
    if not token:
        raise SortInputError(f"the token file {path} is empty")
    return token


def write_token(directory: Path, token: str) -> Path:
    """Write a token to a file in a directory that only the owner can read; replace one of an earlier process."""
    path = directory / TOKEN_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return path


def _refuse(_: object, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, f"the call has no token, or not the one of this sort; {HOW_TO_GIVE}")


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise SortInputError(f"{path} cannot be read: {error.strerror}") from error
