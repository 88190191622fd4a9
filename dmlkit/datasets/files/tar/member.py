"""Images in tar files by paths such as ``SHARD.tar/KEY.jpg``, which pages and caches use."""

import os
import tarfile
from functools import lru_cache
from pathlib import Path

from dmlkit.datasets.files.tar.index_file import INDEX, read_index_of
from dmlkit.datasets.files.tar.reading import Place, Stamp, read_place, stamp_of
from dmlkit.errors import UserError
from dmlkit.files.regular import check_regular

SUFFIX = ".tar"


def shard_and_name(path: str) -> tuple[str, str] | None:
    """Split a path into its tar file and the name of the image in it; return None for any other path."""
    end = path.find(f"{SUFFIX}/")
    while end >= 0:
        shard = path[: end + len(SUFFIX)]
        if os.path.isfile(shard):  # noqa: PTH113 - a folder may be named like this; Path takes twice the time
            return shard, path[end + len(SUFFIX) + 1 :]
        end = path.find(f"{SUFFIX}/", end + 1)
    return None


def content_in_shard(path: str) -> bytes | None:
    """Return the content of a file inside a tar file; None for any other path.

    Raises:
        OSError: the file cannot be read.
    """
    found = shard_and_name(path)
    if found is None:
        return None
    shard, name = found
    stamp = stamp_of(shard)
    place = _places(os.path.abspath(shard), stamp).get(name)  # noqa: PTH100 - as in `read_place`
    if place is None:
        raise FileNotFoundError(path)
    return read_place(shard, place, stamp)


def file_content(path: str) -> bytes:
    """Return the content of a file, which may be inside a tar file.

    Raises:
        OSError: the file cannot be read, or is not regular.
    """
    content = content_in_shard(path)
    if content is None:
        check_regular(path)
        content = Path(path).read_bytes()
    return content


@lru_cache(maxsize=16)  # an entry for 10 000 images takes 3 MB
def _places(shard: str, stamp: Stamp) -> dict[str, Place]:
    """Return the places of a tar file's members, from an up-to-date index above it or else from its headers."""
    path = Path(shard)
    for root in (path.parent, path.parent.parent):
        name = path.relative_to(root).as_posix()
        try:
            document, table = read_index_of(root / INDEX, name)
        except UserError:
            continue
        if document.shards.get(name) == stamp:
            rows = table.select(["name", "offset", "size"]).to_pylist()
            return {row["name"]: Place(row["offset"], row["size"]) for row in rows if row["offset"] is not None}
    try:
        with tarfile.open(path, "r:") as tar:
            return {
                plain_name(member.name): Place(member.offset_data, member.size)
                for member in tar
                if member.isreg() and not member.issparse()
            }
    except tarfile.TarError as error:
        raise OSError(str(error)) from error


def plain_name(name: str) -> str:
    """Return a member's name without the ``./`` that ``tar cf SHARD.tar .`` adds."""
    return name.removeprefix("./")
