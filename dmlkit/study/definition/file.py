"""Studies on disk: YAML in, a checked `Study` or all its faults as file:line out."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from dmlkit.datasets.base import FOLDS
from dmlkit.errors import UserError
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.scoring import metric_configs
from dmlkit.recipe.extends import path_in_collection
from dmlkit.recipe.faults import describe_faults, fault_line, shown, suggest
from dmlkit.recipe.file import Override, parse_override, read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.recipe.yaml_tree import Key, Tree, read_yaml
from dmlkit.study.definition.config import FIGURES, Axis, Candidate, MethodsConfig, Study, StudyConfig, Variant
from dmlkit.study.definition.methods import Method, grid_of, label, methods_of, num_recipes

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


Fault = tuple[Key, str]
NAME = re.compile(r"\w[\w.,=+-]*")  # of a variant: also the name of a folder
ERRORS = {variant.key for variant in MetricConfig.variants.values() if variant.smaller_is_better}
"""Figures of which less is better."""
FEW_CLASSES, FEW_SEEDS = 30, 3  # 10 classes and one seed took a value 0.007 better, which was 0.033 worse on test
NAME_BYTES = 255  # that a file system takes for a folder's name


def config_faults(config: StudyConfig, methods: Sequence[Method], tree: Tree) -> Iterator[Fault]:
    """What does not fit together within the study's file."""
    if next(iter(tree.data)) != "claim" or not config.claim or "\n" in config.claim:
        yield ("claim",), "expected as the first key of the file, and in one line"
    if (config.grid is None) == (config.variants is None):
        yield (), "expected either a grid or variants"
    elif len(methods) < 2:
        yield methods[0].place if methods else (), f"{len(methods)} variant(s); a study compares at least two"
    names = [method.name for method in methods]
    folders = [name.casefold() for name in names]
    for method in methods:
        if not NAME.fullmatch(method.name) or len(method.name.encode()) > NAME_BYTES:
            text = f"the name {shown(method.name)} is no name for a folder of at most {NAME_BYTES} bytes in letters"
            yield method.place, f"{text}, digits and _.,=+-; name it under variants"
        elif folders.count(method.name.casefold()) > 1:  # macOS and Windows tell no capitals apart
            yield method.place, f"the name {method.name!r} is not the only one, capitals aside; name it under variants"
        if method.trials != methods[0].trials:
            told = f"{method.trials} trial(s) to tune {method.name}, {methods[0].trials} for {methods[0].name}"
            yield (*method.place, "tune"), f"{told}; every variant gets the same budget"
        if method.tune and method.trials == 1:
            yield (*method.place, "tune"), f"one value to choose from for {method.name}; give two, or set it"
    for key, seeds in (("seeds", config.seeds), ("tune_seeds", config.tune_seeds)):
        if len(set(seeds)) < len(seeds):
            yield (key,), f"got {list(seeds)}, expected each seed once"
    for key, values in (config.grid or {}).items():
        if len(values) == 1:
            yield ("grid", key), "one value, by which nothing is compared; put it under overrides"
    for key in ("tune_seeds", "extend"):
        if getattr(config, key) and all(method.trials == 1 for method in methods):
            yield (key,), "nothing is tuned; give values under tune, or leave this out"
    if config.extend:
        for method in methods:
            if not any(len(grid_of([one.value.data for one in values])) > 1 for values in method.tune):
                yield ("extend",), f"{method.name} tunes no key with two numbers or more, which is what has an edge"
    if config.more_seeds and not config.expect:
        yield ("more_seeds",), "there is no statement under expect that they could decide; leave this out"
    if config.rotate_folds and config.protocol == "reality_check":
        yield ("rotate_folds",), "each run of protocol reality_check has all folds already; leave this out"
    if config.reference is not None and config.reference not in names:
        yield ("reference",), f"unknown variant {config.reference!r}; {suggest(config.reference, names)}"
    yield from _expectation_faults(config, names)
    yield from _metric_faults(config)


def _expectation_faults(config: StudyConfig, names: Sequence[str]) -> Iterator[Fault]:
    for index, expectation in enumerate(config.expect):
        known = {"better": names, "than": names, "metric": config.reported()}
        for key, choices in known.items():
            name = getattr(expectation, key)
            if name not in choices:
                what = "variant" if choices is names else "figure"
                yield ("expect", index, key), f"unknown {what} {name!r}; {suggest(name, choices)}"
        if expectation.metric in ERRORS:
            yield ("expect", index, "metric"), f"less of {expectation.metric} is better; expected the reverse"
        if expectation.better == expectation.than:
            yield ("expect", index), f"{expectation.better} cannot be better than itself"


def _metric_faults(config: StudyConfig) -> Iterator[Fault]:
    for index, name in enumerate(config.metrics):
        if name in config.metrics[:index]:
            yield ("metrics", index), f"{name!r} is given twice"
        if config.protocol == "reality_check" and name not in FIGURES["reality_check"]:
            yield ("metrics", index), f"{name!r}: the Reality Check reports {', '.join(FIGURES['reality_check'])}"
        elif config.protocol == "official":
            try:
                (metric,) = metric_configs([name])
                if name not in metric.names():
                    yield ("metrics", index), f"{name!r} is reported as {', '.join(metric.names())}; write it so"
            except ValueError as error:
                yield ("metrics", index), str(error).removeprefix("metrics: ")


def recipe_faults(study: Study, methods: Sequence[Method]) -> Iterator[Fault]:
    """What does not fit together between the recipes."""
    first: dict[str, str] = {}
    precision = study.variants[0].candidates[0].recipe.training.precision
    for variant, method in zip(study.variants, methods, strict=True):
        labels = [candidate.label for candidate in variant.candidates]
        for name in labels:
            if len(name.encode()) > NAME_BYTES:
                yield (
                    (*method.place, "tune"),
                    f"{name[:20]}... is longer than the {NAME_BYTES} bytes of a folder's name",
                )
        if len(set(labels)) < len(labels):
            yield (*method.place, "tune"), f"two values are called the same: {', '.join(labels)}"
        for candidate in variant.candidates:
            recipe, name = candidate.recipe, "/".join(filter(None, (variant.name, candidate.label)))
            other = first.setdefault(recipe.model_dump_json(), name)
            if other != name:
                yield method.place, f"{name} trains the same recipe as {other}; each must differ in a key"
            if study.config.protocol == "official" and recipe.dataset.validation_fraction == 0:
                text = f"{name} has dataset.validation_fraction 0; validation classes choose the checkpoint"
                yield method.place, text
            if study.config.rotate_folds and recipe.dataset.split != "reality_check":
                yield method.place, f"{name} has dataset.split {recipe.dataset.split}; only reality_check has folds"
            if recipe.training.precision != precision:
                yield method.place, f"{name} has another training.precision; a study runs in one"


def study_notes(study: Study, validation_classes: Mapping[str, int]) -> list[str]:
    """What a reader of the study's verdicts should know before it runs; nothing here stops it.

    Args:
        study: without faults.
        validation_classes: how many a run of a variant has, by its name; those that are known.
    """
    notes: list[str] = []
    folds = len({seed % FOLDS for seed in study.first_seeds}) if study.config.rotate_folds else 1
    few = sorted({folds * count for count in validation_classes.values() if folds * count < FEW_CLASSES})
    if few:
        counts = " or ".join(map(str, few))
        notes.append(f"{counts} validation classes choose; expected at least {FEW_CLASSES}: the best of few is chance")
    if study.is_tuned and len(study.first_seeds) < FEW_SEEDS:
        seeds = ", ".join(map(str, study.first_seeds))
        notes.append(f"only seed {seeds} tunes; expected at least {FEW_SEEDS}, e.g. tune_seeds: [0, 1, 2]")
    samplers = {variant.name: variant.candidates[0].recipe.sampler for variant in study.variants}
    pairs = dict.fromkeys((one.better, one.than) for one in study.config.expect)
    for better, than in pairs:
        if samplers[better] != samplers[than]:
            notes.append(f"{better} and {than} have different samplers; their difference may be due to that")
    return notes
