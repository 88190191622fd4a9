"""From images to points, once: models, their computation, and the folders that hold what was embedded.

Importing this package imports nothing heavy, so that programs without torch get at `index_vectors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmlkit.vectors.run import EmbedOptions, embed
    from dmlkit.vectors.trained import load_model

__all__ = ["EmbedOptions", "embed", "load_model"]
HOMES = {
    "EmbedOptions": "dmlkit.vectors.run",
    "embed": "dmlkit.vectors.run",
    "load_model": "dmlkit.vectors.trained",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)
