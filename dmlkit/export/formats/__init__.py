"""File formats of embeddings, one per file: a member of `EmbeddingFormat` of `dmlkit.export.wanted`."""

from dmlkit.component import load_family
from dmlkit.export.formats.base import FORMATS, Format, export_embeddings

__all__ = ["FORMATS", "Format", "export_embeddings"]

load_family(__name__)
