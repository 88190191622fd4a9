"""A plug-in of dmlkit as a stranger would write it: pyproject.toml lists its modules."""
