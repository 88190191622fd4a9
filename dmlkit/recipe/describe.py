"""Reference of recipes, made from the configuration classes, including plug-ins."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from dmlkit.component import ComponentConfig, from_weights
from dmlkit.recipe.file import schema
from dmlkit.recipe.key_meanings import meanings_of
from dmlkit.recipe.plugin import plugin_of
from dmlkit.recipe.reference import KeyReference, MemberReference, Reference
from dmlkit.recipe.schema import FAMILIES, Recipe, TrainingConfig


def describe() -> Reference:
    """Return the reference of all recipe keys known in this process."""
    families = {
        family: tuple(describe_member(member) for _, member in sorted(root.variants.items()))
        for family, root in FAMILIES.items()
    }
    return Reference(tuple(keys_of(Recipe)), tuple(keys_of(TrainingConfig)), families, schema())


def describe_member(member: type[ComponentConfig]) -> MemberReference:
    """Return the reference of a member: the first line of its docstring, and its keys."""
    plugin = plugin_of(member)
    meaning = as_text((member.__doc__ or "").strip().partition("\n")[0])
    name = member.model_fields["name"].default
    return MemberReference(name, meaning, tuple(keys_of(member)), plugin.title if plugin else None)


def keys_of(config: type[BaseModel]) -> Iterator[KeyReference]:
    """Yield the keys of a configuration: first those of the class, then inherited ones.

    Example:
        >>> from dmlkit.datasets import GlyphsConfig
        >>> [key for key in keys_of(GlyphsConfig) if key.key == "size"]
        [KeyReference(key='size', default='32', meaning='Side of an image, in pixels.')]
    """
    fields = sorted(config.model_fields.items(), key=lambda field: field[0] not in config.__annotations__)
    meanings = meanings_of(config)
    for name, info in fields:
        if name != "name" or not issubclass(config, ComponentConfig):
            default = "required" if info.is_required() else _plain(info.get_default(call_default_factory=True))
            default = "published" if from_weights in info.metadata else default
            yield KeyReference(name, default, as_text(info.description or meanings.get(name, "")))


def _plain(default: Any) -> str:
    if isinstance(default, tuple):
        return json.dumps([item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in default])
    return json.dumps(default.model_dump(mode="json") if isinstance(default, BaseModel) else default)


def as_text(docstring: str) -> str:
    """Return a docstring in one line, without code markup.

    Example:
        >>> as_text("For w+; ``none`` is 1, see `ProxyLoss`.")
        'For w+; none is 1, see ProxyLoss.'
    """
    return " ".join(docstring.replace("`", "").split())
