"""Requests: what they must satisfy before they are read (size, origin, token), and the images in them.

Images are files of a form, or JSON with base64 or paths below a folder.
"""

import asyncio
import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import numpy as np
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dmlkit.datasets.files.image import decode_image
from dmlkit.embedding.serve.service import Pixels
from dmlkit.files.escape import excerpt, printable
from dmlkit.files.image_file import BadImageError, decoding
from dmlkit.files.source import EXTENSIONS

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
        host: address on which the server listens; on a local one without a token, requests for other hosts are
            refused, since a page of another site may have a name that leads here.
        token: what ``Authorization: Bearer TOKEN`` must have; None for no token.
        allow_writes: let requests change the gallery.
        images: folder whose images requests may name by their paths; None for no paths.
        review: folder of a review of the gallery's labels; None for none.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    allow_writes: bool = False
    images: Path | None = None
    review: Path | None = None


class Guard:
    """Middleware that refuses requests that are too large, come from other pages, or lack the token."""

    def __init__(self, app: ASGIApp, *, access: Access, most_bytes: int) -> None:
        self.app, self.token, self.most_bytes = app, access.token, most_bytes
        self.is_local = is_loopback(access.host) and access.token is None

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
            return
        except RefusedError as error:
            refused = error
        except asyncio.CancelledError:  # the server stops, and has waited; uvicorn would print a traceback
            refused = RefusedError(503, "the server is stopping")
        if not started:
            extra = {"www-authenticate": "Bearer"} if refused.status == 401 else {}
            headers = {**extra, "connection": "close"}
            await JSONResponse({"error": str(refused)}, refused.status, headers)(scope, receive, answer)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.is_local and not is_loopback(_split(f"//{host}").hostname or ""):
            raise RefusedError(403, f"Host {host!r}: this server answers on localhost only")
        if origin is not None and _split(origin).netloc != host:
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
        """Return a function that receives the next piece of the body, and counts its bytes."""
        count = 0

        async def next_message() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self.most_bytes:
                raise RefusedError(413, self._too_large())
            return message

        return next_message


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


SAFE = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


MOST_IMAGES = 64  # of one request
MOST_BYTES = 64_000_000  # of one request's body


class Images(BaseModel):
    """Images as JSON."""

    model_config = ConfigDict(extra="forbid")
    images: Annotated[list[str], Field(description="Image files in base64.", max_length=MOST_IMAGES)] = []
    paths: Annotated[
        list[str], Field(description="Files below the server's --images folder.", max_length=MOST_IMAGES)
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


class SentImage(NamedTuple):
    """Image of a request."""

    name: str
    content: bytes
    pixels: Pixels

    @property
    def suffix(self) -> str:
        """Suffix for a file of the image."""
        suffix = Path(self.name).suffix.lower()
        return suffix if suffix in EXTENSIONS else ".jpg"


Check = Callable[[str, Pixels], None]
"""Raises a `BadImageError` for an image, given by its name and its pixels, that the model cannot take."""


async def read_pictures(request: Request, root: Path | None, check: Check) -> list[SentImage]:
    """Return the images of a request: files of a form, or JSON with base64 or paths below a root.

    Raises:
        RefusedError: the body is neither, has no image or too many, or an image cannot be read or taken by the model.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    match kind:
        case "multipart/form-data":
            given = await _of_form(request)
        case "application/json":
            given = await _of_json(request, root)
        case _:
            raise RefusedError(415, f"Content-Type {kind!r}: expected multipart/form-data or application/json")
    if not given:
        raise RefusedError(422, "got no image, expected at least one: form field images, or JSON {images: [BASE64]}")
    return await asyncio.to_thread(
        lambda: [SentImage(name, content, _decoded(name, content, check)) for name, content in given]
    )


async def _of_form(request: Request) -> list[tuple[str, bytes]]:
    try:
        form = await request.form(max_files=MOST_IMAGES, max_fields=1)
    except HTTPException as error:
        raise RefusedError(400, f"cannot read this form: {error.detail}") from None
    parts = form.multi_items()
    wrong = next((name for name, part in parts if name != "images" or not isinstance(part, UploadFile)), None)
    if wrong is not None:
        raise RefusedError(
            422, f"form field {excerpt(wrong)!r}: expected files in the field images, as of curl -F images=@FILE"
        )
    return [
        (part.filename or f"images[{row}]", await part.read())
        for row, (_, part) in enumerate(parts)
        if isinstance(part, UploadFile)
    ]


async def _of_json(request: Request, root: Path | None) -> list[tuple[str, bytes]]:
    try:
        wanted = Images.model_validate_json(await request.body())
    except ValidationError as error:
        raise RefusedError(422, first_message(error.errors())) from None
    if wanted.paths and root is None:
        raise RefusedError(403, "paths: this server reads no files; start it with --images FOLDER, or send the images")
    given: list[tuple[str, bytes]] = []
    for row, text in enumerate(wanted.images):
        try:
            given.append((f"images[{row}]", base64.b64decode(text, validate=True)))
        except (binascii.Error, ValueError):
            raise RefusedError(422, f"images[{row}]: expected an image file in base64") from None
    for name in wanted.paths:
        assert root is not None
        given.append((name, await asyncio.to_thread(_content, root, name)))
    if len(given) > MOST_IMAGES:
        raise RefusedError(422, f"got {len(given)} images, expected at most {MOST_IMAGES}")
    return given


def _content(root: Path, name: str) -> bytes:
    """Return the content of a file below a root, without following a link out of it."""
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()) or not path.is_file():
            raise RefusedError(404, f"paths: {excerpt(name)}: there is no such file in the folder of --images")
        if path.stat().st_size > MOST_BYTES:
            raise RefusedError(413, f"paths: {excerpt(name)}: is larger than {MOST_BYTES / 1e6:g} MB")
        return path.read_bytes()
    except (OSError, ValueError):  # no permission, or a zero byte in the name
        raise RefusedError(404, f"paths: {excerpt(name)}: this file cannot be read") from None


def _decoded(name: str, content: bytes, check: Check) -> Pixels:
    name = printable(excerpt(name))
    try:
        with decoding(name):
            pixels = np.ascontiguousarray(decode_image(name, content, None).permute(1, 2, 0).numpy())
            check(name, pixels)
    except BadImageError as error:
        raise RefusedError(422, str(error)) from None
    return pixels


def first_message(errors: Sequence[Any]) -> str:
    """Return the first of pydantic's errors as a line."""
    place = ".".join(str(part) for part in errors[0]["loc"])
    return f"{excerpt(place)}: {errors[0]['msg']}" if place else str(errors[0]["msg"])
