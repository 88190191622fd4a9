"""What a study compares: the methods of its file, by name, and the values that each sets or chooses from."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from dmlkit.recipe.file import Override
from dmlkit.recipe.yaml_tree import Key, Tree
from dmlkit.study.definition.config import MethodsConfig


@dataclass(frozen=True)
class Method:
    """A variant before its recipe is read: where it lies in the file, what it sets and what it chooses from."""

    name: str
    place: Key
    recipe: Tree  # its name, with the line that gives it
    settings: tuple[Override, ...]
    tune: tuple[tuple[Override, ...], ...]  # for each tuned key its values

    @property
    def trials(self) -> int:
        return prod(len(values) for values in self.tune)


def num_recipes(config: MethodsConfig) -> int:
    """How many recipes `methods_of` makes, without making them."""
    tuned = prod(map(len, config.tune.values()))
    if config.variants is None:
        return tuned * prod(map(len, (config.grid or {}).values()))
    own = (variant.tune for variant in config.variants.values())
    return sum(tuned if tune is None else prod(map(len, tune.values())) for tune in own)


def methods_of(config: MethodsConfig, tree: Tree) -> list[Method]:
    """What a study compares, from its file."""
    everywhere = tuple(Override(key, tree.below(("overrides", key))) for key in config.overrides)
    tune = _values(tree, ("tune",), config.tune)
    if config.variants is None:
        grid = _values(tree, ("grid",), config.grid or {})
        return [
            Method(label(settings), ("grid",), tree.below(("recipe",)), (*everywhere, *settings), tune)
            for settings in product(*grid)
            if settings
        ]
    found: list[Method] = []
    for name, variant in config.variants.items():
        place: Key = ("variants", name)
        settings = tuple(Override(key, tree.below((*place, key))) for key in variant.model_extra or {})
        own_tune = tune if variant.tune is None else _values(tree, (*place, "tune"), variant.tune)
        recipe = tree.below((*place, "recipe") if variant.recipe is not None else ("recipe",))
        found.append(Method(name, place, recipe, (*everywhere, *settings), own_tune))
    return found


def _values(tree: Tree, place: Key, keys: dict[str, tuple[Any, ...]]) -> tuple[tuple[Override, ...], ...]:
    return tuple(
        tuple(Override(key, tree.below((*place, key, index))) for index in range(len(values)))
        for key, values in keys.items()
    )


def label(settings: Sequence[Override]) -> str:
    """The name of a combination of values, fit for a folder.

    Example:
        >>> from dmlkit.recipe.yaml_tree import parse_yaml
        >>> tree = parse_yaml("{a: 0.1, b: {name: exact}}", "s.yaml")
        >>> label([Override("loss.margin", tree.below(("a",))), Override("loss.solver", tree.below(("b",)))])
        'margin=0.1,solver=exact'
    """
    ends = [setting.key.rpartition(".")[2] for setting in settings]
    keys = ends if len(set(ends)) == len(ends) else [setting.key for setting in settings]
    return ",".join(f"{key}={_text(setting.value.data)}" for key, setting in zip(keys, settings, strict=True))


def _text(value: Any) -> str:
    short = value["name"] if isinstance(value, dict) and list(value) == ["name"] else value
    plain = short if isinstance(short, str) else json.dumps(short, ensure_ascii=False)
    return re.sub(r"[^\w.+-]+", "_", plain).strip("_")
