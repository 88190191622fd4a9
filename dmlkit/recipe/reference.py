"""Every key that a recipe may have, from the classes that own them: as lines for a screen, as Markdown for the docs."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from dmlkit.component import ComponentConfig, from_weights
from dmlkit.recipe.schema import FAMILIES, Recipe, TrainingConfig


class KeyReference(NamedTuple):
    """A key, its default as YAML would have it, and what it is."""

    key: str
    default: str
    meaning: str


def first_sentence(member: type[BaseModel]) -> str:
    """What a member of a family is, in one line."""
    return as_text((member.__doc__ or "").strip().partition("\n")[0])


def keys_of(config: type[BaseModel]) -> Iterator[KeyReference]:
    """The keys of a configuration: a member's own first, then those that it shares.

    Example:
        >>> from dmlkit.losses import CosFaceConfig
        >>> next(keys_of(CosFaceConfig))
        KeyReference(key='margin', default='0.35', meaning='m, in units of the cosine.')
    """
    fields = sorted(config.model_fields.items(), key=lambda field: field[0] not in config.__annotations__)
    for name, info in fields:
        if name != "name" or not issubclass(config, ComponentConfig):
            default = "required" if info.is_required() else _plain(info.get_default(call_default_factory=True))
            default = "published" if from_weights in info.metadata else default
            yield KeyReference(name, default, as_text(info.description or ""))


def _plain(default: Any) -> str:
    if isinstance(default, tuple):
        return json.dumps([item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in default])
    return json.dumps(default.model_dump(mode="json") if isinstance(default, BaseModel) else default)


def as_text(docstring: str) -> str:
    """A docstring in one line, without its marks of code.

    Example:
        >>> as_text("For w+; ``none`` is 1, see `ProxyLoss`.")
        'For w+; none is 1, see ProxyLoss.'
    """
    return " ".join(docstring.replace("`", "").split())


def as_markdown() -> str:
    """The page docs/recipe_keys.md: a section for the recipe, its training, and each member of each family."""
    lines = [
        "# The keys of a recipe",
        "",
        "Written by `dmlkit list --markdown > docs/recipe_keys.md` from the classes that own them; a test holds it.",
        "",
        "## recipe",
        "",
        *_table(Recipe, default=False),
        "## training",
        "",
        *_table(TrainingConfig),
    ]
    for family, root in FAMILIES.items():
        lines += [f"## {family}", ""]
        for name, member in sorted(root.variants.items()):
            lines += [f"### {name}", "", _escaped(first_sentence(member)), "", *_table(member)]
    return "\n".join(lines)


def _table(config: type[BaseModel], *, default: bool = True) -> list[str]:
    keys = list(keys_of(config))
    if not keys:
        return []
    head = ["| key | default | meaning |", "|---|---|---|"] if default else ["| key | meaning |", "|---|---|"]
    rows = [[f"`{key.key}`", *([f"`{key.default}`"] if default else []), _escaped(key.meaning)] for key in keys]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
