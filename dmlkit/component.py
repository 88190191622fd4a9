"""The only magic in dmlkit: families of components that find their own members.

A family root (``LossConfig``) records its subclasses by their ``name``. ``Annotated[LossConfig, one_of]``
becomes a tagged union over them, so a recipe's ``loss: {name: triplet, margin: 0.1}`` is validated by the
class that owns the options. A new member is one new file in the family's folder.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import getmembers, isclass
from pkgutil import iter_modules
from typing import Any, ClassVar

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True)
class Requirement:
    """What a component needs of another component of the recipe; ``Recipe`` checks it when it is read.

    Args:
        key: dotted key of the other component, e.g. ``"manifold.name"``.
        allowed: the values that go with this component.
        reason: why, in words that complete "..., because <reason>".
    """

    key: str
    allowed: tuple[object, ...]
    reason: str


class ComponentConfig(BaseModel, frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True):
    """Base of every family root. A direct subclass is a root, a subclass of a root is a member unless it is
    ``abstract``: what several members share.

    Raises:
        TypeError: a member has no ``name`` default, or a name that another member has.

    Example:
        >>> from typing import Literal
        >>> class ShapeConfig(ComponentConfig, frozen=True): ...
        >>> class CircleConfig(ShapeConfig, frozen=True):
        ...     name: Literal["circle"] = "circle"
        ...     radius: float = 1.0
        >>> ShapeConfig.variants["circle"]().radius
        1.0
    """

    variants: ClassVar[dict[str, type[Any]]]
    name: str

    def __init_subclass__(cls, abstract: bool = False) -> None:
        """Take ``abstract``, which `__pydantic_init_subclass__` looks at once the fields are known."""

    @classmethod
    def __pydantic_init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        if ComponentConfig in cls.__bases__:
            cls.variants = {}
            return
        if abstract:
            return
        name = cls.model_fields["name"].default
        if not isinstance(name, str):
            raise TypeError(f"{cls.__qualname__}: give the field 'name' a Literal default")
        known = cls.variants.get(name)
        if known is not None and known.__module__ != cls.__module__:
            raise TypeError(f"{cls.__module__}: the name {name!r} is taken by {known.__module__}")
        cls.variants[name] = cls

    def options(self, *others: str) -> dict[str, Any]:
        """The fields as keyword arguments for what is built, without the name and ``others``."""
        return {field: getattr(self, field) for field in type(self).model_fields if field not in ("name", *others)}

    def requirements(self) -> Iterable[Requirement]:
        """What this component needs of other components of the recipe; nothing unless a member says so."""
        return ()


class FromWeights:
    """Marker for ``Annotated[int, from_weights]``: a recipe may leave the key to its published weights."""


from_weights = FromWeights()


class OneOf:
    """Marker for ``Annotated[Root, one_of]``: the member is chosen by its ``name``."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {tag(name): handler.generate_schema(variant) for name, variant in source.variants.items()}
        return core_schema.tagged_union_schema(choices, discriminator=_discriminator)


one_of = OneOf()


def tag(name: str) -> str:
    """The union tag of a member: in angle brackets, so that it never equals a key in an error's location."""
    return f"<{name}>"


def _discriminator(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return tag(name) if isinstance(name, str) else None


def components_below(key: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], ComponentConfig]]:
    """Every component below a value, nested ones too, with its key."""
    if isinstance(value, ComponentConfig):
        yield key, value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from components_below((*key, name), getattr(value, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from components_below((*key, index), item)


def load_family(package: str) -> None:
    """Import every file of a family's folder and export from the folder its base classes and its members.

    A member is a configuration and what it builds: ``dmlkit.losses.triplet.Triplet`` becomes
    ``dmlkit.losses.Triplet``. Helpers in the same file stay there, and sub-folders hold no members.

    Raises:
        TypeError: two files export the same name.
    """
    family = sys.modules[package]
    for module_info in iter_modules(family.__path__, f"{package}."):
        if module_info.ispkg:
            continue
        module = import_module(module_info.name)
        classes = {name: kind for name, kind in getmembers(module, isclass) if kind.__module__ == module.__name__}
        wanted = set(classes) if module_info.name.endswith(".base") else _member_names(classes.values())
        for name in wanted & set(classes):
            taken = getattr(family, name, None)
            if taken is not None:
                raise TypeError(f"{module.__name__}: the name {name} is taken by {taken.__module__}")
            if not name.startswith("_"):
                setattr(family, name, classes[name])


def _member_names(classes: Iterable[type[Any]]) -> set[str]:
    """The names of configurations, and of what their ``build`` or ``create`` says that it returns."""
    found: set[str] = set()
    for config in (kind for kind in classes if issubclass(kind, ComponentConfig)):
        makers: list[Any] = [getattr(config, name, None) for name in ("build", "create")]
        made = " ".join(str(maker.__annotations__.get("return", "")) for maker in makers if maker)
        found |= {config.__name__, *re.findall(r"\w+", made)}
    return found


def missing_attribute(package: str, name: str) -> AttributeError:
    """The error for ``from dmlkit.losses import Tripet``: it names what the family has."""
    from difflib import get_close_matches

    known = [key for key, value in vars(sys.modules[package]).items() if isclass(value)]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
    return AttributeError(f"module {package!r} has no attribute {name!r}; {hint}")
