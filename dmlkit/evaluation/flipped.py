"""Test-time augmentation: the mean of the embeddings of an image and of its mirror image."""

from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset, PickedSamples
from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.in_memory import Embeddings, embed_dataset
from dmlkit.embedding.progress_bar import EMBEDDING, Bar, no_bar
from dmlkit.errors import UserError
from dmlkit.model import EmbeddingModel
from dmlkit.recipe.schema import Recipe


class MirroredImages(PickedSamples):
    """Mirror images of some samples of a dataset: left and right are exchanged."""

    def __init__(self, dataset: Dataset, rows: Tensor) -> None:
        super().__init__(dataset, rows, dataset.labels[rows])
        self.resizing = dataset.resizing

    def sample(self, index: int) -> Tensor:
        return super().sample(index).flip(-1)


def with_mirror_images(
    fabric: Ranks, model: EmbeddingModel, dataset: Dataset, recipe: Recipe, own: Embeddings, bar: Bar = no_bar
) -> Embeddings:
    """Embed the mirror image of each image as well, and return the means.

    The mean is taken of features, see `Manifold.to_features`; on the sphere it has the direction of the sum.

    Args:
        fabric, model, dataset, recipe: see `dmlkit.evaluation.evaluate.evaluate`.
        own: embeddings of the images.
        bar: shows the progress.

    Raises:
        UserError: the samples are no images, or one can no longer be read.
    """
    if not dataset.kind.has_pixels:
        raise UserError("--tta flip: applies to images, but the samples of this run have no pixels; remove this option")
    mirrored = MirroredImages(dataset, own.indices)
    with bar(EMBEDDING, len(mirrored)) as advance:
        found = embed_dataset(
            fabric, model, mirrored, recipe.transform, workers=recipe.training.workers, advance=advance
        )
    if found.faults:
        raise UserError(f"--tta flip: an image can no longer be read: {found.faults[0]}")
    manifold, device = model.manifold, fabric.device
    both = [manifold.to_features(points.to(device)) for points in (own.points, found.points)]
    return own._replace(points=manifold.from_features((both[0] + both[1]) / 2).cpu())
