"""Plug-ins that a recipe uses: recorded when a run starts, and compared when the run is opened."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from pydantic import BaseModel

from dmlkit.component import components_below
from dmlkit.errors import UserError
from dmlkit.recipe.plugin import loaded_plugins, plugin_of

if TYPE_CHECKING:
    from dmlkit.recipe.schema import Recipe


class PluginRecord(BaseModel, frozen=True, extra="forbid", strict=True):
    """Plug-in that a recipe has members of."""

    name: str
    """Name of the distribution, or of the file."""
    version: str | None
    """Version of the distribution; null for a file."""
    sha256: str
    """SHA-256 of the code."""


def plugins_of(recipe: "Recipe") -> tuple[PluginRecord, ...]:
    """Return the plug-ins that a recipe has members of, sorted by name.

    Example:
        >>> from dmlkit.recipe.file import parse_recipe
        >>> plugins_of(parse_recipe("dataset: {name: glyphs}\\nloss: {name: triplet}", "recipe.yaml"))
        ()
    """
    found = {plugin_of(type(component)) for _, component in components_below((), recipe)} - {None}
    records = (PluginRecord(name=one.name, version=one.version, sha256=one.sha256) for one in found if one)
    return tuple(sorted(records, key=lambda record: record.name))


def open_plugins(records: Sequence[PluginRecord], source: str) -> None:
    """Check that the plug-ins of a run are loaded, and warn about those that have changed.

    Raises:
        UserError: a plug-in is not loaded.
    """
    names = {(plugin.name, plugin.version is None) for plugin in loaded_plugins()}
    missing = [record for record in records if (record.name, record.version is None) not in names]
    if missing:
        raise UserError("\n".join(f"{source}: needs the plug-in {_installation(record)}" for record in missing))
    for change in changed_plugins(records):
        _warn_once(f"{source}: {change}; its results may differ")


@cache
def _warn_once(text: str) -> None:
    """Warn once per process: a command may open a run several times."""
    warnings.warn(text, stacklevel=3)


def changed_plugins(records: Sequence[PluginRecord]) -> list[str]:
    """Return how the plug-ins of a run differ from the loaded ones, one line each."""
    changes: list[str] = []
    for record in records:
        same_name = [plugin for plugin in loaded_plugins() if plugin.name == record.name]
        if same_name and all(plugin.sha256 != record.sha256 for plugin in same_name):
            was = f"{record.name} {record.version}" if record.version else record.name
            hashes = f"sha256 {record.sha256[:12]} then, {same_name[0].sha256[:12]} now"
            changes.append(f"trained with the plug-in {was}, now {same_name[0].title} ({hashes})")
    return changes


def _installation(record: PluginRecord) -> str:
    if record.version is None:
        return f"{record.name} (sha256 {record.sha256[:12]}...); load it with --plugin PATH/{record.name}"
    return f"{record.name} {record.version}; install it with: pip install {record.name}=={record.version}"
