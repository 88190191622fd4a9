"""Images of tar files by their paths, ``SHARD.tar/KEY.jpg``, as pages and caches know them."""

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
    """The tar file that a path leads through, and the name of the image in it; None for any other path."""
    end = path.find(f"{SUFFIX}/")
    while end >= 0:
        shard = path[: end + len(SUFFIX)]
        if os.path.isfile(shard):  # noqa: PTH113 - a folder may be called so; Path costs twice the time
            return shard, path[end + len(SUFFIX) + 1 :]
        end = path.find(f"{SUFFIX}/", end + 1)
    return None


def content_in_shard(path: str) -> bytes | None:
    """What a path that leads through a tar file holds; None for any other path.

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
    """What a file holds, also one within a tar file.

    Raises:
        OSError: it cannot be read, or is not regular.
    """
    content = content_in_shard(path)
    if content is None:
        check_regular(path)
        content = Path(path).read_bytes()
    return content


@lru_cache(maxsize=16)  # an entry of 10 000 images has 3 MB
def _places(shard: str, stamp: Stamp) -> dict[str, Place]:
    """Where the files of a tar file lie: by the index above it if that knows it, else its headers are gone through."""
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
    """A member's name without the ``./`` that ``tar cf SHARD.tar .`` puts before each."""
    return name.removeprefix("./")
