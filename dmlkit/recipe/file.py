"""Reader of recipes: from YAML 1.2 and ``--set`` to a checked `Recipe`, or to all errors with file and line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from dmlkit.backbones.base import BackboneConfig
from dmlkit.component import ComponentConfig, from_weights, one_of
from dmlkit.errors import OptionError, UserError, option_errors
from dmlkit.files.yaml_tree import Key, Tree, parse_yaml
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.scoring import metric_configs
from dmlkit.recipe.faults import describe_faults, fault_line
from dmlkit.recipe.overrides import Override, apply_overrides, read_tree, rename_keys
from dmlkit.recipe.schema import Recipe
from dmlkit.transforms.presets import PretrainedConfig


def read_recipe(path: Path, overrides: Sequence[str | Override] = (), *, is_trained: bool = False) -> Recipe:
    """Read and check a recipe.

    Args:
        path: a YAML file, or the name of a recipe that comes with dmlkit, e.g. ``glyphs/proxy_anchor``; its
            ``extends`` may name another recipe to build on, see `dmlkit.recipe.overrides.read_tree`.
        overrides: values that replace those of the file, in order: ``key.subkey=value`` with the value in YAML, or
            parsed.
        is_trained: the recipe belongs to a run. It stays readable if only its training would be refused today.

    Raises:
        UserError: the file cannot be read, or has errors, which are listed as lines ``file:line: key: what``.
    """
    return _resolve(read_tree(path, name_components), overrides, is_trained)


def parse_recipe(
    text: str, source: str, overrides: Sequence[str | Override] = (), *, is_trained: bool = False
) -> Recipe:
    """Check the text of a recipe; ``source`` names it in messages. See `read_recipe`.

    Example:
        >>> parse_recipe("dataset: {name: glyphs}\\nloss: {name: triplet, margn: .2}", "bad.yaml")
        Traceback (most recent call last):
        ...
        dmlkit.errors.UserError: bad.yaml:2: loss.margn: unknown key; did you mean 'margin'?
    """
    return _resolve(parse_yaml(text, source), overrides, is_trained)


def _resolve(tree: Tree, overrides: Sequence[str | Override], is_trained: bool) -> Recipe:
    if isinstance(tree.data, dict):  # anything else is reported below
        rename_keys(tree)  # before the overrides, which may have the new names
        apply_overrides(tree, overrides)
        rename_keys(tree)
        name_components(tree)  # so that ``--set optimizer.lr=1e-3`` needs no name
        spell_out(tree)
        write_out(tree, is_trained)
    try:
        # strict in JSON mode: lists become tuples, and nothing else is coerced
        recipe = Recipe.model_validate_json(json.dumps(tree.data), context={"is_trained": is_trained})
        return recipe.read_from(dict(tree.origins))
    except ValidationError as error:
        raise UserError("\n".join(describe_faults(error, tree, Recipe))) from None


def name_components(tree: Tree) -> None:
    """Add the names of the components that a recipe has by default."""
    for name, info in Recipe.model_fields.items():
        if isinstance(tree.data.get(name), dict) and isinstance(info.default, ComponentConfig):
            tree.data[name].setdefault("name", info.default.name)


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML, with all defaults.

    Example:
        >>> recipe = parse_recipe("dataset: {name: glyphs}\\nloss: {name: triplet}", "recipe.yaml")
        >>> parse_recipe(dump_recipe(recipe), "again.yaml") == recipe
        True
    """
    # PyYAML writes 1e-05 without a point, which only YAML 1.2 readers, like ours, parse as a number
    return yaml.safe_dump(plain(recipe), sort_keys=False, default_flow_style=None, width=100)


def plain(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe as plain data in the form of a file, by which recipes are compared."""
    return recipe.model_dump(mode="json") | {"metrics": names_of(recipe.metrics)}


BACKBONE: TypeAdapter[BackboneConfig] = TypeAdapter(Annotated[BackboneConfig, one_of])
KEYS = {key for key, info in PretrainedConfig.model_fields.items() if from_weights in info.metadata}


def write_out(tree: Tree, is_trained: bool) -> None:
    """Add the keys that a backbone's weights determine and the tree does not have.

    Weights of a trained recipe were checked before the training; it would import torchvision again.
    """
    data: Any = tree.data
    try:
        named = "backbone" in data
        default: BackboneConfig = Recipe.model_fields["backbone"].default
        backbone = BACKBONE.validate_json(json.dumps(data["backbone"])) if named else default
    except ValidationError:  # validation of the recipe will report it
        return
    try:
        with option_errors("backbone"):
            if named:
                if not is_trained:
                    backbone.check_weights()
                given, fields = data["backbone"], type(backbone).model_fields
                if any(from_weights in info.metadata and not given.get(key) for key, info in fields.items()):
                    given |= {key: value for key, value in backbone.resolved_keys().items() if not given.get(key)}
            transform = data.get("transform")
            if isinstance(transform, dict) and transform.get("name") == "pretrained" and not transform.keys() >= KEYS:
                size = transform.get("size")
                keys = backbone.published_input().keys(size if isinstance(size, int) else None)
                data["transform"] = keys | transform
    except OptionError as error:
        raise UserError(fault_line(tree, tuple(error.key.split(".")), error.message)) from error


def spell_out(tree: Tree) -> None:
    """Replace the names under ``metrics`` of a recipe's tree by mappings; unknown names stay and are reported later.

    Consecutive names of the same metric become one metric with several cut-offs: ``recall@1, recall@2`` becomes
    ``{name: recall, k: [1, 2]}``. A recipe may also contain such a mapping, for options that a name cannot express.

    Example:
        >>> from dmlkit.files.yaml_tree import parse_yaml
        >>> tree = parse_yaml("metrics: [recall@1, recall@2, map@r]", "r.yaml")
        >>> spell_out(tree)
        >>> tree.data
        {'metrics': [{'name': 'recall', 'k': [1, 2]}, {'name': 'map_at_r'}]}
    """
    items = tree.data.get("metrics")
    if not isinstance(items, list):
        return
    spelled: list[Any] = []
    origins: dict[Key, str] = {}
    for index, item in enumerate(items):
        entry = _mapping(item)
        if entry is not None and spelled and _is_more_of(spelled[-1], entry, items[index - 1]):
            option = MetricConfig.variants[entry["name"]].option_in_name()
            spelled[-1][option] += entry[option]
            continue
        for key, origin in tree.origins.items():
            if key[:2] == ("metrics", index):
                origins["metrics", len(spelled), *key[2:]] = origin
        spelled.append(item if entry is None else entry)
    tree.data["metrics"] = spelled
    other_origins = {key: origin for key, origin in tree.origins.items() if key[:1] != ("metrics",) or len(key) == 1}
    tree.origins = other_origins | origins


def _mapping(item: Any) -> dict[str, Any] | None:
    if not isinstance(item, str):
        return None
    try:
        (config,) = metric_configs([item])
    except ValueError:
        return None
    return {"name": config.name} | config.model_dump(mode="json", exclude_unset=True)


def _is_more_of(last: Any, entry: dict[str, Any], item: Any) -> bool:
    """Return whether a name belongs to the same metric as the name before it."""
    option = MetricConfig.variants[entry["name"]].option_in_name()
    if not (isinstance(item, str) and isinstance(last, dict) and option in entry):
        return False
    return {**last, option: None} == {**entry, option: None}


def names_of(metrics: tuple[MetricConfig, ...]) -> list[Any]:
    """Return metrics as names where names express all options, else as mappings; this reverses `spell_out`.

    Example:
        >>> from dmlkit.metrics import NmiConfig, RecallConfig
        >>> names_of((RecallConfig(k=(1, 8)), NmiConfig(restarts=3)))
        ['recall@1', 'recall@8', {'name': 'nmi', 'iterations': 20, 'restarts': 3, 'seed': 0}]
    """
    names: list[Any] = []
    for config in metrics:
        option = config.option_in_name()
        options = {option: getattr(config, option)} if option else {}
        suffixes = {key: value for key in ("compat", "level") if (value := getattr(config, key, None))}
        is_named = option is not None or len(config.names()) == 1  # spread measures three figures under one name
        if is_named and type(config)(**options, **suffixes) == config:
            names += config.names()
        else:
            names.append(config.model_dump(mode="json", exclude=None if config.level else {"level"}))
    return names
