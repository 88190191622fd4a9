"""Recipes: the typed schema, and the reader of YAML files."""

from typing import TYPE_CHECKING

from dmlkit.component.lazy import import_on_demand

if TYPE_CHECKING:
    from dmlkit.recipe.file import dump_recipe, parse_recipe, read_recipe
    from dmlkit.recipe.schema import Recipe

__all__ = ["Recipe", "dump_recipe", "parse_recipe", "read_recipe"]

import_on_demand(__name__)  # recipes can be listed without torch
