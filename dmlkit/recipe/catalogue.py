"""Catalogue: the reference of dmlkit's recipes in the user's cache folder, so that listing it need not import torch.

It belongs to one installation of dmlkit and one state of its sources. Where it cannot be read or written, everything
works and takes the seconds of importing torch.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from dmlkit.files.atomic import atomic_write
from dmlkit.recipe.plugin import GROUP
from dmlkit.recipe.reference import KeyReference, MemberReference, Reference

PACKAGE = Path(__file__).parent.parent


def stored_reference() -> Reference | None:
    """Return the reference from the cache folder; None if there is none of these sources, or a plug-in is installed."""
    if entry_points(group=GROUP):
        return None
    try:
        found = json.loads(catalogue_file().read_text(encoding="utf-8"))
        return from_plain(found["reference"]) if found["fingerprint"] == fingerprint(PACKAGE) else None
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError):  # none, no home, or damaged
        return None


def new_reference() -> Reference:
    """Return the reference made from the classes, and store it, unless other packages or files have members in it."""
    sources = fingerprint(PACKAGE)  # before the import: a file that changes during it has another one
    from dmlkit.recipe.describe import describe
    from dmlkit.recipe.schema import FAMILIES

    reference = describe()
    members = (member for family in FAMILIES.values() for member in family.variants.values())
    if all(member.__module__.startswith("dmlkit.") for member in members):
        with suppress(OSError, RuntimeError):  # a full disk, a read-only home, or none
            kept = json.dumps({"fingerprint": sources, "reference": reference._asdict()}, ensure_ascii=False)
            catalogue_file().parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(catalogue_file()) as partial:
                partial.write_text(kept, encoding="utf-8")
    return reference


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


def from_plain(data: Any) -> Reference:
    """Convert data read from JSON to a reference."""
    families = {
        family: tuple(MemberReference(name, meaning, _keys(keys), plugin) for name, meaning, keys, plugin in members)
        for family, members in data["families"].items()
    }
    return Reference(_keys(data["recipe"]), _keys(data["training"]), families, data["schema"])


def _keys(rows: Iterable[Any]) -> tuple[KeyReference, ...]:
    return tuple(KeyReference(*row) for row in rows)
