"""Recipes: the typed schema, and YAML files that are read into it."""
