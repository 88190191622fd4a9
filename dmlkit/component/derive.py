"""Configurations derived from the options of components: what a recipe may say, and what its ``build`` returns."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from inspect import Parameter, isclass, isfunction, signature
from types import UnionType, new_class
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from dmlkit.component.family import ComponentConfig, MemberError, OptionsConfig, one_of

REQUIRED: Any = Parameter.empty


@dataclass(frozen=True)
class Option:
    """An attribute of a component, which its constructor, its recipe, both or neither give; see `option`."""

    attribute: str
    key: str  # name in the constructor and in recipes
    annotation: Any
    default: Any
    in_constructor: bool
    in_recipe: bool

    @property
    def parameter(self) -> Parameter:
        """The parameter of the constructor."""
        kind = Parameter.KEYWORD_ONLY if self.in_recipe else Parameter.POSITIONAL_OR_KEYWORD
        return Parameter(self.key, kind, default=self.default, annotation=self.annotation)


def config_of(cls: Any, name: str | None) -> Any:
    """Derive the configuration of a component from its options; without a name it is abstract, and no member."""
    bases: tuple[Any, ...] = tuple(base.Config for base in cls.__bases__ if hasattr(base, "Config"))
    roots = [base for base in bases if issubclass(base, ComponentConfig)]
    if len(bases) > 1:
        bases = tuple(base for base in bases if base is not OptionsConfig)
    lacking = _abstract_methods(cls) if name else []
    if lacking:
        raise MemberError(f"{cls.__qualname__}: the class must define {', '.join(f'{hook}()' for hook in lacking)}")
    if name:
        _check_constructor(cls)
    known = {key for base in bases for key in base.model_fields}
    own = vars(cls)["own_options"]
    fresh = [entry for entry in cls.options_by_key.values() if entry in own or entry.key not in known]
    annotations: dict[str, Any] = {entry.key: as_key(entry.annotation) for entry in fresh}
    namespace: dict[str, Any] = {entry.key: entry.default for entry in fresh if entry.default is not REQUIRED}
    if name:
        annotations["name"], namespace["name"] = Literal[name], name
    for shared in (shared for root in roots for shared in _shared(root) if hasattr(cls, shared)):
        value = namespace[shared] = getattr(cls, shared)
        if isinstance(value, property):
            namespace[shared] = property(lambda config, shared=shared: getattr(config.with_options_only(), shared))
        elif isfunction(value):
            namespace[shared] = _forwarded(shared)
        else:
            annotations[shared] = ClassVar[Any]
    title = f"{cls.__name__}Config"
    is_local = "<locals>" in cls.__qualname__
    namespace |= {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}.Config" if is_local else title,
        "__doc__": (cls.__doc__ or "").strip().partition("\n")[0],
        "__annotations__": {**annotations, "component": ClassVar[Any]},
        "component": cls,
        roots[0].builder if roots else "build": _builder(cls, next(iter([*roots, *bases]))),
    }
    options = {"frozen": True, **({"abstract": not name} if roots else {})}
    config = new_class(title, bases, options, lambda scope: scope.update(namespace))
    if not is_local and cls.__module__ in sys.modules:  # where pickle looks for the class
        vars(sys.modules[cls.__module__]).setdefault(title, config)  # `IdentityConfig` is defined by hand
    return config


def _check_constructor(cls: Any) -> None:
    """Raise a `MemberError` if a constructor of the class itself does not take what `_builder` gives."""
    keys = [*cls.arguments, *(key for key, option in cls.options_by_key.items() if option.in_constructor)]
    try:
        cls.__signature__.bind(**dict.fromkeys(keys))
    except TypeError as error:
        way = "annotate options in the class, and write __post_init__() instead"
        raise MemberError(f"{cls.__qualname__}: __init__(): {error}; {way}") from None


def _forwarded(method: str) -> Callable[[OptionsConfig], Any]:
    return lambda config: getattr(config.with_options_only(), method)()


def _abstract_methods(cls: type) -> list[str]:
    names = {name for base in cls.__mro__ for name in getattr(base, "__abstractmethods__", ())}
    return sorted(name for name in names if getattr(getattr(cls, name), "__isabstractmethod__", False))


def _shared(root: type[ComponentConfig]) -> Iterable[str]:
    """Yield the attributes and methods of a family's configurations that are not options, e.g. ``shares_classes``."""
    for base in root.__mro__:
        if issubclass(base, ComponentConfig) and base is not ComponentConfig:
            yield from (name for name in base.__class_vars__ if name not in ("variants", "component"))
            yield from (name for name, value in vars(base).items() if isinstance(value, property) or isfunction(value))


def _builder(cls: Any, base: Any) -> Any:
    """Return the method of a configuration that builds it, which takes the arguments of the family's."""
    declared = signature(getattr(base, base.builder)) if hasattr(base, "builder") else None
    names = list(cls.arguments) if declared is None else list(declared.parameters)[1:]

    def build(self: Any, *args: Any, **arguments: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **arguments}
        options = {key: getattr(self, key) for key, option in cls.options_by_key.items() if option.in_constructor}
        return cls(**{key: arguments[key] for key in cls.arguments if key in arguments}, **options)

    if declared:
        build.__signature__ = declared  # pyright: ignore[reportFunctionMemberAccess]
    build.__doc__ = f"Return a `{cls.__name__}`."
    return build


def as_key(annotation: Any) -> Any:
    """Return the type of a recipe key for an option: components become the configurations of their family."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return reduce(lambda whole, part: Annotated[whole, part], metadata, as_key(inner))
    config = getattr(annotation, "Config", None)
    if isclass(config) and issubclass(config, OptionsConfig):
        root = next((base for base in config.__mro__ if ComponentConfig in base.__bases__), None)
        return Annotated[root, one_of] if root else config
    if get_origin(annotation) in (UnionType, Union):
        return Union[tuple(as_key(part) for part in get_args(annotation))]  # noqa: UP007
    return annotation
