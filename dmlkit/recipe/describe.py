"""The reference of recipes from the classes that own the keys, plug-ins included."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from dmlkit.component import ComponentConfig, from_weights
from dmlkit.recipe.file import schema
from dmlkit.recipe.key_meanings import meanings_of
from dmlkit.recipe.plugin import plugin_of
from dmlkit.recipe.reference import KeyReference, MemberReference, Reference
from dmlkit.recipe.schema import FAMILIES, Recipe
from dmlkit.recipe.training import TrainingConfig


def describe() -> Reference:
    """All that is known of recipes in this process."""
    families = {
        family: tuple(describe_member(member) for _, member in sorted(root.variants.items()))
        for family, root in FAMILIES.items()
    }
    return Reference(tuple(keys_of(Recipe)), tuple(keys_of(TrainingConfig)), families, schema())


def describe_member(member: type[ComponentConfig]) -> MemberReference:
    """What a member is, by the first line of its docstring, and its keys."""
    plugin = plugin_of(member)
    meaning = as_text((member.__doc__ or "").strip().partition("\n")[0])
    name = member.model_fields["name"].default
    return MemberReference(name, meaning, tuple(keys_of(member)), plugin.title if plugin else None)


def keys_of(config: type[BaseModel]) -> Iterator[KeyReference]:
    """The keys of a configuration: a member's own first, then those that it shares.

    Example:
        >>> from dmlkit.losses import CosFaceConfig
        >>> next(keys_of(CosFaceConfig))
        KeyReference(key='margin', default='0.35', meaning='m, in units of the cosine.')
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
    """A docstring in one line, without its marks of code.

    Example:
        >>> as_text("For w+; ``none`` is 1, see `ProxyLoss`.")
        'For w+; none is 1, see ProxyLoss.'
    """
    return " ".join(docstring.replace("`", "").split())
