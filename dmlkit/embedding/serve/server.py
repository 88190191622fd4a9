"""The processes of a server: their socket, and their end."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dmlkit.embedding.fusion import ModelChoice
from dmlkit.embedding.serve.app import make_app
from dmlkit.embedding.serve.requests import PATIENCE, Access, is_loopback
from dmlkit.embedding.serve.service import Service
from dmlkit.embedding.serve.workers import run_workers
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


class Serving(NamedTuple):
    """What a server serves: ``source`` and ``model`` as in `Service`, ``access`` and ``review`` as in `make_app`."""

    source: Path
    access: Access
    review: Path | None
    model: ModelChoice


class WorkerServer(uvicorn.Server):
    """Server of one of several processes, whose signals are those of `answer_as_worker`."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals as they are."""
        yield


def open_server(serving: Serving, kind: type[uvicorn.Server] = uvicorn.Server) -> tuple[uvicorn.Server, Service]:
    """Return a server that is ready to run, and what it serves, which is closed after it.

    Raises:
        UserError: see `Service` and `make_app`.
    """
    service = Service(serving.source, serving.model)
    config = uvicorn.Config(
        make_app(service, serving.access, review=serving.review),
        http=PatientProtocol,
        log_level="warning",
        access_log=False,
        lifespan="off",  # at a second Ctrl-C uvicorn would print the traceback of its task
        timeout_graceful_shutdown=GRACE,
        server_header=False,
    )
    allow_connections()
    return kind(config), service


def answer_as_worker(serving: Serving, listening: socket.socket, connection: Connection) -> None:
    """Answer requests in one of several processes, see `run_workers`."""
    try:
        server, service = open_server(serving, WorkerServer)
    except (UserError, OSError, MemoryError) as error:
        connection.send(str(error) or type(error).__name__)
        return

    def stop(*_: object) -> None:
        server.should_exit = True

    def stop_with_parent() -> None:
        with suppress(EOFError, OSError):
            connection.recv()
        stop()

    signal.signal(signal.SIGTERM, stop)
    with suppress(OSError):  # the first process has stopped meanwhile
        connection.send(len(service.snapshot.points))
    threading.Thread(target=stop_with_parent, daemon=True).start()
    with closing(service):
        server.run(sockets=[listening])


def run_server(serving: Serving, *, port: int, workers: int, started: Callable[[str, int], None]) -> None:
    """Serve a source until the process gets SIGINT or SIGTERM; requests that are running are finished.

    Args:
        port: port; 0 takes a free one.
        started: called with the address and the number of images when the server listens.

    Raises:
        UserError: the host needs a token, the port is taken, a review has several workers, or see `Service`.
    """
    source, access, review, _ = serving
    host, token = access.host, access.token
    if not is_loopback(host) and not token:
        raise UserError(
            f"--host {host}: other machines could use this server; set a token with DMLKIT_TOKEN or --token"
        )
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token and token):
        raise UserError("--token: expected printable ASCII characters without spaces at the ends")
    if access.allow_writes and kind_of(source) != "gallery":
        raise UserError(f"--allow-writes: {source} is not a gallery; serve a gallery to change it")
    if workers > 1 and review is not None:
        raise UserError(
            f"--workers {workers}: one process divides the questions of a review among reviewers; leave out --workers "
            "or --review"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None
    name = f"[{host}]" if ":" in host else host
    started_at = partial(started, f"http://{name}:{listening.getsockname()[1]}")
    with listening:
        if workers > 1:
            run_workers(partial(answer_as_worker, serving, listening), workers, started_at)
            return
        server, service = open_server(serving)
        started_at(len(service.snapshot.points))
        with suppress(KeyboardInterrupt), closing(service):  # uvicorn raises it again, once all requests are answered
            server.run(sockets=[listening])
