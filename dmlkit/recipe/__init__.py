"""Recipes: the typed schema, and the reader of YAML files."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmlkit.recipe.file import dump_recipe, parse_recipe, read_recipe
    from dmlkit.recipe.schema import Recipe

__all__ = ["Recipe", "dump_recipe", "parse_recipe", "read_recipe"]

if not TYPE_CHECKING:  # imported on first access, so that recipes can be listed without torch

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'dmlkit.recipe' has no attribute {name!r}; it has {', '.join(__all__)}")
        return getattr(import_module(f"dmlkit.recipe.{'schema' if name == 'Recipe' else 'file'}"), name)
