"""Catalogue: the reference of dmlkit's recipes in the user's cache folder, so that listing it need not import torch.

It belongs to one installation of dmlkit and one state of its sources. Where it cannot be read or written, everything
works and takes the seconds of importing torch.
"""

import json
import os
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from dmlkit.files.atomic import atomic_write
from dmlkit.recipe.plugin import GROUP
from dmlkit.recipe.reference import Reference

PACKAGE = Path(__file__).parent.parent


class Catalogue(NamedTuple):
    """A reference, and the `fingerprint` of the sources that it was made from."""

    fingerprint: str
    reference: Reference


CATALOGUE = TypeAdapter(Catalogue)


def stored_reference() -> Reference | None:
    """Return the reference from the cache folder; None if there is none of these sources, or a plug-in is installed."""
    if entry_points(group=GROUP):
        return None
    try:
        stored = CATALOGUE.validate_json(catalogue_file().read_bytes())
    except (OSError, RuntimeError, ValueError):  # none, no home, or damaged
        return None
    return stored.reference if stored.fingerprint == fingerprint(PACKAGE) else None


def new_reference() -> Reference:
    """Return the reference made from the classes, and store it, unless other packages or files have members in it."""
    sources = fingerprint(PACKAGE)  # before the import: a file that changes during it has another one
    from dmlkit.recipe.describe import describe
    from dmlkit.recipe.schema import FAMILIES

    reference = describe()
    members = (member for family in FAMILIES.values() for member in family.variants.values())
    if all(member.__module__.startswith("dmlkit.") for member in members):
        with suppress(OSError, RuntimeError):  # a full disk, a read-only home, or none
            catalogue_file().parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(catalogue_file()) as partial:
                partial.write_bytes(CATALOGUE.dump_json(Catalogue(sources, reference)))
    return reference


@cache
def keep_reference() -> None:
    """Store the reference if none is stored, at most once per process that has imported the classes anyway.

    The next mistake in a recipe is then found without importing them, see `dmlkit.recipe.early`.
    """
    if not entry_points(group=GROUP) and stored_reference() is None:
        new_reference()


def catalogue_file() -> Path:
    """Return the file of this installation in ``$XDG_CACHE_HOME/dmlkit``, or ``~/.cache/dmlkit``.

    Raises:
        RuntimeError: the user has no home folder.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder, "dmlkit", f"catalogue-{sha256(os.fsencode(PACKAGE)).hexdigest()[:16]}.json")


def fingerprint(package: Path) -> str:
    """Hash the paths, sizes and times of all modules, and pydantic's version, which shapes the schema (4 ms)."""
    states = ((path, path.stat()) for path in sorted(package.rglob("*.py")))
    modules = [(str(path), state.st_size, state.st_mtime_ns) for path, state in states]
    return sha256(json.dumps([version("pydantic"), *modules]).encode()).hexdigest()
