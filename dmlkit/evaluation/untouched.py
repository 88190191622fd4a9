"""The pretrained baseline ("untouched"): the cosine of pooled features of the untrained backbone, without the head."""

import torch

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.evaluation.evaluate import Evaluation, evaluate
from dmlkit.evaluation.report import Question, Report
from dmlkit.manifolds.sphere import Sphere
from dmlkit.model import EmbeddingModel, backbone_alone
from dmlkit.recipe.schema import Recipe
from dmlkit.vectors.progress_bar import Bar, no_bar

NO_GAIN = 0.005  # a difference that nobody would notice: one more of 200 queries
ADVICE = "backbone.tuning last_blocks or more classes, see docs/tuning.md"
LATE = 0.9  # share of the epochs from which on a best one says that more epochs may help


def untouched_model(model: EmbeddingModel) -> EmbeddingModel:
    """Return a model whose points are the backbone's features as unit vectors (B, F); it shares the model's backbone.

    Example:
        >>> from dmlkit.recipe.file import parse_recipe
        >>> from dmlkit.model import build_model
        >>> model = build_model(parse_recipe("dataset: {name: glyphs}\\nloss: {name: triplet}", "recipe.yaml"))
        >>> points = untouched_model(model)(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
        >>> points.shape[1] == model.backbone.num_features, torch.allclose(points.norm(dim=1), torch.ones(2))
        (True, True)
    """
    return backbone_alone(model, Sphere(model.backbone.num_features))


def untouched_question(model: EmbeddingModel, recipe: Recipe, split: Split) -> Question:
    """Return the question that the metrics of an untouched model answer."""
    return Question.of(recipe, untouched_model(model).fingerprint(), "untouched", split)


def evaluate_untouched(
    fabric: Ranks,
    model: EmbeddingModel,
    dataset: Dataset,
    recipe: Recipe,
    question: Question,
    *,
    source: str,
    bar: Bar = no_bar,
) -> tuple[Report, Evaluation]:
    """Score the features of a model's backbone. The caller's random number generator is not changed.

    Args:
        model: the model, whose backbone is moved to the fabric's device.
        recipe: the recipe, whose transform and metrics are used.
        question: the result of `untouched_question` for the split of the dataset.
        source: the name of the evaluated run, for the report.
    """
    features, split = untouched_model(model).to(fabric.device), question.split
    with torch.random.fork_rng(devices=[]):  # a loader draws one random number whenever it starts
        evaluation = evaluate(fabric, features, dataset, recipe, split=split, bar=bar)
    return Report.of(evaluation, source, split, epoch=0, question=question), evaluation


def gain_message(
    metric: str,
    tuned: float,
    untouched: float,
    interval: tuple[float, float] | None,
    units: str,
    split: str = "test",
    *,
    epoch: int,
    epochs: int,
) -> str:
    """Return a line that says whether training improved a metric, as far as the interval shows it.

    Args:
        metric: a metric whose larger values are better.
        interval: 95 % interval of their difference on the same queries; None if there are too few classes for one.
        units: what the interval is over, e.g. "30 classes".
        epoch, epochs: epoch of the checkpoint, and number of epochs of the run.

    Example:
        >>> gain_message("map@r", 0.42, 0.327, (0.081, 0.105), "30 classes", epoch=9, epochs=20)
        'map@r on test: 0.420 after training, 0.327 before: +0.093 (0.081 to 0.105)'
        >>> gain_message("mrr", 0.3, 0.3, (-0.1, 0.1), "9 classes", epoch=9, epochs=20).partition("); ")[2]
        'epoch 9 of 20 is the best, so try backbone.tuning last_blocks or more classes, see docs/tuning.md'
    """
    line = f"{metric} on {split}: {tuned:.3f} after training, {untouched:.3f} before:"
    change = f"{tuned - untouched:+.3f}"
    if interval is None:
        return f"{line} {change}, without an interval"
    low, high = interval
    ends = f"{low:.3f} to {high:.3f}"
    if high > NO_GAIN and low > 0:
        return f"{line} {change} ({ends})"
    if high > NO_GAIN:
        verdict = f"no gain is detectable with {units}"
    elif high < 0 and low < -NO_GAIN:
        verdict = "training made it worse"
    else:
        verdict = "training did not help here"
    way = "try more epochs," if epoch >= LATE * epochs else f"epoch {epoch} of {epochs} is the best, so try"
    return f"{line} {verdict} ({change}, {ends}); {way} {ADVICE}"
