"""Components: families that find their own members, and members whose attributes are their options."""

from dmlkit.component.family import (
    ComponentConfig,
    MemberError,
    NameTakenError,
    OptionsConfig,
    Requirement,
    components_below,
    from_weights,
    load_family,
    one_of,
    suggest_members,
)
from dmlkit.component.options import Component, option, recipe_key

__all__ = [
    "Component",
    "ComponentConfig",
    "MemberError",
    "NameTakenError",
    "OptionsConfig",
    "Requirement",
    "components_below",
    "from_weights",
    "load_family",
    "one_of",
    "option",
    "recipe_key",
    "suggest_members",
]
