"""Recipes: the typed schema, and YAML files that are read into it."""

from dmlkit.recipe.file import dump_recipe, parse_recipe, read_recipe
from dmlkit.recipe.schema import Recipe

__all__ = ["Recipe", "dump_recipe", "parse_recipe", "read_recipe"]
