"""Requests: what they must satisfy before they are read (size, origin, token), and the image files in them.

Images are files of a form, or JSON with base64 or paths below a folder.
"""

import asyncio
import base64
import hmac
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from fastapi import Request
from pydantic import BaseModel, Field, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dmlkit.files.escape import excerpt
from dmlkit.serve.access import Access

PUBLIC = ("/", "/docs", "/openapi.json", "/healthz")
"""Paths that need no token, like the files of the page: the page asks for the token."""
POLICY = "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
SAFE = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]
MOST_IMAGES = 64  # of one request
MOST_BYTES = 64_000_000  # of one request's body
MOST_BYTES_AT_ONCE = 8 * MOST_BYTES  # of the bodies of all requests that were not answered
MOST_LABEL = 4096  # characters: Linux's limit of a path, which a label may be
SILENCE = 5.0  # seconds without a byte of a body that nobody needs, after which its client is answered


def busy() -> HTTPException:
    """Return the refusal of a request that would take more memory than is left."""
    return HTTPException(503, "too many images are waiting; send the request again later", {"retry-after": "1"})


class Guard:
    """Middleware that refuses requests that are too large, come from other pages, or lack the token."""

    def __init__(self, app: ASGIApp, *, access: Access, most_bytes: int = MOST_BYTES) -> None:
        self.app, self.token, self.most_bytes = app, access.token, most_bytes
        self.is_local = is_loopback(access.host) and access.token is None
        self.held = 0  # bytes of all bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, received = False, 0
        is_read = "expect" in Headers(scope=scope)  # its client waits for the answer before it sends the body

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                await _drop(receive, is_read=is_read)
                started = True
                message["headers"] = [*message["headers"], *SAFE]
            await send(message)

        async def counted() -> Message:
            nonlocal received, is_read
            message = await receive()
            is_read, size = not message.get("more_body"), len(message.get("body", b""))
            received, self.held = received + size, self.held + size
            if received > self.most_bytes:
                raise self._too_large()
            if self.held > MOST_BYTES_AT_ONCE:
                raise busy()
            return message

        try:
            self._check(scope)
            await self.app(scope, counted, answer)
            return
        except HTTPException as error:
            refused = error
        except asyncio.CancelledError:  # the server stops, and has waited; uvicorn would print a traceback
            refused, is_read = HTTPException(503, "the server is stopping"), True
        finally:
            self.held -= received
        if not started:
            headers = {**(refused.headers or {}), "connection": "close"}
            await JSONResponse({"error": refused.detail}, refused.status_code, headers)(scope, receive, answer)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.is_local and not is_loopback(_split(f"//{host}").hostname or ""):
            raise HTTPException(403, f"Host {host!r}: this server answers on localhost only")
        if origin is not None and _split(origin).netloc != host:
            raise HTTPException(403, f"Origin {origin!r}: requests from pages of other sites are refused")
        path = scope["path"]
        if self.token is not None and path not in PUBLIC and not path.startswith(("/page/", "/swagger/")):
            token = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
                message = "expected the header Authorization: Bearer TOKEN, with the token of DMLKIT_TOKEN"
                raise HTTPException(401, message, {"www-authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            raise HTTPException(400, f"Content-Length {length!r}: expected a number of bytes")
        if int(length) > self.most_bytes:
            raise self._too_large()

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body has more than {self.most_bytes / 1e6:g} MB; send fewer or smaller images")


async def _drop(receive: Receive, *, is_read: bool) -> None:
    """Read the rest of a body: a client that still sends when its connection is closed never reads the answer."""
    dropped = 0
    with suppress(TimeoutError, asyncio.CancelledError):  # the client is silent, or the server stops
        while not is_read and dropped < MOST_BYTES_AT_ONCE:
            message = await asyncio.wait_for(receive(), SILENCE)
            is_read, dropped = not message.get("more_body"), dropped + len(message.get("body", b""))


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # e.g. "http://[": no host
        return urlsplit("")


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


class Images(BaseModel, extra="forbid"):
    """Images as JSON."""

    images: Annotated[
        list[str], Field(description="Image files in base64, or data URLs of them.", max_length=MOST_IMAGES)
    ] = []
    paths: Annotated[
        list[str], Field(description="Files below the server's --root folder.", max_length=MOST_IMAGES)
    ] = []


BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["images"],
                    "properties": {"images": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            },
            "application/json": {"schema": Images.model_json_schema()},
        },
    }
}
"""The body of a request with images, for ``/docs``."""


async def read_files(request: Request, root: Path | None) -> list[tuple[str, bytes]]:
    """Return names and contents of a request's images: files of a form, or JSON with base64 or paths below a root."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    match kind:
        case "multipart/form-data":
            images = await _of_form(request)
        case "application/json":
            images = await _of_json(request, root)
        case _:
            raise HTTPException(415, f"Content-Type {kind!r}: expected multipart/form-data or application/json")
    if not images:
        raise HTTPException(422, "got no image, expected at least one: form field images, or JSON {images: [BASE64]}")
    return images


def _too_many() -> HTTPException:
    return HTTPException(413, f"got more than {MOST_IMAGES} images; send fewer")


async def _of_form(request: Request) -> list[tuple[str, bytes]]:
    try:
        form = await request.form(max_files=MOST_IMAGES, max_fields=1)
    except HTTPException as error:  # Starlette's, for any form that it does not read
        raise (_too_many() if error.detail.startswith("Too many files") else error) from None
    images: list[tuple[str, bytes]] = []
    for name, part in form.multi_items():
        if name != "images" or not isinstance(part, UploadFile):
            raise HTTPException(
                422, f"form field {excerpt(name)!r}: expected files in the field images, as of curl -F images=@FILE"
            )
        images.append((part.filename or f"images[{len(images)}]", await part.read()))
    return images


async def _of_json(request: Request, root: Path | None) -> list[tuple[str, bytes]]:
    try:
        wanted = Images.model_validate_json(await request.body())
    except ValidationError as error:
        errors = error.errors()
        raise (_too_many() if errors[0]["type"] == "too_long" else HTTPException(422, first_message(errors))) from None
    if wanted.paths and root is None:
        raise HTTPException(403, "paths: this server reads no files; start it with --root FOLDER, or send the images")
    if len(wanted.images) + len(wanted.paths) > MOST_IMAGES:
        raise _too_many()
    images = [(f"images[{row}]", _of_base64(row, text)) for row, text in enumerate(wanted.images)]
    return images if root is None else [*images, *await asyncio.to_thread(_contents, root, wanted.paths)]


def _of_base64(row: int, text: str) -> bytes:
    """Decode base64 in any of its usual forms: a data URL, lines of 76 characters, letters for URLs, no padding.

    Example:
        >>> [_of_base64(0, text) for text in ("data:image/png;base64,+/8=", "+/\\n8=", "-_8")]
        [b'\\xfb\\xff', b'\\xfb\\xff', b'\\xfb\\xff']
    """
    start, comma, _ = text[:100].partition(",")
    if comma and start.lower().startswith("data:") and start.lower().endswith(";base64"):
        text = text[len(start) + 1 :]
    letters = "".join(text.split()).rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(letters + "=" * (-len(letters) % 4), validate=True)
    except ValueError:
        raise HTTPException(422, f"images[{row}]: expected an image file in base64, or a data URL of one") from None


def _contents(root: Path, names: Sequence[str]) -> list[tuple[str, bytes]]:
    """Return the contents of files below a root, without following a link out of it."""
    contents, size = list[tuple[str, bytes]](), 0
    for name in names:
        try:
            path = (root / name).resolve()
            if not path.is_relative_to(root.resolve()) or not path.is_file():
                raise HTTPException(404, f"paths: {excerpt(name)}: there is no such file in the folder of --root")
            size += path.stat().st_size
            if size > MOST_BYTES:
                raise HTTPException(413, f"paths: the files have more than {MOST_BYTES / 1e6:g} MB; name fewer")
            contents.append((name, path.read_bytes()))
        except (OSError, ValueError, RuntimeError):  # no permission, a zero byte in the name, or a link to itself
            raise HTTPException(404, f"paths: {excerpt(name)}: this file cannot be read") from None
    return contents


def first_message(errors: Sequence[Any]) -> str:
    """Return the first of pydantic's errors as a line."""
    location = ".".join(str(part) for part in errors[0]["loc"])
    return f"{excerpt(location)}: {errors[0]['msg']}" if location else str(errors[0]["msg"])
