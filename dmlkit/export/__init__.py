"""Export of models and embeddings to the formats of other programs."""

from dmlkit.export.export import export

__all__ = ["export"]
