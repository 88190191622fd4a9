"""Catalogue in the user's cache folder: the reference of all recipe keys, read without torch and pydantic.

It belongs to one installation of dmlkit and one state of its sources. Where it cannot be read or written, everything
works and takes the seconds of importing torch.
"""

import json
import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from dmlkit.files.regular import cache_folder

PACKAGE = Path(__file__).parent.parent
GROUP = "dmlkit"  # of the entry points of plug-ins


class KeyReference(NamedTuple):
    """Key of a recipe, its default in YAML, and its meaning."""

    key: str
    default: str
    meaning: str


class MemberReference(NamedTuple):
    """Member of a family: its meaning, its keys, its plug-in (None: it is of dmlkit itself), and its heading."""

    name: str
    meaning: str
    keys: tuple[KeyReference, ...]
    plugin: str | None = None
    heading: str = ""


class Reference(NamedTuple):
    """Reference of recipes."""

    recipe: tuple[KeyReference, ...]  # top-level keys
    below: dict[str, tuple[KeyReference, ...]]  # keys below ``training`` and ``evaluation``
    families: dict[str, tuple[MemberReference, ...]]  # members of each family, by name
    schema: dict[str, Any]  # a JSON schema


def stored_reference() -> Reference | None:
    """Return the reference from the cache folder; None if there is none of these sources, or a plug-in is installed."""
    if entry_points(group=GROUP):
        return None
    try:
        stored = json.loads(catalogue_file().read_bytes())
        if stored["fingerprint"] != fingerprint():
            return None
        recipe, below, families, schema = stored["reference"]
        members = {
            family: tuple(MemberReference(name, meaning, _keys(keys), *more) for name, meaning, keys, *more in rows)
            for family, rows in families.items()
        }
        return Reference(_keys(recipe), {name: _keys(keys) for name, keys in below.items()}, members, schema)
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError):  # none, no home, or damaged
        return None


def _keys(rows: Iterable[Sequence[Any]]) -> tuple[KeyReference, ...]:
    return tuple(KeyReference(*row) for row in rows)


def catalogue_file() -> Path:
    """Return the file of this installation in the user's cache."""
    return cache_folder() / f"catalogue-{sha256(os.fsencode(PACKAGE)).hexdigest()[:16]}.json"


def fingerprint(package: Path = PACKAGE) -> str:
    """Hash the paths, sizes and times of all modules, and pydantic's version, which shapes the schema (4 ms)."""
    states = ((path, path.stat()) for path in sorted(package.rglob("*.py")))
    modules = [(str(path), state.st_size, state.st_mtime_ns) for path, state in states]
    return sha256(json.dumps([version("pydantic"), *modules]).encode()).hexdigest()
