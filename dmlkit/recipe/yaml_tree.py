"""YAML 1.2 as plain data that remembers its lines.

PyYAML reads YAML 1.1: ``3e-4`` is a string to it, ``no`` is False and ``1:30`` is 90. Only the core schema of
YAML 1.2 is resolved here, and nothing else is constructed.
"""

import re
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.files.regular import read_start

Key = tuple[str | int, ...]

MAX_BYTES = 1_000_000  # of a file
MAX_NODES = 10_000  # stops aliases that multiply ("billion laughs")
MAX_DEPTH = 50
MAX_DIGITS = 400  # a float of 64 bits may be written with 309 before the point
MERGE_KEY = "<<"
NO_MERGE = "YAML's merge keys are not taken; write the keys out, or build on another file with extends"


@dataclass
class Tree:
    """Plain data and where each value of it came from.

    Args:
        source: the name of the file.
        data: the root mapping (or, for an override, any value).
        origins: key -> ``file:line`` or the override that set it.
    """

    source: str
    data: Any = None
    origins: dict[Key, str] = field(default_factory=dict[Key, str])

    def origin(self, key: Key) -> str:
        """Where a key came from; for a missing one, its nearest parent."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, self.source)

    def below(self, key: Key) -> "Tree":
        """What the tree has at a key that it has."""
        data: Any = reduce(getitem, key, self.data)
        size = len(key)
        origins = {place[size:]: origin for place, origin in self.origins.items() if place[:size] == key}
        return Tree(self.origin(key), data, origins)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's implicit types."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own convention

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """A node without a tag: a value says itself what it is."""
        event: Any = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(
                problem=f"the tag {event.tag} is not allowed; write plain values", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])


def read_yaml(path: Path, kind: str, missing: str) -> Tree:
    """Parse a small YAML file; ``kind`` says what it should be, ``missing`` is the message where there is none.

    Raises:
        UserError: the file is missing, not regular, too large for its kind, or no text; see `parse_yaml`.
    """
    try:
        content = read_start(path, MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path}: larger than {MAX_BYTES:,} bytes; this is no {kind}")
        text = content.decode()
    except FileNotFoundError:
        raise UserError(missing) from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a null character in the name
        raise UserError(f"{path}: cannot read this {kind}: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Tree:
    """Parse one YAML document.

    Raises:
        UserError: the text is no YAML, repeats a key, uses a tag, or is unreasonably large or deep.

    Example:
        >>> parse_yaml("{lr: 3e-4, country: no, workers: 010}", "r.yaml").data
        {'lr': 0.0003, 'country': 'no', 'workers': 10}
    """
    try:
        node = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not valid YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UserError(f"{source}: more than {MAX_DEPTH} levels; this is no recipe") from None
    tree = Tree(source)
    if node is not None:
        tree.data = _build(node, (), tree)
    return tree


def _build(node: yaml.Node, key: Key, tree: Tree) -> Any:
    where = f"{tree.source}:{node.start_mark.line + 1}"
    tree.origins.setdefault(key, where)
    if len(tree.origins) > MAX_NODES or len(key) > MAX_DEPTH:
        raise UserError(f"{where}: more than {MAX_NODES} values or {MAX_DEPTH} levels; this is no recipe")
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for name_node, value_node in node.value:
            here = f"{tree.source}:{name_node.start_mark.line + 1}"
            if not isinstance(name_node, yaml.ScalarNode):
                raise UserError(f"{here}: a list or a mapping is no name of a key; write a word")
            name = str(name_node.value)
            dotted = excerpt(".".join(map(str, (*key, name))))
            if name == MERGE_KEY:
                raise UserError(f"{here}: {dotted}: {NO_MERGE}")
            if name in mapping:
                raise UserError(f"{here}: {dotted}: this key is given twice; remove one")
            tree.origins[*key, name] = here
            mapping[name] = _build(value_node, (*key, name), tree)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*key, index), tree) for index, item in enumerate(node.value)]
    return _scalar(node, where)


def _scalar(node: yaml.Node, where: str) -> Any:
    text: str = node.value
    kind = node.tag.rpartition(":")[2]
    match kind:
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case _:
            return _number(text, kind, where)


def _number(text: str, kind: str, where: str) -> int | float:
    """A finite number of at most 64 bits."""
    shown = excerpt(text, 40)
    if len(text) > MAX_DIGITS:
        raise UserError(f"{where}: {shown} has more than {MAX_DIGITS} digits")
    base = 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10
    number = int(text, base) if kind == "int" else float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not isfinite(number):  # 1e999 is infinite too
        raise UserError(f"{where}: {shown} is not a finite number")
    if kind == "int" and not -(2**63) <= number < 2**63:
        raise UserError(f"{where}: {shown} does not fit into 64 bits")
    return number
