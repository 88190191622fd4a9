"""Studies on disk: YAML in, a checked `Study` or all its faults as file:line out."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from dmlkit.errors import UserError
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.scoring import metric_configs
from dmlkit.recipe.extends import path_in_collection
from dmlkit.recipe.faults import describe_faults, fault_line
from dmlkit.recipe.file import Override, parse_override, read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.recipe.yaml_tree import Tree, read_yaml
from dmlkit.study.definition.checks import config_faults, recipe_faults
from dmlkit.study.definition.config import Axis, Candidate, MethodsConfig, Study, StudyConfig, Variant
from dmlkit.study.definition.methods import Method, label, methods_of, num_recipes

Config = TypeVar("Config", bound=MethodsConfig)
MAX_RECIPES = 1000  # of a study, all variants and all values to choose from; the largest in recipes/study has 40
OWN_KEYS = {"seed": "seeds", "metrics": "metrics"}  # of a recipe, by the key that decides them in a study


def read_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read and check a study and every recipe that it trains.

    Args:
        path: a YAML file, see `StudyConfig`.
        overrides: ``key.subkey=value`` each: changes of every recipe, after the study's own.

    Raises:
        UserError: the file cannot be read, or the study or a recipe has faults: all of them, one a line.
    """
    changes = [parse_override(override) for override in overrides]
    tree = read_yaml(path, "study", f"{path}: no such file; expected a study, e.g. recipes/study/mpa.yaml")
    faults: list[str] = []
    config = _validated(StudyConfig, tree, faults)
    # the recipes are looked at even where something else is wrong, to tell all faults at once
    compared = config or _validated(MethodsConfig, tree, [])
    if compared and num_recipes(compared) > MAX_RECIPES:  # 10^8 of them would fill the memory before anything is told
        text = (
            f"{num_recipes(compared):,} recipes to compare; expected at most {MAX_RECIPES:,}: give fewer keys or values"
        )
        raise UserError("\n".join([*faults, fault_line(tree, () if compared.variants else ("grid",), text)]))
    methods = methods_of(compared, tree) if compared else []
    if config:
        faults += [fault_line(tree, *fault) for fault in config_faults(config, methods, tree)]
    variants = [_variant(method, path, config, changes, faults) for method in methods]
    if config and not faults:
        study = Study(config, config.reference or methods[0].name, tuple(variants), _axis(config))
        faults += [fault_line(tree, *fault) for fault in recipe_faults(study, methods)]
        if not faults:
            return study
    raise UserError("\n".join(dict.fromkeys(faults)))


def _validated(model: type[Config], tree: Tree, faults: list[str]) -> Config | None:
    try:
        return model.model_validate_json(json.dumps(tree.data))
    except ValidationError as error:
        faults += describe_faults(error, tree, model)
        return None


def _variant(
    method: Method, study: Path, config: StudyConfig | None, changes: Sequence[Override], faults: list[str]
) -> Variant:
    """The variant's recipes; what is wrong with them is added to the faults."""
    candidates: list[Candidate] = []
    for choice in product(*method.tune):
        settings = (*method.settings, *choice, *changes)
        faults += [
            f"{setting.value.source}: {setting.key}: a study sets this itself; see its key {OWN_KEYS[setting.key]}"
            for setting in settings
            if setting.key in OWN_KEYS
        ]
        try:
            path = path_in_collection(f"{method.recipe.source}: recipe", method.recipe.data, study)
            recipe = read_recipe(path, settings)
        except UserError as error:
            faults += str(error).splitlines()
            continue
        if config and not faults:
            recipe = recipe.model_copy(update={"seed": config.seeds[0], "metrics": _measured(config, recipe)})
        candidates.append(Candidate(label(choice), recipe, {one.key: one.value.data for one in choice}))
    return Variant(method.name, tuple(candidates))


def _measured(config: StudyConfig, recipe: Recipe) -> tuple[MetricConfig, ...]:
    """The study's metrics, and the one that chooses the checkpoint."""
    if config.protocol == "reality_check":
        return recipe.metrics  # the protocol brings its own
    selecting = [metric for metric in recipe.metrics if recipe.training.select_by in metric.names()]
    names = config.reported()
    return (*metric_configs(names), *(selecting if recipe.training.select_by not in names else ()))


def _axis(config: StudyConfig) -> Axis | None:
    """The key of a grid that is one number, with its values."""
    if config.variants is not None or config.grid is None or len(config.grid) != 1:
        return None
    ((key, values),) = config.grid.items()
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return Axis(key, values) if is_numeric and len(values) > 2 else None
