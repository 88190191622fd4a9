"""Recipes on disk: YAML 1.2 and ``--set`` in, a checked `Recipe` or all its faults as file:line out."""

import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from dmlkit.component import ComponentConfig
from dmlkit.errors import UserError
from dmlkit.recipe import Recipe
from dmlkit.recipe_extends import EXTENDS, read_tree
from dmlkit.yaml_tree import Key, Tree, parse_yaml


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: a YAML file; its ``extends`` may name another to build on, see `dmlkit.recipe_extends.read_tree`.
        overrides: ``key.subkey=value`` each, the value in YAML; they replace what the file says.

    Raises:
        UserError: the file cannot be read, or has faults: all of them, one a line, as ``file:line: key: what``.
    """
    return _resolve(read_tree(path), overrides)


def parse_recipe(text: str, source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Check the text of a recipe; ``source`` names it in messages. See `read_recipe`.

    Example:
        >>> parse_recipe("dataset: {name: glyphs}\\nloss: {name: triplet, margn: .2}", "bad.yaml")
        Traceback (most recent call last):
        ...
        dmlkit.errors.UserError: bad.yaml:2: loss.margn: unknown key; did you mean 'margin'?
    """
    return _resolve(parse_yaml(text, source), overrides)


def _resolve(tree: Tree, overrides: Sequence[str]) -> Recipe:
    for override in overrides:
        _apply_override(tree, override)
    if isinstance(tree.data, dict) and EXTENDS in tree.data:
        raise UserError(f"{tree.origin((EXTENDS,))}: {EXTENDS}: only a recipe file can extend another")
    _name_default_parts(tree.data)
    return validate(tree)


def validate(tree: Tree) -> Recipe:
    """A tree as a recipe; every fault at once."""
    try:
        # strict in JSON mode: lists become tuples, and nothing else is coerced
        return Recipe.model_validate_json(json.dumps(tree.data))
    except ValidationError as error:
        lines = [line for fault in error.errors() for line in _describe(fault, tree)]
        raise UserError("\n".join(lines)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default spelled out.

    Example:
        >>> recipe = parse_recipe("dataset: {name: glyphs}\\nloss: {name: triplet}", "recipe.yaml")
        >>> parse_recipe(dump_recipe(recipe), "again.yaml") == recipe
        True
    """
    # PyYAML writes 1e-05 without a point, which only YAML 1.2 readers take as a number: ours is one
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=100)


def _name_default_parts(data: Any) -> None:
    """Let ``optimizer: {lr: 1e-3}`` mean the default optimizer, as ``--set optimizer.lr=1e-3`` must."""
    for name, info in Recipe.model_fields.items() if isinstance(data, dict) else ():
        if isinstance(data.get(name), dict) and isinstance(info.default, ComponentConfig):
            data[name].setdefault("name", info.default.name)


def _apply_override(tree: Tree, override: str) -> None:
    source = f"--set {override}"
    name, equals, text = override.partition("=")
    if not equals or not all(name.split(".")):
        raise UserError(f"{source}: expected key.subkey=value, e.g. --set loss.margin=0.2")
    value = parse_yaml(text, source)
    key: Key = tuple(int(part) if part.isdigit() else part for part in name.split("."))
    parent: Any = tree.data
    for index, part in enumerate(key[:-1]):
        if isinstance(part, str) and isinstance(parent, dict):
            parent = parent.setdefault(part, {})
        elif isinstance(part, int) and isinstance(parent, list) and part < len(parent):
            parent = parent[part]
        else:
            raise UserError(f"{source}: {'.'.join(map(str, key[: index + 1]))} does not exist in {tree.source}")
        if not isinstance(parent, dict | list):
            raise UserError(f"{source}: {'.'.join(map(str, key[: index + 1]))} is the value {parent!r}, not a mapping")
    last = key[-1]
    if isinstance(parent, list) and not (isinstance(last, int) and last < len(parent)):
        raise UserError(f"{source}: {name} does not exist in {tree.source}")
    if isinstance(parent, list):
        parent[int(last)] = value.data
    else:
        parent[str(last)] = value.data
    tree.origins = {old: origin for old, origin in tree.origins.items() if old[: len(key)] != key}
    tree.origins.update({(*key, *below): source for below in value.origins} | {key: source})


def _describe(fault: Any, tree: Tree) -> list[str]:
    if fault["type"] == "requirements":
        return [_line(tree, tuple(key), text) for key, text in fault["ctx"]["faults"]]
    location = fault["loc"]
    key: Key = tuple(part for part in location if not _is_tag(part))
    match fault["type"]:
        case "extra_forbidden":
            known = list(_model_at(location[:-1]).model_fields)
            return [_line(tree, key, f"unknown key; {_suggest(str(key[-1]), known)}")]
        case "missing":
            return [_line(tree, key, "missing, and it has no default")]
        case "union_tag_invalid":
            known = list(_model_at(location).variants)
            name = fault["input"]["name"]
            return [_line(tree, (*key, "name"), f"unknown {key[0]} {name!r}; {_suggest(name, known)}")]
        case "union_tag_not_found":
            known = ", ".join(_model_at(location).variants)
            came = "a mapping without a name" if isinstance(fault["input"], dict) else repr(fault["input"])
            return [_line(tree, key, f"got {came}; expected a mapping such as {{name: NAME}}, NAME one of {known}")]
        case _:
            expected = fault["msg"].removeprefix("Input should be ")
            return [_line(tree, key, f"got {fault['input']!r}, expected {expected}")]


def _line(tree: Tree, key: Key, text: str) -> str:
    dotted = ".".join(map(str, key))
    return f"{tree.origin(key)}: {dotted}: {text}" if dotted else f"{tree.origin(key)}: {text}"


def _suggest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"


def _is_tag(part: str | int) -> bool:
    return isinstance(part, str) and part.startswith("<")


def _model_at(location: Sequence[str | int]) -> Any:
    """The model class that a pydantic error location points into."""
    model: Any = Recipe
    for part in location:
        if _is_tag(part):
            model = model.variants[str(part)[1:-1]]
        elif isinstance(part, str):
            model = _model_in(model.model_fields[part].annotation)
    return model


def _model_in(annotation: Any) -> Any:
    """The first model class inside an annotation such as ``tuple[Annotated[LossConfig, one_of], ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(argument) for argument in get_args(annotation))
    return next((model for model in found if model is not None), None)


def schema() -> dict[str, Any]:
    """The JSON schema of recipes, for editors that check YAML while it is typed.

    A file that extends another may leave out what that one has: required keys, and the names of parts.
    """
    found = Recipe.model_json_schema()
    extends = {"type": "string", "description": "A recipe file to build on, relative to this one."}
    complete = [{"required": [EXTENDS]}, {"required": found.pop("required")}]
    found["properties"] = {EXTENDS: extends, **found["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_any_part(found), "anyOf": complete}


def _any_part(schema: Any) -> Any:
    """``oneOf`` as ``anyOf``: a part without a name fits several members of its family, with a name only its own."""
    if isinstance(schema, dict):
        return {"anyOf" if key == "oneOf" else key: _any_part(value) for key, value in schema.items()}
    return [_any_part(item) for item in schema] if isinstance(schema, list) else schema


def first_line(component: type[ComponentConfig]) -> str:
    """What a component is, in one line."""
    return (component.__doc__ or "").strip().splitlines()[0]
