"""``shards.json``, the manifest of the shards that ``dmlkit data shards`` wrote, by which lost images are noticed."""

from typing import ClassVar

from dmlkit.files.document import Document

MANIFEST = "shards.json"


class ShardManifest(Document, frozen=True, strict=True):
    """Contents of a folder of shards, complete or still being written."""

    kind: ClassVar[str] = "manifest of shards"

    source: str
    """SHA-256 of the names, labels, sizes and modification times of the images."""
    classes: tuple[str, ...]
    """Names of the classes in the order of their labels."""
    shards: dict[str, int]
    """Number of images per shard, by the shard's name relative to the folder."""
