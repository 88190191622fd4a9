"""The process of a server: its socket, and its end."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dmlkit.embedding.fusion import ModelChoice
from dmlkit.embedding.serve.app import make_app
from dmlkit.embedding.serve.limits import PATIENCE, Access, is_loopback
from dmlkit.embedding.serve.service import Service
from dmlkit.errors import UserError
from dmlkit.files.source import kind_of

GRACE = 30  # seconds for requests that are running when the server is stopped


class PatientProtocol(H11Protocol):
    """Connection that ends if the headers of a request do not come in time; uvicorn waits for them without end."""

    patience: float = PATIENCE
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.patience, self._end)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_waiting = self.conn.their_state is h11.IDLE
        if is_waiting and self._timer is None:
            self._timer = self.loop.call_later(self.patience, self._end)
        elif not is_waiting:
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()


def allow_connections() -> None:
    """Let this process open as many files as the system allows, since each connection is one; often 1024 at first."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows, which has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_server(
    source: Path,
    access: Access,
    *,
    port: int,
    review: Path | None,
    model: ModelChoice,
    started: Callable[[str, int], None],
) -> None:
    """Serve a source until the process gets SIGINT or SIGTERM; requests that are running are finished.

    Args:
        source, model: see `Service`.
        access, review: see `make_app`.
        port: port; 0 takes a free one.
        started: called with the address and the number of images when the server listens.

    Raises:
        UserError: the host needs a token, the port is taken, or see `Service`.
    """
    host, token = access.host, access.token
    if not is_loopback(host) and not token:
        raise UserError(
            f"--host {host}: other machines could use this server; set a token with DMLKIT_TOKEN or --token"
        )
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token and token):
        raise UserError("--token: expected printable ASCII characters without spaces at the ends")
    if access.allow_writes and kind_of(source) != "gallery":
        raise UserError(f"--allow-writes: {source} is not a gallery; serve a gallery to change it")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None
    with listening:
        service = Service(source, model)
        app = make_app(service, access, review=review)
        config = uvicorn.Config(
            app,
            http=PatientProtocol,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=GRACE,
            server_header=False,
        )
        allow_connections()
        name = f"[{host}]" if ":" in host else host
        started(f"http://{name}:{listening.getsockname()[1]}", len(service.snapshot.points))
        with suppress(KeyboardInterrupt):  # uvicorn raises it again, once all requests are answered
            uvicorn.Server(config).run(sockets=[listening])
