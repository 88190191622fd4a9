"""Reference and JSON schema of recipes, made from the configuration classes, including plug-ins."""

import ast
import json
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc, getsource
from itertools import pairwise
from textwrap import dedent
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema

from dmlkit.component import Component, ComponentConfig, from_weights
from dmlkit.recipe.overrides import EXTENDS
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


def schema() -> dict[str, Any]:
    """Return the JSON schema of recipes, for editors that check YAML during typing.

    A file that extends another need not repeat its required keys and names of members.
    """
    found = Recipe.model_json_schema(schema_generator=_WithMeanings)
    extends = {"type": "string", "description": "Path of a recipe file to build on, relative to this file."}
    complete = [{"required": [EXTENDS]}, {"required": found.pop("required")}]
    name = {"type": "string", "description": "Name of a metric, e.g. recall@1, map@r, ndcg@8, nmi."}
    metrics = found["properties"]["metrics"]
    metrics["items"] = {"anyOf": [name, metrics["items"]]}
    found["properties"] = {EXTENDS: extends, **found["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_any_member(found), "anyOf": complete}


class _WithMeanings(GenerateJsonSchema):
    """Schema generator that describes the keys of each model by the docstrings below them."""

    def model_schema(self, schema: ModelSchema) -> dict[str, Any]:
        found = super().model_schema(schema)
        for key, meaning in meanings_of(schema["cls"]).items():
            found["properties"][key].setdefault("description", meaning)
        return found


def _any_member(schema: Any) -> Any:
    """Replace ``oneOf`` by ``anyOf``, because a component without a name matches several members of its family."""
    if isinstance(schema, dict):
        return {"anyOf" if key == "oneOf" else key: _any_member(value) for key, value in schema.items()}
    return [_any_member(item) for item in schema] if isinstance(schema, list) else schema


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each key, including inherited keys; without source code, there are none.

    Pydantic would read them whenever a class is defined, which would add 0.3 s to the start of every command.

    Example:
        >>> from dmlkit.datasets import GlyphsConfig
        >>> meanings_of(GlyphsConfig)["size"]
        'Side of an image, in pixels.'
    """
    component: type[Any] | None = getattr(model, "component", None)
    keys = {} if component is None else {one.attribute: key for key, one in component.options_by_key.items()}
    classes = model.__mro__ if component is None else (*component.__mro__, *model.__mro__)
    owners = (owner for owner in reversed(classes) if issubclass(owner, BaseModel | Component))
    found = {keys.get(name, name): meaning for owner in owners for name, meaning in _own_meanings(owner)}
    return {name: found[name] for name in model.model_fields if name in found}


@cache
def _own_meanings(owner: type) -> tuple[tuple[str, str], ...]:
    try:
        source = getsource(owner)
    except (OSError, TypeError):  # a class defined at a prompt
        return ()
    (statement,) = ast.parse(dedent(source)).body
    return tuple(_documented(statement.body if isinstance(statement, ast.ClassDef) else []))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for key, below in pairwise(body):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, cleandoc(text)
            case _:
                pass
