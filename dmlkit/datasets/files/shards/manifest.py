"""``shards.json``: what ``dmlkit data shards`` wrote, so that nothing of it gets lost unnoticed."""

from typing import ClassVar

from dmlkit.files.document import Document

MANIFEST = "shards.json"


class ShardManifest(Document, frozen=True, strict=True):
    """What is, or is going to be, in a folder of shards."""

    kind: ClassVar[str] = "manifest of shards"

    source: str
    """The SHA-256 of the names, labels, sizes and times of its images."""
    classes: tuple[str, ...]
    """In the order that numbers them."""
    shards: dict[str, int]
    """Name of each, relative to the folder, and how many images it has."""
