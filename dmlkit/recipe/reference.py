"""Reference of all recipe keys as plain data, made from the configuration classes, with the JSON schema of recipes."""

import ast
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, cached_property
from inspect import cleandoc, getsource
from itertools import pairwise
from textwrap import dedent
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema, definition_reference_schema, tagged_union_schema

from dmlkit.component import Component, ComponentConfig, from_weights
from dmlkit.files.atomic import write_text
from dmlkit.recipe import catalogue
from dmlkit.recipe.catalogue import KeyReference, MemberReference, Reference
from dmlkit.recipe.faults import models_in
from dmlkit.recipe.plugin import plugin_of


def as_markdown(reference: Reference) -> str:
    """Return the page docs/recipe_keys.md: the keys of a recipe, of its training, and of each member of each family.

    Keys that several members of a family have are explained once, below the family.
    """
    lines = [
        "# The keys of a recipe",
        "",
        "Written by `dmlkit list -o docs/recipe_keys.md`. Parentheses contain the default. Keys that several "
        "members of a family have are explained once, below the heading of the family.",
        "",
        "## recipe",
        "",
        *_lines(key._replace(default="") for key in reference.recipe),
    ]
    for name, keys in reference.below.items():
        lines += [f"## {name}", "", *_lines(keys)]
    for family, members in reference.families.items():
        shared = _shared_keys(members)
        lines += [f"## {family}", "", *_lines(shared.values())]
        for member in members:
            lines += [f"### {member.name}", "", _escaped(member.meaning), ""]
            inherited = [key for key in member.keys if key.meaning == getattr(shared.get(key.key), "meaning", None)]
            lines += _lines(key for key in member.keys if key not in inherited)
            also = [_name(key, is_short=bool(shared[key.key].default)) for key in inherited if "." not in key.key]
            lines += [f"Also {', '.join(also)}.", ""] if also else []
    return "\n".join(lines)


def _shared_keys(members: Sequence[MemberReference]) -> dict[str, KeyReference]:
    """Return the keys that all or three members have with one meaning; without a default if they differ in it."""
    uses = Counter((key.key, key.meaning) for member in members for key in member.keys)
    shared: dict[str, KeyReference] = {}
    for (name, meaning), count in uses.most_common():
        if (count > 2 or count == len(members) > 1) and name not in shared:
            keys = [key for member in members for key in member.keys if (key.key, key.meaning) == (name, meaning)]
            default = keys[0].default if len({key.default for key in keys}) == 1 else ""
            shared[name] = KeyReference(name, default, meaning)
    return shared


def _lines(keys: Iterable[KeyReference]) -> list[str]:
    lines = [f"- {_name(key)}: {_escaped(key.meaning)}" for key in keys]
    return [*lines, ""] if lines else []


def _name(key: KeyReference, *, is_short: bool = False) -> str:
    return f"`{key.key}`" if is_short or not key.default else f"`{key.key}` (`{key.default}`)"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


def describe() -> Reference:
    """Return the reference of all recipe keys known in this process."""
    from dmlkit.recipe.schema import FAMILIES, EvaluationConfig, Recipe, TrainingConfig

    families = {family: tuple(map(_described, root.variants.values())) for family, root in FAMILIES.items()}
    below = {"training": tuple(keys_of(TrainingConfig)), "evaluation": tuple(keys_of(EvaluationConfig))}
    return Reference(tuple(keys_of(Recipe)), below, families, schema())


def _described(member: type[ComponentConfig]) -> MemberReference:
    plugin, name = plugin_of(member), member.model_fields["name"].default
    meaning = as_text((member.__doc__ or "").strip().partition("\n")[0])
    title = plugin.title if plugin else None
    return MemberReference(name, meaning, tuple(keys_of(member)), title, member.listed_under())


def keys_of(config: type[BaseModel]) -> Iterator[KeyReference]:
    """Yield the keys of a configuration: first those of the class, then inherited ones."""
    fields = sorted(config.model_fields.items(), key=lambda field: field[0] not in config.__annotations__)
    meanings = meanings_of(config)
    for name, info in fields:
        if name != "name" or not issubclass(config, ComponentConfig):
            default = "required"
            if from_weights in info.metadata:
                default = "published"
            elif not info.is_required():
                default = json.dumps(_values(info.get_default(call_default_factory=True)))
            yield KeyReference(name, default, as_text(info.description or meanings.get(name, "")))
            if issubclass(config, ComponentConfig):  # options of a part that is no member, so not described elsewhere
                parts = (part for part in models_in(info.annotation) if not issubclass(part, ComponentConfig))
                yield from (key._replace(key=f"{name}.{key.key}") for part in parts for key in keys_of(part))


def _values(default: Any) -> Any:
    """Return a default as plain data; a component has only its name and what differs from its own defaults."""
    if isinstance(default, tuple):
        return [*map(_values, default)]
    if isinstance(default, ComponentConfig):
        return {"name": default.name, **default.model_dump(mode="json", exclude_defaults=True)}
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else default


def as_text(docstring: str) -> str:
    """Return a docstring in one line, without code markup."""
    return " ".join(docstring.replace("`", "").split())


def schema() -> dict[str, Any]:
    """Return the JSON schema of recipes, for editors that check YAML during typing.

    A file that extends another need not repeat its required keys and names of members, nor keys that a member requires.
    """
    from dmlkit.recipe.overrides import EXTENDS  # with YAML: 30 ms, which a catalogue that is stored does not need
    from dmlkit.recipe.schema import Recipe

    described = Recipe.model_json_schema(schema_generator=_WithMeanings)
    extends = {"type": "string", "description": "Recipe to build on: a path relative to this file, or a name."}
    complete = [{"required": [EXTENDS]}, {"required": described.pop("required")}]
    name = {"type": "string", "description": "Name of a metric, e.g. recall@1, map@r, ndcg@8, nmi."}
    metrics = described["properties"]["metrics"]
    metrics["items"] = {"anyOf": [name, metrics["items"]]}
    described["properties"] = {EXTENDS: extends, **described["properties"]}
    for member in described["$defs"].values():
        member.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_any_member(described), "anyOf": complete}


class _WithMeanings(GenerateJsonSchema):
    """Schema generator that describes the keys of each model by the docstrings below them, and families by members."""

    @cached_property
    def described(self) -> set[type[ComponentConfig]]:
        """Families whose members are in the schema, or will be."""
        return set()

    def function_plain_schema(self, schema: Any) -> dict[str, Any]:
        """Describe a family as the union of its members, and only refer to them the next time, as within a member."""
        family: type[ComponentConfig] = schema["metadata"]["family"]
        members: dict[str, Any] = {name: member.__pydantic_core_schema__ for name, member in family.variants.items()}
        if family in self.described:
            members = {name: definition_reference_schema(member["ref"]) for name, member in members.items()}
        self.described.add(family)
        return self.tagged_union_schema(tagged_union_schema(members, discriminator=str))

    def model_schema(self, schema: ModelSchema) -> dict[str, Any]:
        described = super().model_schema(schema)
        for key, meaning in meanings_of(schema["cls"]).items():
            described["properties"][key].setdefault("description", meaning)
        return described


def _any_member(schema: Any) -> Any:
    """Replace ``oneOf`` by ``anyOf``, because a component without a name matches several members of its family."""
    if isinstance(schema, dict):
        return {"anyOf" if key == "oneOf" else key: _any_member(value) for key, value in schema.items()}
    return [_any_member(item) for item in schema] if isinstance(schema, list) else schema


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each key, including inherited keys; without source code, there are none.

    Pydantic would read them whenever a class is defined, which would add 0.3 s to the start of every command.
    """
    component: type[Any] | None = getattr(model, "component", None)
    keys = {} if component is None else {option.attribute: key for key, option in component.options_by_key.items()}
    classes = model.__mro__ if component is None else (*component.__mro__, *model.__mro__)
    owners = (owner for owner in reversed(classes) if issubclass(owner, BaseModel | Component))
    meanings = {keys.get(name, name): meaning for owner in owners for name, meaning in _own_meanings(owner)}
    return {name: meanings[name] for name in model.model_fields if name in meanings}


@cache
def _own_meanings(owner: type) -> tuple[tuple[str, str], ...]:
    try:
        source = getsource(owner)
    except (OSError, TypeError):  # a class defined at a prompt
        return ()
    (statement,) = ast.parse(dedent(source)).body
    meanings: list[tuple[str, str]] = []
    for key, below in pairwise(statement.body if isinstance(statement, ast.ClassDef) else []):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                meanings.append((name, cleandoc(text)))
            case _:
                pass
    return tuple(meanings)


def new_reference() -> Reference:
    """Return the reference made from the classes, and store it, unless other packages or files have members in it."""
    sources = catalogue.fingerprint()  # before the import: a file that changes during it has another one
    from dmlkit.recipe.schema import FAMILIES

    reference = describe()
    members = (member for family in FAMILIES.values() for member in family.variants.values())
    if all(member.__module__.startswith("dmlkit.") for member in members):
        with suppress(OSError, RuntimeError):  # a full disk, a read-only home, or none
            catalogue.catalogue_file().parent.mkdir(parents=True, exist_ok=True)
            write_text(catalogue.catalogue_file(), json.dumps({"fingerprint": sources, "reference": reference}))
    return reference
