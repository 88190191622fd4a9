"""From a run's model and images to points, in memory or in a folder, and the search in them."""

from dmlkit.embedding.run import embed
from dmlkit.embedding.trained import load_model

__all__ = ["embed", "load_model"]
