"""File formats of embeddings, one per file: a member of `EmbeddingFormat` of `dmlkit.files.export_formats`."""

from dmlkit.component import load_family
from dmlkit.export.formats.base import FORMATS, Format, check_embeddings_output, export_embeddings

__all__ = ["FORMATS", "Format", "check_embeddings_output", "export_embeddings"]

load_family(__name__)
