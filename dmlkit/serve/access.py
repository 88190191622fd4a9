"""Who reaches a server, and what requests may do: options of ``dmlkit serve``, read without its packages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dmlkit.errors import UserError


@dataclass(frozen=True)
class Access:
    """Who reaches a server, and what requests may do.

    On a local host without a token, requests for other hosts are refused, since a page of another site may have a name
    that leads here.
    """

    host: Annotated[
        str,
        "ADDRESS",
        "Address to listen on; other than localhost needs a token that requests must have, in DMLKIT_TOKEN.",
    ] = "127.0.0.1"
    token: str | None = None  # what ``Authorization: Bearer TOKEN`` must have; None for no token
    allow_writes: Annotated[
        bool, "Let requests add and remove images of a gallery, and answer questions of a review."
    ] = False
    root: Annotated[Path | None, "FOLDER", "Let requests name images in this folder by their paths."] = None
    review: Annotated[
        Path | None,
        "FOLDER",
        "Ask the questions of this review, which dmlkit review started; answering needs --allow-writes.",
    ] = None


def check_token(token: str | None, where: str) -> None:
    """Raise a `UserError` for a token that a header of a request cannot have; None is no token."""
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token and token):
        raise UserError(f"{where}: expected printable ASCII characters without spaces at the ends")
