"""What does not fit together in a study: in its file, and between its recipes."""

import re
from collections.abc import Iterator, Mapping, Sequence

from dmlkit.datasets.base import FOLDS
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.scoring import metric_configs
from dmlkit.recipe.faults import shown, suggest
from dmlkit.recipe.yaml_tree import Key, Tree
from dmlkit.study.definition.config import FIGURES, Study, StudyConfig
from dmlkit.study.definition.edge import grid_of
from dmlkit.study.definition.methods import Method

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
        for label in labels:
            if len(label.encode()) > NAME_BYTES:
                yield (
                    (*method.place, "tune"),
                    f"{label[:20]}... is longer than the {NAME_BYTES} bytes of a folder's name",
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
