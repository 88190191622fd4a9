"""Client of ``dmlkit serve`` with the standard library alone: it imports no torch."""

import base64
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from dmlkit.errors import UserError, require_list
from dmlkit.serve.access import check_token

Image = str | Path | bytes
"""Image file: its path or its content."""
NAME = r"[^\s/:.\[\]]+"
ADDRESS = re.compile(rf"https?://(\[[^\s/\[\]]+\]|{NAME}(\.{NAME})*\.?)(:[0-9]+)?(/\S*)?")
"""Address of a server: its name, or IPv6 in brackets, and perhaps its port and a path."""


class Client:
    """Connection to a server at the address that ``dmlkit serve`` prints; ``timeout``: seconds to wait for an answer.

    Example:
        >>> Client("http://127.0.0.1:1").info()
        Traceback (most recent call last):
        dmlkit.errors.UserError: http://127.0.0.1:1: no server answers: [Errno 111] Connection refused
    """

    def __init__(self, url: str = "http://127.0.0.1:8765", *, token: str | None = None, timeout: float = 60) -> None:
        if not ADDRESS.fullmatch(url):
            raise UserError(
                f"{url}: expected an address that starts with http:// or https://, e.g. http://127.0.0.1:8765"
            )
        check_token(token or None, "token")
        self.url, self.token, self.timeout = url.rstrip("/"), token or None, timeout

    def info(self) -> dict[str, Any]:
        """Return what is served."""
        return self._ask("/v1/info")

    def embed(self, images: Sequence[Image]) -> list[list[float]]:
        """Return the embeddings of images."""
        return self._ask("/v1/embed", _body(images))["embeddings"]

    def search(self, images: Sequence[Image], *, k: int = 10) -> list[list[dict[str, Any]]]:
        """Return ``rank``, ``similarity``, ``id``, ``label`` and ``path`` of the k nearest images of each image."""
        return [query["nearest"] for query in self._ask(f"/v1/search?k={k}", _body(images))["queries"]]

    def identify(self, images: Sequence[Image]) -> list[dict[str, Any]]:
        """Return for each image ``label``, ``guess``, ``probability``, ``score``, ``margin`` and ``nearest``."""
        return self._ask("/v1/identify", _body(images))["answers"]

    def verify(self, a: Image, b: Image) -> dict[str, Any]:
        """Return ``similarity``, ``threshold`` and ``same`` of two images."""
        return self._ask("/v1/verify", _body([a, b]))

    def add(self, images: Sequence[Image], label: str) -> dict[str, Any]:
        """Add images to the gallery, and return how many were ``added``, ``messages`` and ``version``."""
        return self._ask(f"/v1/gallery/add?{urlencode({'label': label})}", _body(images))

    def remove(self, *, labels: Sequence[str] = (), ids: Sequence[str] = ()) -> int:
        """Remove images from the gallery, and return their number."""
        require_list("labels", labels)
        require_list("ids", ids)
        return self._ask("/v1/gallery/remove", {"labels": list(labels), "ids": list(ids)})["removed"]

    def review(self) -> dict[str, Any]:
        """Return how many ``labels`` the review has, and how many of them may be wrong (``most_wrong``)."""
        return self._ask("/v1/review")

    def question(self, reviewer: str, *, about: Literal["labels", "unknown"] = "labels") -> dict[str, Any] | None:
        """Return the next question: ``row``, ``id``, ``path``, proposed ``label`` and more; None if there is none."""
        return self._ask("/v1/review/question", {"reviewer": reviewer, "about": about})["question"]

    def answer(self, question: dict[str, Any], label: str | None, reviewer: str) -> dict[str, Any]:
        """Keep the correct label of a question's image; None if the reviewer cannot tell."""
        body = {"reviewer": reviewer, "row": question["row"], "id": question["id"], "label": label}
        return self._ask("/v1/review/answer", body)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request, and return the answer."""
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data, headers), timeout=self.timeout) as response:
                return json.load(response)
        except HTTPError as error:
            reason = f"status {error.code}; is this a server of dmlkit serve?"
            with suppress(OSError, HTTPException, ValueError, LookupError, TypeError):  # a page of another server
                reason = str(json.load(error)["error"])
        except URLError as error:
            reason = f"no server answers: {error.reason}"
            if isinstance(error.reason, BrokenPipeError | ConnectionResetError):
                reason = (
                    f"the server ended the connection while {len(data or b'') / 1e6:.0f} MB were sent; it takes at "
                    "most 64 MB: send fewer or smaller images"
                )
        except TimeoutError:  # the connection was accepted, and no answer came
            reason = f"no answer within {self.timeout:g} s"
        except (OSError, HTTPException):
            reason = "the connection ended before the answer; is the server still running?"
        except ValueError:
            reason = "the answer is not JSON; is this a server of dmlkit serve?"
        raise UserError(f"{self.url}: {reason}")


def _body(images: Sequence[Image]) -> dict[str, Any]:
    """Return images as a request has them."""
    if isinstance(images, str | Path | bytes):
        raise UserError(f"got one {type(images).__name__}, expected a list of images: [image]")
    contents = list[str]()
    for image in images:
        try:
            content = image if isinstance(image, bytes) else Path(image).read_bytes()
        except OSError as error:
            raise UserError(f"{image}: cannot read this image: {error.strerror or error}") from None
        contents.append(base64.b64encode(content).decode())
    return {"images": contents}
