"""Reading and checking a study's file: the result is a `Study`, or an error that lists all problems by line."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from dmlkit.datasets.base import FOLDS, DatasetConfig
from dmlkit.errors import UserError, counted
from dmlkit.files.document import differences
from dmlkit.files.escape import quoted
from dmlkit.files.yaml_tree import Key, Tree
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.distribution import NormConfig, SpectrumConfig, SpreadConfig
from dmlkit.metrics.scoring import metric_configs
from dmlkit.recipe.faults import describe_faults, fault_line, suggest
from dmlkit.recipe.file import plain, read_recipe
from dmlkit.recipe.overrides import Override, parse_override, path_in_collection, read_extended
from dmlkit.recipe.schema import Recipe
from dmlkit.study.definition.config import FIGURES, Axis, Candidate, MethodsConfig, Study, StudyConfig, Variant
from dmlkit.study.definition.methods import Method, grid_of, label, methods_of, num_recipes

Config = TypeVar("Config", bound=MethodsConfig)
MAX_RECIPES = 1000  # per study, over all variants and tuned values; the largest in recipes/study has 40
OWN_KEYS = {"seed": "seeds", "metrics": "metrics"}  # keys of a recipe that a study sets, and the study's key


def read_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read and check a study and every recipe that it trains.

    Args:
        path: a YAML file, see `StudyConfig`; its ``extends`` may name another study to build on.
        overrides: changes of every recipe after the study's own, each ``key.subkey=value``.
    """
    changes = [parse_override(override) for override in overrides]
    tree = read_extended(path, "study")
    faults: list[str] = []
    config = _validated(StudyConfig, tree, faults)
    # the recipes are checked even if something else is wrong, to report all problems at once
    compared = config or _validated(MethodsConfig, tree, [])
    if compared and num_recipes(compared) > MAX_RECIPES:  # 10^8 recipes would fill the memory before any message
        text = f"got {num_recipes(compared):,} recipes, expected at most {MAX_RECIPES:,}; use fewer keys or values"
        raise UserError("\n".join([*faults, fault_line(tree, () if compared.variants else ("grid",), text)]))
    methods = methods_of(compared, tree) if compared else []
    if config:
        defaults = {
            "metrics": config.metrics or FIGURES[config.protocol],
            "reference": config.reference or next((method.name for method in methods), ""),
        }
        config = config.model_copy(update=defaults)
        faults += [fault_line(tree, *fault) for fault in config_faults(config, methods, tree)]
    variants = [_variant(method, path, config, changes, faults) for method in methods]
    if config and not faults:
        study = Study(config, tuple(variants), _axis(config))
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
    """Return a variant with its recipes, and add their problems to ``faults``."""
    candidates: list[Candidate] = []
    for choice in product(*method.tune):
        settings = (*method.settings, *choice, *changes)
        faults += [
            f"{setting.value.source}: {setting.key}: a study sets this; use its key {OWN_KEYS[setting.key]}"
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
        candidates.append(Candidate(label(choice), recipe, {setting.key: setting.value.data for setting in choice}))
    return Variant(method.name, tuple(candidates))


def _measured(config: StudyConfig, recipe: Recipe) -> tuple[MetricConfig, ...]:
    """Return the study's metrics, and the metric that selects the checkpoint, which may have several names."""
    if config.protocol == "reality_check":
        return recipe.metrics  # the protocol sets its metrics
    if (select_by := recipe.training.select_by) in config.metrics:
        return tuple(metric_configs(config.metrics))
    selecting = next(metric for metric in recipe.metrics if select_by in metric.names())
    return tuple(metric_configs([*(name for name in config.metrics if name not in selecting.names()), selecting]))


def _axis(config: StudyConfig) -> Axis | None:
    """Return the key and values of a grid with a single numeric key."""
    if config.grid is None or len(config.grid) > 1:
        return None
    ((key, values),) = config.grid.items()
    return Axis(key=key, values=values) if grid_of(values) and len(values) > 2 else None


Fault = tuple[Key, str]
NAME = re.compile(r"\w[\w.,=+-]*")  # name of a variant, which is also the name of a folder
FEW_CLASSES, FEW_SEEDS = 30, 3  # 10 classes and one seed chose a value 0.007 better, which was 0.033 worse on test
NAME_BYTES = 255  # longest name of a folder on common file systems
DESCRIPTIVE = {name for config in (SpreadConfig(), SpectrumConfig(), NormConfig()) for name in config.figures()}


def best_values(figure: str) -> Literal["largest", "smallest", "none"]:
    """Return which values of a figure are the best ones, at any level; none of a figure that describes embeddings.

    Example:
        >>> [best_values(figure) for figure in ("separated recall@1", "eer:genus", "norm:genus")]
        ['largest', 'smallest', 'none']
    """
    name = figure.rpartition(" ")[2].partition(":")[0]
    if name in DESCRIPTIVE:
        return "none"
    errors = (variant.key for variant in MetricConfig.variants.values() if variant.smaller_is_better)
    return "smallest" if name.partition("@")[0] in {key.partition("@")[0] for key in errors} else "largest"


def config_faults(config: StudyConfig, methods: Sequence[Method], tree: Tree) -> Iterator[Fault]:
    """Yield the problems of the study's file."""
    if next(iter(tree.data)) != "claim" or not config.claim or "\n" in config.claim:
        yield ("claim",), "expected one line of text as the first key of the file"
    if (config.grid is None) == (config.variants is None):
        yield (), "expected either a grid or variants"
    elif not methods:
        yield (), "got 0 variants, expected at least 1"
    yield from _name_faults(methods)
    yield from _tuning_faults(config, methods)
    yield from _seed_faults(config)
    for key, values in (config.grid or {}).items():
        if len(values) == 1:
            yield ("grid", key), "got one value, expected at least two to compare; move the key to overrides"
    names = [method.name for method in methods]
    if config.reference and config.reference not in names:
        yield ("reference",), f"unknown variant {config.reference!r}; {suggest(config.reference, names)}"
    yield from _expectation_faults(config, names)
    yield from _metric_faults(config)


def _name_faults(methods: Sequence[Method]) -> Iterator[Fault]:
    folders = [method.name.casefold() for method in methods]
    for method in methods:
        if not NAME.fullmatch(method.name) or len(method.name.encode()) > NAME_BYTES:
            text = f"name {quoted(method.name)} is not valid; expected at most {NAME_BYTES} bytes of letters"
            yield method.place, f"{text}, digits and _.,=+-; choose a name under variants"
        elif folders.count(method.name.casefold()) > 1:  # macOS and Windows ignore the case of names
            text = f"name {method.name!r} is used twice, ignoring case"
            yield method.place, f"{text}; choose another name under variants"


def _tuning_faults(config: StudyConfig, methods: Sequence[Method]) -> Iterator[Fault]:
    for method in methods:
        tune: Key = (*method.place, "tune")
        if method.trials != methods[0].trials:
            trials = counted(method.trials, "trial", "trials")
            text = f"{trials} to tune {method.name}, but {methods[0].trials} for {methods[0].name}"
            yield tune, f"{text}; expected the same number for every variant"
        if method.tune and method.trials == 1:
            yield tune, f"got one value to tune for {method.name}; give two, or set the key instead"
        if config.extend and not any(
            len(grid_of([setting.value.data for setting in values])) > 1 for values in method.tune
        ):
            text = f"{method.name} has no tuned key with at least two numbers"
            yield ("extend",), f"{text}, so no grid can be extended"
    for key in ("tune_seeds", "extend"):
        if getattr(config, key) and all(method.trials == 1 for method in methods):
            yield (key,), "nothing is tuned; give values under tune, or remove this key"


def _seed_faults(config: StudyConfig) -> Iterator[Fault]:
    for key, seeds in (("seeds", config.seeds), ("tune_seeds", config.tune_seeds)):
        if len(set(seeds)) < len(seeds):
            yield (key,), f"got {list(seeds)}, expected each seed once"
    if config.more_seeds and not config.expect:
        yield ("more_seeds",), "expect has no statement to decide with more seeds; remove this key"
    if config.rotate_folds and config.protocol == "reality_check":
        yield ("rotate_folds",), "each run of protocol reality_check uses all folds; remove this key"


def _expectation_faults(config: StudyConfig, names: Sequence[str]) -> Iterator[Fault]:
    papers: dict[tuple[str, str, str], str | None] = {}
    for index, expectation in enumerate(config.expect):
        statement = expectation.better, expectation.than, expectation.metric
        if papers.setdefault(statement, expectation.paper) != expectation.paper:
            text = f"the same statement is above with paper {papers[statement]}; expected it once, with one paper"
            yield ("expect", index), text
        known = {"better": names, "than": names, "metric": config.metrics}
        for key, choices in known.items():
            name = getattr(expectation, key)
            if name not in choices:
                kind = "variant" if choices is names else "metric"
                yield ("expect", index, key), f"unknown {kind} {name!r}; {suggest(name, choices)}"
        if (best := best_values(metric := expectation.metric)) != "largest":
            text = f"smaller {metric} is better" if best == "smallest" else f"no value of {metric} is best"
            yield ("expect", index, "metric"), f"{text}; expected a metric of which larger is better"
        if expectation.better == expectation.than:
            yield ("expect", index), f"{expectation.better} cannot be better than itself"


def _metric_faults(config: StudyConfig) -> Iterator[Fault]:
    known = FIGURES["reality_check"]
    for index, name in enumerate(config.metrics):
        key = ("metrics", index)
        if name in config.metrics[:index]:
            yield key, f"{name!r} is given twice"
        if config.protocol == "reality_check" and name not in known:
            yield key, f"{name!r}: not a metric of the Reality Check; expected one of {', '.join(known)}"
        elif config.protocol == "official":
            try:
                (metric,) = metric_configs([name])
                if name not in metric.names():
                    names = ", ".join(metric.names())
                    yield key, f"{name!r}: expected the name under which it is reported: {names}"
            except ValueError as error:
                yield key, str(error)


def recipe_faults(study: Study, methods: Sequence[Method]) -> Iterator[Fault]:
    """Yield the problems between the recipes."""
    first: dict[str, str] = {}
    precision = study.variants[0].candidates[0].recipe.training.precision
    for variant, method in zip(study.variants, methods, strict=True):
        labels = [candidate.label for candidate in variant.candidates]
        tune: Key = (*method.place, "tune")
        for name in labels:
            if len(name.encode()) > NAME_BYTES:
                yield tune, f"{name[:20]}... is longer than the {NAME_BYTES} bytes of a folder's name"
        if len(set(labels)) < len(labels):
            yield tune, f"two values have the same label: {', '.join(labels)}"
        if study.config.extend:
            yield from ((("extend",), f"{variant.name}: {text}") for text in _derived(variant))
        for candidate in variant.candidates:
            recipe, name = candidate.recipe, "/".join(filter(None, (variant.name, candidate.label)))
            other = first.setdefault(recipe.model_dump_json(), name)
            if other != name:
                yield method.place, f"{name} trains the same recipe as {other}; each must differ in a key"
            yield from ((method.place, f"{name} has {text}") for text in _unsuitable(study.config, recipe.dataset))
            if recipe.training.precision != precision:
                text = f"{name} has a different training.precision; expected the same in all recipes of a study"
                yield method.place, text


def _derived(variant: Variant) -> Iterator[str]:
    """Yield the tuned numbers from which other keys follow, e.g. ``transform.resize`` from the size of pretrained.

    A recipe beyond the edge of a grid is made from one of the grid, in which these keys have values already.
    """
    first = variant.candidates[0]
    for key in first.values:
        line = [other for other in variant.candidates if {**other.values, key: first.values[key]} == first.values]
        if len(grid_of([candidate.values[key] for candidate in line])) > 1:
            changes = list(differences("", *(plain(candidate.recipe) for candidate in line[:2])))
            if len(changes) > 1:
                others = "; ".join(changes)
                yield f"other keys follow from {key} ({others}), so its grid cannot be extended; remove this key"


def _unsuitable(config: StudyConfig, dataset: DatasetConfig) -> Iterator[str]:
    """Yield what of a dataset does not suit a study."""
    if config.protocol == "official" and "test" not in dataset.own_splits:
        yield f"dataset.split {dataset.split_text}, which leaves no test classes; use another split"
    elif config.protocol == "official" and "validation" not in dataset.own_splits:
        yield "dataset.validation_fraction 0; validation classes are needed to select the checkpoint"
    if config.rotate_folds and dataset.split != "reality_check":
        yield f"dataset.split {dataset.split_text}; only reality_check has folds"


def study_notes(study: Study, validation_classes: Mapping[str, int]) -> list[str]:
    """Return notes on weaknesses of the study that its readers should know; they do not stop it."""
    notes: list[str] = []
    folds = len({seed % FOLDS for seed in study.first_seeds}) if study.config.rotate_folds else 1
    few = sorted({folds * count for count in validation_classes.values() if folds * count < FEW_CLASSES})
    if few:
        counts = " or ".join(map(str, few))
        notes.append(
            f"{counts} validation classes select checkpoints; use at least {FEW_CLASSES}, or it is mostly chance"
        )
    if study.is_tuned and len(study.first_seeds) < FEW_SEEDS:
        seeds = ", ".join(map(str, study.first_seeds))
        notes.append(
            f"values are tuned only with seed {seeds}; use at least {FEW_SEEDS} seeds, e.g. tune_seeds: [0, 1, 2]"
        )
    samplers = {variant.name: variant.candidates[0].recipe.sampler for variant in study.variants}
    others: dict[str, list[str]] = {}  # by variant, those that it is compared with and whose sampler differs
    for better, than in dict.fromkeys((expectation.better, expectation.than) for expectation in study.config.expect):
        if samplers[better] != samplers[than]:
            others.setdefault(better, []).append(than)
    return notes + [
        f"{better} has another sampler than {', '.join(names)}, which may cause their difference"
        for better, names in others.items()
    ]
