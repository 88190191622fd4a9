"""What a request must satisfy before it is read: size, time, origin and token."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PATIENCE = 30  # seconds for the headers of a request, and between two pieces of its body
LEAST_RATE = 10_000  # bytes/s of a body after that; 64 MB may take 1.8 h, and 1 byte every 29 s may not
PUBLIC = ("/", "/docs", "/openapi.json", "/healthz")
"""Paths that need no token, like the files of the page: the page asks for the token."""
POLICY = "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"


class RefusedError(Exception):
    """A request that is answered with a status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Access:
    """Who reaches a server, and what requests may do.

    Args:
        host: address on which the server listens; on a local one, requests for other hosts are refused.
        token: what ``Authorization: Bearer TOKEN`` must have; None for no token.
        allow_writes: let requests change the gallery.
        images: folder whose images requests may name by their paths; None for no paths.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    allow_writes: bool = False
    images: Path | None = None


class Guard:
    """Middleware that refuses requests that are too large or slow, come from other pages, or lack the token.

    Args:
        app: application that answers the others.
        access: who reaches the server.
        most_bytes: size of a body.
        patience: seconds to wait for the next piece of a body.
    """

    def __init__(self, app: ASGIApp, *, access: Access, most_bytes: int, patience: float = PATIENCE) -> None:
        self.app, self.token, self.most_bytes, self.patience = app, access.token, most_bytes, patience
        self.is_local = is_loopback(access.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], *SAFE]
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, self._bounded(receive), answer)
        except RefusedError as error:
            if started:
                raise
            extra = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            headers = {**extra, "connection": "close"}
            await JSONResponse({"error": str(error)}, error.status, headers)(scope, receive, answer)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.is_local and not is_loopback(urlsplit(f"//{host}").hostname or ""):
            raise RefusedError(403, f"Host {host!r}: this server answers on localhost only")
        if origin is not None and urlsplit(origin).netloc != host:
            raise RefusedError(403, f"Origin {origin!r}: requests from pages of other sites are refused")
        path = scope["path"]
        is_public = path in PUBLIC or path.startswith(("/page/", "/swagger/"))
        if self.token is not None and not is_public:
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode()):
                raise RefusedError(401, "expected the header Authorization: Bearer TOKEN, with the token of --token")
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            raise RefusedError(400, f"Content-Length {length!r}: expected a number of bytes")
        if int(length) > self.most_bytes:
            raise RefusedError(413, self._too_large())

    def _too_large(self) -> str:
        return f"the body has more than {self.most_bytes / 1e6:g} MB; send fewer or smaller images"

    def _bounded(self, receive: Receive) -> Callable[[], Awaitable[Message]]:
        """Return a function that receives the next piece of the body in time, and counts its bytes."""
        count, started = 0, monotonic()
        complete = False

        async def next_message() -> Message:
            nonlocal count, complete
            if complete:  # only a disconnection can follow, however long the answer takes
                return await receive()
            left = started + self.patience + count / LEAST_RATE - monotonic()
            try:
                message = await asyncio.wait_for(receive(), min(self.patience, left))
            except TimeoutError:
                raise RefusedError(408, "the body comes too slowly; send the request again") from None
            count += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if count > self.most_bytes:
                raise RefusedError(413, self._too_large())
            return message

        return next_message


def is_loopback(host: str) -> bool:
    """Return whether a host name is this machine only.

    Example:
        >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org")]
        [True, True, True, False, False]
    """
    try:
        return host.lower() == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _headers(pairs: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in pairs]


SAFE = _headers(
    [
        ("content-security-policy", POLICY),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-store"),
    ]
)
