"""The end of a training: the summary of a finished run, and the recipe of a last training on every class.

The summary has the test metrics of the run's checkpoints, costs, and curves. The last training takes the number of
epochs that validation chose in the run.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.exchange import gather_lists
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.evaluation.augmented import embed_with_copies
from dmlkit.evaluation.evaluate import Evaluation, SecondScoring, evaluate, score_split
from dmlkit.evaluation.report import Figures
from dmlkit.files.pictures import picture
from dmlkit.metrics.base import Points
from dmlkit.metrics.ranking.rerank import parse_rerank
from dmlkit.recipe.schema import Copies, EvaluationConfig, Recipe
from dmlkit.run_folder.documents import (
    Alignment,
    Basis,
    ChosenTechniques,
    ClassMetrics,
    EpochRow,
    Metrics,
    ScoredCheckpoint,
    Summary,
    technique_name,
)
from dmlkit.run_folder.folder import RunFolder, named
from dmlkit.training.checkpoint import State
from dmlkit.training.data import TrainingData
from dmlkit.training.experiment import Experiment
from dmlkit.training.pretrained import compare_with_pretrained
from dmlkit.vectors.in_memory import embed_dataset
from dmlkit.vectors.trained import TrainedModel, recipe_of, take_weights


def summarize(
    experiment: Experiment,
    data: TrainingData,
    run: RunFolder,
    ranks: Ranks,
    state: State,
    pretrained: Mapping[Split, Figures],
) -> Summary:
    """Score the last and the best checkpoint on the test classes; write ``summary.json``, the classes and the curves.

    ``pretrained`` are the figures of the pretrained backbone before training; empty if it had random weights.
    """
    rows = run.read_metrics()
    if experiment.average:
        experiment.average.put_in_place()
    tuned = evaluate_test(experiment, data, ranks, state)
    last = ScoredCheckpoint(epoch=state.epoch, validation=rows[-1].validation, test=tuned and tuned.scores.values)
    best, final = None, {}
    if state.best is not None and state.best["epoch"] == state.epoch:
        best = last = last.model_copy(update={"validation": state.best["metrics"]})  # a row may be damaged
    elif state.best is not None:
        final = {name: tensor.clone() for name, tensor in experiment.model.state_dict().items()}
        take_weights(experiment.model, run.load_checkpoint("best"), run.checkpoint_path("best"))
        tuned = evaluate_test(experiment, data, ranks, state)
        tested = tuned and tuned.scores.values
        best = ScoredCheckpoint(epoch=state.best["epoch"], validation=state.best["metrics"], test=tested)
    techniques = choose_techniques(experiment, ranks)
    if final:
        experiment.model.load_state_dict(final)
    summary = Summary(
        last=last,
        best=best,
        selected_by=experiment.recipe.training.select_by if best else None,
        seconds=round(state.seconds, 1),
        images_per_second=rows[-1].images_per_second,
        skipped_images=tuple(sorted(set(gather_lists(ranks, state.skipped)))),
        pretrained=compare_with_pretrained(pretrained, tuned) if tuned else None,
        seconds_per_epoch=seconds_per_epoch(rows),
        peak_memory_bytes=max((row.peak_memory_bytes or 0 for row in rows), default=0) or None,
        basis=run.basis(),
        techniques=techniques,
    )
    if ranks.is_global_zero:
        plot_curves(rows, run.curves_path, pretrained=summary.pretrained.validation if summary.pretrained else None)
        if tuned and tuned.scores.per_query:
            classes = tuned.class_figures()
            values = {name: tuple(round(row.metrics[name], 9) for row in classes) for name in classes[0].metrics}
            names, queries = tuple(row.name for row in classes), tuple(row.queries for row in classes)
            ClassMetrics(names=names, queries=queries, metrics=values).write(run.test_classes_path)
        summary.write(run.summary_path)  # last: with it a run counts as complete
    return summary


def evaluate_test(experiment: Experiment, data: TrainingData, ranks: Ranks, state: State) -> Evaluation | None:
    """Evaluate the current weights on the test classes; None if there are none."""
    if data.test is None:
        return None
    evaluation = evaluate(ranks, data.model, data.test, experiment.recipe, split="test")
    state.note_skipped(evaluation.faults)
    return evaluation


def choose_techniques(experiment: Experiment, ranks: Ranks) -> ChosenTechniques | None:
    """Score the techniques of a recipe's ``evaluation`` on validation classes, and the best of them on test classes.

    They are scored alone and together, with the current weights; without validation classes, all of them are taken.
    """
    recipe, metric = experiment.recipe, experiment.recipe.training.select_by
    tta, rerank = recipe.evaluation.tta, recipe.evaluation.rerank
    if not (tta or rerank):
        return None
    trained = TrainedModel.of(recipe, experiment.model)
    figures: Metrics | None = None
    if experiment.validation is not None:
        pairs = list(product(dict.fromkeys((None, tta)), dict.fromkeys((None, rerank))))
        scored = _with_techniques(trained, ranks, experiment.validation, "validation", pairs)
        figures = {technique_name(*pair): metrics[metric] for pair, metrics in zip(pairs, scored, strict=True)}
        tta, rerank = max(pairs, key=lambda pair: figures[technique_name(*pair)])  # the first of several: the fewest
    test = None
    if experiment.test is not None:
        (test,) = _with_techniques(trained, ranks, experiment.test, "test", [(tta, rerank)])
    return ChosenTechniques(tta=tta, rerank=rerank, validation=figures, test=test)


def _with_techniques(
    trained: TrainedModel,
    ranks: Ranks,
    dataset: Dataset,
    split: Split,
    pairs: Sequence[tuple[Copies | None, str | None]],
) -> list[Metrics]:
    """Return the metrics with each pair of techniques; with any, those that rank."""
    recipe = trained.recipe
    copies: Copies | None = next((tta for tta, _ in pairs if tta), None)
    embeddings = embed_dataset(ranks, trained.model, dataset, recipe.transform, workers=recipe.training.workers)
    means = embed_with_copies(ranks, trained, dataset, embeddings, copies) if copies else embeddings
    metrics: list[Metrics] = []
    for tta, rerank in pairs:
        points = Points(means.points, means.labels, trained.manifold) if tta else None
        second = SecondScoring(parse_rerank(rerank) if rerank else None, points)
        evaluation = score_split(ranks, trained, embeddings, dataset, split=split, second=second)
        metrics.append((evaluation.alternative or evaluation.scores).values)
    return metrics


def seconds_per_epoch(rows: Sequence[EpochRow]) -> float | None:
    """Return the median over the epochs that were not interrupted."""
    seconds = [row.training_seconds for row in rows if row.training_seconds is not None]
    return round(median(seconds), 3) if seconds else None


try:
    import resource
except ImportError:  # Windows has none
    resource = None

LINUX = Path("/proc/self")


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of a CUDA device, or of this process on Linux; other systems cannot reset it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # another system, or one that forbids it
        (LINUX / "clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes; see `dmlkit.run_folder.documents.Summary.peak_memory_bytes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (LINUX / "status").exists():
        match = re.search(r"VmHWM:\s+(\d+) kB", (LINUX / "status").read_text())
        return 1024 * int(match[1]) if match else None
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def plot_curves(rows: Sequence[EpochRow], path: Path, *, pretrained: Metrics | None = None) -> None:
    """Draw the loss and the validation metrics over the epochs as a PNG."""
    with picture(path, 64, columns=2) as figure:
        left, right = figure.subplots(1, 2)
        left.plot([row.epoch for row in rows], [row.loss for row in rows], marker=".", label="sum")
        terms = list(rows[0].terms or ()) if rows else []
        for name in terms:
            left.plot([row.epoch for row in rows], [(row.terms or {}).get(name, nan) for row in rows], label=name)
        if terms:
            left.legend()
        left.set(xlabel="epoch", ylabel="loss", title="Training loss")
        validated = [(row.epoch, row.validation) for row in rows if row.validation]
        names = list(validated[0][1]) if validated else []
        curves = {name: [metrics.get(name, nan) for _, metrics in validated] for name in names}
        before = pretrained or {}
        beyond = [name for name in names if any(v < 0 or v > 1 for v in (*curves[name], before.get(name, nan)))]
        other = right.twinx() if beyond else right  # lengths and ranks of 30 would flatten the shares
        for number, (name, values) in enumerate(curves.items()):
            axes, label = (other, f"{name}, right axis") if name in beyond else (right, name)
            (line,) = axes.plot([epoch for epoch, _ in validated], values, marker=".", label=label, color=f"C{number}")
            if name in before:
                axes.axhline(before[name], linestyle="--", color=line.get_color(), label=f"{name}, pretrained")
        right.set(xlabel="epoch", title="Validation" if names else "No validation", ylim=(0, 1.02))
        if names:
            other.legend(handles=[line for axes in dict.fromkeys((right, other)) for line in axes.lines])
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def final_recipe(path: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, Basis]:
    """Return the recipe that trains on every class, and the run whose figures stand for its model.

    It is the recipe of a finished run with three changes. ``dataset.split`` is ``all``: training, validation and test
    classes are trained on. ``training.stop_after`` is the epoch of the run's best checkpoint on validation classes, or
    of its last one if it had none; the schedule of the learning rate still spans the epochs of the run, so that each
    epoch has the learning rate that it had there. An epoch passes over more images, thus has more steps.
    ``evaluation`` names the techniques that validation chose.
    """
    run = RunFolder(path)
    recipe = recipe_of(run, overrides)
    if run.recipe().dataset.split == "all":
        basis = run.basis()
        instead = f"; use {basis.run}" if basis else ""
        raise UserError(f"{path}: was trained on every class already, expected a run with test classes{instead}")
    if run.alignment_path.exists():
        newer = Alignment.read(run.alignment_path).run
        raise UserError(
            f"{path}: was written by dmlkit align and was not trained itself; use {newer}, which was aligned"
        )
    if not run.summary_path.exists():
        raise UserError(f"{path}: is not finished, expected a summary.json; continue it with dmlkit train --resume")
    summary = Summary.read(run.summary_path)
    run.warn_of_loss()
    changes: dict[str, Any] = {
        "dataset": recipe.dataset.model_copy(update={"split": "all", "fold": 0}),
        "training": recipe.training.model_copy(update={"stop_after": summary.chosen.epoch}),
    }
    if chosen := summary.techniques:
        changes["evaluation"] = EvaluationConfig(tta=chosen.tta, rerank=chosen.rerank)
    selected_by = summary.selected_by or recipe.training.select_by
    return recipe.model_copy(update=changes), Basis(
        run=str(named(path)), selected_by=selected_by, checkpoint=summary.chosen
    )
