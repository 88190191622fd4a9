"""Families of components that find their own members.

A family root (``LossConfig``) records its subclasses by their ``name``. A field ``Annotated[LossConfig, one_of]``
accepts each of them, so a recipe's ``loss: {name: triplet, margin: 0.1}`` is validated by the class that owns the
options. A new member is one new file in the family's folder, which is imported when the member is asked for.
"""

import json
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


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
        options = self.component.options_by_key.items()
        bare.__dict__.update(self.component.presets)
        bare.__dict__.update({entry.attribute: getattr(self, key) for key, entry in options})
        return bare


class _Blank:
    pass


class Members(MutableMapping[str, type[Any]]):
    """Members of a family by name, in alphabetical order; those in its folder are imported when they are asked for.

    A name imports the file that is called so, and the whole family if there is none, as a loop over the members does.
    Files whose names start with an underscore and subfolders have no members.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder  # package whose files are not all imported yet
        self.imported: dict[str, type[Any]] = {}

    def _import(self, name: str | None = None) -> None:
        """Import the file of a name; without a name, or if it has no file, import all of them."""
        folder = self.folder  # which another thread may set to None meanwhile
        if folder is None:
            return
        infos = iter_modules(import_module(folder).__path__)
        files = [info.name for info in infos if not info.ispkg and not info.name.startswith("_")]
        for file in [name] if name in files else files:
            import_module(f"{folder}.{file}")
        if name not in files:
            self.folder = None

    def __getitem__(self, name: str) -> type[Any]:
        if name not in self.imported:
            self._import(name)
        if name not in self.imported:  # a file such as base.py
            self._import()
        return self.imported[name]

    def __setitem__(self, name: str, member: type[Any]) -> None:
        self.imported[name] = member

    def __delitem__(self, name: str) -> None:
        del self.imported[name]

    def __iter__(self) -> Iterator[str]:
        self._import()
        return iter(sorted(self.imported))

    def __len__(self) -> int:
        self._import()
        return len(self.imported)


class ComponentConfig(OptionsConfig, frozen=True):
    """Base of every family root. A direct subclass is a root; a subclass of a root is a member. A subclass defined
    with ``abstract=True`` is neither: it holds what several members share. If the root is in a module ``base``, its
    folder holds the members.

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

    variants: ClassVar[Members]
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
            folder, _, module = cls.__module__.rpartition(".")
            cls.variants = Members(folder or None if module == "base" else None)
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
        of_folder = cls.__module__.startswith(f"{cls.variants.folder}.")  # the file that is being imported
        known = (cls.variants.imported if of_folder else cls.variants).get(name)
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
        return core_schema.with_info_plain_validator_function(partial(_validate, source), metadata={"family": source})


one_of = OneOf()


def _validate(family: type[ComponentConfig], value: Any, info: ValidationInfo) -> Any:
    """Validate a value by the member of a family that it names."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if not isinstance(name, str):
        raise PydanticCustomError("member_without_name", "Input should be a mapping with the name of a member")
    member = family.variants.get(name)
    if member is None:
        known = ", ".join(family.variants)
        raise PydanticCustomError("unknown_member", "Input should have one of the names {known}", {"known": known})
    if info.mode == "json":  # where lists become tuples
        return member.model_validate_json(json.dumps(value), context=info.context)
    return member.model_validate(value, context=info.context)


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
