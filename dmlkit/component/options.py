"""Components defined once: a class whose annotated attributes are its options.

``class Triplet(PairLoss, name="triplet")`` with ``margin: NonNegativeFloat = 0.1`` is the loss, its constructor
``Triplet(manifold, margin=0.2)``, and the recipe's ``loss: {name: triplet, margin: 0.2}``, whose values the derived
configuration ``Triplet.Config`` checks.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from inspect import Signature, get_annotations, isclass, signature
from typing import Any, ClassVar, Literal, dataclass_transform, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dmlkit.component.derive import REQUIRED, Option, config_of
from dmlkit.component.family import ComponentConfig, MemberError, OptionsConfig, Requirement


def option(*, default: Any = REQUIRED, alias: str | None = None, kw_only: bool = True, init: bool = True) -> Any:
    """Describe an attribute of a component for which ``name: type = default`` does not suffice.

    Args:
        default: value if it is not given; without one it is required.
        alias: the key in recipes and in the constructor, if the attribute needs another name.
        kw_only: false for an argument that comes from other components, e.g. ``manifold``, and has no key in recipes.
        init: false for an attribute that ``__post_init__`` sets, e.g. a buffer; until then it has its default, if any.
    """
    return Option("", alias or "", None, default, in_constructor=init, in_recipe=init and kw_only)


def recipe_key(*, default: Any = REQUIRED, init: Literal[False] = False) -> Any:
    """Describe a key that only recipes have: its user reads it from the configuration, not from the component."""
    return Option("", "", None, default, in_constructor=init, in_recipe=True)


@dataclass_transform(kw_only_default=True, field_specifiers=(option, recipe_key))
class Component:
    """Base of the families' classes, which turns annotated attributes with a value into options.

    The constructor takes them by keyword, checks their types and ranges, builds nested components given by their
    configuration (unless the option's type is the configuration itself), sets all attributes and calls
    ``__post_init__``. ``Config`` has the same options for recipes; its ``build`` takes the arguments that are not
    options. The docstring below an attribute is its meaning.

    Raises:
        MemberError: a class with a ``name`` lacks a method, or an attribute has neither a value nor `option`.
        ValueError: on construction, an option has a wrong type or is out of range.

    Example:
        >>> from dmlkit.miners import DistanceWeighted, MinerConfig
        >>> from dmlkit.manifolds import Sphere
        >>> DistanceWeighted(Sphere(2), cutoff=0.4).cutoff
        0.4
        >>> MinerConfig.variants["distance_weighted"] is DistanceWeighted.Config
        True
        >>> DistanceWeighted(Sphere(2), cutoff=3.0)
        Traceback (most recent call last):
        ...
        ValueError: DistanceWeighted: cutoff: got 3.0, expected less than 2
    """

    Config: ClassVar[Any] = OptionsConfig
    options_by_key: ClassVar[dict[str, Option]] = {}
    arguments: ClassVar[dict[str, Option]] = {}
    presets: ClassVar[dict[str, Any]] = {}
    own_options: ClassVar[list[Option]] = []
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls, name: str | None = None, family: type[ComponentConfig] | None = None) -> None:
        super().__init_subclass__()
        inherited = [entry for base in cls.__mro__[:0:-1] for entry in vars(base).get("own_options", [])]
        own_options = [*_own_options(cls), *_new_defaults(cls, inherited)]
        redefined = {entry.attribute for entry in own_options}
        all_options = [*(entry for entry in inherited if entry.attribute not in redefined), *own_options]
        cls.options_by_key = {entry.key: entry for entry in all_options if entry.in_recipe}
        cls.arguments = {entry.key: entry for entry in all_options if entry.in_constructor and not entry.in_recipe}
        unset = [entry for entry in all_options if not entry.in_constructor and not entry.in_recipe]
        cls.presets = {entry.attribute: entry.default for entry in unset if entry.default is not REQUIRED}
        cls.own_options = own_options
        cls.__signature__ = _signature_of(cls)
        cls.Config = family or config_of(cls, name)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        cls = type(self)
        try:
            bound = Signature([entry.parameter for entry in _parameters(cls)]).bind(*args, **options).arguments
        except TypeError as error:
            raise TypeError(f"{cls.__name__}: {error}") from None
        for attribute, value in cls.presets.items():
            setattr(self, attribute, value)
        arguments = {key: bound.get(key, entry.default) for key, entry in cls.arguments.items()}
        for key, entry in cls.arguments.items():
            setattr(self, entry.attribute, arguments[key])
        for entry in _constructor_options(cls):
            value = _checked(cls, entry, bound[entry.key]) if entry.key in bound else entry.default
            if isinstance(value, OptionsConfig) and not isinstance(value, tuple(_parts_in(entry.annotation))):
                value = _build(value, arguments)
            setattr(self, entry.attribute, value)
        for key, fault in self.faults():
            raise ValueError(f"{cls.__name__}: {key}: {fault}")
        self.__post_init__()

    def __post_init__(self) -> None:
        """Complete the object, whose options and arguments are set; a subclass calls ``super().__post_init__()``."""

    def requirements(self) -> Iterable[Requirement]:
        """Return the conditions on other components of the recipe, none by default; only options may be read."""
        return ()

    def faults(self) -> Iterable[tuple[str, str]]:
        """Return the keys of options that contradict others, each with the error; only options may be read."""
        return ()


def _own_options(cls: type[Component]) -> Iterable[Option]:
    """Yield the options that a class itself defines, and remove their values: they would hide buffers and modules."""
    for attribute, annotation in get_annotations(cls, eval_str=True).items():
        if attribute.startswith("_") or annotation is ClassVar or get_origin(annotation) is ClassVar:
            continue
        if attribute not in vars(cls):
            if "__init__" in vars(cls):  # its own constructor sets them
                continue
            text = f"{attribute}: an attribute is an option and needs a value or option(...), e.g. option(init=False)"
            raise MemberError(f"{cls.__qualname__}: {text}")
        value = vars(cls)[attribute]
        entry: Option = value if isinstance(value, Option) else option(default=value)
        delattr(cls, attribute)
        yield replace(entry, attribute=attribute, key=entry.key or attribute, annotation=annotation)


def _new_defaults(cls: type[Component], inherited: Iterable[Option]) -> Iterable[Option]:
    """Yield the inherited options to which a class assigns a value without an annotation, and remove the values."""
    for entry in inherited:
        value = vars(cls).get(entry.attribute, REQUIRED)
        if value is not REQUIRED and not hasattr(value, "__get__"):  # a property computes it
            delattr(cls, entry.attribute)
            yield replace(entry, default=value)


def _parameters(cls: type[Component]) -> list[Option]:
    """Return arguments and options, those without a default first."""
    required = [argument for argument in cls.arguments.values() if argument.default is REQUIRED]
    others = [argument for argument in cls.arguments.values() if argument.default is not REQUIRED]
    return [*required, *others, *_constructor_options(cls)]


def _constructor_options(cls: type[Component]) -> list[Option]:
    return [entry for entry in cls.options_by_key.values() if entry.in_constructor]


def _signature_of(cls: type[Component]) -> Signature:
    """Return the parameters of the constructor, for ``help``."""
    if cls.__init__ is not Component.__init__:
        whole = signature(cls.__init__)
        return whole.replace(parameters=list(whole.parameters.values())[1:])
    return Signature([entry.parameter for entry in _parameters(cls)])


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(strict=True))


def _checked(cls: type[Component], entry: Option, value: Any) -> Any:
    """Return the value of an option after a check of its type and range."""
    parts = _parts_in(entry.annotation)
    if parts:
        fits = any(isinstance(value, (part, getattr(part, "Config", part))) for part in parts)
        if not fits and not (value is None and type(None) in get_args(entry.annotation)):
            expected = " or ".join(part.__name__ for part in parts)
            raise ValueError(f"{cls.__name__}: {entry.key}: got {type(value).__name__}, expected {expected}")
        return value
    try:
        return _adapter(entry.annotation).validate_python(value)
    except ValidationError as error:
        expected = expected_in(error.errors()[0]["msg"])
        raise ValueError(f"{cls.__name__}: {entry.key}: got {value!r}, expected {expected}") from None


def expected_in(message: str) -> str:
    """Return what pydantic expected by its message.

    Example:
        >>> expected_in("Input should be less than 2"), expected_in("String should have at least 1 character")
        ('less than 2', 'at least 1 character')
    """
    return re.sub(r"^(Value error, |\w+ should (be|have|match) )| after validation.*", "", message)


def _parts_in(annotation: Any) -> list[type]:
    """Return the components that an option takes, or the configurations, which it keeps without building them."""
    if isclass(annotation):
        return [annotation] if issubclass(annotation, Component | OptionsConfig) else []
    inner = () if get_origin(annotation) in (Literal, tuple) else get_args(annotation)  # items of a tuple stay as given
    return [part for other in inner for part in _parts_in(other)]


def _build(config: Any, arguments: dict[str, Any]) -> Any:
    """Build a nested component with those of the outer component's arguments that it takes."""
    names = signature(config.build).parameters if config.component is None else config.component.arguments
    return config.build(**{key: arguments[key] for key in names if arguments.get(key) is not None})
