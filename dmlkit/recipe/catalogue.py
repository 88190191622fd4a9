"""Catalogue: the reference of dmlkit's recipes on disk, so that listing it need not import torch, which takes seconds.

Run ``python -m dmlkit.recipe.catalogue`` to update it after a change of a configuration class; a test checks this.
"""

import json
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from dmlkit.files.atomic import atomic_write
from dmlkit.recipe.plugin import GROUP
from dmlkit.recipe.reference import KeyReference, MemberReference, Reference

CATALOGUE = Path(__file__).with_suffix(".json")
CONFIGURATION = re.compile(r"^class (?:Recipe|\w+Config)\(.*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def find_reference(plugin_files: Sequence[Path] = ()) -> Reference:
    """Return the current reference, from disk if no class has changed and there is no plug-in.

    Args:
        plugin_files: files loaded by ``--plugin``.
    """
    if not plugin_files and not entry_points(group=GROUP):
        found = json.loads(CATALOGUE.read_text(encoding="utf-8"))
        if found["fingerprint"] == fingerprint():
            return from_plain(found["reference"])
    from dmlkit.recipe.describe import describe

    return describe()


def fingerprint() -> str:
    """Compute a hash of the text of all configuration classes (125 classes in 20 ms)."""
    digest = sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        for block in CONFIGURATION.findall(path.read_text(encoding="utf-8")):
            digest.update(block.encode())
    return digest.hexdigest()


def write_catalogue(reference: Reference) -> None:
    """Write a reference to disk for `find_reference`."""
    kept = {"fingerprint": fingerprint(), "reference": reference._asdict()}
    with atomic_write(CATALOGUE) as partial:
        partial.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def from_plain(data: Any) -> Reference:
    """Convert data read from JSON to a reference."""
    families = {
        family: tuple(MemberReference(name, meaning, _keys(keys), plugin) for name, meaning, keys, plugin in members)
        for family, members in data["families"].items()
    }
    return Reference(_keys(data["recipe"]), _keys(data["training"]), families, data["schema"])


def _keys(rows: Iterable[Any]) -> tuple[KeyReference, ...]:
    return tuple(KeyReference(*row) for row in rows)


if __name__ == "__main__":
    from dmlkit.recipe.describe import describe

    write_catalogue(describe())
