"""Models and embeddings in the formats of other programs."""

from dmlkit.export.export import export

__all__ = ["export"]
