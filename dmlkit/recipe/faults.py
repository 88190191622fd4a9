"""Messages on mistakes in a recipe or a study, with file, line and key."""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from inspect import isclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dmlkit.component import ComponentConfig
from dmlkit.component.options import expected_in
from dmlkit.files.escape import EXCERPT, excerpt, quoted
from dmlkit.files.yaml_tree import Key, Tree

OPTION = "--set "
"""Start of the origin of a value that an option of the command line sets."""
WORDS = {
    "a valid array": "a list",
    "an object": "a mapping",
}  # pydantic's messages use terms of JSON, but recipes are YAML

FORMS = ("<name>", "<time>", "<one>", "<several>")  # tags of an option's forms, which are no keys


def describe_faults(error: ValidationError, tree: Tree, model: type[BaseModel]) -> list[str]:
    """Return all errors of ``model`` in a tree, one per line: ``file:line: key: what, and what was expected``."""
    faults = error.errors()
    # if all items of a list are invalid, pydantic also reports that the list is too short
    deeper = {fault["loc"][:length] for fault in faults for length in range(len(fault["loc"]))}
    reported = (fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in deeper)
    return [line for fault in reported for line in _describe(fault, tree, model)]


def _describe(fault: Any, tree: Tree, model: type[BaseModel]) -> list[str]:
    if fault["type"] == "requirements":
        return [_requirement_line(tree, tuple(key), text) for key, text in fault["ctx"]["faults"]]
    key: Key = tuple(step for step in fault["loc"] if step not in FORMS)
    match fault["type"]:
        case "extra_forbidden":
            known = list(_model_at(key[:-1], tree.data, model).model_fields)
            return [key_line(tree, key, f"unknown key; {suggest(str(key[-1]), known)}")]
        case "missing":
            what = "item of the list" if isinstance(key[-1], int) else "key"
            return [key_line(tree, key, f"this {what} is missing and has no default; add it")]
        case "unknown_member":
            family, name = _model_at(key, tree.data, model), fault["input"]["name"]
            kind = family.__name__.removesuffix("Config").lower()
            text = f"unknown {kind} {quoted(name)}; {suggest_member(name, [*family.variants])}"
            return [fault_line(tree, (*key, "name"), text)]
        case "member_without_name":
            family = _model_at(key, tree.data, model)
            if isinstance(fault["input"], str) and hasattr(family, "names_known"):
                hint = suggest_member(fault["input"], family.names_known())
                return [fault_line(tree, key, f"unknown name {quoted(fault['input'])}; {hint}")]
            known = ", ".join(family.variants)
            got = "a mapping without a name" if isinstance(fault["input"], dict) else quoted(fault["input"])
            text = f"got {got}; expected a mapping such as {{name: NAME}}, with NAME one of {known}"
            return [fault_line(tree, key, text)]
        case "value_error":  # values of one component that contradict each other
            return [fault_line(tree, key, str(fault["ctx"]["error"]))]
        case "too_short":
            minimum = fault["ctx"]["min_length"]
            items = "item" if minimum == 1 else "items"
            return [fault_line(tree, key, f"got {quoted(fault['input'])}, expected at least {minimum} {items}")]
        case _:
            expected = expected_in(fault["msg"])
            return [fault_line(tree, key, f"got {quoted(fault['input'])}, expected {WORDS.get(expected, expected)}")]


def fault_line(tree: Tree, key: Key, text: str) -> str:
    """Return the message on a key of a tree, with its file and line if the tree has a source."""
    return ": ".join(part for part in (tree.origin(key), excerpt(".".join(map(str, key))), text) if part)


def key_line(tree: Tree, key: Key, text: str) -> str:
    """Return the message on a key that its component does not have, or lacks: the name may come from ``--set``."""
    name = tree.origins.get((*key[:-1], "name"), "")
    is_named_later = name.startswith(OPTION) and not tree.origin(key).startswith(OPTION)
    return fault_line(Tree(name) if is_named_later else tree, key, text)


def _requirement_line(tree: Tree, key: Key, text: str) -> str:
    """Return the message on components that do not go together, from the ``--set`` that changed one of them, if any."""
    if tree.origin(key).startswith(OPTION):
        return fault_line(tree, key, text)
    for other_key, origin in tree.origins.items():
        dotted = ".".join(map(str, other_key[:-1] if other_key[-1:] == ("name",) else other_key))
        is_named = other_key[:-1] == key or re.search(rf"\b{re.escape(dotted)}\b", text)
        if origin.startswith(OPTION) and dotted and is_named:
            return fault_line(Tree(origin), key, text)
    return fault_line(tree, key, text)


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names."""
    matches = get_close_matches(name[:EXCERPT], known, n=1)  # run time grows with the square of the length
    return f"did you mean {matches[0]!r}?" if matches else f"expected one of {', '.join(known)}"


def suggest_member(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name of a family, which may be that of a plug-in."""
    hint = suggest(name, known)
    return f"{hint}{'' if hint.endswith('?') else ';'} or load its file with --plugin FILE"


def _model_at(location: Key, data: Any, model: Any) -> Any:
    """Return the model class at the location of an error; a family's root where no member is named."""
    for step in location:
        data = data[step]
        if isinstance(step, str):
            model = next(models_in(model.model_fields[step].annotation))
        if isinstance(data, dict) and issubclass(model, ComponentConfig):
            model = model.variants.get(str(data.get("name")), model)
    return model


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the model classes inside an annotation."""
    if isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)
