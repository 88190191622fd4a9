"""Models and embeddings in the formats of other programs."""

from dmlkit.export.run import export

__all__ = ["export"]
