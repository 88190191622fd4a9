"""Reader of every YAML file: YAML 1.2 as plain data with line numbers, from regular files of a bounded size.

PyYAML reads YAML 1.1, in which ``3e-4`` is a string, ``no`` is False and ``1:30`` is 90. This reader resolves only the
core schema of YAML 1.2, and constructs no other types.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import isfinite
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from dmlkit.errors import UserError, first_line
from dmlkit.files.escape import excerpt
from dmlkit.files.regular import read_start

Key = tuple[str | int, ...]

MAX_BYTES = 1_000_000  # size of a file
MAX_NODES = 10_000  # stops aliases that multiply ("billion laughs")
MAX_DEPTH = 50
MAX_DIGITS = 400  # a 64-bit float may have 309 digits before the point
STARTED = ("while scanning a simple key", "while scanning a quoted scalar")
FLOW = ("while parsing a flow sequence", "while parsing a flow mapping")
MERGE_KEY = "<<"
NO_MERGE = "YAML's merge keys are not supported; write the keys out, or build on another file with extends"


@dataclass
class Tree:
    """Plain data with the origin of each value."""

    source: str  # name of the file
    data: Any = None  # root mapping; for an override, any value
    origins: dict[Key, str] = field(default_factory=dict[Key, str])  # ``file:line``, or the override that set it

    def origin(self, key: Key) -> str:
        """Return the origin of a key; for a missing key, that of its nearest parent."""
        while key and key not in self.origins:
            key = key[:-1]
        return self.origins.get(key, self.source)

    def below(self, key: Key) -> "Tree":
        """Return the subtree at an existing key."""
        data: Any = reduce(getitem, key, self.data)
        size = len(key)
        origins = {full_key[size:]: origin for full_key, origin in self.origins.items() if full_key[:size] == key}
        return Tree(self.origin(key), data, origins)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's implicit types and without tags."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's convention

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, and reject tags."""
        event: Any = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(
                problem=f"the tag {event.tag} is not allowed; write plain values", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def read_yaml(path: Path, kind: str, missing: str) -> Tree:
    """Parse a small YAML file; ``kind`` names its content in errors, ``missing`` is the error for a missing file."""
    try:
        content = read_start(path, MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{path}: the file has more than {MAX_BYTES:,} bytes; expected a {kind}")
        text = content.decode()
    except FileNotFoundError:
        raise UserError(missing) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: cannot read this {kind}: this is not UTF-8; save the file as UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UserError(f"{path}: cannot read this {kind}: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str, *, has_lines: bool = True) -> Tree:
    """Parse one YAML document; errors and origins have line numbers, unless it is the value of an option."""
    try:
        node = _compose(text)
    except yaml.YAMLError as error:
        line = _line_of(error, text) if has_lines else None
        where = source if line is None else f"{source}:{line + 1}"
        raise UserError(f"{where}: not valid YAML: {_reason(error)}") from None
    except RecursionError:
        raise UserError(f"{source}: the YAML has more than {MAX_DEPTH} levels; expected a recipe") from None
    tree = Tree(source)
    if node is not None:
        tree.data = _build(node, (), tree, has_lines)
    return tree


@lru_cache(maxsize=64)
def _compose(text: str) -> yaml.Node | None:
    """Compose a document, at most once: 10 ms for a run's recipe, which ``dmlkit eval`` reads three times.

    Nothing changes a node, and an error is raised again by composing again.
    """
    return yaml.compose(text, _Loader)


def _line_of(error: yaml.YAMLError, text: str) -> int | None:
    """Return the index of the line to correct, which may be before the one where PyYAML notices the error."""
    if isinstance(error, yaml.reader.ReaderError):
        return text.count("\n", 0, error.position)
    context, mark = getattr(error, "context", None), getattr(error, "problem_mark", None)
    begin = getattr(error, "context_mark", None)
    if mark is None:
        return None
    problem = str(getattr(error, "problem", ""))
    if begin is not None and (context in STARTED or "<stream end>" in problem):  # not closed, or without its colon
        return begin.line
    lines = text.splitlines()
    start = lines[mark.line][: mark.column] if mark.line < len(lines) else ""
    above = next((line for line in range(mark.line - 1, -1, -1) if lines[line].strip()), mark.line)
    if context in FLOW and "got ':'" in problem and not set(start) & set(",:[{"):
        return above  # a comma or a bracket is missing there
    is_key = ":" in lines[above] or lines[above].lstrip().startswith("-")
    if problem.startswith("mapping values") and not set(start) & set(":") and not is_key:
        return above  # a colon is missing there
    return mark.line


def _reason(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return first_line(error)
    problem = str(error.problem or error.context)
    if problem == "but found another document":
        problem = "this line begins another document; expected one"
    return "found a tab; indent with spaces" if "'\\t'" in problem else problem


def _build(node: yaml.Node, key: Key, tree: Tree, has_lines: bool) -> Any:
    where = _place(node, tree.source, has_lines)
    tree.origins.setdefault(key, where)
    if len(tree.origins) > MAX_NODES or len(key) > MAX_DEPTH:
        raise UserError(f"{where}: the YAML has more than {MAX_NODES} values or {MAX_DEPTH} levels; expected a recipe")
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for name_node, value_node in node.value:
            here = _place(name_node, tree.source, has_lines)
            if not isinstance(name_node, yaml.ScalarNode):
                raise UserError(f"{here}: got a list or a mapping as the name of a key; expected a word")
            name = str(name_node.value)
            dotted = excerpt(".".join(map(str, (*key, name))))
            if name == MERGE_KEY:
                raise UserError(f"{here}: {dotted}: {NO_MERGE}")
            if name in mapping:
                raise UserError(f"{here}: {dotted}: this key is given twice; remove one")
            tree.origins[*key, name] = here
            mapping[name] = _build(value_node, (*key, name), tree, has_lines)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*key, index), tree, has_lines) for index, item in enumerate(node.value)]
    text, kind = str(node.value), node.tag.rpartition(":")[2]
    if kind in ("int", "float"):
        return _number(text, kind, where)
    return {"str": text, "null": None, "bool": text.lower() == "true"}[kind]


def _place(node: yaml.Node, source: str, has_lines: bool) -> str:
    return f"{source}:{node.start_mark.line + 1}" if has_lines else source


def _number(text: str, kind: str, where: str) -> int | float:
    """Parse a finite number of at most 64 bits."""
    shown = excerpt(text, 40)
    if len(text) > MAX_DIGITS:
        raise UserError(f"{where}: the number {shown} has more than {MAX_DIGITS} digits; use fewer")
    base = 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10
    number = int(text, base) if kind == "int" else float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not isfinite(number):  # 1e999 is infinite too
        raise UserError(f"{where}: {shown} is not a finite number; expected one")
    if kind == "int" and not -(2**63) <= number < 2**63:
        raise UserError(f"{where}: {shown} does not fit into 64 bits; use a smaller number")
    return number
