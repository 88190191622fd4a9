"""Calibrate a run: choose its threshold on validation classes, try it on test classes, keep it in the run."""

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning_fabric import Fabric

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.in_memory import Bar, embed_dataset, no_bar
from dmlkit.embedding.trained import TrainedModel, load_model
from dmlkit.errors import UserError
from dmlkit.evaluation.calibration import calibrate_points, rates_at
from dmlkit.loading.cache import images_of_split
from dmlkit.loading.faults import refuse_faults, refuse_nothing_read
from dmlkit.metrics.base import Points
from dmlkit.metrics.pairing import Pairing
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import Threshold


@torch.no_grad()  # the curvature of a manifold may be learned
def calibrate_run(
    path: Path,
    *,
    far: float = 1e-3,
    checkpoint: CheckpointName | None = None,
    overrides: Sequence[str] = (),
    fabric: Fabric | None = None,
    bar: Bar = no_bar,
) -> Threshold:
    """Find from which similarity on two images are taken for the same, and write it to ``threshold.json`` of the run.

    It is chosen on all pairs of the validation images, which the model was not trained on, and tried on those of the
    test images.

    Args:
        path: of the run.
        far: the share of the pairs of different classes that may be taken for the same.
        checkpoint: which weights; by default the best, else the last.
        overrides: ``key=value`` each, of the run's dataset, which may have moved.
        fabric: a device.
        bar: shows each step.

    Raises:
        UserError: there is no such run, it has no validation classes, or they have too few pairs for ``far``.
    """
    if not 0 < far < 1:
        raise UserError(f"--far {far:g}: expected a share between 0 and 1, e.g. 1e-3")
    run, fabric = RunFolder(path), fabric or start_fabric("auto")
    trained = load_model(run, fabric, checkpoint, overrides=overrides)
    validation = points_of_split(trained, "validation", fabric, bar)
    try:
        found = calibrate_points(validation, far)
    except ValueError as error:
        raise UserError(f"cannot calibrate {path} on its validation classes: {error}") from error
    test = Pairing.of(points_of_split(trained, "test", fabric, bar))
    threshold = Threshold(
        weights=trained.model.fingerprint(),
        checkpoint=trained.checkpoint,
        similarity=trained.model.manifold.similarity_name,
        threshold=found.threshold,
        far=far,
        far_interval=found.interval,
        validation=found.rates,
        test=rates_at(test, found.threshold),
    )
    if fabric.is_global_zero:
        threshold.write(run.threshold_path)
    return threshold


def points_of_split(trained: TrainedModel, split: Split, fabric: Fabric, bar: Bar) -> Points:
    """Embed the images of a split.

    Raises:
        UserError: there are none, or an image cannot be read.
    """
    recipe = trained.recipe
    dataset = images_of_split(recipe.dataset, split)
    workers = recipe.training.workers
    with bar(f"embedding {split} images", len(dataset)) as advance:
        found = embed_dataset(fabric, trained.model, dataset, recipe.transform, workers=workers, advance=advance)
    refuse_faults(found.faults, recipe.dataset.on_bad_image)
    refuse_nothing_read(len(found.labels), found.faults, f"the {split} split")
    labels = found.labels.unique(return_inverse=True)[1]
    device = trained.model.device
    return Points(found.points.to(device), labels.to(device), trained.model.manifold)
