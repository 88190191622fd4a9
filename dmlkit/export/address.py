"""Addresses of other people's stores: what is shown of them holds no password."""

from urllib.parse import urlsplit

from dmlkit.errors import UserError


def is_address(target: str) -> bool:
    """Whether a text names a server, not a file.

    Example:
        >>> is_address("postgresql://db/birds"), is_address("exports/birds")
        (True, False)
    """
    return "://" in target


def shown_address(address: str) -> str:
    """An address without its password and its options, which may hold one.

    Raises:
        UserError: it cannot be told what of it is the password; then nothing of it is shown.

    Example:
        >>> shown_address("postgresql://me:secret@db:5433/birds?sslmode=require")
        'postgresql://me@db:5433/birds'
    """
    try:
        parts = urlsplit(address)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:  # of a port that is no number, which may be the beginning of a password
        raise _unclear(address) from None
    if parts.netloc.count("@") > 1 or any("@" in part for part in (parts.path, parts.query, parts.fragment)):
        raise _unclear(address)
    user = f"{parts.username}@" if parts.username else ""
    return f"{parts.scheme}://{user}{parts.hostname or ''}{port}{parts.path}"


def _unclear(address: str) -> UserError:
    scheme = address.partition("://")[0]
    return UserError(
        f"--output {scheme}://...: cannot read this address; expected {scheme}://USER:PASSWORD@HOST:PORT/NAME, where a "
        "password has %40 for @, %3A for :, %2F for /, %3F for ? and %23 for #"
    )
