"""Figures of a study in addition to those that are compared: after the last epoch, and before training."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from lightning_fabric import Fabric

from dmlkit.errors import UserError
from dmlkit.evaluation.report import Report, store, stored_answer
from dmlkit.evaluation.untouched import evaluate_untouched, has_pretrained_weights, untouched_question
from dmlkit.loading.cache import images_of_split
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import Metrics, Summary
from dmlkit.run_folder.question import Question
from dmlkit.study.definition.config import Study
from dmlkit.study.findings.results import Choice, ExtraFigures
from dmlkit.study.protocol import ProtocolName, RealityCheckFigures, fold_recipe
from dmlkit.training.untrained_baseline import untrained_model


def extra_figures(study: Study, choices: Mapping[str, Choice], folder: Path, fabric: Fabric) -> dict[str, ExtraFigures]:
    """Return the figures of each variant after all epochs, and those of its backbone before training.

    Args:
        fabric: the device and the ranks, for backbones with random weights; see `untrained_figures`.
    """
    protocol, found = study.config.protocol, dict[str, ExtraFigures]()
    for name, choice in choices.items():
        runs = folder / "runs" / name / choice.candidate.label
        files = {seed: sorted((runs / f"seed-{seed}").rglob("summary.json")) for seed in choice.figures}
        summaries = {seed: [Summary.read(file) for file in models] for seed, models in files.items()}
        last = {seed: _last(protocol, models) for seed, models in summaries.items()}
        recipe, untouched = choice.candidate.recipe, next(iter(summaries.values()))[0].untouched
        untrained = untouched.test if untouched else None
        if not has_pretrained_weights(recipe):
            recipe = fold_recipe(recipe, 0) if protocol == "reality_check" else recipe
            try:
                untrained = untrained_figures(recipe, folder / "untrained", fabric)
            except UserError as error:  # for example, the images are only on the machines of a cluster
                logging.getLogger("dmlkit").warning(f"{name}: no baseline without training: {error}")
        if untrained and protocol == "reality_check":
            kinds = RealityCheckFigures.model_fields  # all models start from the same weights, so both kinds are equal
            untrained = {f"{kind} {metric}": value for kind in kinds for metric, value in untrained.items()}
        found[name] = ExtraFigures(last, untrained)
    return found


def untrained_figures(recipe: Recipe, folder: Path, fabric: Fabric) -> Metrics:
    """Return the figures of a recipe's backbone before training, without its head, on test classes.

    They are scored once for all recipes with the same initial network, test images and metrics.

    Raises:
        UserError: the images are not available, or the recipe is not usable.
    """
    dataset = images_of_split(recipe.dataset, "test")
    model = untrained_model(recipe, dataset)
    question = untouched_question(model, recipe, "test")
    path = folder / f"{question.key()}.json"
    stored = fabric.broadcast(_stored(path, question) if fabric.is_global_zero else None)
    if stored is None:
        stored, evaluation = evaluate_untouched(fabric, model, dataset, recipe, question, source="untrained")
        if fabric.is_global_zero:
            store(stored, evaluation, path)
    return stored.metrics


def _stored(path: Path, question: Question) -> Report | None:
    try:
        stored = stored_answer(path, question)
    except UserError as error:
        logging.getLogger("dmlkit").warning(f"{error}; scored again")
        return None
    return stored.report if stored else None


def _last(protocol: ProtocolName, models: Sequence[Summary]) -> Metrics:
    """Return the figures after all epochs.

    The Reality Check concatenates only the best checkpoints: the last ones would need 4 more embeddings per image.
    """
    kind = "separated " if protocol == "reality_check" else ""
    tests = [model.last.test or {} for model in models]
    return {f"{kind}{name}": fmean(test[name] for test in tests) for name in tests[0]}
