"""Protocols: how the runs of a study split the classes, and what is trained and measured in one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from dmlkit.datasets.base import FOLDS
from dmlkit.distributed.launch import Ranks
from dmlkit.evaluation.evaluate import score_dataset
from dmlkit.files.document import Document
from dmlkit.loading.inputs import refuse_faults
from dmlkit.manifolds.sphere import Sphere
from dmlkit.metrics.retrieval import MapAtRConfig, PrecisionConfig, RPrecisionConfig
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import Metrics, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.record import ProtocolName
from dmlkit.training.progress import Progress
from dmlkit.training.train import train
from dmlkit.vectors.in_memory import Embeddings, embed_dataset
from dmlkit.vectors.trained import load_model

EMBEDDING_DIM = 128  # of each Reality Check model; the four together have 512
METRICS = (PrecisionConfig(), RPrecisionConfig(), MapAtRConfig())


class RealityCheckFigures(Document, frozen=True):
    """``result.json``: the figures of one run of the Reality Check; see `run_once`."""

    kind: ClassVar[str] = "document of a Reality Check's figures"

    separated: Metrics
    concatenated: Metrics

    def flat(self) -> Metrics:
        """Return the figures by names such as ``separated map@r``."""
        return {f"{kind} {name}": value for kind, metrics in self.plain().items() for name, value in metrics.items()}


def run_once(
    name: ProtocolName, recipe: Recipe, folder: Path, ranks: Ranks, start_model: Callable[[], Progress]
) -> Metrics:
    """Train a recipe under a protocol, with its own seed. Complete trainings are kept, and interrupted ones resumed.

    ``start_model`` is called before each model trains, for the receiver of its events.

    ``official``: the recipe unchanged. The figures are those of the best checkpoint on validation classes.

    ``reality_check`` (Musgrave et al., ECCV 2020): the last half of the sorted classes is the test set. The first half
    is divided into 4 contiguous folds. Each of 4 models with 128 dimensions validates on one fold, by MAP@R, and trains
    on the others. ``separated`` is the mean of the 4 models. ``concatenated`` is their 512-dimensional concatenation:
    the embeddings of each model are normalized, then the result is, and cosines are compared. The protocol sets the
    recipe's split, dimension and metrics; the models are in ``fold-F/`` of the folder.
    """
    if name == "official":
        return _trained(recipe, folder, ranks, start_model)
    folds = [folder / f"fold-{fold}" for fold in range(FOLDS)]
    tests = [_trained(fold_recipe(recipe, fold), path, ranks, start_model) for fold, path in enumerate(folds)]
    target = folder / "result.json"
    if target.exists():
        return RealityCheckFigures.read(target).flat()
    separated = {name: sum(test[name] for test in tests) / FOLDS for name in tests[0]}
    figures = RealityCheckFigures(separated=separated, concatenated=_concatenated(folds, ranks))
    ranks.barrier()
    if ranks.is_global_zero:
        figures.write(target)
    return figures.flat()


def is_complete(name: ProtocolName, folder: Path) -> bool:
    """Return whether the run in this folder is complete."""
    return (folder / ("summary.json" if name == "official" else "result.json")).exists()


def fold_recipe(recipe: Recipe, fold: int) -> Recipe:
    """Return the recipe of one of the 4 models of a Reality Check."""
    return recipe.model_copy(
        update={
            "dataset": recipe.dataset.model_copy(update={"split": "reality_check", "fold": fold}),
            "embedding_dim": EMBEDDING_DIM,
            "metrics": METRICS,
            "training": recipe.training.model_copy(update={"select_by": "map@r"}),
        }
    )


def _trained(recipe: Recipe, folder: Path, ranks: Ranks, start_model: Callable[[], Progress]) -> Metrics:
    """Return the test metrics of a run, which is trained or resumed if it is not complete."""
    run, summary = RunFolder(folder), None
    if run.holds_run():
        run.check_same_recipe(recipe)
        summary = Summary.read(run.summary_path) if run.summary_path.exists() else None
    if summary is None:
        ranks.barrier()
        summary = train(recipe, folder, device=ranks, progress=start_model(), resume=True)
    assert summary.chosen.test is not None, "recipes without test classes are refused above"
    return summary.chosen.test


def _concatenated(folds: Sequence[Path], ranks: Ranks) -> dict[str, float]:
    models = [load_model(RunFolder(path), ranks, "best") for path in folds]
    images = models[0].recipe.dataset.build("test")  # the folds differ in their validation classes alone
    parts: list[Embeddings] = []
    for trained in models:
        recipe = trained.recipe
        parts.append(embed_dataset(ranks, trained.model, images, recipe.transform, workers=recipe.training.workers))
        refuse_faults(parts[-1].faults, recipe.dataset.on_bad_image)
    points = normalize(torch.cat([normalize(part.points) for part in parts], dim=1))
    joined = parts[0]._replace(points=points)
    return score_dataset(joined, images, Sphere(points.shape[1]), METRICS, ranks=ranks).scores.values
