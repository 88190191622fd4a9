"""The model of a run, what it can embed, and embeddings in memory. Into files: `dmlkit.embedding.embed`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from dmlkit import __version__
from dmlkit.datasets.base import Dataset, Split
from dmlkit.datasets.files.image import read_image
from dmlkit.datasets.files.paths import raise_faults, readable_name, unreadable_name
from dmlkit.distributed.launch import gather_lists, gather_rows
from dmlkit.errors import UserError
from dmlkit.loading.batches import evaluation_loader
from dmlkit.model import EmbeddingModel, build_model
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder import CheckpointName, RunFolder
from dmlkit.transforms.base import TransformConfig

Advance = Callable[[int], None]
"""Told how many more images are done."""


class Embeddings(NamedTuple):
    """Points of the images that could be read."""

    points: Tensor  # (N, D) float32 on the CPU
    labels: Tensor  # (N,) int64
    indices: Tensor  # (N,) int64, into the dataset
    faults: list[str]  # one message per image that could not be read


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run, ready to embed.

    Args:
        recipe: the run's.
        model: in evaluation mode, on the fabric's device.
        checkpoint: which of the run's checkpoints.
        epoch: finished epochs.
    """

    recipe: Recipe
    model: EmbeddingModel
    checkpoint: CheckpointName
    epoch: int


def load_model(run: RunFolder, fabric: Fabric, checkpoint: CheckpointName | None = None) -> TrainedModel:
    """The model of a run; the best checkpoint where none is named, the last where none was chosen.

    Raises:
        UserError: there is no run, or no readable checkpoint.
    """
    recipe = run.recipe()
    if checkpoint is None:
        checkpoint = "best" if run.checkpoint_path("best").exists() else "last"
    state = run.load_checkpoint(checkpoint)
    model = build_model(without_pretrained_weights(recipe))
    model.load_state_dict(state["model"])
    return TrainedModel(recipe, model.to(fabric.device).eval(), checkpoint, state["epoch"])


def without_pretrained_weights(recipe: Recipe) -> Recipe:
    """The recipe with a fresh backbone: a checkpoint brings the weights, so none need be fetched."""
    if getattr(recipe.backbone, "weights", None) is None:
        return recipe
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"weights": None})})


@torch.inference_mode()
def embed_dataset(
    fabric: Fabric,
    model: EmbeddingModel,
    dataset: Dataset,
    transform: TransformConfig,
    *,
    workers: int | None = None,
    advance: Advance | None = None,
) -> Embeddings:
    """Embed all images in float32, each rank a part; every rank gets all points, in the order of the dataset.

    Args:
        fabric: the device, and the ranks.
        model: on that device; its mode is restored afterwards.
        dataset: the images.
        transform: its evaluation part is applied.
        workers: processes that read images; see `dmlkit.loading.batches.make_loader`.
        advance: told of every batch.
    """
    was_training = model.training
    model.eval()
    share = -(-len(dataset) // fabric.world_size)
    start = fabric.global_rank * share
    loader = evaluation_loader(
        dataset,
        transform,
        indices=range(start, min(start + share, len(dataset))),
        workers=workers,
        pin_memory=fabric.device.type == "cuda",
    )
    points = torch.zeros(share, model.manifold.point_dim)
    indices = torch.full((share,), -1)
    faults: list[str] = []
    filled = 0
    for batch in loader:
        faults += batch.faults
        if len(batch.labels):
            into = slice(filled, filled + len(batch.labels))
            points[into] = model(batch.images.to(fabric.device)).float().cpu()
            indices[into] = batch.indices
            filled = into.stop
        if advance:
            advance((len(batch.labels) + len(batch.faults)) * fabric.world_size)
    model.train(was_training)
    if fabric.world_size > 1:
        points, indices, faults = _gather(fabric, points, indices, faults)
    kept = indices >= 0
    return Embeddings(points[kept], dataset.labels[indices[kept]], indices[kept], faults)


def _gather(fabric: Fabric, points: Tensor, indices: Tensor, faults: list[str]) -> tuple[Tensor, Tensor, list[str]]:
    points, indices = (gather_rows(fabric, part.to(fabric.device)).cpu() for part in (points, indices))
    return points, indices, gather_lists(fabric, faults)


class ImageList(Dataset):
    """Unlabelled image files.

    Args:
        paths: the files.
    """

    def __init__(self, paths: list[str]) -> None:
        super().__init__(torch.zeros(len(paths), dtype=torch.int64), ("",), paths)

    def image(self, index: int) -> Tensor:
        return read_image(self.paths[index])


def dataset_of(images: Path | None, split: Split, recipe: Recipe) -> tuple[Dataset, bool]:
    """What to embed, and whether its labels mean anything: a folder of images, or a split of the recipe's dataset.

    Raises:
        UserError: the folder is missing or holds no image.
    """
    if images is None:
        return recipe.dataset.build(split), True
    from dmlkit.datasets.folder import image_files

    if not images.is_dir():
        raise UserError(f"{images}: no such folder; expected a folder with images")
    paths = image_files(images)
    raise_faults(unreadable_name(path) for path in paths if not readable_name(path))
    if not paths:
        raise UserError(f"{images}: no images found in this folder or below it")
    return ImageList(paths), False


def describe(trained: TrainedModel) -> dict[str, Any]:
    """What anyone needs to use the embeddings of a model: its geometry, its fingerprint and its preprocessing."""
    recipe, manifold = trained.recipe, trained.model.manifold
    return {
        "dmlkit": __version__,
        "dim": manifold.point_dim,
        "features": manifold.dim,
        "dtype": "float32",
        "manifold": recipe.manifold.model_dump(mode="json") | manifold.learned_options(),
        "similarity": manifold.similarity_name,
        "index": {
            "order": "the largest inner products of the two vectors are the most similar; x is an embedding",
            **manifold.index_formula(),
        },
        "model": {
            "fingerprint": trained.model.fingerprint(),
            "checkpoint": trained.checkpoint,
            "epoch": trained.epoch,
            "backbone": recipe.backbone.model_dump(mode="json"),
        },
        "preprocessing": {
            "input": "RGB pixels 0..255, upright",
            **recipe.transform.model_dump(mode="json"),
        },
    }
