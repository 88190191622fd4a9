"""What does not fit together in a study: in its file, and between its recipes."""

import re
from collections.abc import Iterator, Sequence

from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.scoring.names import metric_configs
from dmlkit.recipe.faults import shown, suggest
from dmlkit.recipe.yaml_tree import Key, Tree
from dmlkit.study.config import FIGURES, Study, StudyConfig
from dmlkit.study.methods import Method

Fault = tuple[Key, str]
NAME = re.compile(r"\w[\w.,=+-]*")  # of a variant: also the name of a folder
ERRORS = {variant.key for variant in MetricConfig.variants.values() if variant.smaller_is_better}
"""Figures of which less is better."""
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
    if len(set(config.seeds)) < len(config.seeds):
        yield ("seeds",), f"got {list(config.seeds)}, expected each seed once"
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
            if recipe.training.precision != precision:
                yield method.place, f"{name} has another training.precision; a study runs in one"
