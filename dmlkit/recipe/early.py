"""First check of a recipe, without torch: its file, its YAML, and the names in it that the catalogue knows.

It raises the errors of the complete check (`dmlkit.recipe.file.read_recipe`) in the same words, 3 s earlier. It raises
none about names where it finds a value of which only the complete check can give the error, so that all errors of a
recipe are still listed together.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dmlkit.errors import UserError
from dmlkit.files.source import NO_CLASS_FOLDERS, single_class
from dmlkit.recipe.overrides import apply_overrides, read_tree
from dmlkit.recipe.reference import Reference, stored_reference
from dmlkit.recipe.yaml_tree import Key, Tree, fault_line, key_line, quoted, suggest, suggest_member

KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
"""Types of plain values by their names in a JSON schema."""


def check_recipe(path: Path, overrides: Sequence[str] = (), *, reads_images: bool = False) -> None:
    """Check what can be checked without the classes of components; see `dmlkit.recipe.file.read_recipe`.

    Args:
        path: the recipe.
        overrides: ``key=value`` each.
        reads_images: whether the folder of the dataset must exist, with classes to train and to test on.

    Raises:
        UserError: the file or an override cannot be read, a key or the name of a component is unknown, or the folder
            of the dataset is missing or has a single class.
    """
    tree = read_tree(path)
    apply_overrides(tree, overrides)
    if "dmlkit.recipe.schema" in sys.modules:  # the complete check is at hand, and may know members of plug-ins
        return
    reference = stored_reference()
    if reference is not None and isinstance(tree.data, dict):
        faults = NameCheck(tree, reference).faults()
        if faults:
            raise UserError("\n".join(faults))
        dataset = tree.data.get("dataset")
        if reads_images and isinstance(dataset, dict) and dataset.get("name") == "folder":
            root = dataset.get("root")
            if isinstance(root, str) and root and not Path(root).is_dir():
                raise UserError(fault_line(tree, ("dataset", "root"), f"{Path(root)}: {NO_CLASS_FOLDERS}"))
            trains_on_half = dataset.get("split") != "all" and not dataset.get("levels")
            if isinstance(root, str) and root and trains_on_half and (message := single_class(Path(root))):
                raise UserError(fault_line(tree, ("dataset", "root"), message))


class UncheckedError(Exception):
    """A value that only the complete check can judge."""


class NameCheck:
    """Check of the keys and names of a recipe by the JSON schema of recipes."""

    def __init__(self, tree: Tree, reference: Reference) -> None:
        self.tree, self.families, self.schema = tree, reference.families, reference.schema

    def faults(self) -> list[str]:
        """Return a line per unknown key, unknown name and missing key; none if other errors are possible."""
        properties = {key: schema for key, schema in self.schema["properties"].items() if key != "extends"}
        required = next(one["required"] for one in self.schema["anyOf"] if "extends" not in one["required"])
        try:
            return list(self._mapping((), self._with_default_names(properties), properties, required))
        except UncheckedError:
            return []

    def _with_default_names(self, properties: dict[str, Any]) -> dict[str, Any]:
        """Return the recipe with the names that may be omitted, as in ``optimizer: {lr: 1e-3}``."""
        data = dict(self.tree.data)
        for key, value in data.items():
            default = properties.get(key, {}).get("default")
            if isinstance(value, dict) and isinstance(default, dict) and "name" in default:
                data[key] = {"name": default["name"], **value}
        return data

    def _mapping(
        self, key: Key, data: dict[str, Any], properties: dict[str, Any], required: Sequence[str] = ()
    ) -> Iterator[str]:
        for name, schema in properties.items():
            if name in data:
                yield from self._value((*key, name), data[name], list(self._choices(schema)))
            elif name in required:
                yield key_line(self.tree, (*key, name), "this key is missing and has no default; add it")
        for name in data:
            if name not in properties:
                yield key_line(self.tree, (*key, name), f"unknown key; {suggest(name, list(properties))}")

    def _value(self, key: Key, value: Any, choices: list[dict[str, Any]]) -> Iterator[str]:
        members = {one["properties"]["name"]["const"]: one for one in choices if "const" in _name_of(one)}
        if isinstance(value, dict) and members:
            yield from self._member(key, value, members)
        elif isinstance(value, dict):
            objects = [one for one in choices if one.get("type") == "object"]
            if len(objects) != 1:
                raise UncheckedError
            if "properties" in objects[0]:
                yield from self._mapping(key, value, objects[0]["properties"])
        elif isinstance(value, list):
            arrays = [one for one in choices if one.get("type") == "array"]
            if len(arrays) != 1 or not arrays[0].get("minItems", 0) <= len(value) <= arrays[0].get("maxItems", 1e9):
                raise UncheckedError
            items = list(self._choices(arrays[0].get("items", {})))
            for index, item in enumerate(value):
                yield from self._value((*key, index), item, items)
        elif not any(_fits(value, one) for one in choices):
            raise UncheckedError

    def _member(self, key: Key, value: dict[str, Any], members: dict[str, Any]) -> Iterator[str]:
        name = value.get("name")
        listed = ((family, {one.name: one for one in known}) for family, known in self.families.items())
        family, known = next(((family, known) for family, known in listed if known.keys() == members.keys()), ("", {}))
        if not isinstance(name, str) or not known:
            raise UncheckedError
        if name in members:
            required = [one.key for one in known[name].keys if one.default == "required"]
            yield from self._mapping(key, value, members[name]["properties"], required)
            return
        kind = "loss" if family == "losses" else family.removesuffix("s")
        yield fault_line(
            self.tree, (*key, "name"), f"unknown {kind} {quoted(name)}; {suggest_member(name, sorted(members))}"
        )

    def _choices(self, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the alternatives of a schema, without references."""
        if "$ref" in schema:
            yield from self._choices(self.schema["$defs"][schema["$ref"].rpartition("/")[2]])
        elif "anyOf" in schema:
            for one in schema["anyOf"]:
                yield from self._choices(one)
        else:
            yield schema


def _name_of(schema: dict[str, Any]) -> dict[str, Any]:
    return schema.get("properties", {}).get("name", {})


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value that is neither a mapping nor a list has the type and range of a schema."""
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = schema.get("type")
    if not isinstance(value, KINDS.get(str(kind), ())) or (isinstance(value, bool) and kind != "boolean"):
        return kind is None
    if isinstance(value, str):
        return len(value) >= schema.get("minLength", 0)
    if value is None or isinstance(value, bool):
        return True
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above, below = schema.get("exclusiveMinimum", value - 1), schema.get("exclusiveMaximum", value + 1)
    return low <= value <= high and above < value < below
