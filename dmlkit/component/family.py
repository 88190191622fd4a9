"""Families of components that find their own members.

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
    """A condition that a component sets on another component of the recipe; ``Recipe`` checks it when it is loaded.

    Args:
        key: dotted key of the other component, e.g. ``"manifold.name"``, or a fact of its class, e.g.
            ``"backbone.has_class_token"``; an error then names the members that have it.
        allowed: the values that are compatible with this component.
        reason: a clause that completes "..., because <reason>".
    """

    key: str
    allowed: tuple[object, ...]
    reason: str


class MemberError(TypeError):
    """A class that cannot be a member of its family."""


class NameTakenError(MemberError):
    """Two members of a family have the same name."""

    def __init__(self, name: str, taken_by: type[Any], member: type[Any]) -> None:
        self.name, self.taken_by = name, taken_by
        super().__init__(f"{member.__module__}: the name {name!r} is taken by {taken_by.__module__}")


class OptionsConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Values of the options of a component, as a recipe gives them."""

    component: ClassVar[type[Any] | None] = None
    """The component that these options are of; None for a configuration that defines its own ``build``."""

    def requirements(self) -> Iterable[Requirement]:
        """Return the conditions on other components of the recipe: those of the component, none by default."""
        return () if self.component is None else self.with_options_only().requirements()

    def faults(self) -> Iterable[tuple[str, str]]:
        """Return the options of the component that contradict others of its own, each with the error."""
        return () if self.component is None else self.with_options_only().faults()

    def with_options_only(self) -> Any:
        """Return an object of the component that has its options and nothing else: no weights, no arguments."""
        assert self.component is not None
        bare: Any = object.__new__(_Blank)  # the component may be abstract
        bare.__class__ = self.component
        bare.__dict__.update(self.component.presets)
        bare.__dict__.update({own.attribute: getattr(self, own.key) for own in self.component.options_by_key.values()})
        return bare


class _Blank:
    pass


class ComponentConfig(OptionsConfig, frozen=True):
    """Base of every family root. A direct subclass is a root; a subclass of a root is a member. A subclass defined
    with ``abstract=True`` is neither: it holds what several members share.

    Raises:
        MemberError: a member's ``name`` is not a Literal with a default, another member has the same name, or a method
            is missing that the family's members must define.

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
    builder: ClassVar[str] = "build"
    """Method that returns the component, in the configurations that are derived from components."""
    name: str

    def __init_subclass__(cls, abstract: bool = False) -> None:
        """Accept ``abstract``, which `__pydantic_init_subclass__` reads once the fields are known."""

    @classmethod
    def listed_under(cls) -> str:
        """Return the heading of a member in the list of its family; empty if the family has none."""
        return ""

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
            raise MemberError(f'{cls.__qualname__}: the class needs a field such as name: Literal["mine"] = "mine"')
        lacking = cls.lacks()
        if lacking:
            raise MemberError(f"{cls.__qualname__}: the class must define {', '.join(f'{hook}()' for hook in lacking)}")
        known = cls.variants.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise NameTakenError(name, known, cls)
        cls.variants[name] = cls

    @classmethod
    def lacks(cls) -> list[str]:
        """Return the methods that a member must define and this class does not: the abstract ones."""
        return sorted(cls.__abstractmethods__)

    def options(self, *others: str) -> dict[str, Any]:
        """Return the fields except ``name`` and ``others`` as keyword arguments for the constructor."""
        return {field: getattr(self, field) for field in type(self).model_fields if field not in ("name", *others)}


from_weights = object()
"""Marker for ``Annotated[int, from_weights]``: the recipe may omit the key, whose value comes with the weights."""


class OneOf:
    """Marker for ``Annotated[Root, one_of]``: ``name`` selects the member."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices = {tag(name): handler.generate_schema(variant) for name, variant in source.variants.items()}
        return core_schema.tagged_union_schema(choices, discriminator=_discriminator)


one_of = OneOf()


def tag(name: str) -> str:
    """Return the union tag of a member: in angle brackets, so that it never equals a key in an error's location."""
    return f"<{name}>"


def _discriminator(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return tag(name) if isinstance(name, str) else None


def components_below(key: tuple[str | int, ...], value: Any) -> Iterator[tuple[tuple[str | int, ...], ComponentConfig]]:
    """Yield every component in a value, including nested ones, with its key."""
    if isinstance(value, ComponentConfig):
        yield key, value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from components_below((*key, name), getattr(value, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from components_below((*key, index), item)


def load_family(package: str) -> None:
    """Import every file of a family's folder, which registers its members.

    Subfolders and files whose names start with an underscore have none; they may import packages that take seconds.

    The folder's ``__init__`` also imports them by name, for editors and type checkers. A new file works in recipes
    before it is added there; a test prints the line to add.
    """
    for module_info in iter_modules(sys.modules[package].__path__, f"{package}."):
        if not module_info.ispkg and not module_info.name.startswith(f"{package}._"):
            import_module(module_info.name)
    suggest_members(package)


def suggest_members(module: str) -> None:
    """Let ``dmlkit.losses.Tripet`` raise an error that names the members of the family.

    The function is set here because a ``__getattr__`` in the source would let every name pass the type checker.
    """
    known = [key for key in sys.modules[module].__all__ if isclass(vars(sys.modules[module])[key])]

    def find(name: str) -> object:
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"available: {', '.join(sorted(known))}"
        raise AttributeError(f"module {module!r} has no attribute {name!r}; {hint}")

    vars(sys.modules[module])["__getattr__"] = find
