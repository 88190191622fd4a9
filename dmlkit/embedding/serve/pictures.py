"""Images of a request: the files of a form, or JSON with base64 or paths below a folder."""

import asyncio
import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from dmlkit.datasets.files.image import decode_image
from dmlkit.embedding.serve.limits import RefusedError
from dmlkit.embedding.serve.service import Pixels
from dmlkit.files.escape import excerpt, printable
from dmlkit.files.image_file import BadImageError, decoding
from dmlkit.files.source import EXTENSIONS

MOST_IMAGES = 64  # of one request
MOST_BYTES = 64_000_000  # of one request's body
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
            "application/json": {
                "schema": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "images": {"type": "array", "items": {"type": "string", "format": "byte"}},
                        "paths": {"type": "array", "items": {"type": "string"}},
                    },
                }
            },
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


class Images(BaseModel):
    """Images as JSON."""

    model_config = ConfigDict(extra="forbid")
    images: Annotated[list[str], Field(description="Image files in base64.", max_length=MOST_IMAGES)] = []
    paths: Annotated[
        list[str], Field(description="Files below the server's --images folder.", max_length=MOST_IMAGES)
    ] = []


async def read_pictures(request: Request, root: Path | None) -> list[SentImage]:
    """Return the images of a request: files of a form, or JSON with base64 or paths below a root.

    Raises:
        RefusedError: the body is neither, has no image or too many, or an image cannot be read.
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
        lambda: [SentImage(name, content, _decoded(name, content)) for name, content in given]
    )


async def _of_form(request: Request) -> list[tuple[str, bytes]]:
    try:
        form = await request.form(max_files=MOST_IMAGES, max_fields=0)
    except HTTPException as error:
        raise RefusedError(400, f"cannot read this form: {error.detail}") from None
    parts = form.multi_items()
    wrong = next((name for name, part in parts if name != "images" or not isinstance(part, UploadFile)), None)
    if wrong is not None:
        raise RefusedError(422, f"form field {excerpt(wrong)!r}: expected files in the field images")
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


def _decoded(name: str, content: bytes) -> Pixels:
    name = printable(excerpt(name))
    try:
        with decoding(name):
            return np.ascontiguousarray(decode_image(name, content, None).permute(1, 2, 0).numpy())
    except BadImageError as error:
        raise RefusedError(422, str(error)) from None


def first_message(errors: Sequence[Any]) -> str:
    """Return the first of pydantic's errors as a line."""
    place = ".".join(str(part) for part in errors[0]["loc"])
    return f"{excerpt(place)}: {errors[0]['msg']}" if place else str(errors[0]["msg"])
