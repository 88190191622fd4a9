"""What the finished runs of a study hold beside the figures that are compared: of the last epoch, and from before."""

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
    """The figures of each variant after all epochs, and those of its backbone before the first.

    Args:
        study: whose variants.
        choices: what each was trained with.
        folder: of the study.
        fabric: the device, and the ranks; for a network that begins with random numbers, see `untrained_figures`.
    """
    protocol, found = study.config.protocol, dict[str, ExtraFigures]()
    for name, choice in choices.items():
        runs = folder / "runs" / name / choice.candidate.label
        summaries = {seed: _summaries(runs / f"seed-{seed}") for seed in choice.figures}
        last = {seed: _last(protocol, models) for seed, models in summaries.items()}
        recipe, untouched = choice.candidate.recipe, next(iter(summaries.values()))[0].untouched
        untrained = untouched.test if untouched else None
        if not has_pretrained_weights(recipe):
            recipe = fold_recipe(recipe, 0) if protocol == "reality_check" else recipe
            try:
                untrained = untrained_figures(recipe, folder / "untrained", fabric)
            except UserError as error:  # as where the images are on the machines of a cluster alone
                logging.getLogger("dmlkit").warning(f"{name}: nothing to hold its training against: {error}")
        if untrained and protocol == "reality_check":
            kinds = RealityCheckFigures.model_fields  # whose models, and so their concatenation, begin as one
            untrained = {f"{kind} {metric}": value for kind in kinds for metric, value in untrained.items()}
        found[name] = ExtraFigures(last, untrained)
    return found


def untrained_figures(recipe: Recipe, folder: Path, fabric: Fabric) -> Metrics:
    """The figures of a recipe's backbone as it is before training, without its head, on test classes.

    They are scored once for all recipes that begin with the same network and are asked the same.

    Args:
        recipe: with its seed.
        folder: where they are kept.
        fabric: the device, and the ranks, which share the work.

    Raises:
        UserError: the images cannot be had, or the recipe is at fault.
    """
    dataset = images_of_split(recipe.dataset, "test")
    model = untrained_model(recipe, dataset)
    question = untouched_question(model, recipe, "test")
    path = folder / f"{question.key()}.json"
    kept = fabric.broadcast(_kept(path, question) if fabric.is_global_zero else None)
    if kept is None:
        kept, evaluation = evaluate_untouched(fabric, model, dataset, recipe, question, source="untrained")
        if fabric.is_global_zero:
            store(kept, evaluation, path)
    return kept.metrics


def _kept(path: Path, question: Question) -> Report | None:
    try:
        stored = stored_answer(path, question)
    except UserError as error:
        logging.getLogger("dmlkit").warning(f"{error}; scored again")
        return None
    return stored.report if stored else None


def _summaries(run: Path) -> list[Summary]:
    """One a model: four of a Reality Check."""
    return [Summary.read(path) for path in sorted(run.rglob("summary.json"))]


def _last(protocol: ProtocolName, models: Sequence[Summary]) -> Metrics:
    """After all epochs. The models of a Reality Check are joined by their best checkpoints alone: to join the last ones
    too would embed every image 4 times more."""
    kind = "separated " if protocol == "reality_check" else ""
    tests = [model.last.test for model in models]
    return {f"{kind}{name}": fmean(test[name] for test in tests) for name in tests[0]}
