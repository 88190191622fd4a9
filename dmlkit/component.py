"""The only magic in dmlkit: families of components that find their own members.

A family root (``LossConfig``) records its subclasses by their ``name``. ``Annotated[LossConfig, one_of]``
becomes a tagged union over them, so a recipe's ``loss: {name: triplet, margin: 0.1}`` is validated by the
class that owns the options. A new member is one new file in the family's folder.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from inspect import isclass
from pkgutil import iter_modules
from typing import Any, ClassVar, Literal, get_args, get_origin

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


class MemberError(TypeError):
    """A class that cannot be a member of its family."""


class NameTakenError(MemberError):
    """Two members of a family have one name.

    Args:
        name: that both have.
        taken_by: the member that was there first.
        member: the one that is refused.
    """

    def __init__(self, name: str, taken_by: type[Any], member: type[Any]) -> None:
        self.name, self.taken_by = name, taken_by
        super().__init__(f"{member.__module__}: the name {name!r} is taken by {taken_by.__module__}")


class ComponentConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Base of every family root. A direct subclass is a root, a subclass of a root is a member unless it is
    ``abstract``: what several members share.

    Raises:
        MemberError: a member's ``name`` is no Literal with a default, or another member has it.

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
        field = cls.model_fields["name"]
        name = field.default
        if get_origin(field.annotation) is not Literal or get_args(field.annotation) != (name,):
            raise MemberError(f'{cls.__qualname__}: name it by a field such as name: Literal["mine"] = "mine"')
        known = cls.variants.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise NameTakenError(name, known, cls)
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


def rebuild_unions() -> None:
    """Build every model with a union of members again: a union is fixed once it is built, and members came later."""
    known: dict[type[BaseModel], bool] = {}
    holders = [model for model in _below(BaseModel) if _holds_union(model, known)]
    for model in holders:  # else one would be built of what another was built of before
        if "__pydantic_core_schema__" in vars(model):
            del model.__pydantic_core_schema__
    for model in holders:
        model.model_rebuild(force=True)


def _below(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in root.__subclasses__():
        yield model
        yield from _below(model)


def _holds_union(model: type[BaseModel], known: dict[type[BaseModel], bool]) -> bool:
    """Whether a union is in a model, or in a model that is in it."""
    if model not in known:
        known[model] = False  # until it is found: models may go round in a circle
        inside = [part for field in model.model_fields.values() for part in models_in(field.annotation)]
        known[model] = any(ComponentConfig in part.__bases__ or _holds_union(part, known) for part in inside)
    return known[model]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The model classes inside an annotation.

    Example:
        >>> from typing import Annotated
        >>> [model.__name__ for model in models_in(tuple[Annotated[ComponentConfig, one_of], ...])]
        ['ComponentConfig']
    """
    if isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def load_family(package: str) -> None:
    """Import every file of a family's folder, so that its members are known; sub-folders hold none.

    The folder's ``__init__`` imports them by name as well, for editors and type checkers. A new file works in recipes
    before it is named there, and a test tells the line to add.
    """
    for module_info in iter_modules(sys.modules[package].__path__, f"{package}."):
        if not module_info.ispkg:
            import_module(module_info.name)


def missing_attribute(package: str, name: str) -> AttributeError:
    """The error for ``from dmlkit.losses import Tripet``: it names what the family has."""
    from difflib import get_close_matches

    known = [key for key, value in vars(sys.modules[package]).items() if isclass(value)]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
    return AttributeError(f"module {package!r} has no attribute {name!r}; {hint}")
