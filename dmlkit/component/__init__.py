"""Components: families that find their own members, and members whose attributes are their options."""

from typing import TYPE_CHECKING

from dmlkit.component.lazy import import_on_demand

if TYPE_CHECKING:
    from dmlkit.component.family import (
        ComponentConfig,
        MemberError,
        NameTakenError,
        OptionsConfig,
        Requirement,
        components_below,
        from_weights,
        one_of,
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
    "import_on_demand",
    "one_of",
    "option",
    "recipe_key",
]

import_on_demand(__name__)
