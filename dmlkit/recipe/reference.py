"""Reference of all recipe keys as plain data, from which screens and pages are made."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class KeyReference(NamedTuple):
    """Key of a recipe, its default in YAML, and its meaning."""

    key: str
    default: str
    meaning: str


class MemberReference(NamedTuple):
    """Member of a family: its meaning, its keys, and the plug-in that it comes from; None for dmlkit's own."""

    name: str
    meaning: str
    keys: tuple[KeyReference, ...]
    plugin: str | None = None


class Reference(NamedTuple):
    """Reference of recipes."""

    recipe: tuple[KeyReference, ...]  # top-level keys
    training: tuple[KeyReference, ...]  # keys below ``training``
    families: dict[str, tuple[MemberReference, ...]]  # members of each family, by name
    schema: dict[str, Any]  # a JSON schema


def as_markdown(reference: Reference) -> str:
    """Return the page docs/recipe_keys.md: a section for the recipe, its training, and each member of each family."""
    lines = [
        "# The keys of a recipe",
        "",
        "Generated from the configuration classes by `dmlkit list --markdown > docs/recipe_keys.md`; a test checks it.",
        "",
        "## recipe",
        "",
        *_table(reference.recipe, default=False),
        "## training",
        "",
        *_table(reference.training),
    ]
    for family, members in reference.families.items():
        lines += [f"## {family}", ""]
        for member in members:
            lines += [f"### {member.name}", "", _escaped(member.meaning), "", *_table(member.keys)]
    return "\n".join(lines)


def _table(keys: Iterable[KeyReference], *, default: bool = True) -> list[str]:
    rows = [[f"`{key.key}`", *([f"`{key.default}`"] if default else []), _escaped(key.meaning)] for key in keys]
    if not rows:
        return []
    head = ["| key | default | meaning |", "|---|---|---|"] if default else ["| key | meaning |", "|---|---|"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
